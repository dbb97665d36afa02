"""The class ``Driver``: rank 0 of a service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aiocomms.communicator import Communicator
from aiocomms.errors import CommClosedError, CommError, PlanLostError, WorkerError
from aiocomms.progress.work import Work
from aiocomms.serving.current import CurrentComm
from aiocomms.serving.plans import PLANS, REPORTS, Execute, Plan

_log = logging.getLogger("aiocomms")


class _Traceback(Exception):  # noqa: N818 - it is the cause of an error, which shows it
    """The traceback of another rank."""


class _Request:
    """One plan of the driver, until all ranks have ended it."""

    def __init__(self, plan: Plan, size: int) -> None:
        self.plan = plan
        self.waiting = set(range(size))
        """The ranks that have not ended it."""
        self.in_step = True
        self.result: Any = None
        self.error: Exception | None = None
        self.over = anyio.Event()


def _ask(work: Work[None]) -> None:
    """Let nobody report that it failed: who has left, or is lost, is heard of by the receive from it."""
    work.exception()


class Driver:
    """Rank 0 of a service, which gives out plans; made by :meth:`Service.drive`."""

    def __init__(
        self,
        comm: CurrentComm,
        numbers: Iterator[int],
        replace: Callable[[CommError], Awaitable[None]],
        execute: Execute,
        tasks: TaskGroup,
    ) -> None:
        self.failure: CommError | None = None
        """Why no plan can be carried out: the ranks recover, or cannot; None while they can."""
        self._comm, self._numbers, self._replace = comm, numbers, replace
        self._execute, self._tasks = execute, tasks
        self._requests: dict[int, _Request] = {}
        self._last: Plan | None = None
        self._draining: anyio.Event | None = None
        self._down = anyio.Event()  # of the communicator of the moment
        self._recovered = anyio.Event()
        self._recovered.set()

    async def run(self, plan: Any) -> Any:
        """Have every rank carry out a plan at the same time as others, in a lane of its own; any number of tasks.

        Its collectives, messages and objects meet those of this plan only. A cancelled caller leaves it to its end.

        :param plan: what objects may hold, see :meth:`Communicator.send_object`; its tensors are not to be changed.
        :returns: what ``execute`` returns on this rank, once it has ended on all ranks.
        :raises WorkerError: it failed on another rank, and was given up on all. What is raised here is raised as it is.
        :raises PlanLostError: a rank was lost meanwhile, or is not replaced yet.
        :raises CommClosedError: the driver is ending.
        :raises ArgumentError: the plan cannot be sent.
        """
        return await self._run(plan, in_order=False)

    async def run_in_order(self, plan: Any) -> Any:
        """The same, but every rank carries these out one after the other, in the order of the calls, and in no lane.

        So its collectives are the communicator's own, which a transport may carry natively. When one fails that has
        called an op, the ranks are out of step: the communicator is lost.
        """
        return await self._run(plan, in_order=True)

    async def ready(self) -> None:
        """Wait until plans can be carried out, again if ranks were lost.

        :raises CommError: the communicator was lost, and there will be no other.
        """
        await self._recovered.wait()
        if self.failure is not None:
            raise self.failure.about()

    async def _run(self, what: Any, *, in_order: bool) -> Any:
        comm, number, down = self._comm.current, next(self._numbers), self._down
        if self._draining is not None:
            raise CommClosedError("the driver is ending", comm=comm.name, op="run", rank=0)
        try:
            if self.failure is not None:
                raise self.failure.about()
            self._tell(comm, range(1, comm.size), number, in_order, what)
            request = self._requests[number] = _Request(Plan(number, in_order, comm), comm.size)
            self._tasks.start_soon(self._carry_out, request, what, self._last if in_order else None)
            if in_order:
                self._last = request.plan
            await request.over.wait()
            if request.error is not None:
                raise request.error
        except Exception as error:
            if not comm.aborted:
                raise
            await down.wait()  # so that ready() waits, too
            if isinstance(error, (WorkerError, CommClosedError)) or not isinstance(error, CommError):
                raise
            raise PlanLostError(f"the plan was lost: {error}", comm=comm.name, rank=0) from error
        return request.result

    def _tell(self, comm: Communicator, workers: Iterable[int], *message: Any) -> None:
        for worker in workers:
            comm.lane(PLANS).send_object(message, worker).add_done_callback(_ask)

    async def _carry_out(self, request: _Request, what: Any, before: Plan | None) -> None:
        error: Exception | None = None
        try:
            request.result = await request.plan.run(self._execute, what, before)
        except Exception as raised:
            error = raised
        self._ended(request, 0, error, request.plan.in_step())

    def _ended(self, request: _Request, rank: int, error: Exception | None, in_step: bool) -> None:
        """A rank has ended a plan: the first that fails has it given up on all ranks."""
        request.waiting.discard(rank)
        request.in_step &= in_step
        plan, comm = request.plan, self._comm.current
        if error is not None and request.error is None:
            request.error = error
            plan.give_up(f"it failed on rank {rank}")
            with contextlib.suppress(CommError):  # it is lost, which fails the request
                self._tell(comm, request.waiting - {0}, plan.number)
        if request.error is not None and not (request.in_step and plan.in_step()):  # a thread may wait for ever there
            comm.abort(f"plan {plan.number} failed amid its operations, and ran in no lane: {request.error}")
        if not request.waiting and self._requests.pop(plan.number, None) is not None:
            request.over.set()
            self._look()

    async def _hear(self, comm: Communicator, worker: int) -> None:
        """Hear how plans have ended on a worker."""
        with contextlib.suppress(CommError):
            while True:
                number, raised, trace, in_step = await comm.lane(REPORTS).recv_object(worker, timeout=None)
                error = None
                if raised:
                    error = WorkerError(f"plan {number} failed on rank {worker}: {raised}", rank=0, peer=worker)
                    error.__cause__ = _Traceback(f"on rank {worker}:\n{trace}")
                if number in self._requests:
                    self._ended(self._requests[number], worker, error, in_step)
        comm.abort(f"rank {worker} has left the service")

    async def _keep(self) -> None:
        """Serve on one communicator after the other."""
        while self.failure is None:
            comm = self._comm.current
            async with anyio.create_task_group() as hearing:
                for worker in range(1, comm.size):
                    hearing.start_soon(self._hear, comm, worker)
                try:
                    failure = await comm.lost()
                except CommClosedError as error:
                    failure = error
                hearing.cancel_scope.cancel()
            self._last, self.failure, self._recovered = None, failure, anyio.Event()
            self._down.set()
            for request in list(self._requests.values()):
                if request.error is None or (
                    isinstance(request.error, CommError) and not isinstance(request.error, WorkerError)
                ):
                    request.error = failure.about()
                request.plan.give_up("the communicator is lost")
                request.over.set()
            self._requests.clear()
            self._look()
            await self._recover(failure)

    async def _recover(self, failure: CommError) -> None:
        """Have the ranks that are left go on, if they can."""
        try:
            await self._replace(failure)
            self.failure, self._down = None, anyio.Event()
        except Exception as error:
            if error is not failure:
                _log.exception("the service cannot go on")
                self.failure = error if isinstance(error, CommError) else CommError(f"recovery failed: {error!r}")
        self._recovered.set()

    def _end(self) -> None:
        """Take no more plans, and wait for none: the block was left, perhaps by an error."""
        self._draining = anyio.Event()
        for request in self._requests.values():
            request.error = CommClosedError("the driver ended before the plan did", op="run", rank=0)
            request.over.set()
        self._down.set()
        self._recovered.set()

    def _look(self) -> None:
        if self._draining is not None and not self._requests:
            self._draining.set()

    async def _drain(self) -> None:
        """Let the plans under way end, and the workers leave.

        :raises CommError: the communicator was lost, and there is no other.
        """
        self._draining = anyio.Event()
        self._look()
        await self._draining.wait()
        if self._comm.current.aborted:
            await self._down.wait()
        await self.ready()
        comm = self._comm.current
        with contextlib.suppress(CommError):  # it is lost now, and nothing was
            for work in [comm.lane(PLANS).send_object((), worker) for worker in range(1, comm.size)]:
                await work
