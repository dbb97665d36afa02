"""The plug-in. A :class:`UcxTransport` is one communicator on an engine. Other communicators may share the engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, cast

import torch

from aiocomms import ops
from aiocomms.cuda import Cuda
from aiocomms.errors import ArgumentError, CommError, PeerDiedError, ProtocolError
from aiocomms.lowlevel import Reason, closed_by, disagreement, gone
from aiocomms.transport import OP_RESULT, Capabilities, Completion, LaneTransport, Rendezvous
from aiocomms_ucx import speeds, wire
from aiocomms_ucx._engine import MOST_TURNS, NO_DEVICE, Count, is_plain
from aiocomms_ucx.arrivals import post_arrival
from aiocomms_ucx.bringup import Ranks, shared_engine
from aiocomms_ucx.collectives import START, describe
from aiocomms_ucx.lane_collectives import LaneCollectives
from aiocomms_ucx.loading import no_cuda_in_ucx
from aiocomms_ucx.meeting import meet
from aiocomms_ucx.shared_engine import SharedEngine, kept
from aiocomms_ucx.shortcuts import Hastened
from aiocomms_ucx.side_channel import UcxSideChannel
from aiocomms_ucx.status import BROKEN, DONE, DROPPED, UNEQUAL, error_of, found, has_ended, peer_of
from aiocomms_ucx.windows import Windows

PLAIN: Final = -1
"""The number of an op that is not a collective."""
_NONE: Final = -1
_MOST_RANKS: Final = 65535
"""The largest number of ranks that the header of a message can distinguish."""
_STEPS: Final = frozenset({ops.WindowOpen, ops.WindowClose, ops.FetchAdd, ops.CompareSwap})
"""The op types that need a further step after the engine's step, or that have a value as their result."""


class UcxTransport(LaneTransport, Hastened):
    """The transport over UCX. Collectives use shared memory within a host, and UCX between hosts."""

    capabilities = Capabilities(
        ops=(ops.P2P - {ops.Batch}) | ops.ARRIVALS | ops.COLLECTIVES | ops.RMA | ops.RUNS,
        devices=frozenset({"cpu", "cuda"}),
        lanes=ops.COLLECTIVES,
        in_process=True,
        spin=MOST_TURNS,  # the engine decides when the loop may park
    )
    fast_check: Callable[[object, bool], bool] | None = staticmethod(is_plain)
    windows: type[Windows] = Windows
    for_gpu: Callable[[], type[UcxTransport]]
    """The function that returns the transport class for GPU memory. The class is imported only when it is needed."""
    proves = True
    """True if ranks exchange test messages while an engine's first communicator forms."""

    def __init__(self, shared: SharedEngine, ranks: Ranks) -> None:
        """Add a communicator to an engine."""
        self.shared = shared
        self.engine = shared.engine
        self.ranks = ranks
        self.peers, self.hosts, self.pids, self.in_place = ranks.peers, ranks.hosts, ranks.pids, ranks.in_place
        self.rank = self.peers.index(shared.number)
        self.size = len(self.peers)
        self.group = self.engine.add_group(self.rank, self.peers)
        self.segment = 0  # the bytes of memory that the ranks of this host share
        self._numbers = [0] * self.size
        self._windows = self.windows(self)
        self.lanes = LaneCollectives(self)
        self.post_in_lane = self.lanes.post  # type: ignore[method-assign]
        self.call_count = Count()
        """The counter of posted collectives. Native code also increments this counter."""
        self._collectives: dict[int, Completion] = {}  # the pending collectives, by number
        self._left: dict[int, int] = {}  # the ranks that have closed, and how many collectives each had done
        self._disputes: dict[int, list[tuple[int, str]]] = {}  # ranks and the calls that they describe, by collective
        self._disputed = _NONE  # the number of the collective in which ranks disagree
        self._failure: CommError | None = None
        self._ending = threading.RLock()  # the engine must not be closed while another thread uses it
        self._aborted = self._closed = False
        self.gone: set[int] = set()
        """The ranks that have closed the communicator, and the ranks to which the connection has broken."""
        shared.join(self.group, self)

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        """See :meth:`Transport.probe`. If UCX cannot be loaded, this module cannot be imported."""
        return None if device.type == "cpu" else no_cuda_in_ucx()

    @classmethod
    def preference(cls, device: torch.device, size: int, family: ops.Family) -> int:
        """See :meth:`Transport.preference`.

        This transport is the fastest on CPUs. On GPUs, its collectives consist of messages.
        """
        return 0 if device.type == "cuda" and family == "collectives" else 50

    @classmethod
    def info(cls) -> Mapping[str, str]:
        """See :meth:`Transport.info`."""
        return speeds.describe()

    # --------------------------------------------------------------------------------------------------- opening

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`."""
        if rendezvous.size > _MOST_RANKS:
            raise ArgumentError(f"size is {rendezvous.size}, and transport 'ucx' carries at most {_MOST_RANKS} ranks")
        if rendezvous.device.type == "cuda":
            return cast("Self", await cls.for_gpu().open(rendezvous, options))
        return await cls._open(rendezvous, None, NO_DEVICE)

    @classmethod
    async def _open(cls, rendezvous: Rendezvous, cuda: Cuda | None, memory: int) -> Self:
        """Open a communicator on an engine; see :func:`shared_engine`."""
        async with shared_engine(rendezvous, cuda, memory) as (shared, ranks):
            self = cls(shared, ranks)
        return await self._meet(rendezvous, first=True)

    async def split(self, rendezvous: Rendezvous, ranks: Sequence[int], options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.split`. Both communicators share the engine."""
        return await type(self)(self.shared, self.ranks.some(ranks))._meet(rendezvous, first=False)

    async def _meet(self, rendezvous: Rendezvous, *, first: bool) -> Self:
        try:
            await meet(self, rendezvous, first=first)
        except BaseException:
            if first:
                self.shared.distrust(self.peers)
            await self.aclose()
            raise
        return self

    def named(self, numbers: Sequence[int]) -> None:
        """Store the number that each rank's engine gives to this communicator."""
        self._numbers = list(numbers)

    @property
    def failure(self) -> CommError | None:
        """The error because of which the communicator is lost; None if the communicator is not lost."""
        return self._failure

    # --------------------------------------------------------------------------------------- ops and their outcomes

    def post(self, op: ops.Op, work: Completion) -> float | None:
        """See :meth:`Transport.post`."""
        if self._failure is not None:
            self.on_failure(self._failure)
        ticket, engine = id(work), self.engine
        try:
            if (collective := START.get(type(op))) is not None:
                if (behind := self._windows.behind) is not None:
                    behind.append(work)
                    return None
                start, form = collective
                if at := start(engine, ticket, self.group, self.size, op, form):
                    self.call_count.next()
                    work.complete()
                    return at
                self.follow_collective(work, done=False)
            elif isinstance(op, ops.Send):
                self.follow(work, engine.send(ticket, self.group, op.tensor, op.dst, op.channel, op.tag))
            elif isinstance(op, (ops.Probe, ops.Take)):
                post_arrival(self, op, work)
            elif isinstance(op, ops.Recv):
                self.follow(work, engine.recv(ticket, self.group, op.tensor, op.src, op.channel, op.tag))
            else:
                self._windows.post(op, work)
        except CommError:
            raise
        except BaseException:  # A signal handler may have raised this, and the engine may already use the op's memory.
            if not work.done():
                self.shared.pending.setdefault(ticket, (self, work, PLAIN, kept(work)))
            raise
        return None

    hand_over = post
    """The method that posts an op to the engine at once. The ``post`` of a subclass may call this method later."""

    def post_in_lane(self, op: ops.Op, lane: int, work: Completion) -> float | None:
        """See :meth:`LaneTransport.post_in_lane`."""
        return self.lanes.post(op, lane, work)

    def give_up_lane(self, lane: int, error: CommError) -> None:
        """See :meth:`LaneTransport.give_up_lane`."""
        self.lanes.give_up(lane, error)

    def forget_lane(self, lane: int, rank: int) -> None:
        """See :meth:`LaneTransport.forget_lane`."""
        self.lanes.forget(lane, rank)

    def follow(self, work: Completion, done: bool) -> None:
        """Complete an op of the engine if the op is already done.

        Otherwise, keep a reference to the op until the op is done.
        """
        if done:
            return work.complete()
        self.shared.pending[id(work)] = (self, work, PLAIN, kept(work))
        return self.look_after(PLAIN)

    def follow_collective(self, work: Completion, done: bool) -> None:
        """Give a number to a collective of the engine, and then handle the collective as in :meth:`follow`."""
        index = self.call_count.next()
        if done:
            return self.finish(work, index, DONE, 0, 0)
        self._collectives[index] = work
        self.shared.pending[id(work)] = (self, work, index, kept(work))
        return self.look_after(index)

    def finish(self, work: Completion, index: int, status: int, a: int, b: int) -> None:
        """Complete an op that has ended.

        The work may already be done, because the engine also reports the end of abandoned ops.
        """
        collective = index != PLAIN
        if collective:
            self._collectives.pop(index, None)
        if work.done() or status == DROPPED:
            return  # the communicator ends a work that is not done
        if status == UNEQUAL:
            self._disputed = index
        if status == BROKEN and self.ends_soon(peer_of(work.op)):
            return  # the end of the communicator ends the work
        if status != DONE:
            peer = peer_of(work.op)
            lives = peer is not None and not self.far(peer)
            error = error_of(work.op, status, a, b, self.rank, self.size, lives=lives)
            work.fail(error)
            if status == BROKEN and not isinstance(error, PeerDiedError):
                self._fail(error)  # Later ops would wait without end for the missing message.
        elif type(work.op) in _STEPS:
            self._windows.finish(work, collective, a)
        else:
            work.complete(found(work.op, a, b) if isinstance(work.op, ops.Probe) else OP_RESULT)

    def ends_soon(self, peer: int | None) -> bool:
        """Return whether the communicator will soon end because of a peer on this host.

        The communicator ends soon if that peer has died or has lost the communicator.
        """
        if peer is None or self.far(peer):
            return False
        if self.engine.has_let_go(self.group, peer):
            return True  # The rank has sent the reason to every rank.
        if has_ended(self.pids[peer]):
            self.lost(self.peers[peer])
            return True
        return False

    def progress(self) -> bool | None:
        """See :meth:`Transport.progress`."""
        return self.shared.progress()

    def fileno(self) -> int | None:
        """See :meth:`Transport.fileno`.

        The result is the engine's descriptor, which all communicators of the engine share.
        """
        return self.engine.fileno()

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        op, ticket = work.op, id(work)
        if isinstance(op, (ops.Recv, ops.Probe)):
            withdrawn = self.engine.cancel(self.group, op.src, op.channel, op.tag, ticket)
        else:
            withdrawn = isinstance(op, ops.WaitSignal) and self._windows.withdraw(op, ticket)
        if withdrawn:
            del self.shared.pending[ticket]
        return withdrawn

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """See :meth:`Transport.waiting_for`."""
        peer = peer_of(work.op)
        if peer is not None:
            return [peer]
        with self._ending:
            return () if self._closed else self.lanes.waiting_for(work)

    def last_heard(self) -> Sequence[float]:
        """See :meth:`Transport.last_heard`. The engines' threads ask and answer over the control connections."""
        with self._ending:
            if self._closed:
                return ()
            signs = self.engine.signs(self.peers)
        return [math.inf if rank == self.rank else sign / 1e9 for rank, sign in enumerate(signs)]

    def shared_memory(self) -> int:
        """See :meth:`Transport.shared_memory`.

        The result counts the memory of this host's ranks and this rank's windows.
        """
        return self.segment + self._windows.shared()

    def side_channel(self) -> UcxSideChannel:
        """See :meth:`Transport.side_channel`. The control connections to ranks that are alive stay open."""
        return UcxSideChannel(self)

    def say(self, rank: int, note: bytes) -> bool:
        """See :meth:`Transport.say`. A control connection carries the note, and a separate thread receives it."""
        with self._ending:
            if not self._closed:
                self._tell(rank, wire.Note(self._numbers[rank], note))
            return not self._closed

    # ---------------------------------------------------------------------------------------------- frames and notices

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""
        return self.hosts[rank] != self.hosts[self.rank]

    def rank_of(self, peer: int) -> int | None:
        """Return the rank of an engine's peer in this communicator; None if the peer is not a member."""
        return self.peers.index(peer) if peer in self.peers else None

    def lost(self, peer: int) -> None:
        """Handle a broken connection to an engine's peer. The peer had not closed the connection."""
        rank = self.rank_of(peer)
        if rank is not None:
            self.gone.add(rank)
        if rank is not None and rank not in self._left:
            self._fail(gone(rank))

    def misled(self, peer: int, what: str) -> None:
        """Declare the communicator lost because a peer of the engine has sent invalid data."""
        rank = self.rank_of(peer)
        if rank is not None:
            self._fail(ProtocolError(f"rank {rank}: {what}", peer=rank))

    def failed(self, why: str) -> None:
        """Declare the communicator lost because a step of the engine failed, for example for lack of memory."""
        self._fail(CommError(f"the engine of transport 'ucx' on rank {self.rank} failed in a step: {why}"))

    def left(self, rank: int, collectives: int) -> None:
        """Handle the close of this communicator by another rank.

        :param collectives: the number of collectives that had ended on the other rank before the close.
        """
        self._left[rank] = collectives
        self.gone.add(rank)
        for index in list(self._collectives):
            self._reconsider(index)
        self.lanes.reconsider()

    def disagrees(self, rank: int, index: int) -> None:
        """Describe this rank's call to all ranks, because the engine has found that another rank's call differs."""
        work = self._collectives.get(index)
        if work is not None:
            text = describe(work.op)
            self.tell_all(lambda number: wire.Dispute(number, index, text))
            self._reconsider(index)

    def hear(self, rank: int, said: wire.Frame) -> None:
        """Handle a frame from a rank. If the frame is a note, any thread may call this method."""
        if isinstance(said, wire.Dispute):
            self._disputes.setdefault(said.index, []).append((rank, said.text))
            self._reconsider(said.index)
        elif isinstance(said, wire.LaneDispute):
            self.lanes.hear(rank, said)
        elif isinstance(said, wire.Note):
            self.on_note(rank, said.text)
        else:
            error = said.reason.to_error()
            self._disputed = said.index  # This rank's own abort also names this collective.
            work = self._collectives.get(said.index)
            if work is not None and not work.done():
                work.fail(error)
            self._fail(error)

    def _reconsider(self, index: int) -> None:
        """Fail a pending collective and the communicator if the collective can no longer complete."""
        work = self._collectives.get(index)
        error = None if work is None or work.done() else self._verdict(work.op, index)
        if work is not None and error is not None:
            work.fail(error)
            self._fail(error)

    def _verdict(self, op: ops.Op, index: int) -> CommError | None:
        for rank, done in self._left.items():
            if index >= done:
                return closed_by(rank)
        text = describe(op) if index in self._disputes else ""
        for rank, theirs in self._disputes.get(index, ()):
            if theirs != text:
                self._disputed = index
                return disagreement(rank, theirs, self.rank, text)
        return None

    def _fail(self, error: CommError) -> None:
        """Report that the communicator is lost. The first error remains the reason for the loss."""
        self._failure = self._failure or error
        self.on_failure(self._failure)

    def tell_all(self, frame: Callable[[int], wire.Frame]) -> None:
        """Send a frame to all ranks.

        :param frame: a function that makes the frame for one rank. The argument is the communicator's number in the
            engine of that rank.
        """
        for rank, number in enumerate(self._numbers):
            self._tell(rank, frame(number))

    def _tell(self, rank: int, frame: wire.Frame) -> None:
        if rank != self.rank:
            self.engine.send_frame(self.peers[rank], wire.pack(frame))

    # ----------------------------------------------------------------------------------------- abort and close

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`."""
        with self._ending:
            if self._aborted or self._closed:
                return
            self._aborted = True
            if isinstance(error, PeerDiedError):  # the peer may be silent although its connection is open
                self.shared.distrust(self.peers)
            reason = Reason.of(error, self.rank)
            self.engine.lose_group(self.group)  # This comes before the frames, because then ranks may reuse memory.
            self.tell_all(lambda number: wire.Abort(number, reason, self._disputed))

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
        self._windows.close()
        await self.shared.leave(self.group)
