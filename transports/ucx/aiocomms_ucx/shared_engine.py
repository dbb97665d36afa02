"""The engine that communicators share: those of a family, or of an endpoint; and the works that wait for it."""

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
"""Seconds in which the peers' engines must confirm that they have received everything, without their loops."""

_MOST_PARTED: Final = 64
"""Peers from which an engine parts before later communicators have another one.

UCX gives an endpoint back with its worker alone, if a message of more than some 40 bytes went over it: 85 KiB each.
"""

_OF_LANES: Final = frozenset({NoticeKind.LANE_DISAGREES, NoticeKind.LANE_LEFT})


class Finisher(Protocol):
    """The receiver of an op's outcome: a transport, or the lanes of one."""

    def finish(self, work: Completion, index: int, status: int, a: int, b: int) -> None:
        """Complete an op that has ended. Its work may be done already: the engine also reports abandoned ops."""


class Lanes(Protocol):
    """The lanes of a communicator, as the engine's notices reach them."""

    def left(self, rank: int, lane: int) -> None:
        """Handle that a rank has closed the communicator which the collective under way in a lane needs."""

    def disagrees(self, rank: int, lane: int) -> None:
        """Handle that a rank calls something else in a lane than this one; it will say what."""


class Sharer(Protocol):
    """A communicator that shares an engine, as the engine's notices reach it."""

    peers: list[int]
    """The numbers of its ranks' engines."""

    @property
    def lanes(self) -> Lanes:
        """Its lanes."""

    def rank_of(self, peer: int) -> int | None:
        """Return the rank of a peer of the engine in this communicator; None if it is not a member."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""

    def lost(self, peer: int) -> None:
        """Handle that the connection to a peer of the engine has broken without a goodbye."""

    def misled(self, peer: int, what: str) -> None:
        """Lose the communicator because a peer of the engine has sent something that makes no sense."""

    def failed(self, why: str) -> None:
        """Lose the communicator because the engine could not take one of its steps, such as for want of memory."""

    def left(self, rank: int, collectives: int) -> None:
        """Handle that a rank has closed this communicator, after that many collectives."""

    def disagrees(self, rank: int, index: int) -> None:
        """Tell all ranks what this rank calls, because the engine has found that a rank calls something else."""

    def hear(self, rank: int, said: wire.Frame) -> None:
        """Handle a frame from a rank; a note on any thread."""


Entry = tuple[Finisher, Completion, int, Kept | None]
"""The finisher of an op, its work, the number of a collective or of its lane, and the op's memory."""


def kept(work: Completion) -> Kept:
    """Return the memory of an op that was handed to the engine, which stays in place while the result is referred to.

    A program that resizes such a storage is refused. Memory that it has moved away from stays in place, too.
    """
    op = work.op
    return Kept([tensor for _, tensor in op.reads() + op.writes()])


class SharedEngine:
    """One rank's engine, and the communicators that share it. The loop's thread calls all methods that are not marked.

    The engine ends with the last communicator. It parts from another rank's engine with the last one that has both.
    """

    def __init__(self, engine: Engine, cuda: Cuda | None = None) -> None:
        """Start without communicators.

        :param engine: the engine, which has been started.
        :param cuda: the GPU whose memory the engine carries; None if it carries the memory of CPUs.
        """
        self.engine = engine
        self.cuda = cuda
        self.number: int = engine.number
        self.numbers = itertools.count(self.number + 1)
        """The numbers for engines that come later, if this one is an endpoint's."""
        self.forming = 0
        """The number of communicators that are about to share the engine."""
        self.transports: dict[int, Sharer] = {}
        """The transports, by the engine's number of their communicator."""
        self.pending: dict[int, Entry] = {}
        """The ops that are not done, by ticket: the work's ``id``.

        An entry keeps its op's tensors alive, because the wire may still use them.
        """
        self._known: dict[int, list[Any]] = {}
        """The other engines, by number: the addresses of the connections with them."""
        self._uses: Counter[int] = Counter()
        """The number of communicators that each other engine is in."""
        self._silent: set[int] = set()
        """The engines whose goodbye is not waited for."""
        self._retired = self._closed = False
        self._parted = 0
        """The number of engines from which this one has parted."""
        cookie = secrets.randbits(64)
        engine.introduce(self.number, engine.address(), -1, os.getpid(), (cookie, cookie), self.number, 0)
        register(self)
        try:
            self._listener = Listener(engine.notes_fileno(), self.hear_notes)
        except (RuntimeError, OSError) as error:
            engine.close(False, 0.0)
            raise CommError(f"what other ranks say cannot be heard: {error}") from error
        self._unshared = Unshared()
        self._unshared.belongs_to(self)
        _open_engines.add(self)

    @property
    def lasts(self) -> bool:
        """True while new communicators may share the engine: it is sound, and UCX has freed peers that have left."""
        return not (self._retired or self._closed) and self._parted < _MOST_PARTED

    def introduce(
        self, peer: int, addresses: Iterable[Any], address: bytes, socket: int, pid: int,
        cookies: tuple[int, int], name: int, cores: int,
    ) -> None:  # fmt: skip
        """Let the engine know another one.

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
        """Wait for no goodbye of some peers: they are dead or silent, or do not know this engine."""
        self._silent.update(self._known.keys() & peers)

    def join(self, group: int, transport: Sharer) -> None:
        """Add a communicator."""
        self.transports[group] = transport
        self._uses.update(transport.peers)

    def progress(self) -> bool | None:
        """Make progress, and pass on outcomes and notices.

        :returns: whether there were any; None if there were none and the engine's own thread makes progress.
        """
        happened = self.engine.progress()
        if happened is None:
            return None if self.engine.parks else False
        outcomes, notices = happened
        pop = self.pending.pop
        for ticket, status, a, b in outcomes:
            entry = pop(ticket, None)
            # An op without an entry had its post interrupted by a signal handler, and its caller knows.
            if entry is not None:
                owner, work, index, _ = entry
                owner.finish(work, index, status, a, b)
        for kind, peer, group, detail, raw in notices:
            self._handle_notice(kind, peer, group, detail, raw)
        return True

    def held(self) -> list[Tensor]:
        """Return the tensors of ops that are not done, also of communicators that were given up. On any thread."""
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
        """Hand on the notes of other ranks to this one's core. The listener's thread calls this."""
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
        """Fail all communicators with a rank whose frames or messages make no sense."""
        for transport in list(self.transports.values()):
            transport.misled(peer, what)

    async def leave(self, group: int) -> None:
        """Close a communicator."""
        self._uses.subtract(self.transports.pop(group).peers)
        self.engine.close_group(group)
        await self.settle()

    async def settle(self) -> None:
        """Part from peers that are in no communicator any more. Close the engine if there is none, and none forms."""
        with anyio.CancelScope(shield=True):  # This takes some seconds at most.
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
        """Part from some peers. Blocks, off the loop.

        :returns: whether UCX has freed all that belongs to these peers.
        """
        if self.cuda is not None:
            self.cuda.activate()
        clean = not silent or self.engine.part(list(silent), False, _GOODBYE)
        return self.engine.part(list(peers), True, _GOODBYE) and clean

    def _close(self) -> None:
        """Close the engine. Blocks, off the loop."""
        if self.cuda is not None:
            self.cuda.activate()
        self.engine.close(not self._silent, _GOODBYE)
        self._listener.join()


_open_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


def _stop_all() -> None:
    """Halt all engines at exit: UCX must not be used while the process ends, though a loop's thread may go on."""
    for shared in list(_open_engines):
        shared.engine.halt()


at_end(_stop_all)
os.register_at_fork(after_in_child=_open_engines.clear)  # the engines and their threads belong to the parent
