"""The class users hold: one rank's handle on a fixed, ordered group of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import Any, Self

import anyio

from aiocomms import ops
from aiocomms.bootstrap import directory, recovery
from aiocomms.bootstrap.registry import Plan, open_transports
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.core import Core
from aiocomms.diagnosis import dumps
from aiocomms.diagnosis.leak_guard import LeakGuard, guards
from aiocomms.diagnosis.recorder import PEERS
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    BufferBusyError,
    CommAbortedError,
    CommError,
    MismatchError,
    StoreLostError,
    wrong_thread,
)
from aiocomms.families.collectives import Collectives
from aiocomms.families.hooks import Hooked, Hooks
from aiocomms.families.objects import Objects
from aiocomms.families.p2p import PointToPoint
from aiocomms.families.rma import OneSided
from aiocomms.families.streams import Streams
from aiocomms.ops import Op, checks
from aiocomms.progress.inflight import StartedWork
from aiocomms.progress.work import Work
from aiocomms.transport import Transport


class Communicator(PointToPoint, Collectives, OneSided, Objects, Streams, Hooked):
    """One rank's handle on a fixed, ordered group of ranks; made by :func:`aiocomms.new_comm`.

    Every operation is started by its call and returns a :class:`~aiocomms.Work` at once. A communicator belongs to the
    event loop, thread and process that made it; :meth:`abort` and :meth:`dump` may be called on any thread.
    """

    _core: Core

    def __init__(self, rendezvous: StoreRendezvous, plan: Plan, transports: Mapping[ops.Family, Transport]) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.name, self.device, self.timeout = rendezvous.name, rendezvous.device, rendezvous.timeout
        self._rendezvous, self._plan = rendezvous, plan
        self._core = core = Core(rendezvous, transports, plan.options)
        self._router, self._trace = core.router, core.recorder.trace
        self._children = 0  # communicators split off
        self._pre_hooks, self._post_hooks, self._abort_hooks = Hooks(), core.post_hooks, core.abort_hooks
        self._debug = os.environ.get("AIOCOMMS_DEBUG", "0") not in ("", "0")
        self._guard = LeakGuard(self)
        dumps.register(core.recorder)
        directory.register(self)

    def __repr__(self) -> str:
        failure, closed = self._core.life.failure, self._core.life.closed
        reason = closed if failure is None else failure.error
        state = f" ({reason.message})" if reason is not None else ""
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
        return self._core.closed

    @property
    def aborted(self) -> bool:
        """Whether it is poisoned: aborted here or elsewhere, a peer died, a deadline passed, or ranks disagreed."""
        return self._core.life.failure is not None

    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: checks.Timeout = None) -> Work[Any]:
        """Check an op, post it, and return its work."""
        core = self._core
        if core.refusing or get_ident() != core.thread:
            raise core.refused(op)
        seq, kind = core.issued, type(op)
        try:
            op.check(core)
            seconds = self.timeout if timeout is None else checks.seconds("timeout", timeout)
            if hints is not None or self._debug:
                self._check_rarely(op, hints)
        except CommError as error:
            raise error.about(comm=self.name, op=op.name, rank=self.rank) from None
        core.issued = seq + 1  # and with it, so that no other thread sees one without the other:
        if (trace := self._trace) is not None:
            trace.append(kind)
        if self._pre_hooks:
            self._pre_hooks.ask(op, seq)
        work: StartedWork[Any] = StartedWork(op, seq, core, hints)
        core.calls += op.family == "collectives"
        try:
            at = self._router[kind](op, work)
        except BaseException as error:
            raise core.post_raised(op, error)  # noqa: B904 - it is this error, or caused by it
        if not work._state:  # done(), without the call
            return core.keep(work, seconds)
        if trace is not None:
            trace.append((at or monotonic()) if kind not in PEERS else core.recorder.row(work))
        if self._post_hooks or work.fault is not None:
            core.ended_at_once(work)
        return work

    def _check_rarely(self, op: Op, hints: Mapping[str, Any] | None) -> None:
        """Check the hints; in debug mode refuse buffers that an unfinished op still writes, or this one would write."""
        if hints is not None:
            checks.mapping("hints", hints)
        for work in self._core.in_flight if self._debug else ():
            try:
                checks.disjoint(op.writes(), work.op.reads() + work.op.writes())
                checks.disjoint(work.op.writes(), op.reads())
            except ArgumentError as error:
                raise BufferBusyError(f"a buffer still belongs to {work!r}: {error.message}") from None

    # ------------------------------------------------------------------------------------- aborting and closing

    def abort(self, reason: str | BaseException) -> None:
        """Give up, on every rank: all pending works of all ranks fail with :class:`CommAbortedError`.

        It may be called on any thread and in a signal handler. Nothing can be started any more when it returns; what is
        pending ends on the loop's next turn. The first reason stays: later calls do nothing.

        :param reason: why; the peers are told.
        """
        if isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__
        self._core.abort(reason)

    async def aclose(self) -> None:
        """Close: let ops that are under way end, withdraw receives that nothing matched, release everything.

        It waits :data:`aiocomms.core.CLOSE_GRACE` seconds for the former. A cancelled close still releases everything.
        Idempotent.

        :raises RuntimeError: this is not the communicator's thread.
        :raises CommError: a transport broke while it closed; everything else is released.
        """
        if get_ident() != self._core.thread:
            raise wrong_thread(f"aclose on '{self.name}'")
        try:
            await self._core.aclose(self._released)
        finally:
            self._rendezvous.leave()

    def _released(self) -> None:
        directory.unregister(self)
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

    def set_timeout(self, timeout: checks.Timeout) -> None:
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
        :raises StoreLostError: the store is gone, and the transport cannot do without it; this communicator goes on.
        :raises CommAbortedError: it has failed on another rank, or was cancelled there. Then this communicator is lost.
        """
        members = checks.members(ranks, self._core)
        child = f"{self.name}/{self._children + 1}" if name is None else checks.label(name)
        number = self._children = self._children + 1  # another split may begin before this one goes on
        core = self._core
        with anyio.CancelScope() as scope:
            hook = self.register_abort_hook(lambda _: scope.cancel())  # also of what meets the others elsewhere
            try:
                return await self._form_child(members, child, number)
            except StoreLostError:
                raise  # on every rank that needs the store; this communicator does not
            except BaseException as error:
                hook.remove()
                core.lose(_broken_off(error).about(comm=self.name, op="split", rank=self.rank))
                raise
            finally:
                hook.remove()
        lost = core.life.refusal()
        assert lost is not None
        raise lost.about(comm=self.name, op="split", rank=self.rank)

    async def _form_child(self, members: list[int], child: str, number: int) -> Communicator | None:
        """Agree on the groups of a split, and form this rank's."""
        claims: list[list[int]] = await self.all_gather_object(members)
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
        rendezvous = self._rendezvous.child(key, child, members.index(self.rank), len(members))
        plan, parents = self._plan, self._core.by_family
        opened = await open_transports(plan, lambda _, f: parents[f].split(rendezvous, members, plan.options))
        return Communicator(rendezvous, plan, opened)

    async def reconfigure(
        self, ranks: Sequence[int] | None = None, *, size: int | None = None, timeout: checks.Timeout = 10.0
    ) -> Communicator:
        """Form a new communicator of the ranks that are left of this lost one, which it closes; collective over those.

        :param ranks: who is left, the same on all; None: whoever calls this within a quarter of ``timeout`` seconds.
        :param size: the new size; who is left keeps its number, and newcomers (``new_comm(join=True)``) fill the gaps.
            None: they are numbered anew, in the old order.
        :raises CommAbortedError: this rank is excluded: the others go on without it.
        :raises CommTimeoutError: a rank or newcomer did not come in time.
        :raises StoreLostError: the store is gone, and the transport cannot do without it.
        """
        core, failure = self._core, self._core.life.failure
        reason = None if failure is None else failure.error
        old = recovery.Lost(self._rendezvous, self._plan, core.transports, self.timeout, reason, self.closed)
        return await recovery.replace(self, Communicator(*await recovery.form_again(old, ranks, size, timeout)))

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


def _broken_off(error: BaseException) -> CommError:
    """Why a split ends on this rank: the others would wait for it until their time is up."""
    if isinstance(error, CommError):
        return error
    if isinstance(error, Exception):
        return CommError(f"split failed: {type(error).__name__}: {error}")
    return CommAbortedError("split was cancelled")


def _disown_in_child() -> None:
    """A forked child shares its parent's sockets, and must not use or close them."""
    for guard in guards():
        guard.dismiss()
        guard.comm._core.disown()


os.register_at_fork(after_in_child=_disown_in_child)
