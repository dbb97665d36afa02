"""The abort of a lane: if one rank aborts a lane, all ranks abort the lane. The communicator's other lanes continue.

The rank that aborts the lane sends a notice to every other rank. Each rank that gets a notice also sends notices, once
per lane. Unmatched receives of the lane are withdrawn, and no further messages are sent. A pending op of the lane ends
when the transport no longer uses the op's tensors. Messages between two ranks keep their order. So after a rank's
notice, no more messages of the lane come from that rank. The receiver of the notice receives and drops the messages
that have arrived, so that the sender's tensors are released.

A rank begins to receive notices at its first operation on a lane. Earlier notices wait like any unmatched message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec
import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.cuda import crossing
from aiocomms.errors import CommError, LaneAbortedError, MessageTruncatedError, MismatchError, ProtocolError
from aiocomms.lowering.runs import Poster
from aiocomms.lowering.tags import GIVEN_UP, collective_tags
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.versions import Dialect
from aiocomms.ops import buffers
from aiocomms.transport import OP_RESULT, Completion

REMEMBERED: Final = 2**12
"""The largest number of aborted lanes that are remembered.

If more lanes are aborted, a rank forgets the oldest of them. Operations on a forgotten lane are not refused.
"""

_BYTES: Final = 1024
_LONGEST_LANE, _LONGEST_REASON = 60, 120
"""Two limits of a notice: the largest number of characters of the lane's key, and of the abort's reason."""
_MOST_TAGS: Final = 16
"""The largest number of messages that a notice lists."""


_Channel = Annotated[int, msgspec.Meta(ge=0, le=ops.RMA_REPLY)]
_Tag = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _GivenUp(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A notice that tells another rank that a lane is aborted."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    lane: str
    reason: str
    first: Annotated[int, msgspec.Meta(ge=0)]
    """The rank that aborted the lane first."""
    tags: list[tuple[_Channel, _Tag]]
    """The channels and tags of the lane's messages that may still be unmatched at the receiver of the notice."""


_CODEC = ControlCodec[_GivenUp](_GivenUp, "the end of a lane", dialect=Dialect("ends of lanes", b"aioL", 2))


class Stopping(Protocol):
    """The methods of a router that end the ops of a lane."""

    def stop(self, number: int, error: CommError) -> list[ops.Send]:
        """End all pending ops of a lane, and return the sends that may still be unmatched."""

    def post_at_once(self, op: ops.Recv, work: Completion) -> None:
        """See :meth:`aiocomms.transport.Transport.post_at_once`."""

    def forget(self, number: int, rank: int) -> None:
        """Forget a lane's messages from a rank, because the rank sends no more messages in the lane."""


class LaneAborts:
    """The aborted lanes of one communicator, and the exchange of notices about them."""

    def __init__(self, comm: Poster, router: Stopping) -> None:
        self._comm = comm
        self._router = router
        self.given_up: dict[int, LaneAbortedError] = {}
        """The errors of aborted lanes, by lane number."""
        self._listening = self._closed = False
        self._ears: dict[int, _Ear] = {}
        """The pending receive of the next notice from each rank."""

    def listen(self) -> None:
        """Start to receive the notices of other ranks. Idempotent."""
        if not self._listening:
            self._listening = True
            for rank in self._others():
                self._await_word(rank)

    def close(self) -> None:
        """Stop receiving notices."""
        self._listening = self._closed = True
        for ear in self._ears.values():
            if not ear.done():
                self._comm.withdraw(ear)

    def give_up(self, number: int, lane: str, reason: str) -> None:
        """Abort a lane on all ranks."""
        self.listen()
        self._end(_GivenUp(number, lane, reason, self._comm.rank, []))

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._comm.size) if rank != self._comm.rank)

    def _await_word(self, rank: int) -> None:
        buffer = buffers.empty(_BYTES, dtype=torch.uint8, device=self._comm.device)
        ear = self._ears[rank] = _Ear(ops.Recv(buffer, rank, GIVEN_UP, ops.COLLECTIVE), self)
        self._post(ear)

    def _drop(self, src: int, channel: int, tag: int) -> None:
        """Drop the unmatched messages from a rank. The method uses empty receives, which match messages of any size."""
        op = ops.Recv(buffers.empty(0, dtype=torch.uint8, device=self._comm.device), src, tag, channel)
        while True:
            sink = _Sink(op)
            try:
                self._router.post_at_once(op, sink)
            except CommError:  # The rank has closed, or the communicator is lost.
                return
            if sink.ended and not sink.took:
                return
            if not sink.ended and self._comm.withdraw(sink):
                return

    def _post(self, message: _Message) -> None:
        try:
            self._comm.post(message.op, message)
        except CommError:  # The rank has closed, or the communicator is lost, so it needs no notice.
            message.ended = True

    def heard(self, rank: int, words: Tensor) -> None:
        """Handle the notice of a rank that has aborted a lane."""
        try:
            told = _CODEC.decode_padded(crossing.to_bytes(words), rank)
        except ProtocolError as error:
            self._comm.lose(error)
            return
        if not self._closed:
            self._await_word(rank)
        self._end(told)
        self._router.forget(told.number, rank)
        for channel, tag in {*told.tags, *((ops.COLLECTIVE, tag) for tag in collective_tags(told.number))}:
            self._drop(rank, channel, tag)

    def _end(self, told: _GivenUp) -> None:
        """Abort a lane on this rank, and notify the other ranks.

        If this rank has already aborted the lane, do nothing.
        """
        number = told.number
        if number in self.given_up:
            return
        error = LaneAbortedError(f"the lane was aborted by rank {told.first}: {told.reason}", peer=told.first)
        if len(self.given_up) >= REMEMBERED:
            del self.given_up[next(iter(self.given_up))]
        self.given_up[number] = error
        left = self._router.stop(number, error)
        for send in left:
            if send.dst == self._comm.rank:
                self._drop(send.dst, send.channel, send.tag)
        for rank in self._others():
            tags = [(send.channel, send.tag) for send in left if send.dst == rank]
            told = msgspec.structs.replace(told, tags=tags[:_MOST_TAGS])
            self._post(_Message(ops.Send(_tell(told, self._comm.device), rank, GIVEN_UP, ops.COLLECTIVE)))


class _Message:
    """The object through which the transport completes a message that no program awaits."""

    __slots__ = ("__weakref__", "ended", "op")

    hints: Mapping[str, Any] | None = None

    def __init__(self, op: ops.Send | ops.Recv) -> None:
        self.op = op
        self.ended = False

    def done(self) -> bool:
        """See :meth:`aiocomms.transport.Completion.done`."""
        return self.ended

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        self.ended = True

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`."""
        self.ended = True


class _Sink(_Message):
    """The object through which the transport completes a receive whose message is dropped."""

    __slots__ = ("took",)

    def __init__(self, op: ops.Recv) -> None:
        super().__init__(op)
        self.took = False

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        self.ended = self.took = True

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`. A message of another size or dtype counts as received."""
        self.ended = True
        self.took = isinstance(error, (MessageTruncatedError, MismatchError))


class _Ear(_Message):
    """The object through which the transport completes the receive of the next notice from one rank."""

    __slots__ = ("_ends",)

    op: ops.Recv

    def __init__(self, op: ops.Recv, ends: LaneAborts) -> None:
        super().__init__(op)
        self._ends = ends

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        super().complete(value)
        self._ends.heard(self.op.src, self.op.tensor)


def _tell(told: _GivenUp, device: torch.device) -> Tensor:
    short = msgspec.structs.replace(told, lane=told.lane[:_LONGEST_LANE], reason=told.reason[:_LONGEST_REASON])
    return crossing.to_tensor(_CODEC.encode_padded(short, _BYTES), device)
