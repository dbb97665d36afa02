"""The awaitable handle of one started op: ``Work`` for its users, ``StartedWork`` for the core and transports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from threading import get_ident
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
from torch import UntypedStorage

from aiocomms.errors import CapturedWorkError, CommError, WorkCancelledError, wrong_thread
from aiocomms.ops import Op
from aiocomms.progress.driver import Driver, Waiters
from aiocomms.progress.handed import Handed, Steps
from aiocomms.transport import OP_RESULT

T_co = TypeVar("T_co", covariant=True)

_RESIZED = (
    "the storage of a tensor was resized while the op had it: its result is lost, or went to memory that was freed"
)
_PENDING, _DONE, _ABANDONED = range(3)


class Owner(Protocol):
    """The communicator's side of its works."""

    driver: Driver
    name: str
    rank: int

    def settled(self, work: StartedWork[Any], error: CommError | None = None) -> None:
        """Record and forget a pending work that has just become done, or failed with ``error``."""

    def withdraw(self, work: Any) -> bool:
        """Take an unmatched receive or wait back from the transport; False if it is under way."""

    def order_stream(self, work: Any, stream: Any) -> None:
        """Make a CUDA stream wait for a work.

        :raises UnsupportedOperation: the work runs on no stream.
        """

    @property
    def lost(self) -> bool:
        """Whether something has ended it: then it ends its works itself, and what a transport says of them is late."""


class Work(msgspec.Struct, Handed[T_co], Generic[T_co], eq=False, weakref=True):
    """One operation under way: await it, share it, or leave it alone; it completes all the same.

    A work behaves as an :class:`asyncio.Future` where the two overlap, and a task may be made of it. A
    cancelled ``await`` detaches that awaiter and nothing else; only when the last awaiter of a receive that nothing has
    matched yet is gone, or was cancelled before it began, is the receive withdrawn.
    """

    op: Op
    """The record of what was asked."""
    seq: int
    """Its number among the ops of its communicator on this rank, from 0."""
    _owner: Owner
    hints: Mapping[str, Any] | None = None
    """The caller's advice for this op."""
    _state: int = _PENDING
    _value: Any = OP_RESULT
    _error: CommError | None = None
    _waiters: Waiters | None = None
    _callbacks: list[Callable[[Self], object]] | None = None
    _unseen: _UnseenError | None = None
    _steps: Steps | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._state else f"failed {self._error!r}" if self._error else "done"
        return f"<Work {self.op.name} #{self.seq} on '{self._owner.name}' (rank {self._owner.rank}) {state}>"

    @property
    def __name__(self) -> str:
        """What asyncio and trio call it where they show a task or complain."""
        return self.op.name

    def __await__(self) -> Generator[Any, Any, T_co]:
        if not self._state:
            yield from self._owner.driver.park(self._waiting())
        if self._error is None:  # as result() does, without the call
            value = self._value
            return self.op.result() if value is OP_RESULT else value  # type: ignore[no-any-return]
        return self.result()

    def done(self) -> bool:
        """Whether the op has completed or failed on this rank."""
        return self._state != _PENDING

    def result(self) -> T_co:
        """Return what awaiting returns.

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

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Have ``fn(work)`` called on the loop's next turn after the op is done."""
        if self._state:
            self._owner.driver.call_soon(fn, self)
        elif self._callbacks is None:
            self._callbacks = [fn]
        else:
            self._callbacks.append(fn)

    async def cancel(self) -> bool:
        """Withdraw the op if that is still possible, else wait for its end.

        :returns: True: the op did not happen, and the buffer is untouched. False: it ran to its end.
        :raises RuntimeError: this is not the communicator's thread.
        """
        if not self._state and get_ident() != self._owner.driver.thread:
            raise wrong_thread(f"cancel of {self!r}")
        if not self._state and self._withdraw():
            return True
        if not self._state:
            await self.wait()
        return isinstance(self._error, WorkCancelledError)

    def wait(self) -> Awaitable[None]:
        """Wait until the op is done, without asking how it went."""
        return _Wait(self)

    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait for the op; the host does not.

        For an op that was captured into a CUDA graph, this joins it back to the capturing stream.

        :param stream: a ``torch.cuda.Stream``; None: the current one.
        :raises UnsupportedOperation: the op runs on no stream: its tensors are on the CPU, or it completes on the host.
        """
        owner = self._owner
        try:
            owner.order_stream(self, stream)
        except CommError as error:
            raise error.about(comm=owner.name, op=self.op.name, seq=self.seq, rank=owner.rank) from None

    def wait_blocking(self, timeout: float | None = None) -> T_co:
        """Wait in synchronous code, on any thread; on the loop's own thread this drives the transports meanwhile.

        :param timeout: the caller's patience in seconds; None: as long as it takes.
        :returns: what awaiting returns.
        :raises TimeoutError: the op took longer; it goes on.
        :raises CommError: the op failed.
        """
        if not self._state:
            self._owner.driver.block(self, timeout)
        return self.result()

    # --------------------------------------------------------------------------------------------- inside

    def _waiting(self) -> Waiters:
        """The tasks that wait for it, to which one more is about to be added."""
        if self._waiters is None:
            self._waiters = Waiters(self, self._nobody_waits)
        return self._waiters

    def _nobody_waits(self) -> None:
        """The last awaiter was cancelled: withdraw the op if that is possible."""
        self._waiters = None
        self._withdraw()

    def _never_awaited(self) -> None:
        waiters = self._waiters
        if (waiters is None or not waiters.waiting) and get_ident() == self._owner.driver.thread:
            self._nobody_waits()

    def _withdraw(self) -> bool:
        """Take an unmatched receive or wait back. True: it did not happen."""
        if self._state or not self.op.withdrawable or not self._owner.withdraw(self):
            return False
        self._end(WorkCancelledError("it was withdrawn before it happened, and its buffer is untouched"), _DONE)
        return True

    def _end(self, error: CommError, state: int) -> None:
        owner = self._owner
        self._error = error.about(comm=owner.name, op=self.op.name, seq=self.seq, rank=owner.rank)
        self._state = state
        self._notify()

    def _notify(self) -> None:
        """Wake all who wait; called again, it goes on where the exception of a signal handler has cut it short."""
        driver = self._owner.driver
        if self._waiters is not None:
            self._waiters.wake(driver)
            self._waiters = None
        while self._callbacks:
            driver.call_soon(self._callbacks[0], self)
            del self._callbacks[0]

    def _seen(self) -> Exception:
        if not self._state:
            import asyncio

            return asyncio.InvalidStateError(f"{self!r} is not done")
        if self._unseen is not None:
            self._unseen.error = None
        error = self._error
        assert error is not None
        return error.with_traceback(None)


class StartedWork(Work[T_co]):
    """A work as the core and transports see it; every ``Work`` is one.

    A signal handler may raise between any two steps. So the outcome is stored before the state, and a work stays among
    those in flight until all who wait for it have been woken: there its deadline finds it, and :meth:`finish` goes on.
    """

    fault: CommError | None = None
    """The error with which the transport failed it; None where the work was abandoned or withdrawn."""
    queue: Any = None
    """The queue of works in flight that it stands in while it is pending; see :mod:`aiocomms.progress.inflight`."""
    memory: UntypedStorage | list[tuple[UntypedStorage, int]] | None = None
    """The storage of the tensor of a pending op, or several storages and their addresses.

    The program may give the tensors other storages meanwhile.
    """
    _place: int = 0

    @property
    def error(self) -> CommError | None:
        """The error of a failed work; reading it does not count as asking for the result."""
        return self._error

    def waiters(self) -> list[object]:
        """The suspended awaiters."""
        return [] if self._waiters is None else list(self._waiters.waiting)

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        if self._state:
            return self._refuse_second()
        if self.queue is not None and self._resized():
            return self.fail(CommError(_RESIZED))
        self._value = value
        self._state = _DONE
        if self._waiters is not None or self._callbacks is not None:
            self._notify()
        if self.queue is not None:
            self._owner.settled(self)
        return None

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`."""
        if self._state:
            return self._refuse_second()
        if self._owner.lost:
            return None
        self.fault = error.about(seq=self.seq)
        asked = self._waiters is not None or self._callbacks is not None
        self._end(error, _DONE)
        if self.queue is not None:
            self._owner.settled(self, self._error)
        if not asked and self._error is not None and not isinstance(error, CapturedWorkError):
            self._unseen = _UnseenError(self._owner.driver, self._error)
        return None

    def abandon(self, error: CommError) -> None:
        """End a pending work although its transport has not; what the transport says of it later is ignored."""
        if not self._state:
            self._end(error, _ABANDONED)
        self.finish()

    def finish(self) -> None:
        """Wake those who still wait for a work that is done, and let it go."""
        self._notify()
        if self.queue is not None:
            self._owner.settled(self, self._error)

    def hold(self) -> None:
        """Keep the memory of an op that is pending, also if its program gives a tensor another storage."""
        op = self.op
        tensor = getattr(op, "tensor", None)
        if tensor is not None:  # nearly always
            self.memory = storage = tensor.untyped_storage()
            self._place = storage.data_ptr()
        else:
            storages = [tensor.untyped_storage() for _, tensor in op.reads() + op.writes()]
            self.memory = [(storage, storage.data_ptr()) for storage in storages]

    def _resized(self) -> bool:
        memory = self.memory
        if isinstance(memory, list):
            return any(storage.data_ptr() != place for storage, place in memory)
        return memory is not None and memory.data_ptr() != self._place

    def _withdraw(self) -> bool:
        withdrawn = super()._withdraw()
        if withdrawn and self.queue is not None:
            self._owner.settled(self, self._error)
        return withdrawn

    def _refuse_second(self) -> None:
        if self._state == _DONE:
            raise RuntimeError(f"the transport completed {self!r} twice")


class _Wait(Handed[None]):
    """Awaits the end of a work, however it went."""

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


class _UnseenError:
    """Reports the failure of a work that nobody asks; separate, so that works that succeed need no finalizer."""

    __slots__ = ("_driver", "error")

    def __init__(self, driver: Driver, error: CommError) -> None:
        self._driver = driver
        self.error: CommError | None = error

    def __del__(self) -> None:
        if self.error is not None:
            self._driver.report(f"nobody asked for the result of a work that failed: {self.error}", self.error)
