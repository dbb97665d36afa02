"""The class ``Service``, of every rank."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import AsyncIterator
from typing import Any

import anyio

from aiocomms.arguments import as_int, wrong_type
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.hooks import Hook
from aiocomms.serving import signals
from aiocomms.serving.current import CurrentComm
from aiocomms.serving.driver import Driver
from aiocomms.serving.plans import Execute, Plan, Recover, Worker
from aiocomms.serving.statistics import ServiceStatistics
from aiocomms.serving.watch import CarrierHook, CommHook, PlanHook, Watch


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
        self._worker: Worker | None = None
        self._numbers = itertools.count()
        self._watch = Watch()
        self._closed = False

    @property
    def current(self) -> Communicator:
        """The communicator of the moment."""
        return self.comm.current

    @property
    def closed(self) -> bool:
        """True once the service has ended on this rank."""
        return self._closed

    async def __aexit__(self, *raised: Any) -> None:  # noqa: PYI036 - passed on
        self._closed = True
        await self.current.__aexit__(*raised)

    @contextlib.asynccontextmanager
    async def drive(
        self, execute: Execute, max_running: int | None = None, max_waiting: int | None = None
    ) -> AsyncIterator[Driver]:
        """Give out plans, on rank 0. At the end of the block the plans under way end, and then the workers leave.

        Where ``aiocomms run`` replaces rank 0 by another process, and there is a ``recover``, the workers stay for it.

        If the block raises, or is cancelled, no rank is told, and nothing waited for: the end of the service does both.

        :param execute: an async function, or an async generator function, that carries out a plan here, as ``work`` is
            given on the other ranks.
        :param max_running: how many plans may be under way at once, at least 1; the others wait. None: any number.
        :param max_waiting: how many may wait for their turn, at least 0; others are refused by a
            :class:`~aiocomms.errors.ServiceBusyError`. None: any number.
        :raises ArgumentError: this is not rank 0, or a number is wrong.
        """
        most = _most("max_running", max_running, 1), _most("max_waiting", max_waiting, 0)
        if self.comm.rank != 0:
            raise ArgumentError("rank 0 drives, and the others work()", comm=self.comm.name, rank=self.comm.rank)
        self._worker = driver = Driver(self.comm, self._recover, self._numbers, self._watch, execute, most)
        failure: BaseException | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(driver._serve)
                await driver._turn.wait()
                with signals.noted(driver):
                    yield driver
                await driver._drain()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # The group is around the exception that the block has raised.
            failure = group.exceptions[0]
        finally:
            self._worker = None
        if failure is not None:
            raise failure

    async def work(self, execute: Execute) -> None:
        """Carry out plans, on every rank but 0, until the driver ends; idle for hours, if there are none.

        Meanwhile SIGINT and SIGTERM do not end this process if this is the main thread: rank 0 got them, too, and
        ends the workers when it has drained. If it does not, its death is noticed. SIGTERM to this process alone has
        it :meth:`leave`, if there is a ``recover``.

        :param execute: an async function that carries out a plan. What it raises, its plan's ``run`` raises on rank 0.
        :raises ArgumentError: this is rank 0.
        :raises DriverLostError: rank 0 was lost, and of the ranks that have recovered one that works has its place.
        :raises CommError: the communicator was lost, and there is no ``recover``; or what that raises.
        """
        if self.comm.rank == 0:
            raise ArgumentError("rank 0 drives, and does not work()", comm=self.comm.name, rank=0)
        self._worker = worker = Worker(self.comm, self._recover, self._numbers, self._watch, execute)
        try:
            with signals.held(worker):
                await worker._serve()
        finally:
            self._worker = None

    def leave(self) -> None:
        """Have another process take the place of this worker, without a plan that fails; ``work`` then returns.

        Rank 0 goes on for a second, then holds new plans back, and lets this rank go when those under way have ended.
        The end of the service closes the communicator here; the other ranks ``recover``, with the newcomer, and carry
        out what has waited. If rank 0 was itself told to end by SIGTERM, it ends all ranks instead when it has drained.

        ``aiocomms run`` hears of it when this rank is let go: it starts the newcomer once this process has ended, and
        kills one that has not within its grace time.

        :raises ArgumentError: ``work`` does not run here, or there is no ``recover``.
        """
        if self._worker is None or self._worker._drives or self._recover is None:
            why = "work() does not run" if self._recover else "there is no recover: without this rank the service ends"
            raise ArgumentError(why, comm=self.comm.name, op="leave", rank=self.comm.rank)
        self._worker.leave()

    def statistics(self) -> ServiceStatistics:
        """Look at the plans of this rank; on any thread, whatever the loop is doing. It locks nothing."""
        counts, worker = self._watch.counts, self._worker
        plans = [] if worker is None else list(worker._plans.values())
        return ServiceStatistics(
            name=self.current._core.base,
            rank=self.comm.rank,
            done=counts.done,
            failed=counts.failures(),
            cancelled=counts.cancelled,
            refused=counts.refused,
            running=len(plans),
            waiting=counts.waiting,
            oldest=max((clock.now() - plan.posted for plan in plans), default=None),
            recoveries=counts.recoveries,
            took=counts.took.copy(),
            waited=counts.waited.copy(),
        )

    def register_comm_hook(self, fn: CommHook) -> Hook:
        """Have ``fn(comm)`` called now, and on the loop's thread for each communicator that takes a lost one's place.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called; or whatever it raises now.
        """
        hook = self._watch.comm_hooks.register(fn)
        try:
            fn(self.current)
        except BaseException:
            hook.remove()
            raise
        return hook

    def register_carrier_hook(self, fn: CarrierHook) -> Hook:
        """Have ``fn(carrier)`` called on rank 0 for each plan, in its caller's task: ``carrier`` is a dict of texts.

        The texts travel with the plan, for the plan hooks of every rank. What ``fn`` raises, the call raises.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._watch.carrier_hooks.register(fn)

    def register_plan_hook(self, fn: PlanHook) -> Hook:
        """Have each plan carried out on this rank within the context manager that ``fn(start)`` returns, in its task.

        What that raises, the plan fails with. ``start`` has ``number``, ``comm``, ``waited`` (seconds), ``carrier``.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._watch.plan_hooks.register(fn)

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


def _most(name: str, value: object, least: int) -> float:
    if value is None:
        return math.inf
    count = as_int(value)
    if type(count) is not int:
        raise wrong_type(name, value, "an int or None").about(op="drive")
    if count < least:
        raise ArgumentError(f"{name} is {count}, wanted at least {least}, or None for any number", op="drive")
    return count
