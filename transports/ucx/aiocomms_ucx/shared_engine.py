"""The engine that a communicator shares with all communicators split from it, and the works that wait for it."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Final

from torch import Tensor

from aiocomms.cuda import Cuda
from aiocomms.errors import CommError, ProtocolError
from aiocomms.lowlevel import Unshared, at_end, register, run_in_thread
from aiocomms.transport import Completion
from aiocomms_ucx import wire
from aiocomms_ucx._engine import Engine, NoticeKind
from aiocomms_ucx.listener import Listener

if TYPE_CHECKING:
    from aiocomms_ucx.lanes import LaneCollectives
    from aiocomms_ucx.transport import UcxTransport

_GOODBYE: Final = 2.0
"""Seconds in which the peers' engines must confirm that they have received everything, without their loops."""

_OF_LANES: Final = frozenset({NoticeKind.LANE_DISAGREES, NoticeKind.LANE_LEFT})

Entry = tuple["UcxTransport | LaneCollectives", Completion, int]
"""Who is told the outcome of an op, its work, and the number of a collective or of its lane."""


class SharedEngine:
    """One rank's engine, and the communicators that share it. What is not marked is called on the loop's thread."""

    def __init__(self, engine: Engine, rank: int, unshared: Unshared, cuda: Cuda | None = None) -> None:
        """Start without communicators.

        :param unshared: the addresses of its control connections.
        :param cuda: the GPU whose memory the engine carries; None if it carries the memory of CPUs.
        """
        self.engine = engine
        self.cuda = cuda
        self.rank = rank
        self.transports: dict[int, UcxTransport] = {}
        """The transports, by the engine's number of their communicator."""
        self.pending: dict[int, Entry] = {}
        """The ops that are not done, by ticket: the work's ``id``.

        An entry keeps its op's tensors alive, because the wire may still use them.
        """
        self.broken = False
        register(self)
        try:
            self._listener = Listener(engine.notes_fileno(), self.hear_notes)
        except (RuntimeError, OSError) as error:
            engine.close(False, 0.0)
            raise CommError(f"what other ranks say cannot be heard: {error}") from error
        self._unshared = unshared
        unshared.belongs_to(self)
        _open_engines.add(self)

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
            if entry is not None:  # else a signal handler has interrupted its post, and its caller knows
                owner, work, index = entry
                owner.finish(work, index, status, a, b)
        for kind, peer, group, detail, raw in notices:
            self._handle_notice(kind, peer, group, detail, raw)
        return True

    def held(self) -> list[Tensor]:
        """The tensors of ops that are not done, also of communicators that have been given up. On any thread."""
        entries = [self.pending.get(ticket) for ticket in list(self.pending)]
        ops = [entry[1].op for entry in entries if entry is not None]
        return [tensor for op in ops for _, tensor in op.reads() + op.writes()]

    def _handle_notice(self, kind: int, peer: int, group: int, detail: int, raw: bytes) -> None:
        if kind == NoticeKind.LOST:
            self.broken = True
            for transport in list(self.transports.values()):
                transport.lost(peer)
        elif kind == NoticeKind.FRAME:
            self._handle_frame(peer, raw)
        elif kind == NoticeKind.MISLED:
            self._misled(peer, "sends messages that make no sense")
        elif group in self.transports:
            transport = self.transports[group]
            if kind == NoticeKind.FAILED:
                transport.failed(raw.decode(errors="replace"))
            elif kind in _OF_LANES:
                (transport.lanes.left if kind == NoticeKind.LANE_LEFT else transport.lanes.disagrees)(peer, detail)
            else:
                (transport.left if kind == NoticeKind.LEFT else transport.disagrees)(peer, detail)

    def hear_notes(self) -> None:
        """Hand on what other ranks say to this one's core; on the listener's thread."""
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
        """Close a communicator. The last one closes the engine."""
        del self.transports[group]
        self.engine.close_group(group)
        if not self.transports:
            await run_in_thread(self._close, anyhow=True)
            self.pending.clear()
            self._unshared.release()
            _open_engines.discard(self)

    def _close(self) -> None:
        """Close the engine. Blocks, off the loop."""
        if self.cuda is not None:
            self.cuda.activate()
        self.engine.close(not self.broken, _GOODBYE)
        self._listener.join()


_open_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


def _stop_all() -> None:
    """Halt all engines at exit: UCX must not be used while the process ends, though a loop's thread may go on."""
    for shared in list(_open_engines):
        shared.engine.halt()


at_end(_stop_all)
os.register_at_fork(after_in_child=_open_engines.clear)  # the engines and their threads belong to the parent
