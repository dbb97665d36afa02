"""The classes ``Service``, of every rank, and ``Driver``, of rank 0."""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    CommClosedError,
    CommError,
    LaneAbortedError,
    PlanLostError,
    WorkerError,
    as_reason,
)
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.serving.current import CurrentComm
from aiocomms.serving.plans import Execute, Plan, Recover, Worker

_log = logging.getLogger("aiocomms")


class Service(Handle, contextlib.AbstractAsyncContextManager["Service"]):
    """One rank of a service: rank 0 drives, every other rank works. ``async with`` closes the communicator at the end.

    :param comm: the communicator of all ranks; it is the service's from now on.
    :param recover: what to do when it is lost, on every rank that is left: an async function that is given the lost
        communicator and returns the new one, as ``lambda lost: lost.reconfigure(size=lost.size)`` does. Here a model
        takes its new part. None: the loss is the end, for a layer that is split over ranks is wrong with fewer.
    """

    def __init__(self, comm: Communicator, recover: Recover | None = None) -> None:
        self.comm: CurrentComm = CurrentComm(comm)
        """The communicator that layers hold, which follows a recovery."""
        self._recover = recover
        self._numbers = itertools.count()

    @property
    def current(self) -> Communicator:
        """The communicator of the moment."""
        return self.comm.current

    async def __aexit__(self, *raised: Any) -> None:  # noqa: PYI036 - passed on
        await self.current.__aexit__(*raised)

    @contextlib.asynccontextmanager
    async def drive(self, execute: Execute) -> AsyncIterator[Driver]:
        """Give out plans, on rank 0. At the end of the block the plans under way end, and then the workers leave.

        If the block raises, or is cancelled, no rank is told, and nothing waited for: the end of the service does both.

        :param execute: an async function that carries out a plan here, as ``work`` is given on the other ranks.
        :raises ArgumentError: this is not rank 0.
        """
        if self.comm.rank != 0:
            raise ArgumentError("rank 0 drives, and the others work()", comm=self.comm.name, rank=self.comm.rank)
        driver = Driver(self.comm, self._recover, self._numbers, execute)
        failure: BaseException | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(driver._serve)
                await driver._turn.wait()
                yield driver
                await driver._drain()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # The group is around the exception that the block has raised.
            failure = group.exceptions[0]
        if failure is not None:
            raise failure

    async def work(self, execute: Execute) -> None:
        """Carry out plans, on every rank but 0, until the driver ends; idle for hours, if there are none.

        Meanwhile SIGINT and SIGTERM do not end this process if this is the main thread: rank 0 got them, too, and
        ends the workers when it has drained. If it does not, its death is noticed.

        :param execute: an async function that carries out a plan. What it raises, its plan's ``run`` raises on rank 0.
        :raises ArgumentError: this is rank 0.
        :raises DriverLostError: rank 0 was lost, and of the ranks that have recovered one that works has its place.
        :raises CommError: the communicator was lost, and there is no ``recover``; or what that raises.
        """
        if self.comm.rank == 0:
            raise ArgumentError("rank 0 drives, and does not work()", comm=self.comm.name, rank=0)
        with _signals_ignored():
            await Worker(self.comm, self._recover, self._numbers, execute)._serve()

    async def cancelled(self) -> bool:
        """Ask on every rank, within a plan that runs in order, whether its caller has been cancelled; a collective.

        So all ranks end the plan at the same step. It costs one small message of rank 0 to each other rank, and no
        round trip: ask at each step of a loop, or at every tenth.

        :returns: what rank 0 knew when it asked; the same on all ranks.
        :raises ArgumentError: this task carries out no plan.
        """
        plan = Plan.current.get(None)
        if plan is None:
            raise ArgumentError("cancelled() is asked within a plan", comm=self.comm.name, rank=self.comm.rank)
        return bool(await self.comm.broadcast_object(plan.cancelled, 0))


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    before, mine = {}, clock.simulation is None and threading.current_thread() is threading.main_thread()
    if mine and signal.getsignal(signal.SIGINT) is not _ignore:
        before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: object) -> None:
    """Do nothing but say so; unlike SIG_IGN it is not passed on to programs that are started."""
    if number == signal.SIGTERM:  # The sender of SIGTERM to one process alone waits for its end.
        _log.warning("SIGTERM does not end a rank that works: rank 0 ends it when it has drained, so send it there")


class Driver(Worker):
    """Rank 0 of a service, which gives out plans; made by :meth:`Service.drive`."""

    _drives = True
    _draining = False
    _over: Exception | None = None  # The reason why there will be no other communicator.

    @property
    def failure(self) -> CommError | None:
        """The reason why no plan can be carried out: the ranks recover, or cannot; None while they can."""
        failure = self._comm._core.life.failure
        return None if failure is None else failure.error

    async def run(self, plan: Any) -> Any:
        """Have every rank carry out a plan at the same time as others, in a lane of its own; any number of tasks.

        Its collectives, messages and objects meet those of this plan only. If the caller is cancelled, so is the plan,
        on every rank: the caller goes on at once, and ``execute`` is cancelled amid the operation under way.

        :param plan: what objects may hold, see :meth:`Communicator.send_object`; its tensors are not to be changed.
        :returns: what ``execute`` returns on this rank, once it has ended on all ranks.
        :raises WorkerError: it failed on another rank, and was given up on all. What is raised here is raised as it is,
            if it is an :class:`Exception`; of others, such as a ``CancelledError``, this is raised, too.
        :raises PlanLostError: a rank was lost meanwhile, or is not replaced yet.
        :raises CommClosedError: the driver is ending.
        :raises ArgumentError: the plan cannot be sent.
        """
        return await self._run(plan, in_order=False)

    async def run_in_order(self, plan: Any) -> Any:
        """Run a plan in no lane: every rank carries such plans out one by one, in the order of the calls.

        So its collectives are the communicator's own, which a transport may carry natively. When one fails that has
        called an op, the ranks are out of step: the communicator is lost. So a cancelled caller leaves the plan to its
        end, unless ``execute`` asks :meth:`Service.cancelled`.
        """
        return await self._run(plan, in_order=True)

    async def ready(self) -> None:
        """Wait until plans can be carried out, again if ranks were lost.

        :raises CommError: the communicator was lost, and there will be no other; or what ``recover`` has raised.
        """
        while self.failure is not None:
            if self._over is not None:
                raise self._over
            await self._turn.wait()

    async def _run(self, what: Any, *, in_order: bool) -> Any:
        await checkpoint_if_cancelled()  # A plan that nobody waits for is not begun.
        comm = self._comm
        if self._draining:
            raise CommClosedError("the driver is ending", comm=comm.name, op="run", rank=0)
        if self.failure is not None:
            raise PlanLostError(f"the plan is lost: {self.failure}", comm=comm.name, rank=0) from self.failure
        number = next(self._numbers)
        self._tell(range(1, comm.size), number, in_order, what)
        plan = self._begin(number, in_order, what)
        try:
            await plan.over.wait()
        finally:
            self._leave(plan)
        if plan.error is not None:
            raise plan.error
        return plan.result

    def _leave(self, plan: Plan) -> None:
        """Note that nobody waits for a plan any more. One that is under way is given up, unless it runs in order."""
        plan.cancelled = True
        if not plan.over.is_set() and not plan.in_order:
            self._give_up(plan, LaneAbortedError("the plan was cancelled", rank=0, peer=0), "its caller was cancelled")

    def _give_up(self, plan: Plan, error: Exception, why: str) -> None:
        """Give a plan up on all ranks, unless that has happened."""
        if plan.error is None:
            plan.error = error
            plan.give_up(why)
            self._tell(plan.waiting - {0}, plan.number)

    async def _serve(self) -> None:
        """Carry out plans as every rank does. An error is raised to the tasks that wait, and the workers hear of it."""
        try:
            await super()._serve()
        except Exception as error:
            _log.exception("the service cannot go on")
            self._over = error
            self._comm.abort(error)  # This does nothing if the communicator is lost.
        finally:
            ended = CommClosedError("the driver has ended", comm=self._comm.name, op="run", rank=0)
            self._over = self._over or ended
            self._draining |= self.failure is None
            self._fail(ended)
            self._turn.set()

    async def _drain(self) -> None:
        """Let the plans under way end, and the workers leave."""
        self._draining = True
        while self._plans:
            await next(iter(self._plans.values())).over.wait()
        await self.ready()
        self._tell(range(1, self._comm.size))

    def _heard(self, rank: int, number: int, *outcome: Any) -> None:
        """Note that a worker has ended a plan."""
        raised, trace, in_step = outcome
        error = WorkerError(f"plan {number} failed on rank {rank}: {raised}", rank=0, peer=rank) if raised else None
        if error is not None:
            error.__cause__ = Exception(f"on rank {rank}:\n{trace}")
        if number in self._plans:
            self._ended(self._plans[number], error, rank, in_step)

    def _ended(self, plan: Plan, error: BaseException | None, rank: int = 0, in_step: bool = True) -> None:
        """Note that a rank has ended a plan. The first that fails has it given up on all."""
        plan.waiting.discard(rank)
        # The exception, if raised, would end the caller's task.
        if error is not None and not isinstance(error, Exception):
            cause, text = error, f"plan {plan.number} failed on rank 0: {as_reason(error)}"
            error = WorkerError(text, comm=self._comm.name, rank=0, peer=0)
            error.__cause__ = cause
        if error is not None:
            self._give_up(plan, error, f"it failed on rank {rank}")
        if not plan.in_step(in_step) and plan.error is not None:  # A thread may wait there for ever.
            self._comm.abort(f"plan {plan.number} failed amid its operations, and ran in no lane: {plan.error}")
        elif not plan.waiting:
            del self._plans[plan.number]
            plan.over.set()
