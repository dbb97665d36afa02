"""The engine that several communicators share, and the works that wait for this engine.

A communicator shares its engine with its splits. The communicators of an endpoint also share an engine.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Final, Protocol

import anyio
from torch import Tensor

from aiocomms.cuda import Cuda
from aiocomms.errors import CommError, ProtocolError
from aiocomms.lowlevel import Unshared, at_end, register, run_in_thread
from aiocomms.transport import Completion
from aiocomms_ucx import wire
from aiocomms_ucx._engine import Engine, Kept, NoticeKind
from aiocomms_ucx.listener import Listener

_GOODBYE: Final = 2.0
"""The time, in seconds, within which the peers' engines must confirm that they have received all data.

For this confirmation, the peers' event loops need not run.
"""

_MOST_PARTED: Final = 64
"""The number of disconnected peers after which new communicators get a new engine.

The limit bounds the memory that UCX has not freed. After a message of more than about 40 bytes, UCX frees the 85 KiB of
a UCX endpoint only when UCX's worker ends.
"""

_OF_LANES: Final = frozenset({NoticeKind.LANE_DISAGREES, NoticeKind.LANE_LEFT})


class Finisher(Protocol):
    """The receiver of an op's outcome: a transport, or the lanes of a transport."""

    def finish(self, work: Completion, index: int, status: int, a: int, b: int) -> None:
        """Complete an op that has ended.

        The work may already be done, because the engine also reports abandoned ops.
        """


class Lanes(Protocol):
    """The methods of a communicator's lanes that handle notices of the engine."""

    def left(self, rank: int, lane: int) -> None:
        """Fail the running collective of a lane, because a rank that the collective needs has closed."""

    def disagrees(self, rank: int, lane: int) -> None:
        """Handle a difference between this rank's call and another rank's call in a lane.

        The other rank describes its call later.
        """


class Sharer(Protocol):
    """The attributes and methods with which a communicator on a shared engine handles notices of the engine."""

    peers: list[int]
    """The numbers of the ranks' engines."""

    @property
    def lanes(self) -> Lanes:
        """The communicator's lanes."""

    def rank_of(self, peer: int) -> int | None:
        """Return the rank of an engine's peer in this communicator; None if the peer is not a member."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""

    def lost(self, peer: int) -> None:
        """Handle a broken connection to an engine's peer. The peer had not closed the connection."""

    def misled(self, peer: int, what: str) -> None:
        """Declare the communicator lost because a peer of the engine has sent invalid data."""

    def failed(self, why: str) -> None:
        """Declare the communicator lost because a step of the engine failed, for example for lack of memory."""

    def left(self, rank: int, collectives: int) -> None:
        """Handle the close of this communicator by another rank.

        :param collectives: the number of collectives that had ended on the other rank before the close.
        """

    def disagrees(self, rank: int, index: int) -> None:
        """Describe this rank's call to all ranks, because the engine has found that another rank's call differs."""

    def hear(self, rank: int, said: wire.Frame) -> None:
        """Handle a frame from a rank. If the frame is a note, any thread may call this method."""


Entry = tuple[Finisher, Completion, int, Kept | None]
"""The record of a pending op: the op's finisher, its work, a number, and the object that keeps its memory.

For a collective in a lane, the number is the lane's number. For any other collective, it is the number of the
collective. For all other ops, it is -1.
"""


def kept(work: Completion) -> Kept:
    """Return an object that keeps the memory of an op's tensors at its address, because the engine uses the memory.

    While the object exists, the program cannot resize the storage. If the program gives a tensor other memory, the old
    memory stays allocated.
    """
    op = work.op
    return Kept([tensor for _, tensor in op.reads() + op.writes()])


class SharedEngine:
    """One rank's engine, and the communicators that share it.

    Methods run on the loop's thread, unless their docstrings say otherwise.

    The engine ends with its last communicator. Two engines disconnect when their last common communicator ends.
    """

    def __init__(self, engine: Engine, cuda: Cuda | None = None) -> None:
        """Create an object without communicators.

        :param engine: the started engine.
        :param cuda: the GPU whose memory the engine sends and receives; None for CPU memory.
        """
        self.engine = engine
        self.cuda = cuda
        self.number: int = engine.number
        self.numbers = itertools.count(self.number + 1)
        """The iterator over unused numbers. In an endpoint, each engine of another rank gets one of these numbers."""
        self.forming = 0
        """The number of communicators that are being formed on the engine."""
        self.transports: dict[int, Sharer] = {}
        """The transports, by their communicators' numbers in the engine."""
        self.pending: dict[int, Entry] = {}
        """The pending ops by ticket, which is the work's ``id``.

        An entry keeps its op's tensors alive, because the network may still use these tensors.
        """
        self._known: dict[int, list[Any]] = {}
        """The addresses of the connections with each other engine, by the engine's number."""
        self._uses: Counter[int] = Counter()
        """The number of communicators that this engine shares with each other engine."""
        self._silent: set[int] = set()
        """The engines from which this engine awaits no confirmation when the two engines disconnect."""
        self._retired = self._closed = False
        self._parted = 0
        """The number of engines from which this engine has disconnected."""
        cookie = secrets.randbits(64)
        engine.introduce(self.number, engine.address(), -1, os.getpid(), (cookie, cookie), self.number, 0)
        register(self)
        try:
            self._listener = Listener(engine.notes_fileno(), self.hear_notes)
        except (RuntimeError, OSError) as error:
            engine.close(False, 0.0)
            raise CommError(f"the notes of other ranks cannot be received: {error}") from error
        self._unshared = Unshared()
        self._unshared.belongs_to(self)
        _open_engines.add(self)

    @property
    def lasts(self) -> bool:
        """True while new communicators may share the engine.

        The engine must not have failed, and must have disconnected from fewer than :data:`_MOST_PARTED` peers.
        """
        return not (self._retired or self._closed) and self._parted < _MOST_PARTED

    def introduce(
        self, peer: int, addresses: Iterable[Any], address: bytes, socket: int, pid: int,
        cookies: tuple[int, int], name: int, cores: int,
    ) -> None:  # fmt: skip
        """Register another engine in this engine.

        :param addresses: the addresses of the connections with that engine.
        :param cores: the number of cores that the ranks of this host may use.
        """
        self._known[peer] = list(addresses)
        for each in self._known[peer]:
            self._unshared.add(each)
        try:
            self.engine.introduce(peer, address, socket, pid, cookies, name, cores)
        except RuntimeError:
            self._retired = True
            raise

    def distrust(self, peers: Collection[int]) -> None:
        """Mark peers from which this engine awaits no confirmation.

        These peers are dead or silent, or do not know this engine.
        """
        self._silent.update(self._known.keys() & peers)

    def join(self, group: int, transport: Sharer) -> None:
        """Add a communicator."""
        self.transports[group] = transport
        self._uses.update(transport.peers)

    def progress(self) -> bool | None:
        """Make progress, and handle the engine's outcomes and notices.

        :returns: True if there were outcomes or notices. Otherwise, None if the engine's own thread continues the work,
            or False if it does not.
        """
        happened = self.engine.progress()
        if happened is None:
            return None if self.engine.parks else False
        outcomes, notices = happened
        pop = self.pending.pop
        for ticket, status, a, b in outcomes:
            entry = pop(ticket, None)
            # A signal handler has interrupted the post of an op without an entry, and the caller has got its error.
            if entry is not None:
                owner, work, index, _ = entry
                owner.finish(work, index, status, a, b)
        for kind, peer, group, detail, raw in notices:
            self._handle_notice(kind, peer, group, detail, raw)
        return True

    def held(self) -> list[Tensor]:
        """Return the tensors of pending ops, including the ops of abandoned communicators.

        Any thread may call this method.
        """
        entries = [self.pending.get(ticket) for ticket in list(self.pending)]
        ops = [entry[1].op for entry in entries if entry is not None]
        return [tensor for op in ops for _, tensor in op.reads() + op.writes()]

    def _handle_notice(self, kind: int, peer: int, group: int, detail: int, raw: bytes) -> None:
        if kind == NoticeKind.LOST:
            self.distrust([peer])
            for transport in list(self.transports.values()):
                rank = transport.rank_of(peer)
                self._retired |= rank is not None and not transport.far(rank)
                transport.lost(peer)
        elif kind == NoticeKind.FRAME:
            self._handle_frame(peer, raw)
        elif kind == NoticeKind.MISLED:
            self._misled(peer, "sends messages that make no sense")
        elif group in self.transports:
            transport = self.transports[group]
            if kind == NoticeKind.FAILED:
                self._retired = True
                transport.failed(raw.decode(errors="replace"))
            elif kind in _OF_LANES:
                (transport.lanes.left if kind == NoticeKind.LANE_LEFT else transport.lanes.disagrees)(peer, detail)
            else:
                (transport.left if kind == NoticeKind.LEFT else transport.disagrees)(peer, detail)

    def hear_notes(self) -> None:
        """Pass other ranks' notes to the core of aiocomms on this rank. The listener's thread calls this method."""
        for peer, raw in self.engine.take_notes():
            self._handle_frame(peer, raw)

    def _handle_frame(self, peer: int, raw: bytes) -> None:
        try:
            frame = wire.unpack(raw)
        except ProtocolError as error:
            self._misled(peer, error.message)
            return
        transport = self.transports.get(frame.group)
        rank = None if transport is None else transport.rank_of(peer)
        if transport is not None and rank is not None:
            transport.hear(rank, frame)

    def _misled(self, peer: int, what: str) -> None:
        """Fail all communicators of which ``peer`` is a member, because its frames or messages are invalid."""
        for transport in list(self.transports.values()):
            transport.misled(peer, what)

    async def leave(self, group: int) -> None:
        """Close a communicator."""
        self._uses.subtract(self.transports.pop(group).peers)
        self.engine.close_group(group)
        await self.settle()

    async def settle(self) -> None:
        """Disconnect from the peers with which this engine shares no communicator any more.

        If no communicator exists on the engine or is being formed, close the engine.
        """
        with anyio.CancelScope(shield=True):  # This takes at most some seconds.
            await self._settle()

    async def _settle(self) -> None:
        if self._closed:
            return
        if not self.transports and not self.forming:
            self._closed = True
            await run_in_thread(self._close, anyhow=True)
            self.pending.clear()
            self._unshared.release()
            _open_engines.discard(self)
        elif gone := [peer for peer in self._known if self._uses[peer] <= 0]:
            addresses = [address for peer in gone for address in self._known.pop(peer)]
            silent = self._silent.intersection(gone)
            self._silent -= silent
            for peer in gone:
                del self._uses[peer]
            clean = await run_in_thread(lambda: self._part(set(gone) - silent, silent), anyhow=True)
            self._retired |= not clean
            self._parted += len(gone)
            for address in addresses if not self._closed else ():  # A closed engine has released all of them.
                self._unshared.remove(address)

    def _part(self, peers: Collection[int], silent: Collection[int]) -> bool:
        """Disconnect from some peers. This method blocks, so it is not called on the loop's thread.

        :returns: whether UCX has freed all memory of these peers.
        """
        if self.cuda is not None:
            self.cuda.activate()
        clean = not silent or self.engine.part(list(silent), False, _GOODBYE)
        return self.engine.part(list(peers), True, _GOODBYE) and clean

    def _close(self) -> None:
        """Close the engine. This method blocks, so it is not called on the loop's thread."""
        if self.cuda is not None:
            self.cuda.activate()
        self.engine.close(not self._silent, _GOODBYE)
        self._listener.join()


_open_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


def _stop_all() -> None:
    """Halt all engines when the process exits.

    UCX must not run while the process ends. A loop's thread may still be running at this time, and could call UCX.
    """
    for shared in list(_open_engines):
        shared.engine.halt()


at_end(_stop_all)
os.register_at_fork(after_in_child=_open_engines.clear)  # the engines and their threads belong to the parent
