"""The class ``Service``. Every rank of a service creates one object of this class."""

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
    """One rank of a service: rank 0 is the driver, and every other rank is a worker.

    The end of an ``async with`` block closes the communicator.

    :param comm: the communicator of all ranks. The service takes ownership of the communicator.
    :param recover: an async function. If the communicator is lost, the service calls the function on every remaining
        rank, with the lost communicator. The function returns the new communicator, as
        ``lambda lost: lost.reconfigure(size=lost.size)`` does. The function can also load the part of a model that this
        rank runs after the recovery. If ``recover`` is None, the loss of the communicator ends the service.
    """

    def __init__(self, comm: Communicator, recover: Recover | None = None) -> None:
        self.comm: CurrentComm = CurrentComm(comm)
        """The object that the layers of a model use as communicator. The object stays valid after a recovery."""
        self._recover = recover
        self._worker: Worker | None = None
        self._numbers = itertools.count()
        self._watch = Watch()
        self._closed = False

    @property
    def current(self) -> Communicator:
        """The current communicator."""
        return self.comm.current

    @property
    def closed(self) -> bool:
        """True if the service has ended on this rank."""
        return self._closed

    async def __aexit__(self, *raised: Any) -> None:  # noqa: PYI036 - passed on
        self._closed = True
        await self.current.__aexit__(*raised)

    @contextlib.asynccontextmanager
    async def drive(
        self, execute: Execute, max_running: int | None = None, max_waiting: int | None = None
    ) -> AsyncIterator[Driver]:
        """Run the driver on rank 0 within an ``async with`` block.

        At the end of the block, the driver finishes the accepted plans, and then ends the workers.

        If ``aiocomms run`` replaces rank 0 and the service has a ``recover``, the workers continue with the new
        process.

        If the block raises an exception or is cancelled, the block does not wait for plans, and does not end the
        workers. In this case, the other ranks lose the communicator when the service's own ``async with`` block ends.

        :param execute: an async function, or an async generator function, that runs a plan on this rank. The other
            ranks pass their functions to :meth:`work`.
        :param max_running: the number of plans that may run at once, at least 1. Further plans wait. None means no
            limit.
        :param max_waiting: the number of plans that may wait, at least 0. Further calls raise
            :class:`~aiocomms.errors.ServiceBusyError`. None means no limit.
        :raises ArgumentError: this rank is not rank 0, or a number is out of range.
        """
        most = _most("max_running", max_running, 1), _most("max_waiting", max_waiting, 0)
        if self.comm.rank != 0:
            raise ArgumentError("only rank 0 calls drive(): call work() here", comm=self.comm.name, rank=self.comm.rank)
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
        except BaseExceptionGroup as group:  # The group holds the exception of the block.
            failure = group.exceptions[0]
        finally:
            self._worker = None
        if failure is not None:
            raise failure

    async def work(self, execute: Execute) -> None:
        """Run plans on a rank above 0 until the driver ends. The wait for the next plan has no deadline.

        During a call on the main thread, SIGINT and SIGTERM do not end this process. Rank 0 also gets these signals,
        and ends the workers after its plans have ended. If rank 0 dies, the workers' communicator is lost. If the
        service has a ``recover``, this process calls :meth:`leave` on SIGTERM.

        :param execute: an async function that runs a plan on this rank. If the function raises, :meth:`Driver.run` on
            rank 0 raises a :class:`~aiocomms.errors.WorkerError`.
        :raises ArgumentError: this rank is rank 0.
        :raises DriverLostError: rank 0 was lost, and a worker has become rank 0 in the recovered communicator.
        :raises CommError: the communicator was lost and there is no ``recover``, or ``recover`` has raised this error.
        """
        if self.comm.rank == 0:
            raise ArgumentError("rank 0 does not call work(): call drive() here", comm=self.comm.name, rank=0)
        self._worker = worker = Worker(self.comm, self._recover, self._numbers, self._watch, execute)
        try:
            with signals.held(worker):
                await worker._serve()
        finally:
            self._worker = None

    def leave(self) -> None:
        """Leave the service, so that another process can replace this worker. No plan fails. :meth:`work` then returns.

        After this call, rank 0 waits for 1 s. Then rank 0 begins no new plans, and releases this rank when the running
        plans have ended. The end of the service's ``async with`` block on this rank closes the communicator. The other
        ranks call ``recover`` together with the new process, and run the waiting plans. If rank 0 also got SIGTERM,
        rank 0 ends all ranks after the driver's plans have ended.

        ``aiocomms run`` starts the new process after this process has ended. If this process does not end within the
        grace time, ``aiocomms run`` kills it.

        :raises ArgumentError: :meth:`work` does not run on this rank, or the service has no ``recover``.
        """
        if self._worker is None or self._worker._drives or self._recover is None:
            why = "work() does not run" if self._recover else "there is no recover: without this rank the service ends"
            raise ArgumentError(why, comm=self.comm.name, op="leave", rank=self.comm.rank)
        self._worker.leave()

    def statistics(self) -> ServiceStatistics:
        """Return the statistics of this rank's plans. Thread-safe, even if the event loop is blocked."""
        counts, worker = self._watch.counts, self._worker
        plans = [] if worker is None else list(worker._plans.values())
        return ServiceStatistics(
            name=self.current._core.label,
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
        """Call ``fn(comm)`` now, and later on the loop's thread with each communicator that replaces a lost one.

        If the first call of ``fn`` raises an exception, this method raises the same exception.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` is not callable.
        """
        hook = self._watch.comm_hooks.register(fn)
        try:
            fn(self.current)
        except BaseException:
            hook.remove()
            raise
        return hook

    def register_carrier_hook(self, fn: CarrierHook) -> Hook:
        """Call ``fn(carrier)`` on rank 0 for each plan, in the task that calls the plan.

        The carrier is a dict, to which ``fn`` adds strings. Rank 0 sends the carrier with the plan to the plan hooks of
        every rank. If ``fn`` raises, the call of the plan raises the same exception.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` is not callable.
        """
        return self._watch.carrier_hooks.register(fn)

    def register_plan_hook(self, fn: PlanHook) -> Hook:
        """Call ``fn(start)`` in each plan's task on this rank, and run the plan within the returned context manager.

        If ``fn`` or the context manager raises, the plan fails. ``start`` is a :class:`~aiocomms.serving.PlanStart`
        with ``number``, ``comm``, ``waited`` (seconds) and ``carrier``.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` is not callable.
        """
        return self._watch.plan_hooks.register(fn)

    async def cancelled(self) -> bool:
        """Return on every rank whether the caller of an in-order plan was cancelled. The call is a collective.

        All ranks get the same value, so they can end the plan at the same step. Rank 0 sends one small message to each
        other rank, and waits for no answer. So a loop can call this method at each step, or at every tenth step.

        :returns: whether the caller was cancelled before rank 0's call of this method.
        :raises ArgumentError: the current task runs no plan.
        """
        plan = Plan.current.get(None)
        if plan is None:
            raise ArgumentError("cancelled() was called outside of a plan", comm=self.comm.name, rank=self.comm.rank)
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
