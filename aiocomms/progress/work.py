"""The awaitable handle of a started op for users. :mod:`aiocomms.progress.inflight` has the part for the core."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from threading import get_ident
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from aiocomms.errors import CommError, WorkCancelledError, wrong_thread
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import Op
from aiocomms.progress.driver import LoopDriver, Waiters
from aiocomms.progress.handed import Handed, Steps
from aiocomms.progress.misuse import RESULTS, refuse_as_result
from aiocomms.transport import OP_RESULT

T_co = TypeVar("T_co", covariant=True)

PENDING, DONE, ABANDONED = range(3)
"""The states of a work. An abandoned work has ended before its transport reported the end of the op."""
FIELDS_BELOW: Final[tuple[str, ...]] = ()
"""The slots of a base class of works: none. The subclasses, in Python or native code, have the fields."""


class Owner(Protocol):
    """The methods of a communicator that its works use."""

    driver: LoopDriver
    name: str
    rank: int
    failures: dict[tuple[str, int | None], int]
    """The number of works that failed, were abandoned, or were withdrawn, by the error's class and the rank in the
    error.
    """

    worded: Callable[[CommError], CommError]
    """The function that adapts the error of an op for the caller: errors of an endpoint name no ranks."""

    def settled(self, work: Any, error: CommError | None = None) -> None:
        """Record and drop a pending work that has just completed, or failed with ``error``."""

    def withdraw(self, work: Any) -> bool:
        """Withdraw an op that no message or signal has matched. Return False if the op cannot be withdrawn any more."""

    def collective(self, seq: int) -> int | None:
        """Return the number of the collective that is op ``seq`` on this rank; None if the op has no number.

        All ranks give the collective the same number.
        """

    def order_stream(self, work: Any, stream: Any) -> None:
        """Make a CUDA stream wait for a work.

        :raises UnsupportedOperation: the work runs on no stream.
        """

    @property
    def lost(self) -> bool:
        """True after a failure has ended the communicator.

        The communicator then ends its works itself, and ignores later reports of a transport.
        """


class Work(Handle, Handed[T_co], Generic[T_co]):
    """The handle of one started op: await it in one task or in several. The op completes even if no task awaits it.

    A work has the methods of :class:`asyncio.Future` that make sense for an op. A program can wrap a work in a task. If
    an ``await`` is cancelled, only this await ends. If the last ``await`` of a receive is cancelled, and no message has
    matched the receive yet, the receive is withdrawn. This is also true if the cancelled task has not begun to wait.
    """

    __slots__ = FIELDS_BELOW

    op: Op
    """The record of the op's arguments."""
    seq: int
    """The op's number among the ops of its communicator on this rank, from 0."""
    _owner: Owner
    hints: Mapping[str, Any] | None
    """The caller's advice for this op."""
    called: float | None
    """The time of the call, by ``time.monotonic()``; None: no post-hook was registered at the call."""
    _state: int
    _value: Any
    _error: CommError | None
    _waiters: Waiters | None
    _callbacks: list[Callable[[Self], object]] | None
    _unseen: UnseenError | None
    _steps: Steps | None

    def __repr__(self) -> str:
        state = "pending" if not self._state else f"failed {self._error!r}" if self._error else "done"
        return f"<Work {self.op.name} #{self.seq} on '{self._comm_name()}' (rank {self._owner.rank}) {state}>"

    def __dir__(self) -> list[str]:
        """Return the attributes without the attributes of results, for completion in editors."""
        return [name for name in object.__dir__(self) if name not in RESULTS]

    @property
    def __name__(self) -> str:
        """The name of the op, as asyncio and trio show it in tasks and errors."""
        return self.op.name

    def __await__(self) -> Generator[Any, Any, T_co]:
        driver = self._owner.driver
        if not self._state:
            yield from driver.park(self._waiting())
        elif driver.overdue():
            yield from driver.give_way()
        if self._error is None:  # This is result(), without the cost of the call.
            value = self._value
            return self.op.result() if value is OP_RESULT else value  # type: ignore[no-any-return]
        return self.result()

    _await = __await__
    """The ``__await__`` of pending works. Native code has a faster method for works that are done."""

    def done(self) -> bool:
        """Return whether the op has completed or failed on this rank."""
        return self._state != PENDING

    def result(self) -> T_co:
        """Return the result of the op, as ``await`` does.

        :raises asyncio.InvalidStateError: the work is not done.
        :raises CommError: the op failed.
        """
        if self._error is None and self._state:
            value = self._value
            return self.op.result() if value is OP_RESULT else value  # type: ignore[no-any-return]
        raise self._seen()

    def exception(self) -> CommError | None:
        """Return the error of a failed op, or None.

        :raises asyncio.InvalidStateError: the work is not done.
        """
        if self._error is None and self._state:
            return None
        error = self._seen()
        if isinstance(error, CommError):
            return error
        raise error

    @property
    def error(self) -> CommError | None:
        """The error of a failed op, or None.

        Hooks may read the error: a read does not count as a request for the result.
        """
        return self._error

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call ``fn(work)`` in the loop's next turn after the op is done."""
        if self._state:
            self._owner.driver.call_soon(fn, self)
        elif self._callbacks is None:
            self._callbacks = [fn]
        else:
            self._callbacks.append(fn)

    def forget(self) -> None:
        """Declare that no code needs to await the op, so that debug mode does not warn of a forgotten ``await``.

        If the op fails, the event loop still reports the error.
        """

    async def cancel(self) -> bool:
        """Withdraw the op if that is still possible; otherwise wait for its end.

        :returns: True if the op was withdrawn, and its buffer is unchanged; False if the op ran to its end.
        :raises RuntimeError: the caller is not on the communicator's thread.
        """
        if not self._state and get_ident() != self._owner.driver.thread:
            raise wrong_thread(f"cancel of {self!r}")
        if not self._state and self._withdraw():
            return True
        if not self._state:
            await self.wait()
        return isinstance(self._error, WorkCancelledError)

    def wait(self) -> Awaitable[None]:
        """Wait until the op is done. A failed op raises no error here."""
        return _Wait(self)

    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait for the op. The calling thread does not wait.

        If the op was captured into a CUDA graph, this call joins the op back to the capturing stream.

        :param stream: a ``torch.cuda.Stream``; None: the current one.
        :raises ArgumentError: ``stream`` is not a stream, or its device is not the communicator's device.
        :raises UnsupportedOperation: the op runs on no stream, because its tensors are on the CPU, or because the CPU
            completes the op.
        """
        owner = self._owner
        try:
            owner.order_stream(self, stream)
        except CommError as error:
            raise error.about(comm=owner.name, op=self.op.name, seq=self.seq, rank=owner.rank) from None

    def wait_blocking(self, timeout: float | None = None) -> T_co:
        """Wait in synchronous code, on any thread.

        On the loop's own thread, this call advances the transports while it waits.

        :param timeout: the longest wait in seconds; None: no limit.
        :returns: the result of the op, as ``await`` does.
        :raises TimeoutError: the op took longer than ``timeout``. The op continues.
        :raises CommError: the op failed.
        """
        if not self._state:
            self._owner.driver.block(self, timeout)
        return self.result()

    # --------------------------------------------------------------------------------------------- inside

    def _comm_name(self) -> str:
        """Return the name of the work's communicator, as errors show it."""
        return self._owner.name

    def _waiting(self) -> Waiters:
        """Return the tasks that wait for the work, so that the caller can add one."""
        if self._waiters is None:
            self._waiters = Waiters(self, self._nobody_waits)
        return self._waiters

    def _nobody_waits(self) -> None:
        """Withdraw the op if that is possible, because the last awaiter was cancelled."""
        self._waiters = None
        self._withdraw()

    def _never_awaited(self) -> None:
        waiters = self._waiters
        if (waiters is None or not waiters.waiting) and get_ident() == self._owner.driver.thread:
            self._nobody_waits()

    def _withdraw(self) -> bool:
        """Withdraw an unmatched receive or wait. Return True if the op was withdrawn."""
        raise NotImplementedError

    def _seen(self) -> Exception:
        if not self._state:
            import asyncio

            return asyncio.InvalidStateError(f"{self!r} is not done")
        if self._unseen is not None:
            self._unseen.error = None
        error = self._error
        assert error is not None
        return error.with_traceback(None)


refuse_as_result(Work)


class _Wait(Handed[None]):
    """The awaitable that :meth:`Work.wait` returns. It ends when the work ends, and raises no error of the op."""

    __slots__ = ("_steps", "_work")

    def __init__(self, work: Work[Any]) -> None:
        self._work = work
        self._steps: Steps | None = None

    def __await__(self) -> Generator[Any, Any, None]:
        work = self._work
        if not work._state:
            yield from work._owner.driver.park(work._waiting())

    def _never_awaited(self) -> None:
        self._work._never_awaited()


class UnseenError:
    """The report of a failed work if no code requests the work's result.

    The report is a separate object, so that a work that succeeds needs no finalizer.
    """

    __slots__ = ("_driver", "error")

    def __init__(self, driver: LoopDriver, error: CommError) -> None:
        self._driver = driver
        self.error: CommError | None = error

    def __del__(self) -> None:
        if self.error is not None:
            self._driver.report(f"no task awaited a work that failed: {self.error._where()}", self.error)
