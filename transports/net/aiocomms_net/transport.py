"""The transport ``net``. Each pair of ranks has one connection, and the receiver matches sends and receives."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import anyio
import msgspec
import torch

from aiocomms import lowlevel, ops
from aiocomms.errors import CommError, CommTimeoutError
from aiocomms.lowlevel import clock
from aiocomms.transport import OP_RESULT, Capabilities, Completion, Rendezvous, SideChannel, Transport, conclude

Key = tuple[int, int, int]
"""The source, channel and tag of a message or of a posted receive."""
_PAUSE: Final = 0.05
"""Seconds between two attempts to connect to a rank."""
_CALLS: Final = 10
"""The number of failed attempts to connect after which a rank is treated as dead.

One failed attempt is not enough, because the simulated network cuts some attempts.
"""


class Sent:
    """A message. When a receive matches the message, the receiver reads the bytes from the sender's tensor."""

    def __init__(self, op: ops.Send, number: int) -> None:
        self.channel, self.tag, self.number = op.channel, op.tag, number
        self.tensor = op.tensor

    def keep(self) -> None:
        """Copy the message's bytes, because the sender may reuse its tensor before a receive matches the message."""
        self.tensor = self.tensor.clone()


class Taken(NamedTuple):
    """The frame which reports that a receive has read the bytes of a message."""

    number: int


class NetNote(NamedTuple):
    """The frame with data (a note) that the core of aiocomms sends from one rank to another."""

    what: bytes


class Aborted(NamedTuple):
    """The frame which reports that the communicator is lost."""

    reason: lowlevel.Reason


class Closed(NamedTuple):
    """The frame which reports that the sender has closed the communicator."""


class NetPeer:
    """The connection with one rank."""

    def __init__(self, rank: int, conduit: clock.Conduit) -> None:
        self.rank, self.conduit = rank, conduit
        self.over = False
        """True once the other rank has closed the communicator or the connection has ended."""
        self.sent: dict[int, tuple[Sent, Completion]] = {}
        """The sends whose messages are at the other rank and have not been read. The keys are the messages' numbers."""


class NetTransport(Transport):
    """The transport of one rank. A send is complete when a receive has read the send's message."""

    capabilities = Capabilities(ops=frozenset({ops.Send, ops.Recv, *ops.ARRIVALS}), simulated=True)

    def __init__(self, rank: int, size: int, conduits: Mapping[int, clock.Conduit]) -> None:
        self._rank, self._size = rank, size
        self._numbers = itertools.count(1)
        self._arrived: dict[Key, deque[Sent]] = {}
        self._posted: dict[Key, deque[tuple[ops.Recv, Completion]]] = {}
        self._probes: dict[Key, list[tuple[ops.Probe, Completion]]] = {}
        self._ended = False
        self._peers = {peer: NetPeer(peer, conduit) for peer, conduit in conduits.items()}
        for peer in self._peers.values():
            peer.conduit.hear(functools.partial(self._hear, peer), functools.partial(self._gone, peer))

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        """See :meth:`Transport.probe`."""
        return None if clock.simulation is not None else "it is the network of a simulation, and none runs"

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`."""
        conduits = await _meet(rendezvous) if rendezvous.size > 1 else {}
        return cls(rendezvous.rank, rendezvous.size, conduits)

    # ------------------------------------------------------------------------------------------------ operations

    def post(self, op: Any, work: Completion) -> None:
        """See :meth:`Transport.post`."""
        if not isinstance(op, ops.Probe):  # the program may give its own tensor other memory before the op ends
            op = msgspec.structs.replace(op, tensor=op.tensor.detach())
        if isinstance(op, ops.Send):
            self._send(op, work)
            return
        peer, key = self._peers.get(op.src), (op.src, op.channel, op.tag)
        arrived = self._arrived.get(key)
        if arrived:
            if isinstance(op, ops.Probe):
                conclude(work, op.message(arrived[0].tensor.nbytes, arrived[0].tensor.dtype))
            else:
                self._take(key, arrived.popleft(), op, work)
        elif isinstance(op, ops.Take):
            conclude(work, False)
        elif peer is None or peer.over:
            work.fail(lowlevel.closed_by(op.src))
        elif isinstance(op, ops.Probe):
            self._probes.setdefault(key, []).append((op, work))
        else:
            self._posted.setdefault(key, deque()).append((op, work))

    def _send(self, op: ops.Send, work: Completion) -> None:
        peer = self._peers.get(op.dst)
        if peer is None or peer.over:
            work.fail(lowlevel.closed_by(op.dst))
            return
        message = Sent(op, next(self._numbers))
        peer.sent[message.number] = message, work
        peer.conduit.send(message)

    def _take(self, key: Key, message: Sent, op: ops.Recv, work: Completion) -> None:
        """Copy a message into the tensor of a receive, and notify the sender."""
        src = key[0]
        if lowlevel.has_room(message.tensor):
            outcome: Any = lowlevel.copy_message(message.tensor, op.tensor, src) or OP_RESULT
        else:
            outcome = CommError(f"the storage of a tensor of rank {src} was resized while the op had it", peer=src)
        self._peers[src].conduit.send(Taken(message.number))
        conclude(work, outcome)

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        op: Any = work.op
        if not isinstance(op, ops.Recv | ops.Probe):
            return False
        waiting: dict[Key, Any] = self._probes if isinstance(op, ops.Probe) else self._posted
        entries = waiting.get((op.src, op.channel, op.tag), ())
        for entry in entries:
            if entry[1] is work:
                entries.remove(entry)
                return True
        return False

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """See :meth:`Transport.waiting_for`."""
        return [getattr(work.op, name) for name in ("src", "dst") if hasattr(work.op, name)]

    # --------------------------------------------------------------------------------------- what others have sent

    def _hear(self, peer: NetPeer, frame: object) -> None:
        if self._ended and not isinstance(frame, NetNote):
            return
        match frame:
            case Sent():
                self._match((peer.rank, frame.channel, frame.tag), frame)
            case Taken(number):
                conclude(peer.sent.pop(number)[1])
            case NetNote(what):
                self.on_note(peer.rank, what)
            case Aborted(reason):
                self._end()
                self.on_failure(reason.to_error())
            case Closed():
                self._leave(peer)

    def _end(self) -> None:
        """Mark the communicator as lost. Copy unmatched messages, because other ranks may read these messages later."""
        if not self._ended:
            self._ended = True
            for peer in self._peers.values():
                for message, _ in peer.sent.values():
                    message.keep()

    def _match(self, key: Key, message: Sent) -> None:
        posted = self._posted.get(key)
        if posted:
            self._take(key, message, *posted.popleft())
            return
        self._arrived.setdefault(key, deque()).append(message)
        for probe, work in self._probes.pop(key, ()):
            conclude(work, probe.message(message.tensor.nbytes, message.tensor.dtype))

    def _leave(self, peer: NetPeer) -> None:
        """Fail only the pending works that need a rank that has closed the communicator."""
        peer.over = True
        peer.conduit.close()
        error = lowlevel.closed_by(peer.rank)
        sent, peer.sent = peer.sent, {}
        waiting: list[dict[Key, Any]] = [self._posted, self._probes]
        late = [kept.pop(key) for kept in waiting for key in [key for key in kept if key[0] == peer.rank]]
        for work in [*(work for _, work in sent.values()), *(work for entries in late for _, work in entries)]:
            conclude(work, error)

    def _gone(self, peer: NetPeer, _: bool) -> None:
        """Mark the communicator as lost, because a connection has ended without a ``Closed`` frame."""
        if not peer.over:
            peer.over = True
            if not self._ended:
                self._end()
                self.on_failure(lowlevel.gone(peer.rank))

    # ---------------------------------------------------------------------------------- beside and after operations

    def progress(self) -> None:
        """See :meth:`Transport.progress`. This method does nothing, because the network calls this transport."""

    def fileno(self) -> None:
        """See :meth:`Transport.fileno`."""

    def say(self, rank: int, note: bytes) -> bool:
        """See :meth:`Transport.say`."""
        peer = self._peers.get(rank)
        if peer is not None:
            peer.conduit.send(NetNote(note))
        return True

    def last_heard(self) -> Sequence[float] | None:
        """See :meth:`Transport.last_heard`."""
        for peer in self._peers.values():
            peer.conduit.ping()
        return [
            self._peers[rank].conduit.heard if rank in self._peers and not self._peers[rank].over else clock.now()
            for rank in range(self._size)
        ]

    def side_channel(self) -> SideChannel | None:
        """See :meth:`Transport.side_channel`."""
        return _SideChannel(self._peers)

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`."""
        self._end()
        self._tell(Aborted(lowlevel.Reason.of(error, self._rank)))

    def _tell(self, frame: object) -> None:
        for peer in self._peers.values():
            if not peer.over:
                peer.conduit.send(frame)

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        self._tell(Closed())
        for peer in self._peers.values():
            peer.conduit.close()


class _SideChannel:
    """See :class:`aiocomms.transport.SideChannel`."""

    def __init__(self, peers: Mapping[int, NetPeer]) -> None:
        self._peers = peers

    def gone(self, rank: int) -> bool:
        """See :meth:`aiocomms.transport.SideChannel.gone`."""
        return rank not in self._peers or self._peers[rank].over

    def far(self, rank: int) -> bool:
        """See :meth:`aiocomms.transport.SideChannel.far`. Each simulated rank has its own host."""
        return True


async def _meet(rendezvous: Rendezvous) -> dict[int, clock.Conduit]:
    """Connect to every lower rank, and accept a connection from every higher rank.

    :raises CommTimeoutError: a rank did not connect in time.
    :raises PeerDiedError: a lower rank does not accept connections, and this rank has no connection with it.
    """
    assert clock.simulation is not None
    network = clock.simulation.network
    meeting = _Calling(network, rendezvous)
    address = network.listen(meeting.arrived)
    try:
        addresses = await rendezvous.exchange("net", address)
        async with anyio.create_task_group() as calls:
            for peer in range(rendezvous.rank):
                calls.start_soon(meeting.call, peer, addresses[peer])
            with anyio.move_on_after(max(0.0, rendezvous.left())):
                await meeting.complete.wait()
            calls.cancel_scope.cancel()
        meeting.check()
    except BaseException:
        meeting.close()
        raise
    finally:
        network.unlisten(address)
    return meeting.conduits


class _Calling:
    """The connections of a rank while the rank connects to the other ranks."""

    def __init__(self, network: clock.Network, rendezvous: Rendezvous) -> None:
        self._network, self._rendezvous = network, rendezvous
        self.conduits: dict[int, clock.Conduit] = {}
        self.complete = anyio.Event()
        self._deaf: int | None = None

    def arrived(self, conduit: clock.Conduit, peer: int) -> None:
        """Store a connection with a rank.

        If a connection with rank ``peer`` is already stored, the new connection replaces it, because ``peer`` no longer
        uses the stored connection.
        """
        self.conduits[peer] = conduit
        if len(self.conduits) == self._rendezvous.size - 1:
            self.complete.set()

    async def call(self, peer: int, address: bytes) -> None:
        """Connect to a rank, and retry if the rank does not answer.

        After several failed attempts, the rank is treated as dead.
        """
        for _ in range(_CALLS):
            answered, answers = anyio.Event(), list[bool]()

            def hear(answer: bool, answered: anyio.Event = answered, answers: list[bool] = answers) -> None:
                answers.append(answer)
                answered.set()

            conduit = self._network.connect(address, self._rendezvous.rank, hear)
            try:
                await answered.wait()
            finally:
                if not answers:
                    conduit.close()
            if answers[0]:
                return self.arrived(conduit, peer)
            await anyio.sleep(_PAUSE)
        self._deaf = peer
        self.complete.set()
        return None

    def check(self) -> None:
        """Raise an error if a rank is missing.

        :raises PeerDiedError: a rank does not accept connections.
        :raises CommTimeoutError: a rank did not connect in time.
        """
        if self._deaf is not None:
            raise lowlevel.gone(self._deaf)
        size, seconds = self._rendezvous.size, self._rendezvous.timeout
        absent = [it for it in range(size) if it != self._rendezvous.rank and it not in self.conduits]
        if absent:
            late = f"these ranks did not connect within {seconds:g} s: {absent}"
            raise CommTimeoutError(late, late=absent)

    def close(self) -> None:
        """Close all connections, and notify the other ranks, which may already have opened the communicator."""
        given_up = lowlevel.Reason("CommAbortedError", "it gave up while the ranks connected", self._rendezvous.rank)
        for conduit in self.conduits.values():
            conduit.send(Aborted(given_up))
            conduit.close()
