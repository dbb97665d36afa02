"""The class users hold: one rank's handle on a fixed, ordered group of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock, get_ident
from time import monotonic
from types import TracebackType
from typing import Any, Self

import anyio

from aiocomms import ops
from aiocomms.bootstrap import directory, recovery
from aiocomms.bootstrap.registry import Plan, close_transports, open_transports
from aiocomms.diagnosis import dumps
from aiocomms.diagnosis.leak_guard import LeakGuard, guards
from aiocomms.diagnosis.postmortem import PostMortem, derived_error, late
from aiocomms.diagnosis.recorder import PEERS, Recorder
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    BufferBusyError,
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerDiedError,
    wrong_thread,
)
from aiocomms.families.collectives import Collectives
from aiocomms.families.hooks import Hooked, Hooks
from aiocomms.families.issuer import Timeout
from aiocomms.families.objects import Objects
from aiocomms.families.p2p import PointToPoint
from aiocomms.families.rma import OneSided
from aiocomms.families.streams import Streams
from aiocomms.lowering.routing import Router
from aiocomms.lowering.windows import TwoSided
from aiocomms.ops import Op, checks
from aiocomms.progress.driver import Driver, Promise
from aiocomms.progress.heartbeat import Heartbeat
from aiocomms.progress.inflight import Pending
from aiocomms.progress.work import Work
from aiocomms.transport import Completion, Rendezvous, Transport

CLOSE_GRACE = 5.0
"""Seconds that :meth:`Communicator.aclose` waits for ops which are already under way."""

_POISONS = (CommTimeoutError, MismatchError, PeerDiedError)


class Communicator(PointToPoint, Collectives, OneSided, Objects, Streams, Hooked):
    """One rank's handle on a fixed, ordered group of ranks; made by :func:`aiocomms.new_comm`.

    Every operation is started by its call and returns a :class:`~aiocomms.Work` at once. A communicator belongs
    to the event loop, thread and process that made it; :meth:`abort` and :meth:`dump` may be called on any thread.
    """

    def __init__(self, rendezvous: Rendezvous, plan: Plan, transports: Mapping[ops.Family, Transport]) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.name, self.device, self.timeout = rendezvous.name, rendezvous.device, rendezvous.timeout
        self.driver = Driver.current()
        self._rendezvous = rendezvous
        self._plan = plan
        self._by_family = dict(transports)
        if "rma" not in self._by_family and "p2p" in self._by_family:
            self._by_family["rma"] = TwoSided(self)
        self.issued = self._children = 0  # ops called so far, and communicators split off
        self.calls = 0  # collectives called so far: the same on all ranks, so it tells their messages apart
        self._refusal: CommError | None = None  # why nothing can be started any more; the first reason stays
        self._lock = RLock()  # guards the step to a refusal; a signal handler may abort what it interrupts
        self._pending = Pending(self, Heartbeat(self._transports(), plan.options, self._fail))
        self._recorder = Recorder(self, self._pending)
        self._ring = self._recorder.ring
        self._postmortem: PostMortem | None = None
        self._closing: Promise | None = None
        self._pre_hooks, self._post_hooks, self._abort_hooks = Hooks(), Hooks(), Hooks()
        self._debug = os.environ.get("AIOCOMMS_DEBUG", "0") not in ("", "0")
        self.fast_check = next((t.fast_check for t in self._transports() if t.fast_check is not None), None)
        self._spinning = [t for t in self._transports() if t.capabilities.spin]
        self._router = Router(self, self._by_family)
        for transport in self._transports():
            transport.on_failure = self._fail  # type: ignore[method-assign]
            self.driver.attach(transport)
        self._guard = LeakGuard(self)
        dumps.register(self._recorder)
        directory.register(self)

    def __repr__(self) -> str:
        state = f" ({self._refusal.message})" if self._refusal else ""
        return f"<Communicator '{self.name}' rank {self.rank} of {self.size} on {self.device}{state}>"

    @property
    def transports(self) -> dict[str, str]:
        """Which transport carries what: transport names by family (``"p2p"``, ``"collectives"``, ``"rma"``)."""
        names: dict[str, str] = {str(family): name for family, name in self._plan.names.items()}
        if "rma" not in names and "p2p" in names:
            names["rma"] = f"two-sided over {names['p2p']}"
        return names

    @property
    def closed(self) -> bool:
        """Whether it was closed on this rank."""
        return self._closing is not None

    @property
    def aborted(self) -> bool:
        """Whether it is poisoned: aborted here or elsewhere, a peer died, a deadline passed, or ranks disagreed."""
        return self._refusal is not None and not isinstance(self._refusal, CommClosedError)

    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: Timeout = None) -> Work[Any]:
        """Check an op, post it, and return its work."""
        if self._refusal is not None or get_ident() != self.driver.thread:
            raise self._refused(op)
        seq, kind = self.issued, type(op)
        try:
            op.check(self)
            if hints is not None:
                checks.mapping("hints", hints)
            seconds = self.timeout if timeout is None else checks.seconds("timeout", timeout)
            if self._debug:
                self._check_busy(op)
        except CommError as error:
            raise error.about(comm=self.name, op=op.name, rank=self.rank) from None
        self.issued = seq + 1  # and with it, so that no other thread sees one without the other:
        self._ring.append(kind)
        if self._pre_hooks:
            self._pre_hooks.ask(op, seq)
        work: Work[Any] = Work(op, seq, self, hints)
        self.calls += (collective := op.family == "collectives")
        try:
            at = self._router[kind](op, work)
        except BaseException:  # nothing was sent: the other ranks' next collective is this one's next, too
            self.calls -= collective
            raise
        if not work._state:  # done(), without the call
            return self._keep(work, seconds)
        self._ring.append((at or monotonic()) if kind not in PEERS else self._recorder.row(work))
        if self._post_hooks or work.fault is not None:
            self._after(work, within=True)
        return work

    def _keep(self, work: Work[Any], seconds: float) -> Work[Any]:
        """An op was posted and is pending."""
        self._pending.add(work, seconds)
        for transport in self._spinning:
            self.driver.poll_soon(transport)
        return work

    def post(self, op: Op, work: Completion) -> None:
        """Hand one message of a lowered op to the transport that carries it."""
        self._router[type(op)](op, work)

    def _refused(self, op: Op) -> Exception:
        refusal = self._refusal
        if refusal is None:
            return wrong_thread(f"{op.name} on '{self.name}'")
        error: CommError = CommClosedError(refusal.message)
        if not isinstance(refusal, CommClosedError):
            error = CommAbortedError(f"the communicator is lost: {refusal}", peer=refusal.peer)
            error.__cause__ = refusal
        return error.about(comm=self.name, op=op.name, rank=self.rank)

    def _check_busy(self, op: Op) -> None:
        """Debug mode: refuse buffers that an unfinished op still writes, or that this one would write."""
        for work in self._pending:
            try:
                checks.disjoint(op.writes(), work.op.reads() + work.op.writes())
                checks.disjoint(work.op.writes(), op.reads())
            except ArgumentError as error:
                raise BufferBusyError(f"a buffer still belongs to {work!r}: {error.message}") from None

    # ------------------------------------------------------------------------------------------ and back up

    def settled(self, work: Work[Any]) -> None:
        """Forget a pending work that has just become done."""
        self._ring.append(self._recorder.row(work, self._pending.remove(work)))
        if self._post_hooks or work.fault is not None:
            self._after(work)

    def withdraw(self, work: Completion) -> bool:
        """Take an unmatched receive or wait back from its transport."""
        return self._router.withdraw(work)

    def order_stream(self, work: Work[Any], stream: Any) -> None:
        """Make a CUDA stream wait for a work."""
        self._by_family[work.op.family].wait_stream(work, stream)

    def _after(self, work: Work[Any], *, within: bool = False) -> None:
        fault = work.fault
        if within and fault is not None:
            self._ring.append(self._recorder.row(work))
        self._post_hooks.call(self.driver, work)
        if isinstance(fault, _POISONS) or (isinstance(fault, CommAbortedError) and work.op.family == "collectives"):
            self._fail(fault)

    # ------------------------------------------------------------------------------------- failing and closing

    def abort(self, reason: str | BaseException) -> None:
        """Give up, on every rank: all pending works of all ranks fail with :class:`CommAbortedError`.

        From any thread or signal handler. Nothing can be started any more when it returns; what is pending ends on the
        loop's next turn. The first reason stays, so twice is once.

        :param reason: why; the peers are told.
        """
        if isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__
        self._fail(CommAbortedError(f"aborted by rank {self.rank}: {reason}", peer=self.rank))

    def _fail(self, error: CommError, absent: Sequence[int] = ()) -> None:
        """The communicator is lost; any thread."""
        error = recovery.excluded(error, self.rank)
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = error
            # Before the transports end anything: what everybody is doing.
            postmortem = self._postmortem = PostMortem(self, self._recorder, self._rendezvous, error, absent)
        for transport in self._transports():
            transport.abort(error)
        # On this very thread too: a signal handler may have interrupted anything, and the loop may be asleep.
        postmortem.hold(lambda error: self.driver.call_threadsafe(self._abandon, error))

    def _abandon(self, error: CommError) -> None:
        """End every pending work; of the reason why, more may be known by now."""
        self._refusal = error
        self._pending.unwatch()
        for work in list(self._pending):
            work.abandon(derived_error(work, error))
        if not isinstance(error, CommClosedError):
            hooks, self._abort_hooks = self._abort_hooks, Hooks()  # closing comes by here again
            hooks.call(self.driver, error)

    def error_of(self, work: Work[Any], error: CommError) -> CommError | None:
        """What a work fails with: once the communicator is lost, what a transport says is a consequence of that."""
        if work.queue is not None and self._postmortem is not None and self._postmortem.sitting:
            return None
        return derived_error(work, self._refusal) if self.aborted and self._refusal is not None else error

    def expire(self, work: Work[Any]) -> None:
        """The deadline of a pending op has passed; on the watchdog's thread, while the loop may be busy."""
        if work.op.withdrawable:
            self.driver.call_threadsafe(self._expire_alone, work)
        else:
            self._fail(*late(self, self._by_family.get(work.op.family), work))

    def _expire_alone(self, work: Work[Any]) -> None:
        """A receive or wait is late: it fails alone, or with everything else if something has matched it."""
        if not work.done():
            if self.withdraw(work):
                work.abandon(CommTimeoutError("nothing matched it before its deadline; it was withdrawn"))
            else:
                self._fail(*late(self, self._by_family.get(work.op.family), work))

    async def aclose(self) -> None:
        """Close: let ops that are under way end, withdraw receives that nothing matched, release everything.

        Waits :data:`CLOSE_GRACE` seconds for the former. A cancelled close still releases everything. Twice is once.

        :raises RuntimeError: on another thread than the communicator's.
        """
        if get_ident() != self.driver.thread:
            raise wrong_thread(f"aclose on '{self.name}'")
        if self._closing is not None:
            return await self._closing
        self._closing = Promise(self.driver)
        try:
            await self._drain()
        finally:
            try:
                await self._release()
            finally:
                self._closing.set()

    async def _drain(self) -> None:
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = CommClosedError("it was closed on this rank")
        for work in list(self._pending):
            if work.op.withdrawable and self.withdraw(work):
                work.abandon(CommClosedError("the communicator was closed, and the op withdrawn"))
        with anyio.move_on_after(CLOSE_GRACE):
            await self._pending.drained()

    async def _release(self) -> None:
        directory.unregister(self)
        self._guard.dismiss()
        assert self._refusal is not None
        if self._postmortem is not None:
            self._postmortem.close()
        if self._pending:
            for transport in self._transports():
                transport.abort(CommAbortedError(f"closed by rank {self.rank} with ops unfinished", peer=self.rank))
        self._abandon(self._refusal)
        with anyio.move_on_after(CLOSE_GRACE, shield=True):
            for transport in self._transports():
                self.driver.detach(transport)
            await close_transports(self._transports())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)  # the peers may be waiting for ops that this rank will never call
        await self.aclose()

    # ------------------------------------------------------------------------------------------ and the rest

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the deadline of ops that name none.

        :raises ArgumentError: it is no number of seconds above 0.
        """
        if timeout is None:
            raise ArgumentTypeError("timeout is None, wanted seconds as a number, or a timedelta")
        self.timeout = checks.seconds("timeout", timeout)

    async def split(self, ranks: Sequence[int], name: str | None = None) -> Communicator | None:
        """Form communicators of some of the ranks. Collective over this one.

        :param ranks: the new communicator's members, as ranks of this one, in their new order; the same on each of
        them, and with this rank among them. Empty on a rank that joins none.
        :param name: the new communicator's name, the same on all of them; None: this one's with a number.
        :returns: the new communicator, or None where ``ranks`` is empty.
        :raises ArgumentError: ``ranks`` is no list of distinct ranks, or leaves this rank out; or a wrong name.
        :raises MismatchError: two ranks name groups that overlap and differ.
        """
        members = checks.members(ranks, self)
        child = f"{self.name}/{self._children + 1}" if name is None else checks.label(name)
        number = self._children = self._children + 1  # another split may begin before this one goes on
        claims: list[list[int]] = await self.all_gather_object(members)
        for rank, claim in enumerate(claims):
            if claim != members and set(claim) & set(members):
                error = MismatchError(
                    f"ranks is {members} on rank {self.rank} and {claim} on rank {rank}; wanted groups that are the "
                    "same or have no rank in common", comm=self.name, op="split", rank=self.rank, peer=rank,
                )  # fmt: skip
                self._fail(error)
                raise error
        if not members:
            if any(claims):
                alone = self._rendezvous.child(f"{child}#{number}.out{self.rank}", child, 0, 1)
                for transport in self._transports():
                    await transport.split_nobody(alone)
            return None
        key = f"{child}#{number}.{members[0]}"
        rendezvous = self._rendezvous.child(key, child, members.index(self.rank), len(members))
        plan, parents = self._plan, self._by_family
        opened = await open_transports(plan, lambda _, f: parents[f].split(rendezvous, members, plan.options))
        return Communicator(rendezvous, plan, opened)

    async def reconfigure(
        self, ranks: Sequence[int] | None = None, *, size: int | None = None, timeout: Timeout = 10.0
    ) -> Communicator:
        """Form a new communicator of the ranks that are left of this lost one, which it closes; collective over those.

        :param ranks: who is left, the same on all; None: whoever calls this within a quarter of ``timeout`` seconds.
        :param size: the new size; who is left keeps its number, and newcomers (``new_comm(join=True)``) fill the gaps.
            None: they are numbered anew, in the old order.
        :raises CommAbortedError: this rank is excluded: the others go on without it.
        :raises CommTimeoutError: a rank or newcomer did not come in time.
        :raises StoreLostError: the store is gone, and the transport cannot do without it.
        """
        return await recovery.reconfigure(self, ranks, size, timeout)

    def dump(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Write the flight recorder to a file: the last ops and those that are pending; any thread.

        :param folder: where to; None: ``AIOCOMMS_RECORDER_DIR``, or else a folder of the user's own.
        :returns: the file's path.
        :raises OSError: it cannot be written.
        """
        return dumps.write(self._recorder.snapshot("asked for"), folder)

    def _transports(self) -> list[Transport]:
        """Each transport once: one may carry several families."""
        return list(dict.fromkeys(self._by_family.values()))


def _disown_in_child() -> None:
    """A forked child shares its parent's sockets, and must not use or close them."""
    for guard in guards():
        guard.dismiss()
        comm = guard.comm
        comm._refusal = CommClosedError(f"it was created in process {os.getppid()} and cannot be used after a fork")
        comm._closing = Promise(comm.driver)
        comm._closing.set()


os.register_at_fork(after_in_child=_disown_in_child)
