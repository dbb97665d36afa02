"""What a communicator and all that are split from it share: one engine, and who waits for what."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING, Final

from torch import UntypedStorage

from aiocomms.cuda import Cuda
from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import run_in_thread
from aiocomms.transport import Completion
from aiocomms_ucx import wire
from aiocomms_ucx._engine import Engine, NoticeKind

if TYPE_CHECKING:
    from aiocomms_ucx.transport import UcxTransport

_GOODBYE: Final = 2.0
"""Seconds in which the peers' engines confirm that they have got everything; they do so without their loops."""

Entry = tuple["UcxTransport", Completion, int]
"""Who is told of an op's outcome: its transport and its work; and, of a collective, its number."""


class SharedEngine:
    """One rank's engine. Every method is called on the loop's thread."""

    def __init__(self, engine: Engine, rank: int, cuda: Cuda | None = None) -> None:
        """Begin.

        :param cuda: the GPU whose memory it is for; None: it is for the memory of CPUs.
        """
        self.engine = engine
        self.cuda = cuda
        self.rank = rank
        self.transports: dict[int, UcxTransport] = {}
        """By the engine's number of their communicator."""
        self.pending: dict[int, Entry] = {}
        """By ticket, which is the work's ``id``. What is in here keeps its tensors: the wire may still hold them."""
        self.broken = False
        _open_engines.add(self)

    def progress(self) -> bool | None:
        """Move things on, and pass on what has happened. None: nothing has, and the engine's thread is at it."""
        happened = self.engine.progress()
        if happened is None:
            return None if self.engine.bulk else False
        outcomes, notices = happened
        pop = self.pending.pop
        for ticket, status, a, b in outcomes:
            transport, work, index = pop(ticket)
            transport.finish(work, index, status, a, b)
        for kind, peer, group, detail, raw in notices:
            self._handle_notice(kind, peer, group, detail, raw)
        return True

    def uses(self, storage: UntypedStorage) -> bool:
        """Whether an op that is not done reads or writes this memory."""
        return any(
            tensor.untyped_storage().data_ptr() == storage.data_ptr()
            for _, work, _ in self.pending.values()
            for _, tensor in work.op.reads() + work.op.writes()
        )

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
            (transport.left if kind == NoticeKind.LEFT else transport.disagrees)(peer, detail)

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
        """A member speaks another language: nothing that it says can be relied on."""
        for transport in list(self.transports.values()):
            transport.misled(peer, what)

    async def leave(self, group: int) -> None:
        """A communicator closes; the last one takes the engine with it."""
        del self.transports[group]
        self.engine.close_group(group)
        if not self.transports:
            await run_in_thread(self._close, anyhow=True)
            self.pending.clear()
            _open_engines.discard(self)

    def _close(self) -> None:
        """Blocks, off the loop."""
        if self.cuda is not None:
            self.cuda.activate()
        self.engine.close(not self.broken, _GOODBYE)


_open_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


def _stop_all() -> None:
    """UCX does not expect to be used while the process ends around it."""
    for shared in list(_open_engines):
        shared.engine.close(False, 0.0)


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_open_engines.clear)  # the engines, and their threads, are the parent's
