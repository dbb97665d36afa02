"""The awaitable handle of a started op.

This module has the methods for users, and :mod:`aiocomms.progress.inflight` adds the methods for the core.
"""

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
"""The slots of a base class of works: none.

Each subclass, in Python or in native code, defines the fields itself.
"""


class Owner(Protocol):
    """The methods of a communicator that its works use."""

    driver: LoopDriver
    name: str
    rank: int
    failures: dict[tuple[str, int | None], int]
    """A mapping from a kind of error to the number of works that ended with such an error.

    The key is a pair: the name of the error's class, and the rank in the error. The numbers include abandoned and
    withdrawn works.
    """

    worded: Callable[[CommError], CommError]
    """The function that adapts the error of an op for the caller.

    For example, the errors of an endpoint name no ranks.
    """

    def settled(self, work: Any, error: CommError | None = None) -> None:
        """Record that a pending work has completed, or has failed with ``error``, and drop the work."""

    def withdraw(self, work: Any) -> bool:
        """Withdraw an op that no message or signal has matched. Return False if it is too late to withdraw the op."""

    def collective(self, seq: int) -> int | None:
        """Return the number of the collective that is op ``seq`` on this rank; None if the op has no number.

        All ranks give the collective the same number.
        """

    def order_stream(self, work: Any, stream: Any) -> None:
        """Make a CUDA stream wait for a work.

        :raises UnsupportedOperation: the op of the work does not run on a stream.
        """

    @property
    def lost(self) -> bool:
        """True after a failure has ended the communicator.

        After this failure, the communicator ends its works, and ignores reports of its transports.
        """


class Work(Handle, Handed[T_co], Generic[T_co]):
    """The handle of one started op.

    One task or several tasks can await the handle. The op completes even if no task awaits it.

    A work has those methods of :class:`asyncio.Future` that are useful for an op. A program can wrap a work in a task.
    If an ``await`` is cancelled, only this await ends. If the last ``await`` of a receive is cancelled before a message
    has matched the receive, the receive is withdrawn. The receive is also withdrawn if the cancelled task had not yet
    begun to await the receive.
    """

    __slots__ = FIELDS_BELOW

    op: Op
    """The record of the op's arguments."""
    seq: int
    """The op's number among the ops of its communicator on this rank. The first op has the number 0."""
    _owner: Owner
    hints: Mapping[str, Any] | None
    """The caller's advice for this op."""
    called: float | None
    """The time of the call, by ``time.monotonic()``; None if no post-hook was registered at that time."""
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
        """Return the attributes of a work, for completion in editors.

        The attributes that only results have are left out.
        """
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

        Hooks may read the error, because a read of this attribute does not count as a request for the result.
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
        """Declare that no code needs to await the op. Then debug mode does not warn of a forgotten ``await``.

        If the op fails, the event loop nevertheless reports the error.
        """

    async def cancel(self) -> bool:
        """Withdraw the op if it can still be withdrawn. If not, wait until the op has ended.

        :returns: True if the op was withdrawn, and its buffer is unchanged; False if the op has completed or failed.
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
        """Wait until the op is done. If the op fails, this wait raises no error."""
        return _Wait(self)

    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait for the op. The calling thread does not wait.

        If the op was captured into a CUDA graph, this call makes the capturing stream wait for the op within the graph.

        :param stream: a ``torch.cuda.Stream``; None: the current stream.
        :raises ArgumentError: ``stream`` is not a stream, or its device is not the communicator's device.
        :raises UnsupportedOperation: the op does not run on a stream, because its tensors are on the CPU, or because
            the CPU completes the op.
        """
        owner = self._owner
        try:
            owner.order_stream(self, stream)
        except CommError as error:
            raise error.about(comm=owner.name, op=self.op.name, seq=self.seq, rank=owner.rank) from None

    def wait_blocking(self, timeout: float | None = None) -> T_co:
        """Wait in synchronous code, on any thread.

        On the event loop's own thread, this call also advances the transports during the wait.

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
        """Return the list of tasks that wait for the work, so that the caller can add a task to the list."""
        if self._waiters is None:
            self._waiters = Waiters(self, self._nobody_waits)
        return self._waiters

    def _nobody_waits(self) -> None:
        """Withdraw the op if it can be withdrawn, because the last task that awaited the op was cancelled."""
        self._waiters = None
        self._withdraw()

    def _never_awaited(self) -> None:
        waiters = self._waiters
        if (waiters is None or not waiters.waiting) and get_ident() == self._owner.driver.thread:
            self._nobody_waits()

    def _withdraw(self) -> bool:
        """Withdraw a receive, or a wait for a signal, that nothing has matched yet.

        Return True if the op was withdrawn.
        """
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
    """The awaitable that :meth:`Work.wait` returns.

    The awaitable ends when the work ends, and does not raise the error of the op.
    """

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
    """A report that a work has failed. The report is made if no code requests the result of the work.

    The report is a separate object with a finalizer, so that works that succeed need no finalizer.
    """

    __slots__ = ("_driver", "error")

    def __init__(self, driver: LoopDriver, error: CommError) -> None:
        self._driver = driver
        self.error: CommError | None = error

    def __del__(self) -> None:
        if self.error is not None:
            self._driver.report(f"no task awaited a work that failed: {self.error._where()}", self.error)
