"""Matching: sends with receives, on the host. NCCL then carries the data.

NCCL has no tags: its sends and receives match in the order of the calls, wait for ever where sizes differ, and cannot
be withdrawn. So a sender announces a message on the control connection, the receiver matches it and tells the sender
that it takes the message, and only then do both call NCCL.

Each direction between two ranks has a communicator and a stream of its own (a lane), formed when its first message is
taken. If both directions or several pairs shared one, two ranks that receive first would wait for each other.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from aiocomms import ops
from aiocomms.cuda import Completions, Cuda, Event
from aiocomms.errors import CommError, MismatchError, ProtocolError, UnsupportedOperation
from aiocomms.lowlevel import misfit
from aiocomms.transport import OP_RESULT, Completion, conclude
from aiocomms_nccl import nccl
from aiocomms_nccl.collectives import CommStream
from aiocomms_nccl.control import Control
from aiocomms_nccl.nccl import Nccl, NcclComm
from aiocomms_nccl.wire import DTYPE_CODES, DTYPE_LIST, Announce, Lane, Take

Key = tuple[int, int, int]
"""Source, channel and tag."""

_SENDER: Final = 0
"""The sender's rank in a lane's communicator. The receiver's is 1."""


class Owner(Protocol):
    """What the matcher needs of its transport."""

    cuda: Cuda
    library: Nccl
    control: Control
    completions: Completions
    aborted: bool

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Run a blocking call in a thread, and then ``then`` on the loop's thread. An error loses the communicator."""

    def comm_stream(self, comm: NcclComm, rank: int, size: int) -> CommStream:
        """Return a communicator with a stream."""

    def call_nccl(self, what: str, call: Callable[[], object]) -> bool:
        """Call NCCL. Returns False if the call failed and the communicator is lost."""

    def closed_by(self, peer: int) -> CommError | None:
        """Return the error of ops that need a rank, if the rank has closed; None if it has not."""


class Posted:
    """A send or a receive, and the event of the caller's stream for which it waits."""

    __slots__ = ("after", "op", "work")

    def __init__(self, op: ops.Send | ops.Recv, work: Completion, after: Event) -> None:
        self.op = op
        self.work = work
        self.after = after


class _Lane:
    """One direction between this rank and another: a communicator of the two with a stream."""

    __slots__ = ("comm_stream", "peer", "sends", "waiting")

    def __init__(self, peer: int, sends: bool) -> None:
        self.peer = peer
        self.sends = sends
        self.comm_stream: CommStream | None = None
        self.waiting: deque[tuple[Posted, int, Any]] = deque()


class Matcher:
    """Matches the messages of one rank. Every method is called on the loop's thread unless it says otherwise."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._number = 0
        self._posted: defaultdict[Key, deque[Posted]] = defaultdict(deque)
        self._unexpected: defaultdict[Key, deque[Announce]] = defaultdict(deque)
        self._announced: dict[tuple[int, int], Posted] = {}
        self._lanes: dict[tuple[int, bool], _Lane] = {}

    def comm_streams(self) -> list[CommStream]:
        """Return the communicators of all lanes that are formed. Any thread may call this."""
        return [lane.comm_stream for lane in list(self._lanes.values()) if lane.comm_stream is not None]

    def post(self, op: ops.Send | ops.Recv, work: Completion) -> None:
        """Start a send or a receive.

        :raises UnsupportedOperation: the current stream is being captured.
        """
        owner = self._owner
        peer = op.dst if isinstance(op, ops.Send) else op.src
        if owner.cuda.capturing():
            raise UnsupportedOperation(
                "a message cannot be captured into a CUDA graph, because its two ranks agree on it on the host; "
                "send it outside of the capture, or capture a collective instead"
            )
        closed = owner.closed_by(peer)
        if closed is not None:
            work.fail(closed)
            return
        posted = Posted(op, work, owner.completions.mark(owner.cuda.current_stream()))
        if isinstance(op, ops.Send):
            self._number += 1
            self._announced[peer, self._number] = posted
            code = DTYPE_CODES[op.tensor.dtype]
            owner.control.send(peer, Announce(self._number, op.channel, op.tag, code, op.tensor.nbytes))
        else:
            self._recv((peer, op.channel, op.tag), posted)

    def _recv(self, key: Key, posted: Posted) -> None:
        unexpected = self._unexpected.get(key)
        if not unexpected:
            self._posted[key].append(posted)
            return
        message = unexpected.popleft()
        if not unexpected:
            del self._unexpected[key]
        self._take(key[0], message, posted)

    def withdraw(self, work: Completion) -> bool:
        """Forget a receive. Returns False if a message has already matched it."""
        op = work.op
        if not isinstance(op, ops.Recv):
            return False
        key = (op.src, op.channel, op.tag)
        queue = self._posted.get(key, deque())
        for posted in queue:
            if posted.work is work:
                queue.remove(posted)
                if not queue:
                    del self._posted[key]
                return True
        return False

    def close_peer(self, peer: int, error: CommError) -> None:
        """Fail all messages that wait for a rank, because the rank has closed."""
        orphans = [posted for key in [k for k in self._posted if k[0] == peer] for posted in self._posted.pop(key)]
        orphans += [self._announced.pop(key) for key in [k for k in self._announced if k[0] == peer]]
        for posted in orphans:
            if not posted.work.done():
                posted.work.fail(error)

    # -------------------------------------------------------------------------------------------- frames of the others

    def handle_announce(self, peer: int, message: Announce) -> None:
        """Match a message that a rank has announced."""
        if not 0 <= message.dtype < len(DTYPE_LIST):
            raise ProtocolError(f"rank {peer} announces a message of dtype number {message.dtype}", peer=peer)
        key = (peer, message.channel, message.tag)
        queue = self._posted.get(key)
        if not queue:
            self._unexpected[key].append(message)
            return
        posted = queue.popleft()
        if not queue:
            del self._posted[key]
        self._take(peer, message, posted)

    def handle_take(self, peer: int, frame: Take) -> None:
        """Send a message that a rank takes."""
        posted = self._announced.pop((peer, frame.number), None)
        if posted is None or not 0 <= frame.nbytes <= posted.op.tensor.nbytes:
            raise ProtocolError(f"rank {peer} takes a message that was not announced", peer=peer)
        self._transfer(peer, posted, frame.nbytes, OP_RESULT)

    def handle_lane(self, peer: int, frame: Lane) -> None:
        """Form the lane to a rank that has taken its first message from this rank."""
        self._form(self._lane(peer, sends=True), lambda: frame.unique_id)

    # ------------------------------------------------------------------------------------------------ transfers

    def _take(self, peer: int, message: Announce, posted: Posted) -> None:
        tensor = posted.op.tensor
        outcome = misfit(peer, DTYPE_LIST[message.dtype], message.nbytes, tensor) or OP_RESULT
        nbytes = 0 if isinstance(outcome, MismatchError) else min(message.nbytes, tensor.nbytes)
        self._owner.control.send(peer, Take(message.number, nbytes))
        self._transfer(peer, posted, nbytes, outcome)

    def _transfer(self, peer: int, posted: Posted, nbytes: int, outcome: Any) -> None:
        if not nbytes:
            conclude(posted.work, outcome)
            return
        sends = isinstance(posted.op, ops.Send)
        new = (peer, sends) not in self._lanes
        lane = self._lane(peer, sends)
        if new and not sends:
            self._form(lane, lambda: self._request_lane(peer))
        lane.waiting.append((posted, nbytes, outcome))
        self._flush(lane)

    def _lane(self, peer: int, sends: bool) -> _Lane:
        lane = self._lanes.get((peer, sends))
        if lane is None:
            lane = self._lanes[peer, sends] = _Lane(peer, sends)
        return lane

    def _request_lane(self, peer: int) -> bytes:
        """Ask the sender to form a new communicator. Runs in a thread."""
        unique_id = self._owner.library.unique_id()
        self._owner.control.send(peer, Lane(unique_id))
        return unique_id

    def _form(self, lane: _Lane, unique_id: Callable[[], bytes]) -> None:
        owner, rank = self._owner, _SENDER if lane.sends else 1 - _SENDER

        def form() -> CommStream:
            comm_stream = owner.comm_stream(owner.library.communicator(2, unique_id(), rank), rank, 2)
            comm_stream.warm(lane.sends)
            return comm_stream

        def formed(comm_stream: CommStream) -> None:
            lane.comm_stream = comm_stream
            self._flush(lane)

        owner.spawn(form, formed)

    def _flush(self, lane: _Lane) -> None:
        """Enqueue waiting messages in the order in which the receiver has taken them. Both ends have that order."""
        comm_stream = lane.comm_stream
        while comm_stream is not None and lane.waiting:
            posted, nbytes, outcome = lane.waiting.popleft()
            comm_stream.stream.wait_event(posted.after)
            call = comm_stream.comm.send if lane.sends else comm_stream.comm.recv
            peer = 1 - _SENDER if lane.sends else _SENDER
            enqueue = functools.partial(call, posted.op.tensor.data_ptr(), nbytes, nccl.UINT8, peer, comm_stream.handle)
            if not self._owner.call_nccl(posted.op.name, enqueue):
                return
            self._owner.completions.add(comm_stream.stream, functools.partial(self._finish, posted, outcome))

    def _finish(self, posted: Posted, outcome: Any) -> None:
        self._owner.completions.release(posted.after)
        if not self._owner.aborted:  # after an abort, the event may have fired because NCCL has stopped
            conclude(posted.work, outcome)
