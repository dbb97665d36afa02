"""Probes and receives from any of several ranks, implemented by a transport's ops ``Probe`` and ``Take``.

A transport's ``Probe`` finds a message, but does not receive the message. A ``Take`` is a non-blocking receive. So an
op that waits for a message from several ranks has a probe for each rank. When a probe ends, the op takes the message,
or waits again if another receive has taken the message. So no message is lost. A receive that names one source goes to
the transport directly, and has precedence over the ops of this module.

The ops that wait for one tag are in one queue, in the order of their calls. A queue has at most one probe for each
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

from torch import Tensor

from aiocomms import ops
from aiocomms.errors import CommError
from aiocomms.lowering.runs import Poster
from aiocomms.ops import buffers, checks
from aiocomms.progress.inflight import LaneWork
from aiocomms.transport import OP_RESULT, Completion, conclude

FROM_ANY: Final[frozenset[type[ops.Op]]] = frozenset({ops.ProbeAny, ops.RecvAny, ops.RecvMessage})
"""The types of the ops that this module implements."""
_REMEMBERED: Final = 256
"""The largest number of tags for which this rank remembers the sender of the last message."""


class Arrivals:
    """The probes and receives of one communicator that name several sources or any source."""

    def __init__(self, comm: Poster) -> None:
        self.comm: Poster = comm
        self._queues: dict[int, _Queue] = {}
        self._calls: dict[Completion, _AnyCall] = {}
        self._last: dict[int, int] = {}  # The keys are tags; the values are the ranks of the last messages.

    def call(self, op: Any, work: Completion) -> None:
        """Start an op; see :meth:`aiocomms.transport.Transport.post`."""
        stream = self.comm.caller_stream()  # This call may raise, so it comes first.
        queue = self._queues.setdefault(op.tag, _Queue(self, op.tag))
        call = self._calls[work] = _AnyCall(op, work, queue, stream or nullcontext)
        queue.add(call)

    def withdraw(self, work: Completion) -> bool:
        """Withdraw an op; return False if the op is taking a message or has ended."""
        call = self._calls.get(work)
        return call is not None and call.withdraw()

    def stop(self, number: int, error: CommError) -> None:
        """End all pending ops of a lane; see :meth:`Run.stop`."""
        for work, call in list(self._calls.items()):
            if isinstance(work, LaneWork) and work.number == number:
                call.stopped = error
                if call.withdraw():
                    work.abandon(error)

    def clear(self) -> None:
        """Remove all ops from the queues, because the communicator has ended these ops."""
        for queue in self._queues.values():
            queue.calls.clear()
            queue.looks.clear()
        self._queues.clear()
        self._calls.clear()

    def note(self, tag: int, src: int) -> None:
        """Record that a message from a rank was received. The next round-robin order begins after the sender."""
        self._last.pop(tag, None)
        self._last[tag] = src
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]

    def in_turn(self, tag: int, sources: Iterable[int]) -> list[int]:
        """Return the sources in round-robin order, so that no rank's messages starve."""
        first = self._last.get(tag, -1) + 1
        return sorted(sources, key=lambda src: (src - first) % self.comm.size)

    def forget(self, call: _AnyCall) -> None:
        """Forget an op that has ended or was withdrawn."""
        self._calls.pop(call.work, None)
        if call.queue.idle:
            self._queues.pop(call.queue.tag, None)


class _Queue:
    """The calls that wait for messages of one tag."""

    def __init__(self, owner: Arrivals, tag: int) -> None:
        self.tag = tag
        self.calls: list[_AnyCall] = []  # These calls wait, in this order.
        self.looks: dict[int, _Look] = {}  # These probes are pending, by source.
        self.taking = 0  # This many calls are taking a message.
        self._owner = owner

    @property
    def comm(self) -> Poster:
        """The communicator."""
        return self._owner.comm

    @property
    def idle(self) -> bool:
        """True if no call waits for a message or is taking a message."""
        return not self.calls and not self.taking

    def add(self, call: _AnyCall, *, first: bool = False) -> None:
        """Add an op to the queue.

        :param first: True if the op goes back to the front of the queue.
        """
        self.calls.insert(0 if first else len(self.calls), call)
        sources = self._owner.in_turn(self.tag, call.sources)
        last = next((src for src in reversed(sources) if src != self.comm.rank), None)
        for src in sources:
            self.look(src, more=src != last)

    def look(self, src: int, *, more: bool = True) -> None:
        """Probe a rank for messages. Each message that a probe finds is offered to the waiting calls.

        The method returns when a probe is pending, or when no call waits for a message of the rank.

        :param more: see :attr:`aiocomms.ops.Probe.more`.
        """
        while src not in self.looks and (wants := self._who_wants(src)) is not None:
            look = self.looks[src] = _Look(ops.Probe(src, self.tag, more=more), self)
            try:
                with wants.stream():
                    self.comm.post(look.op, look)
            except CommError as error:
                look.fail(error)
            look.posted = True
            if not look.ended:
                return
            self._handle(look)

    def _who_wants(self, src: int) -> _AnyCall | None:
        return next((call for call in self.calls if src in call.sources), None)

    def seen(self, look: _Look) -> None:
        """Handle the end of a probe that was still pending when ``post`` returned."""
        if self.looks.get(look.op.src) is look:
            self._handle(look)
            self.look(look.op.src)

    def _handle(self, look: _Look) -> None:
        src = look.op.src
        del self.looks[src]
        if isinstance(look.outcome, CommError):
            self._miss(src, look.outcome)
            return
        for call in list(self.calls):
            if src in call.sources:
                self._owner.note(self.tag, src)
                if call.offer(look.outcome):
                    return

    def _miss(self, src: int, error: CommError) -> None:
        """Remove a rank from which no message will come, and end the calls that have no other source."""
        for call in list(self.calls):
            if src in call.sources:
                call.sources.discard(src)
                if not call.sources - {self.comm.rank}:
                    call.end(error)

    def drop(self, call: _AnyCall) -> None:
        """Remove an op from the queue, and withdraw the probes that no other op needs."""
        if call in self.calls:
            self.calls.remove(call)
        for src, look in list(self.looks.items()):
            if look.posted and self._who_wants(src) is None:
                del self.looks[src]
                self.comm.withdraw(look)
        self._owner.forget(call)


class _AnyCall:
    """One op that waits for a message or is receiving a message."""

    def __init__(
        self, op: Any, work: Completion, queue: _Queue, stream: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.op: Any = op
        self.work: Completion = work
        self.queue: _Queue = queue
        self.stream: Callable[[], AbstractContextManager[object]] = stream
        self.sources: set[int] = set(op.sources)
        """The ranks from which a message may still come."""
        self.stopped: CommError | None = None
        """The error with which the op ends if the op's lane was aborted."""
        self._taking: _Taking | None = None

    def offer(self, message: ops.Message) -> bool:
        """Offer a message to the op.

        :returns: True if the op tries to take the message. The later ops in the queue then need the result of a new
            probe.
        """
        # The program sees the call's own tag, not the tag of the lane's message.
        named = message._replace(tag=cast("Any", self.work.op).tag)
        if isinstance(self.op, ops.ProbeAny):
            self.end(named)
            return False
        try:
            tensor = self.op.tensor if isinstance(self.op, ops.RecvAny) else self._room_for(named)
        except CommError as error:
            self.end(error)
            return False
        self._take(ops.Take(tensor, message.src, self.queue.tag))
        return True

    def _room_for(self, message: ops.Message) -> Tensor:
        """Return the tensor into which a message is received: the result of ``into``, or a new tensor."""
        comm, into = self.queue.comm, self.op.into
        if into is None:
            return buffers.empty(message.numel, dtype=message.dtype, device=comm.device)
        try:
            tensor: Tensor = into(message)
        except Exception as error:
            raise CommError(f"into raised {type(error).__name__}: {error}; the message is still there") from error
        checks.writable("the tensor that into gives", tensor, cast("checks.CheckedComm", comm))
        return tensor

    def _take(self, op: ops.Take) -> None:
        queue = self.queue
        queue.calls.remove(self)
        queue.taking += 1
        taking = self._taking = _Taking(op, self)
        try:
            with self.stream():
                queue.comm.post(op, taking)
        except CommError as error:
            taking.fail(error)

    def taken(self, outcome: Any) -> None:
        """Handle the end of an attempt to take a message.

        If another receive took the message first, the op waits again.
        """
        assert self._taking is not None
        op, self._taking = self._taking.op, None
        self.queue.taking -= 1
        if outcome is False and self.stopped is None and not self.work.done():
            self.queue.add(self, first=True)
        elif isinstance(outcome, CommError):
            self.end(outcome)
        else:
            self.end(op.src if isinstance(self.op, ops.RecvAny) else ops.Received(op.src, op.result()))

    def end(self, outcome: Any) -> None:
        """End the op with a value or an error."""
        self.queue.drop(self)
        if self.stopped is None:
            conclude(self.work, outcome)
        else:
            cast("LaneWork[Any]", self.work).abandon(self.stopped)

    def withdraw(self) -> bool:
        """Withdraw the op; return False if the op is taking a message."""
        if self._taking is not None:
            if not self.queue.comm.withdraw(self._taking):
                return False
            self.queue.taking -= 1
            self._taking = None
        self.queue.drop(self)
        return True


class _Look:
    """The object through which the transport completes a native probe; see :class:`aiocomms.transport.Completion`."""

    __slots__ = ("__weakref__", "_queue", "ended", "op", "outcome", "posted")

    hints: Mapping[str, Any] | None = None
    """See :attr:`aiocomms.transport.Completion.hints`."""

    def __init__(self, op: ops.Probe, queue: _Queue) -> None:
        self.op: ops.Probe = op
        self._queue = queue
        self.ended: bool = False
        self.posted: bool = False
        """True once ``post`` has returned for this probe."""
        self.outcome: Any = None

    def done(self) -> bool:
        """See :meth:`aiocomms.transport.Completion.done`."""
        return self.ended

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        self.ended, self.outcome = True, value
        if self.posted:
            self._queue.seen(self)

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`."""
        self.complete(error)


class _Taking:
    """The object through which the transport completes a ``Take``; see :class:`aiocomms.transport.Completion`."""

    __slots__ = ("__weakref__", "_call", "ended", "op")

    def __init__(self, op: ops.Take, call: _AnyCall) -> None:
        self.op: ops.Take = op
        self._call = call
        self.ended: bool = False

    @property
    def hints(self) -> Mapping[str, Any] | None:
        """See :attr:`aiocomms.transport.Completion.hints`."""
        return self._call.work.hints

    def done(self) -> bool:
        """See :meth:`aiocomms.transport.Completion.done`."""
        return self.ended or self._call.work.done()

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        self.ended = True
        self._call.taken(value)

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`."""
        self.complete(error)
