"""The class users hold: one rank's handle on a fixed, ordered group of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import anyio
import torch

from aiocomms import arguments, ops
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.bootstrap import directory, recovery, supervised
from aiocomms.bootstrap.forming import broken_off, explained
from aiocomms.bootstrap.groups import Groups
from aiocomms.bootstrap.meeting import Predecessor
from aiocomms.bootstrap.registry import Selection, open_transports
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.communicator.collectives import Collectives
from aiocomms.communicator.lane import CURRENT, Lane, current
from aiocomms.communicator.objects import AllGatherObject, Objects
from aiocomms.communicator.open_stream import Streams
from aiocomms.communicator.p2p import PointToPoint
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.portal import Portal
from aiocomms.communicator.rma import OneSided
from aiocomms.core.core import Core
from aiocomms.core.leak_guard import LeakGuard, guards
from aiocomms.diagnosis import debug, dumps
from aiocomms.diagnosis.debug import Debugger
from aiocomms.diagnosis.live import Leaving, Sight, live, sight_of
from aiocomms.diagnosis.statistics import Statistics, statistics_of
from aiocomms.errors import CommError, MismatchError, PeerDiedError, StoreLostError, as_reason, wrong_thread
from aiocomms.lowering.lane_messages import Key
from aiocomms.lowering.shortcuts import give_methods
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.shielding import shielded
from aiocomms.ops import Op, membership
from aiocomms.ops.arrays import checked
from aiocomms.progress.hooks import Hooked
from aiocomms.progress.inflight import LaneWork, PlainLaneWork, PlainWork, StartedWork
from aiocomms.progress.work import Work
from aiocomms.transport import Transport


class Communicator(PointToPoint, Collectives, OneSided, Objects, Streams, Hooked):
    """One rank's handle on a fixed, ordered group of ranks; made by :func:`aiocomms.new_comm`.

    Every operation is started by its call and returns a :class:`~aiocomms.Work` at once. A communicator belongs to the
    event loop, thread and process that made it; :meth:`abort`, :meth:`dump` and :meth:`statistics` may be called on any
    thread.
    """

    rank: int
    size: int
    name: str
    device: torch.device

    __slots__ = ("_shortcuts",)

    _core: Core

    def __init__(
        self, rendezvous: StoreRendezvous, plan: Selection, transports: Mapping[ops.Family, Transport]
    ) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.name, self.device, self._seconds = rendezvous.name, rendezvous.device, rendezvous.timeout
        self._rendezvous, self._plan = rendezvous, plan
        self._core = core = Core(rendezvous, transports, plan.options)
        self._children = 0  # The number of communicators split off.
        self._groups = Groups(rendezvous, plan, core.by_family)
        self._portal: Portal | None = None
        self._doors: list[Door] = []  # The doors of portals.
        self._pre_hooks, self._post_hooks, self._abort_hooks = core.pre_hooks, core.post_hooks, core.abort_hooks
        self._shortcuts = shortcuts = core.shortcuts if type(self) is Communicator else None
        if shortcuts is not None:
            give_methods(Communicator, shortcuts.method)
            give_methods(Lane, shortcuts.method)
            shortcuts.know(Lane)
        debugger = Debugger(core.in_flight) if debug.asked_for() else None
        self._start = PlainWork if debugger is None else debugger.start
        self._start_within: Callable[..., LaneWork[Any]] = PlainLaneWork if debugger is None else debugger.start_within
        self._guard = LeakGuard(self)
        dumps.register(core.recorder)
        directory.register(self)
        self._leaving: Leaving | None = None
        live.register(self)
        if supervised.is_supervised():
            self._report(rendezvous)

    def __repr__(self) -> str:
        failure, closed = self._core.life.failure, self._core.life.closed
        state = f" (lost: {type(failure.error).__name__})" if failure else " (closed)" if closed else ""
        return f"<Communicator '{self.name}' rank {self.rank} of {self.size} on {self.device}{state}>"

    def _report(self, rendezvous: StoreRendezvous) -> None:
        """Tell the launcher that this rank has formed a communicator, and later which rank that has lost."""
        about = rendezvous.rank, rendezvous.size, rendezvous.base, rendezvous.epoch

        def lost(error: CommError) -> None:
            if isinstance(error, PeerDiedError) and error.peer is not None:
                supervised.report_lost(*about, error.peer)

        self._abort_hooks.register(lost)
        supervised.report_formed(*about)

    @property
    def transports(self) -> dict[str, str]:
        """The name of the transport that carries each family (``"p2p"``, ``"collectives"``, ``"rma"``)."""
        names: dict[str, str] = {str(family): name for family, name in self._plan.names.items()}
        if "rma" not in names and "p2p" in names:
            names["rma"] = f"two-sided over {names['p2p']}"
        return names

    @property
    def timeout(self) -> float | None:
        """The deadline of ops that are given none, in seconds; None: they have none. See :meth:`set_timeout`."""
        return None if self._seconds == inf else self._seconds

    @property
    def closed(self) -> bool:
        """True once the communicator was closed on this rank."""
        return self._core.closed

    @property
    def aborted(self) -> bool:
        """True once it is poisoned: aborted here or elsewhere, a peer died, a deadline passed, or ranks disagreed."""
        return self._core.life.failure is not None

    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[Any]:
        """Check an op, post it, and return its work."""
        core = self._core
        if core.ledger.refusing or get_ident() != core.thread:
            raise core.refused(op)
        try:
            of_tensors = checked(op, core)
            seconds = self._seconds if timeout is COMM_TIMEOUT else arguments.deadline("timeout", timeout)
            if hints is not None:
                arguments.mapping("hints", hints)
            work: StartedWork[Any] = self._start(of_tensors, core.ledger.issued, core, hints)
        except CommError as error:
            raise core.worded(error.about(comm=self.name, op=op.name, rank=self.rank)) from None
        if of_tensors is not op:
            work._value = op.result()  # The op was called with arrays.
        return core.start(work, seconds)

    _issue_in_order = _issue

    def _issue_in_current_lane(
        self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[Any]:
        """Issue an op on the lane that is current here, if one is and the op goes by it."""
        lane = current(self._core) if _follows(op) else None
        return (self._issue_in_order if lane is None else lane._issue)(op, hints, timeout)

    def _posted(self, work: StartedWork[Any], look_after: Callable[[int], object], index: int) -> Work[Any]:
        """Go on with an op that a shortcut has posted, and that has not ended by then."""
        return self._core.follow(work, self._seconds, look_after, index)

    def lane(self, key: Key) -> Lane:
        """Look at this communicator through a lane, whose operations match those of the same key on the other ranks.

        It sends nothing and keeps nothing: lanes of one key are the same lane, also after one of them is gone.

        :param key: what the ranks call it, a request's number say; a str, bytes and an int are different keys.
        :raises ArgumentTypeError: the key is none of these.
        """
        return Lane(self, key)

    def _follow_lanes(self) -> None:
        """Look from now on whether a lane is current.

        A program that makes no lane the current one pays nothing for it.
        """
        self._issue = self._issue_in_current_lane  # type: ignore[method-assign]
        if self._shortcuts is not None:
            self._shortcuts.follow(CURRENT)

    # ------------------------------------------------------------------------------------- aborting and closing

    def abort(self, reason: str | BaseException) -> None:
        """Give up, on every rank: all pending works of all ranks fail with :class:`CommAbortedError`.

        It may be called on any thread and in a signal handler. Nothing can be started any more when it returns; what is
        pending ends on the loop's next turn. The first reason stays: later calls do nothing.

        :param reason: why; the peers are told.
        """
        self._core.abort(as_reason(reason))

    async def lost(self) -> CommError:
        """Wait until the communicator is lost, for whatever reason: an abort, a death, a deadline, ranks that disagree.

        Any number of tasks may wait. They go on when the pending works have ended, and at once if it is lost already.

        :returns: why: the same error on every call, which the abort hooks get, too.
        :raises CommClosedError: it was closed on this rank, and had not been lost by then.
        :raises RuntimeError: this is not the communicator's thread.
        """
        core = self._core
        if get_ident() != core.thread:
            raise wrong_thread(f"lost on '{self.name}'")
        await core.over
        if core.life.failure is not None:
            return core.life.failure.error
        assert core.life.closed is not None
        raise core.life.closed.about(comm=self.name, op="lost", rank=self.rank)

    async def aclose(self) -> None:
        """Close: let ops that are under way end, withdraw receives that nothing matched, release everything.

        It waits 5 seconds for the former. A cancelled close still releases everything.
        Idempotent.

        :raises RuntimeError: this is not the communicator's thread.
        :raises CommError: a transport broke while it closed; everything else is released.
        """
        if get_ident() != self._core.thread:
            raise wrong_thread(f"aclose on '{self.name}'")
        try:
            await self._core.aclose(self._released)
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Let go of what others may share, with what blocks in a thread."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving.stopped.locked():
            await shielded(lambda: run_in_thread(leaving.finish, anyhow=True))
        elif leaving is not None:
            leaving.finish()
        await self._rendezvous.leave()

    def _disown(self) -> None:
        self._core.disown()
        for door in self._doors:
            door.disown()

    def _released(self) -> None:
        for door in self._doors:
            door.close()
        directory.unregister(self)
        self._leaving = live.unregister(self)
        self._guard.dismiss()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)  # the peers may be waiting for ops that this rank will never call
        await self.aclose()

    # ------------------------------------------------------------------------------------------ and the rest

    def portal(self) -> Portal:
        """Return this communicator's operations for other threads, on which they block; any thread may ask for it.

        :returns: always the same object.
        """
        if self._portal is None:
            self._portal = Portal(self)
        return self._portal

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the deadline of ops that are given none, from the next call on.

        :param timeout: seconds; None: they have no deadline, and wait until they are done or the communicator is lost.
        :raises ArgumentError: it is neither None nor a number of seconds above 0.
        """
        self._seconds = arguments.deadline("timeout", timeout)

    async def split(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        *,
        timeout: OpTimeout = COMM_TIMEOUT,
        hints: Mapping[str, Any] | None = None,
    ) -> Communicator | None:
        """Form communicators of some of the ranks. Collective over this one.

        :param ranks: the new communicator's members, as ranks of this one, in their new order; the same on each of
            them, and with this rank among them. Empty on a rank that joins none.
        :param name: the new communicator's name, the same on all of them; None: this one's with a number.
        :param timeout: its timeout in seconds, within which it forms, as of :func:`aiocomms.new_comm`; by default that
            with which this one was formed.
        :param hints: advice to the transports, which comes before that with which this one was formed.
        :returns: the new communicator, or None where ``ranks`` is empty.
        :raises ArgumentError: ``ranks`` is no list of distinct ranks, or leaves this rank out; or another argument is
            wrong. Nothing was sent.
        :raises MismatchError: two ranks name groups that overlap and differ.
        :raises StoreLostError: the store is gone, and the transport cannot do without it; this communicator goes on.
        :raises CommAbortedError: it has failed on another rank, or was cancelled there. Then this communicator is lost.
        """
        members = membership.members(ranks, self._core)
        child = f"{self.name}/{self._children + 1}" if name is None else arguments.label(name)
        seconds = arguments.op_deadline(timeout, self._rendezvous.timeout)
        plan = self._plan if hints is None else self._plan.advised(hints)
        number = self._children = self._children + 1  # another split may begin before this one goes on
        core = self._core
        with anyio.CancelScope() as scope:
            # An abort also ends the part of this that meets the others elsewhere.
            hook = self.register_abort_hook(lambda _: scope.cancel())
            try:
                return await self._form_child(members, child, number, plan, seconds)
            except StoreLostError:
                raise  # Every rank that needs the store raises this; this communicator needs none.
            except BaseException as error:
                hook.remove()
                reason = broken_off(error, members).about(comm=self.name, op="split", rank=self.rank)
                core.lose(reason)
                raise (reason.about() if isinstance(error, CommError) else error) from error.__cause__
            finally:
                hook.remove()
        lost = core.life.refusal()
        assert lost is not None
        raise lost.about(comm=self.name, op="split", rank=self.rank)

    async def _form_child(
        self, members: list[int], child: str, number: int, plan: Selection, seconds: float
    ) -> Communicator | None:
        """Agree on the groups of a split, and form this rank's."""
        gather = AllGatherObject(0, False, (self._parcel("split", members, False),))
        claims: list[list[int]] = await self._issue_in_order(gather)
        for rank, claim in enumerate(claims):
            if claim != members and set(claim) & set(members):
                raise MismatchError(
                    f"ranks is {members} on rank {self.rank} and {claim} on rank {rank}; wanted groups that are the "
                    "same or have no rank in common", comm=self.name, op="split", rank=self.rank, peer=rank,
                )  # fmt: skip
        if not members:
            if any(claims):
                alone = self._rendezvous.child(f"{child}#{number}.out{self.rank}", child, 0, 1)
                for transport in self._core.transports:
                    await transport.split_nobody(alone)
            return None
        key = f"{child}#{number}.{members[0]}"
        rendezvous = self._rendezvous.child(key, child, members.index(self.rank), len(members), timeout=seconds)
        parents = self._core.by_family
        try:
            opened = await open_transports(plan, lambda _, f: parents[f].split(rendezvous, members, plan.options))
        except PeerDiedError as error:
            raise await explained(rendezvous, error) from error.__cause__
        rendezvous.timeout = seconds
        return Communicator(rendezvous, plan, opened)

    async def create_group(self, ranks: Sequence[int], name: str, *, timeout: OpTimeout = COMM_TIMEOUT) -> Communicator:
        """Form a communicator of some of the ranks; collective over these alone, as ``MPI_Comm_create_group`` is.

        :param ranks: its members, as of :meth:`split`.
        :param name: its name, the same on all of them; it tells it from others that they form at the same time.
        :param timeout: as of :meth:`split`.
        :raises ArgumentError: an argument is wrong. Nothing was sent.
        :raises CommError: it was not formed, as of :func:`aiocomms.new_comm`; this communicator goes on.
        """
        self._core.demand("create_group")
        members = membership.members(ranks, self._core, "create_group", least=1)
        seconds = arguments.op_deadline(timeout, self._rendezvous.timeout)
        return Communicator(*await self._groups.form(members, arguments.label(name), seconds))

    async def reconfigure(
        self, ranks: Sequence[int] | None = None, *, size: int | None = None, timeout: float | timedelta = 10.0
    ) -> Communicator:
        """Form the communicator that takes the place of this one, lost or not; collective over the ranks that are left.

        This one is closed when the new one stands. Until then what is under way on it goes on, if it is not lost.

        :param ranks: the ranks that are left, the same on all; None: those that call this within a quarter of
            ``timeout`` seconds.
        :param size: the new size; a rank that is left keeps its number, and newcomers (``new_comm(join=True)``) fill
            the gaps. None: they are numbered anew, in the old order.
        :raises CommAbortedError: this rank is excluded: the others go on without it.
        :raises CommTimeoutError: a rank or newcomer did not come in time.
        :raises StoreLostError: the store is gone, and the transport cannot do without it.
        """
        core, failure = self._core, self._core.life.failure
        reason = None if failure is None else failure.error
        old = Predecessor(self._rendezvous, self._plan, core.notes, self._seconds, reason, self.closed)
        return await recovery.replace(self, Communicator(*await recovery.form_again(old, ranks, size, timeout)))

    def statistics(self) -> Statistics:
        """Say what the communicator is doing and has done, as a plain record; any thread.

        Nothing is counted for it while ops run: it is read from what the communicator keeps anyway.
        """
        return statistics_of(self._core, self.transports)

    def dump(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Write the flight recorder to a file: the last ops and those that are pending; any thread.

        :param folder: where to; None: ``AIOCOMMS_RECORDER_DIR``, or else a folder of the user's own.
        :returns: the file's path.
        :raises CommError: it cannot be written.
        """
        try:
            return dumps.write(self._core.recorder.snapshot("asked for"), folder)
        except OSError as error:
            raise CommError(f"the dump cannot be written: {error}", comm=self.name, rank=self.rank) from error

    def _sight(self) -> Sight:
        """Return what the live view shows of this communicator; on any thread, whatever its loop is doing."""
        failure = self._core.life.failure
        snapshot = self._core.recorder.snapshot("" if failure is None else failure.error.message)
        return sight_of(snapshot, self._rendezvous.secret("live view"), self.statistics())


def _follows(op: Op) -> bool:
    """Return whether an op goes by the current lane."""
    return op.family == "collectives" or (op.family != "rma" and getattr(op, "channel", ops.USER) == ops.USER)


def _disown_in_child() -> None:
    """Disown all communicators in a forked child, which must neither use nor close its parent's sockets."""
    for guard in guards():
        guard.dismiss()
        guard.comm._disown()


os.register_at_fork(after_in_child=_disown_in_child)
