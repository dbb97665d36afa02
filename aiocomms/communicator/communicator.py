"""The class ``Communicator``: one rank's handle on a fixed, ordered group of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
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
from aiocomms.bootstrap.forming import broken_off, formed
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
from aiocomms.errors import CommClosedError, CommError, MismatchError, PeerDiedError, StoreLostError, as_reason
from aiocomms.lowering.shortcuts import give_methods
from aiocomms.lowering.tags import Key
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

    Each method for an operation starts the operation, and returns a :class:`~aiocomms.Work` at once. A communicator
    belongs to the event loop, thread and process that made it. The methods :meth:`abort`, :meth:`dump` and
    :meth:`statistics` may be called on any thread.
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
        self._reconfiguring = False
        self._groups = Groups(rendezvous, plan, core.by_family)
        self._portal: Portal | None = None
        self._doors: list[Door] = []  # The doors of portals.
        self._pre_hooks, self._post_hooks, self._abort_hooks = core.pre_hooks, core.post_hooks, core.abort_hooks
        self._abort_hooks.register(self._groups.end)
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
        """Report to the launcher that this rank has formed this communicator.

        If a peer dies later, report its rank too.
        """
        about = rendezvous.rank, rendezvous.size, rendezvous.base, rendezvous.epoch

        def lost(error: CommError) -> None:
            if isinstance(error, PeerDiedError) and error.peer is not None:
                supervised.report_lost(*about, error.peer)

        self._abort_hooks.register(lost)
        supervised.report_formed(*about)

    @property
    def transports(self) -> dict[str, str]:
        """A dict from each operation family to the name of the family's transport.

        The families are ``"p2p"``, ``"collectives"`` and ``"rma"``. If no transport has RMA, messages carry the
        one-sided operations, and the value of ``"rma"`` begins with ``"two-sided over"``.
        """
        names: dict[str, str] = {str(family): name for family, name in self._plan.names.items()}
        if "rma" not in names and "p2p" in names:
            names["rma"] = f"two-sided over {names['p2p']}"
        return names

    @property
    def timeout(self) -> float | None:
        """The default deadline of ops, in seconds; None if ops have no deadline. See :meth:`set_timeout`."""
        return None if self._seconds == inf else self._seconds

    @property
    def closed(self) -> bool:
        """True once this rank has begun to close the communicator."""
        return self._core.closed

    @property
    def aborted(self) -> bool:
        """True once the communicator is lost: a rank aborted it, a peer died, a deadline passed, or ranks disagreed."""
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
        """Issue an op. If this task has a current lane and the op may run in a lane, issue the op in that lane."""
        lane = current(self._core) if _follows(op) else None
        return (self._issue_in_order if lane is None else lane._issue)(op, hints, timeout)

    def _posted(self, work: StartedWork[Any], look_after: Callable[[int], object], index: int) -> Work[Any]:
        """Register the pending work of an op that native code has already posted."""
        return self._core.follow(work, self._seconds, look_after, index)

    def lane(self, key: Key) -> Lane:
        """Return a lane. The lane's operations match only operations in lanes with the same key on the other ranks.

        The call sends and stores nothing. All lane objects with the same key are views of one lane, even if one object
        is deleted before the next is created.

        :param key: the lane's name on all ranks, such as the number of a request. Keys of different types (str, bytes,
            int) are always different.
        :raises ArgumentTypeError: the key is no str, bytes or int.
        """
        return Lane(self, key)

    def _follow_lanes(self) -> None:
        """Switch on a check: each later call of an op checks whether the task has a current lane.

        Before a program first enters a lane, its calls avoid the cost of this check.
        """
        self._issue = self._issue_in_current_lane  # type: ignore[method-assign]
        if self._shortcuts is not None:
            self._shortcuts.follow(CURRENT)

    # ------------------------------------------------------------------------------------- aborting and closing

    def abort(self, reason: str | BaseException) -> None:
        """Abort the communicator on every rank: all pending works of all ranks fail with :class:`CommAbortedError`.

        Any thread and any signal handler may call this method. Once the call returns, no operation can start. Pending
        works end in the loop's next iteration. If the communicator is aborted again, the later call does nothing, and
        the reason of the first call remains.

        :param reason: the reason for the abort, which the other ranks also get.
        """
        self._core.abort(as_reason(reason))

    async def lost(self) -> CommError:
        """Wait until the communicator is lost by an abort, a rank's death, a missed deadline, or ranks that disagree.

        Any number of tasks may wait. These tasks resume when the pending works have ended, or at once if the
        communicator is already lost.

        :returns: the error that caused the loss. The abort hooks get this error, and later operations raise this error.
        :raises CommClosedError: this rank closed the communicator before the communicator was lost.
        :raises RuntimeError: the caller is not on the communicator's thread.
        """
        core = self._core
        core.demand_thread("lost")
        await core.over
        if core.life.failure is not None:
            return core.life.failure.error
        assert core.life.closed is not None
        raise core.life.closed.about(comm=self.name, op="lost", rank=self.rank)

    async def aclose(self) -> None:
        """Close the communicator: wait for pending ops, withdraw unmatched receives, and release all resources.

        Idempotent. Pending ops have up to 5 seconds to end. If the close is cancelled, it still releases all resources.

        :raises RuntimeError: the caller is not on the communicator's thread.
        :raises CommError: a transport failed to close, but all other resources were released.
        """
        self._core.demand_thread("aclose")
        try:
            await self._core.aclose(self._released)
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Withdraw this communicator from the view of ``aiocomms top`` and from the rendezvous.

        Other communicators may continue to use the view and the rendezvous. This method does not block the loop:
        it runs blocking calls in another thread.
        """
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
        self._groups.end()
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
            self.abort(error)  # The peers may wait for ops that this rank will never call.
        await self.aclose()

    # ------------------------------------------------------------------------------------------ other methods

    def portal(self) -> Portal:
        """Return the portal, which offers this communicator's operations in blocking form to other threads.

        Any thread may call this method.

        :returns: the same object at every call.
        """
        if self._portal is None:
            self._portal = Portal(self)
        return self._portal

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default deadline of the ops that are called from now on.

        :param timeout: the deadline in seconds. None: ops have no deadline, and wait until they are done or the
            communicator is lost.
        :raises ArgumentError: the timeout is neither None nor a number of seconds above 0.
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
        """Form new communicators, each of which has some of this communicator's ranks.

        The call is collective over this communicator.

        :param ranks: the members of the new communicator that this rank joins, as ranks of this communicator. The order
            in the list is the rank order of the new communicator. All members of a new communicator pass the same list.
            A rank that joins no new communicator passes an empty list.
        :param name: the new communicator's name, the same on all members. None: the name is this communicator's name, a
            slash and a number.
        :param timeout: the new communicator's timeout in seconds. The timeout also limits the formation of the new
            communicator, as in :func:`aiocomms.new_comm`. The default is the timeout with which this communicator was
            formed.
        :param hints: advice to the transports, which takes precedence over the hints of this communicator.
        :returns: the new communicator, or None if ``ranks`` is empty.
        :raises ArgumentError: ``ranks`` is not a list of distinct ranks, or lacks this rank; or another argument is
            wrong. Nothing was sent.
        :raises MismatchError: two ranks pass different groups that have a rank in common, or two members of a group
            pass different names.
        :raises StoreLostError: the store is lost, and the transport needs the store; this communicator stays usable.
        :raises CommAbortedError: the split failed or was cancelled on another rank. This communicator is lost.
        """
        core = self._core
        core.demand("split")
        members = membership.members(ranks, core)
        child = f"{self.name}/{self._children + 1}" if name is None else arguments.label(name)
        seconds = arguments.op_deadline(timeout, self._rendezvous.timeout)
        plan = self._plan if hints is None else self._plan.advised(hints)
        # If this call fails, nothing was sent.
        gathered = self._issue_in_order(AllGatherObject(0, False, (self._parcel("split", (members, child), False),)))
        number = self._children = self._children + 1  # Another split may begin before this one continues.
        with anyio.CancelScope() as scope:
            # An abort also ends the part of the split that runs outside this communicator.
            hook = self.register_abort_hook(lambda _: scope.cancel())
            try:
                return await self._form_child(gathered, members, child, number, plan, seconds)
            except BaseException as error:
                hook.remove()
                reason = self._give_up_split(error, number, members)
                raise (reason.about() if isinstance(error, CommError) else error) from error.__cause__
            finally:
                hook.remove()
        raise self._end_during("split")

    def _end_during(self, what: str) -> CommError:
        """Return the error for a call that failed because this communicator was lost or closed during the call."""
        error = self._core.life.refusal()
        assert error is not None
        return error.about(comm=self.name, op=what, rank=self.rank)

    def _give_up_split(self, error: BaseException, number: int, members: Sequence[int]) -> CommError:
        """Tell the other ranks why a split has failed on this rank, and return the reason."""
        reason = broken_off(error, members).about(comm=self.name, op="split", rank=self.rank)
        if isinstance(error, StoreLostError):  # This communicator needs no store.
            self._core.notes.tell_no_store(number, [rank for rank in members if rank != self.rank])
        else:
            self._core.lose(reason)
        return reason

    async def _form_child(
        self, gathered: Work[Any], members: list[int], child: str, number: int, plan: Selection, seconds: float
    ) -> Communicator | None:
        """Check that the ranks agree on the groups of a split, and form the new communicator of this rank's group.

        :param gathered: the work that gathers two values from each rank: the members of the rank's group, and the name
            of the group's new communicator.
        """
        claims: list[tuple[list[int], str]] = await gathered
        for rank, (claim, name) in enumerate(claims):
            why = ""
            if claim != members and set(claim) & set(members):
                why = f"ranks is {members} on rank {self.rank} and {claim} on rank {rank}; wanted groups that are the "
                why += "same or have no rank in common"
            elif rank in members and name != child:
                why = f"name is {child!r} on rank {self.rank} and {name!r} on rank {rank}; wanted one name of a group"
            if why:
                raise MismatchError(why, comm=self.name, op="split", rank=self.rank, peer=rank)
        if not members:
            if any(claim for claim, _ in claims):
                alone = self._rendezvous.child(f"{child}#{number}.out{self.rank}", child, 0, 1)
                for transport in self._core.transports:
                    await transport.split_nobody(alone)
            return None
        key = f"{child}#{number}.{members[0]}"
        rendezvous = self._rendezvous.child(key, child, members.index(self.rank), len(members), timeout=seconds)
        parents = self._core.by_family
        opening = open_transports(plan, lambda _, f: parents[f].split(rendezvous, members, plan.options))
        opened = await formed(rendezvous, opening, partial(self._core.notes.no_store, number, members))
        rendezvous.timeout = seconds
        return Communicator(rendezvous, plan, opened)

    async def create_group(self, ranks: Sequence[int], name: str, *, timeout: OpTimeout = COMM_TIMEOUT) -> Communicator:
        """Form a communicator of some of the ranks; collective over these ranks only, like ``MPI_Comm_create_group``.

        A call waits until calls of all members are pending at the same time. After a failed call, a member may call
        again.

        :param ranks: the members, as in :meth:`split`.
        :param name: the name, the same on all members. The name distinguishes groups that the members form at the same
            time.
        :param timeout: see :meth:`split`.
        :raises ArgumentError: an argument is wrong. Nothing was sent.
        :raises CommAbortedError: this communicator is lost; or the new communicator was not formed, for the reasons in
            :func:`aiocomms.new_comm`.
        :raises CommError: the new communicator was not formed, for the reasons in :func:`aiocomms.new_comm`; this
            communicator stays usable.
        """
        self._core.demand("create_group")
        members = membership.members(ranks, self._core, "create_group", least=1)
        seconds = arguments.op_deadline(timeout, self._rendezvous.timeout)
        group = await self._groups.form(members, arguments.label(name), seconds)
        if group is None:
            raise self._end_during("create_group")
        return Communicator(*group)

    async def reconfigure(
        self, ranks: Sequence[int] | None = None, *, size: int | None = None, timeout: float | timedelta = 10.0
    ) -> Communicator:
        """Form a communicator that replaces this communicator.

        The call is collective over the remaining ranks, which are the ranks that stay in the group. The call also
        works if this communicator is already lost.

        When the new communicator is formed, this communicator is closed. Until then, the pending ops of this
        communicator continue, unless this communicator is lost.

        :param ranks: the list of the remaining ranks, the same on all ranks. None: the remaining ranks are those that
            call this method within the first quarter of ``timeout``.
        :param size: the number of ranks of the new communicator. Remaining ranks keep their numbers, and newcomers
            (``new_comm(join=True)``) fill the gaps. None: the remaining ranks get new numbers, in the order of their
            old numbers.
        :raises RuntimeError: the caller is not on the communicator's thread.
        :raises CommError: another task of this rank is already reconfiguring this communicator. Nothing was sent.
        :raises CommAbortedError: the other ranks exclude this rank, and form the new communicator without it.
        :raises CommTimeoutError: a rank or newcomer did not arrive in time.
        :raises StoreLostError: the store is lost, and the transport needs the store.
        """
        core, failure = self._core, self._core.life.failure
        core.demand_thread("reconfigure")
        refused: CommError | None = None
        if core.closed:
            refused = core.life.closed or CommClosedError("the communicator was lost, and then closed on this rank")
        elif self._reconfiguring:
            refused = CommError("another task reconfigures this communicator: let all tasks wait for one call")
        if refused is not None:
            raise refused.about(comm=self.name, op="reconfigure", rank=self.rank)
        reason = None if failure is None else failure.error
        old = Predecessor(self._rendezvous, self._plan, core.notes, self._seconds, reason)
        self._reconfiguring = True
        try:
            return await recovery.replace(self, Communicator(*await recovery.form_again(old, ranks, size, timeout)))
        finally:
            self._reconfiguring = False

    def statistics(self) -> Statistics:
        """Return a record of the communicator's present and past activity. Any thread may call this method.

        Ops do no additional work for this record.
        """
        return statistics_of(self._core, self.transports)

    def dump(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Write the flight recorder to a file.

        The file contains the latest ops and the pending ops. Any thread may call this method.

        :param folder: the folder of the file. None: the folder in ``AIOCOMMS_RECORDER_DIR`` or, without this variable,
            the user's default folder.
        :returns: the file's path.
        :raises CommError: the file cannot be written.
        """
        try:
            return dumps.write(self._core.recorder.snapshot("asked for"), folder)
        except OSError as error:
            raise CommError(f"the dump cannot be written: {error}", comm=self.name, rank=self.rank) from error

    def _sight(self) -> Sight:
        """Return this communicator's entry in the live view, which ``aiocomms top`` shows.

        Any thread may call this method, even while the event loop is blocked.
        """
        failure = self._core.life.failure
        snapshot = self._core.recorder.snapshot("" if failure is None else failure.error.message)
        return sight_of(snapshot, self._rendezvous.secret("live view"), self.statistics())


def _follows(op: Op) -> bool:
    """Return whether an op runs in the task's current lane, if the task has one."""
    return op.family == "collectives" or (op.family != "rma" and getattr(op, "channel", ops.USER) == ops.USER)


def _disown_in_child() -> None:
    """Make all communicators unusable in a forked child process, and do not touch the parent's sockets."""
    for guard in guards():
        guard.dismiss()
        guard.comm._disown()


os.register_at_fork(after_in_child=_disown_in_child)
