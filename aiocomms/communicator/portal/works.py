"""The works for which threads wait in a portal: an op, or a coroutine function that the loop runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

import anyio
import torch

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.communicator.portal import pending
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.pending import Pending
from aiocomms.core.core import Core
from aiocomms.cuda import CallerMark, CallerMarks
from aiocomms.errors import CapturedWorkError, CommError, CommTimeoutError, WorkCancelledError
from aiocomms.lowlevel import clock
from aiocomms.ops import Op
from aiocomms.progress.inflight import StartedWork
from aiocomms.progress.work import UnseenError

_T = TypeVar("_T")
T_co = TypeVar("T_co", covariant=True)


class PortalCall(Pending, Generic[_T]):
    """A thread's call of a coroutine function, which runs on the loop."""

    refused: bool

    __slots__ = ("_calls", "_cancelled", "_context", "_error", "_mark", "_scope", "_values", "refused")

    def __init__(self, door: Door, call: Callable[[], Awaitable[_T]], marks: CallerMarks | None = None) -> None:
        """Store the call, which does not start yet.

        :param marks: the communicator's marks of CUDA streams. If the marks are passed, the call's GPU work runs after
            the earlier work on this thread's stream.
        """
        super().__init__(door)
        self._calls = [call]  # The thread that takes the call begins it, or prevents its start.
        self._mark = None if marks is None else marks.mark()
        self._context = copy_context()
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False
        self._values: list[_T] = []  # The value that the coroutine function has returned.
        self._error: BaseException | None = None
        self.refused = False
        """True if the function did not run to its end, because the portal's owner was closed or the loop has ended."""

    def run(self, patience: float | None) -> _T:
        """Run the function on the loop, and block this thread until its end. A timeout or Ctrl-C cancels the function.

        If the loop is blocked at the timeout and has not started the function, the function never runs, and this thread
        does not wait for the loop.

        :param patience: the seconds to wait; None: no limit.
        :raises TimeoutError: ``patience`` seconds have passed, and the function was cancelled.
        """
        self._door.put(self._begin)
        try:
            if not self._block(patience):
                self._door.put(self._cancel)
                if not self._block(pending.LOOK) and self._taken() is None:
                    self._block(None)
        except BaseException:
            self._door.put(self._cancel)
            self._block(None)
            raise
        if self._error is not None:
            raise self._error
        if not self._values:
            raise TimeoutError(f"the call was not done within {patience} s, and was cancelled")
        return self._values[0]

    def _begin(self) -> None:
        call = self._taken()
        if call is None:
            return
        if self._door.closed:
            self._fail(self._door.refusal())
        else:
            if self._mark is not None:
                self._mark.hold_up()
            self._door.core.driver.spawn(functools.partial(self._main, call), self._context)

    async def _main(self, call: Callable[[], Awaitable[_T]]) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancelled:
                    self._scope.cancel()
                self._values.append(await call())
        except Exception as error:
            self._error = error
        except BaseException:
            self._error, self.refused = self._door.refusal(), True
            raise
        finally:
            self._ring()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    def _taken(self) -> Callable[[], Awaitable[_T]] | None:
        """Return the function at the first call of this method, and None at later calls."""
        try:
            return self._calls.pop()
        except IndexError:
            return None

    def _fail(self, error: BaseException) -> None:
        self._taken()
        self._error, self.refused = error, True
        self._ring()


def close(door: Door, what: str, call: Callable[[], Awaitable[object]]) -> None:
    """Run a coroutine function that closes an object, on the loop.

    If the loop refuses the call, the object is already closed.

    :param what: the name of the called method, for the error if the caller is on the loop's own thread.
    """
    door.elsewhere(what)
    closing = PortalCall(door, call)
    try:
        closing.run(None)
    except CommError:
        if not closing.refused:
            raise


def run(door: Door, what: str, call: Callable[[], Awaitable[_T]], timeout: Timeout = None) -> _T:
    """Run a coroutine function on the loop, and return its result.

    :param what: the name of the called method, for the error if the caller is on the loop's own thread.
    :raises TimeoutError: the function took longer than ``timeout``, and was cancelled.
    """
    door.elsewhere(what)
    patience = None if timeout is None else arguments.seconds("timeout", timeout)
    return PortalCall(door, call, door.core.marks).run(patience)


class BlockingWork(Pending, Generic[T_co]):
    """One operation that a thread has called.

    Every thread except the thread of the event loop may wait for the operation. The operation completes even if no
    thread waits. The event loop reports the error of a failed operation if no thread waits for it and the communicator
    stays usable.
    """

    __slots__ = (
        "__weakref__", "_asked", "_comm", "_core", "_error", "_given", "_mark", "_posted_as", "_seconds", "_stream",
        "_unseen", "_until", "_where", "_work", "op",
    )  # fmt: skip

    def __init__(
        self, comm: Any, where: str, door: Door, op: Op, hints: Mapping[str, Any] | None, timeout: OpTimeout
    ) -> None:
        """Store the call, which does not start yet.

        :param comm: the communicator or lane on which the op was called.
        :param where: the name of ``comm`` in errors.
        """
        super().__init__(door)
        self._comm, self._where = comm, where
        self._core: Core = comm._core
        self.op: Op = op
        """The record of the operation."""
        self._given: Op | None = None
        """The record with the arrays that the caller passed; None if the caller passed only tensors."""
        self._seconds: float = comm._seconds if timeout is COMM_TIMEOUT else arguments.deadline("timeout", timeout)
        self._until = clock.now() + self._seconds
        self._asked: list[tuple[Mapping[str, Any] | None, OpTimeout, Context]] = [(hints, timeout, copy_context())]
        # The op comes after the earlier work on this thread's stream, which is not current on the loop's thread.
        self._mark: CallerMark | None = self._core.mark(op)
        torch_has_it = self._mark is None and comm.device.type == "cuda"
        self._stream: Any = torch.cuda.current_stream(comm.device) if torch_has_it else None
        self._work: StartedWork[Any] | None = None
        self._posted_as: tuple[Any, StartedWork[Any], Callable[[int], object], int] | None = None
        self._error: BaseException | None = None
        self._unseen: UnseenError | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._over else "done" if (error := self._outcome()) is None else f"failed {error!r}"
        return f"<BlockingWork {self.op.name} on '{self._where}' (rank {self._comm.rank}) {state}>"

    def done(self) -> bool:
        """Return whether the op has completed or failed on this rank. Any thread may call this method."""
        return self._over

    def wait(self, timeout: Timeout = None) -> T_co:
        """Block this thread until the op is done, and return its result.

        Any number of threads may wait, except the thread of the event loop.

        An exception that a signal handler raises, such as ``KeyboardInterrupt``, can end the wait. If no other thread
        waits, an unmatched receive is then withdrawn.

        :param timeout: the seconds to wait; 0: do not wait; None: no limit.
        :returns: the same result as ``await comm.op(...)`` returns for this op on the event loop.
        :raises TimeoutError: the op was not done in time; the op continues.
        :raises CommError: the op failed or could not be started, or the event loop has ended.
        :raises RuntimeError: the caller is on the loop's own thread, which would wait for itself.
        """
        if not self._over:
            self._door.elsewhere(f"wait for {self.op.name}")
            patience = None if timeout is None else arguments.seconds("timeout", timeout) if timeout else 0.0
            try:
                ended = self._block(patience)
            except BaseException:
                self._leave_alone()
                raise
            if not ended:
                raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")
        if self._unseen is not None:
            self._unseen.error = None
        if self._error is not None:
            raise self._error.about() if isinstance(self._error, CommError) else self._error
        assert self._work is not None
        if self._mark is not None:
            self._mark.join()
        return self._work.result() if self._given is None else self._given.result()  # type: ignore[no-any-return]

    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait for the op. This thread waits for the launch of the op, not for the GPU.

        :param stream: a ``torch.cuda.Stream``; None: this thread's current stream.
        :raises ArgumentError: ``stream`` is no stream, or belongs to another device than the communicator.
        :raises UnsupportedOperation: the op runs on no stream, because its tensors are on the CPU or because it
            completes on the host.
        :raises CommError: the op has failed already, or could not be started.
        :raises RuntimeError: the caller is on the loop's own thread, which would wait for itself.
        """
        marks, error = self._core.marks, self._outcome()
        captured = isinstance(error, CapturedWorkError)
        if self._over and not captured:
            self.wait()
            return
        self._door.elsewhere("wait_stream")
        on = stream if stream is not None or marks is None else marks.cuda.current_stream()

        async def order() -> None:
            if self._work is not None:
                self._work.wait_stream(on)

        PortalCall(self._door, order).run(None)
        if self._over and not isinstance(self._outcome(), CapturedWorkError):
            self.wait()

    def cancel(self) -> bool:
        """Withdraw the op if that is still possible; otherwise wait for the op's end.

        :returns: True: the op did not happen, and the buffer is unchanged. False: the op ran to its end.
        :raises RuntimeError: the caller is on the loop's own thread, which would wait for itself.
        """
        if not self._over:
            self._door.elsewhere(f"wait for {self.op.name}")
            self._door.put(self._withdraw)
            self._block(None)
        return isinstance(self._outcome(), WorkCancelledError)

    # ------------------------------------------------------------------------------------ on the thread that calls it

    def _posted(self) -> bool:
        """Post the op on this thread, if the native shortcuts can post it and no earlier call waits for the loop.

        :returns: True if the op was posted.
        """
        shortcuts, door = self._comm._shortcuts, self._door
        if shortcuts is None or not door.idle:
            return False
        try:
            work = shortcuts.post(self._comm, self.op, self)
        except BaseException as error:
            # A signal handler raised this while the pending op was being registered.
            if self._posted_as is not None:
                self._taken()
                door.put(self._kept)
                self._leave_alone()
                raise
            if not isinstance(error, Exception):
                raise
            raise self._core.not_posted(self.op, error, self._where) from error
        if work is None:
            return False
        self._taken()
        if self._work is None:  # A work that has ended is not registered, and no other thread reports its end.
            self._work = work
            if work.fault is None and not self._core.post_hooks:
                self._over = True
            else:  # Another thread has just registered a hook, or the loop has found that the op fails.
                door.put(self._ended_at_once)
        return True

    def _kept(self) -> None:
        """Register the pending op with the event loop; see :meth:`aiocomms.transport.native.Shortcuts.post`.

        Idempotent.
        """
        assert self._posted_as is not None
        on, work, look_after, index = self._posted_as
        self._work, core = work, self._core
        self._seconds = on._seconds
        self._until = clock.now() + self._seconds
        work.add_first_waiter(_Listener(self))
        core.keep_elsewhere(work, self._seconds)
        # This call bypasses the door, because the next call need not wait for it.
        core.driver.call_threadsafe(core.look_after, look_after, index)
        self._posted_as = None

    # --------------------------------------------------------------------------------------- on the loop's thread

    def _ended_at_once(self) -> None:
        core = self._core
        assert self._work is not None
        if threading.get_ident() != core.thread:  # The door is closed, and the loop has called the last hook.
            return self._ring()
        core.ended_at_once(self._work)
        self._ended()
        return None

    def _begin(self) -> None:
        asked = self._taken()
        if asked is None:  # The work was given up before it began.
            return
        hints, timeout, context = asked
        try:
            with self._behind_its_caller():
                work = self._work = context.run(self._comm._issue, self.op, hints, timeout)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise  # A signal handler has raised this.
            return
        if work._state:
            self._ended()
        else:
            self._until = clock.now() + self._seconds
            work.forget()  # The program reads errors from this object, never from that work.
            work._waiting().waiting.append(_Listener(self))

    def _behind_its_caller(self) -> AbstractContextManager[object]:
        if self._mark is not None:
            return self._mark.begin()
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _ended(self) -> None:
        """Wake the waiting threads when the op has ended and the op's hooks have run."""
        work, driver = self._work, self._core.driver
        assert work is not None
        error = work.error
        if error is not None and not self._bells and work._unseen is None and work.fails_alone():
            self._unseen = UnseenError(driver, error)
        if error is not None or self._core.post_hooks:
            driver.call_soon(self._ring)
        else:
            self._ring()

    def _withdraw(self) -> None:
        if self._work is not None and not self._over:
            self._work._withdraw()

    # ---------------------------------------------------------------------------------------------- on any thread

    def _taken(self) -> tuple[Mapping[str, Any] | None, OpTimeout, Context] | None:
        """Return the op's arguments at the first call, and None at later calls.

        The caller that gets the arguments must start the op or end it with an error.
        """
        try:
            return self._asked.pop()
        except IndexError:
            return None

    def _outcome(self) -> BaseException | None:
        return self._error if self._work is None or self._error is not None else self._work.error

    def _overdue(self) -> CommError | None:
        core, now = self._core, clock.now()
        if (failure := core.life.failure) is not None and now - failure.since >= pending.LOOK:
            return failure.error_of(self._work) if self._work is not None else self._door.refusal()
        if now < self._until + pending.LOOK or (self._work is not None and not self.op.withdrawable):
            return None
        error = CommTimeoutError(
            "its deadline passed, and its event loop has not run since: a call blocks the loop's thread",
            late=[core.rank],
        )  # fmt: skip
        if self._taken() is not None and not self.op.withdrawable:
            core.lose(error.about(op=self.op.name, rank=core.rank))  # The other ranks wait for the op.
        return error

    def _fail(self, error: BaseException) -> None:
        self._taken()
        if isinstance(error, CommError):
            seq = None if self._work is None else self._work.seq
            error = self._core.worded(error.about(comm=self._where, op=self.op.name, seq=seq, rank=self._comm.rank))
        if not self._over:
            self._error = error
            self._ring()


class _Listener:
    """The waiter of a work for which threads wait. When the work ends, it wakes this object."""

    __slots__ = ("_of",)

    def __init__(self, of: BlockingWork[Any]) -> None:
        self._of = of

    def done(self) -> bool:
        """See :class:`aiocomms.progress.loops.Waiter`."""
        return self._of._over

    def set_result(self, _: None) -> None:
        """See :class:`aiocomms.progress.loops.Waiter`."""
        self._of._ended()
