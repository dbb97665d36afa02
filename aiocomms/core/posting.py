"""The part of a core that posts, tracks and records the ops of a communicator and its lanes.

All methods are called on the loop's thread, unless their docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

from aiocomms import ops
from aiocomms.diagnosis.recorder import PEERS, Recorder
from aiocomms.errors import CommClosedError, CommError, as_reason
from aiocomms.lowering.routing import Router
from aiocomms.lowering.runs import Offload
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.threads import call_in_thread
from aiocomms.ops.modes import dispatch_modes, in_inference_mode, set_aside
from aiocomms.ops.versions import note_writes
from aiocomms.progress.driver import LoopDriver
from aiocomms.progress.guard import broken
from aiocomms.progress.hooks import Hooks
from aiocomms.progress.inflight import InFlight, LaneWork, StartedWork
from aiocomms.transport import Completion, Transport
from aiocomms.transport.native import Ledger


class Posting:
    """The part of a communicator's core that starts ops and handles their end."""

    name: str
    rank: int
    ledger: Ledger
    by_family: dict[ops.Family, Transport]
    driver: LoopDriver
    router: Router
    in_flight: InFlight
    recorder: Recorder
    pre_hooks: Hooks
    post_hooks: Hooks
    refusals: int
    """The number of ops that could not be posted."""
    _spinning: list[Transport]
    _ended: bool
    """True once the communicator was lost, and the works that were pending at that time have ended."""

    def lose(self, error: CommError) -> None:
        """Mark the communicator as lost because of a failure. Any thread may call this."""
        raise NotImplementedError

    def _end_works(self) -> None:
        """End every pending work with the error that belongs to the failure. If there is no failure, do nothing."""
        raise NotImplementedError

    def start(self, work: StartedWork[Any], seconds: float, lane: str | None = None) -> StartedWork[Any]:
        """Count, record and post an op that has been checked.

        :param seconds: the seconds until the op's deadline.
        :param lane: the key of the op's lane, as text; None: the op is in no lane. Only collectives outside lanes are
            counted.
        :returns: the op's work, done or pending.
        """
        if not dispatch_modes() and not in_inference_mode():
            started = self._start(work, seconds, lane)
        else:
            with set_aside():
                started = self._start(work, seconds, lane)
        note_writes(started.op, self.rank)
        return started

    def _start(self, work: StartedWork[Any], seconds: float, lane: str | None) -> StartedWork[Any]:
        op, ledger = work.op, self.ledger
        kind, before = type(op), ledger.posting
        try:
            # The number is read again, because another thread's op may have come first.
            work.seq = ledger.begin(kind, lane is None and op.family == "collectives", lane)
            if self.pre_hooks or self.post_hooks:
                self._ask(work)
            try:
                router = self.router
                at = router[kind](op, work) if lane is None else router.within[kind](op, work.number, work)  # type: ignore[attr-defined,arg-type]
            except BaseException as error:
                raise self.post_raised(work, error)  # noqa: B904 - The error raised is this one, or is caused by it.
            if not work._state:  # This is done(), without the call.
                return self.keep(work, seconds)
            ledger.end((at or clock.now()) if kind not in PEERS else self.recorder.row(work))
            if self.post_hooks or work.fault is not None:
                self.ended_at_once(work)
            return work
        finally:
            ledger.posting = before

    def follow(
        self, work: StartedWork[Any], seconds: float, look_after: Callable[[int], object], index: int
    ) -> StartedWork[Any]:
        """Complete the posting of an op that native code has posted. Then track the pending op, or record its end.

        :param look_after: the function that completes the transport's ``post``. The argument of the call is ``index``.
        """
        try:
            look_after(index)
        except BaseException as error:
            raise self.post_raised(work, error)  # noqa: B904 - The error raised is this one, or is caused by it.
        if not work._state:
            return self.keep(work, seconds)
        self.ledger.end(clock.now() if type(work.op) not in PEERS else self.recorder.row(work))
        if self.post_hooks or work.fault is not None:
            self.ended_at_once(work)
        return work

    def post(self, op: ops.Op, work: Completion) -> None:
        """Post one of the messages of which an op consists, on the transport that carries the message.

        :raises CommError: the message could not be posted. If the transport raised an exception that is no
            :class:`CommError`, the error names the transport.
        """
        try:
            self.router[type(op)](op, work)
        except CommError:
            raise
        except Exception as error:
            if (transport := self.router.carrier(op)) is None:
                raise
            raise broken(transport, "post", error) from error

    def offload(self, op: Offload, work: Completion) -> None:
        """See :meth:`Poster.offload`."""

        def ended(error: Exception | None) -> None:
            if error is None:
                work.complete()
            else:
                failure = error if isinstance(error, CommError) else CommError(as_reason(error))
                work.fail(failure)

        call_in_thread(op.call, lambda error: self.driver.call_threadsafe(ended, error))

    def _ask(self, work: StartedWork[Any]) -> None:
        """Store the time of an op's call if there are post-hooks. Then call the pre-hooks of the op."""
        work.called = clock.now() if self.post_hooks else None
        try:
            self.pre_hooks.ask(work.op, work.seq)
        except BaseException as error:
            self._uncount(work, error)
            raise

    def _uncount(self, work: StartedWork[Any], error: BaseException) -> None:
        """Undo the count of an op that is not posted, and call its post-hooks.

        If the op is a collective outside lanes, the next collective outside lanes gets the number of this op.
        """
        self.refusals += 1
        if self.post_hooks:
            work.refuse(error)
            self.post_hooks.call(self.driver, work)
        if not isinstance(work, LaneWork) and work.op.family == "collectives":
            self.ledger.calls -= 1
            self.recorder.refused.append(work.seq)

    def post_raised(self, work: StartedWork[Any], error: BaseException) -> BaseException:
        """Undo the count of an op that could not be posted, and return its error. Nothing was sent for the op.

        A transport that raises an exception other than a :class:`CommError` is broken, and the communicator is lost.
        """
        self._uncount(work, error)
        return self.not_posted(work.op, error, work._comm_name())

    def not_posted(self, op: ops.Op, error: BaseException, where: str) -> BaseException:
        """Return the error of an op that was refused, and so was not counted.

        :param where: the name of the communicator or lane on which the op was called.
        """
        if isinstance(error, CommError):
            return error.about(comm=where, op=op.name, rank=self.rank)
        transport = self.router.carrier(op)
        if transport is None or not isinstance(error, Exception):
            return error
        failure = broken(transport, "post", error)
        self.lose(failure)
        return failure.about(comm=self.name, op=op.name, rank=self.rank)

    def keep(self, work: StartedWork[Any], seconds: float) -> StartedWork[Any]:
        """Record that an op was posted and is pending.

        :returns: the work.
        """
        if self.post_hooks:
            work.context = copy_context()
        self.in_flight.add(work, seconds)
        for transport in self._spinning:
            self.driver.poll_soon(transport)
        if self._ended:  # The pending works were ended before this op was added.
            self.driver.call_soon(self._end_works)
        return work

    # ------------------------------------------------------------------------------------------ ops of other threads

    def keep_elsewhere(self, work: StartedWork[Any], seconds: float) -> None:
        """Record that an op is pending, before the end of the op is reported.

        The thread that has posted the op calls this method.
        """
        self.in_flight.add(work, seconds)
        # The communicator was lost before the op was added, or the op has already ended.
        if self._ended or work._state:
            self.driver.call_threadsafe(self._end_late, work)

    def _end_late(self, work: StartedWork[Any]) -> None:
        if work._state:
            work.finish()
        self._end_works()

    def look_after(self, look_after: Callable[[int], object], index: int) -> None:
        """Complete the posting of another thread's op; see :meth:`NativeTransport.shortcuts`."""
        look_after(index)
        for transport in self._spinning:
            self.driver.poll_soon(transport)

    # ----------------------------------------------------------------------------------------------------- ended ops

    def settled(self, work: StartedWork[Any], error: CommError | None = None) -> None:
        """Record the end of a pending work, and remove it from the works in flight.

        :param error: the error of a failed work.
        """
        self.ledger.end(self.recorder.row(work, self.in_flight.remove(work), error))
        if self.post_hooks or work.fault is not None:
            self.after(work)

    def after(self, work: StartedWork[Any]) -> None:
        """Call the post-hooks of an op that has ended. An error that concerns all ranks ends the communicator."""
        fault = work.fault
        if self.post_hooks:
            context, work.context = work.context, None
            if context is None:  # An op without a context has ended within its call.
                self.post_hooks.call(self.driver, work)
            else:
                context.run(self.post_hooks.call, self.driver, work)
        if fault is not None and work.fails_all():
            self.lose(fault)

    def ended_at_once(self, work: StartedWork[Any]) -> None:
        """Handle an op that has ended within its call, if it has failed or post-hooks are registered."""
        if work.fault is not None:
            self.ledger.end(self.recorder.row(work, None, work.error))
        self.after(work)

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]] | None:
        """See :meth:`Poster.caller_stream`."""
        return self.by_family["p2p"].caller_stream() if "p2p" in self.by_family else None

    def withdraw(self, work: Completion) -> bool:
        """Withdraw an unmatched receive, or a pending ``wait_signal``, from its transport.

        :returns: True if the work was withdrawn.
        """
        return self.router.withdraw(work)

    def withdraw_all(self, of: str, which: Callable[[ops.Op], bool]) -> None:
        """Withdraw unmatched receives and waits of an object that was closed.

        :param of: the name of the object, for the errors.
        :param which: a function that returns whether an op belongs to the object.
        """
        for work in self.in_flight:
            if work.op.withdrawable and which(work.op) and self.withdraw(work):
                work.abandon(CommClosedError(f"{of} was closed on this rank, and the op was withdrawn"))

    def collective(self, seq: int) -> int | None:
        """See :meth:`aiocomms.progress.work.Owner.collective`."""
        return self.recorder.number(seq)

    def order_stream(self, work: StartedWork[Any], stream: Any) -> None:
        """Make a CUDA stream wait for a work."""
        self.by_family[work.op.family].wait_stream(work, stream)
