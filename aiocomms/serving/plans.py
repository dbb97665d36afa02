"""The part of a service that runs plans on every rank. After each recovery, this part uses the new communicator.

Rank 0 and the workers exchange messages in a separate lane. Rank 0 sends:

* ``(number, in order, plan)`` to begin a plan. If carrier hooks added texts, the texts are a fourth element.
* ``(number,)`` to cancel a plan, and ``(number, None)`` to request the plan's state.
* ``(LEAVES,)`` when a worker may leave, and ``()`` at the end of the service.

A worker sends:

* ``(number, exception, traceback, in step)`` for each ended plan. For the last element, see :meth:`Plan.in_step`.
* ``(number, state)`` as the answer to a request, and ``(LEAVES,)`` to ask for permission to leave.

If a function of the program raises an exception of any class, the plan fails. A ``CancelledError`` also makes the plan
fail, unless the task is being cancelled.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from traceback import format_exception, format_exception_only
from typing import Any, Final, cast

import anyio

from aiocomms.bootstrap import supervised
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.expected import Expected
from aiocomms.diagnosis.recorder import PLAN_LANE, called
from aiocomms.errors import (
    ArgumentTypeError,
    CommAbortedError,
    CommError,
    DriverLostError,
    PeerDiedError,
    PlanLostError,
    as_reason,
)
from aiocomms.lowering.tags import number_of
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.guard import ends_task
from aiocomms.progress.inflight import StartedWork
from aiocomms.progress.work import Work
from aiocomms.serving.current import CurrentComm
from aiocomms.serving.watch import Carrier, PlanStart, Watch

Execute = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any]]
"""A function that runs a plan on one rank.

The plan's result is the function's result on rank 0, or the list of the items that the function yields on rank 0.
"""
Take = Callable[[Any], Awaitable[object]]
"""A function that the driver calls for each item that a plan yields on rank 0. The item is the argument."""
Recover = Callable[[Communicator], Awaitable[Communicator]]
"""A function that takes a lost communicator, and returns the communicator that replaces it."""
LEAVES: Final = -1
"""The number that marks two kinds of messages: a worker's request to leave, and rank 0's permission to leave.

In other messages, the number of a plan is in the same position.
"""
SERVICE_LANE = "aiocomms.serving"
_log = logging.getLogger("aiocomms")


class Plan:
    """One plan on one rank.

    A worker keeps the plan until the plan has ended on the worker's rank. The driver keeps the plan until the plan has
    ended on all ranks.
    """

    number: int
    ended: anyio.Event
    over: anyio.Event
    cancelled: bool
    current: ContextVar[Plan] = ContextVar("aiocomms plan")
    """The plan that the current task runs."""

    def __init__(
        self, comm: Communicator, watch: Watch, number: int, in_order: bool, carrier: Carrier | None = None
    ) -> None:
        self.number, self._comm, self._core, self._watch = number, comm, comm._core, watch
        self._carrier: Carrier = carrier or {}
        # The times of the call or the arrival here, and of the start of this attempt.
        self.called = self.posted = clock.now()
        self._lane = None if in_order else comm.lane(f"{PLAN_LANE} {number}")
        self._scope = anyio.CancelScope()
        self._begun: int | None = None  # The number of ops outside lanes that were called before the plan's start.
        self._in_step = True
        self.cancelled = False  # Whether the caller was cancelled.
        self.given_up = False  # Whether the plan was ended here because of an event elsewhere.
        self.ended, self.over = anyio.Event(), anyio.Event()  # Events for the end here, and for the end on all ranks.
        self.waiting: set[int] = set(range(comm.size))  # The ranks that have not ended the plan yet.
        self.result: Any = None
        self.error: Exception | None = None
        self.take: Take | None = None
        self.stands: dict[int, str] = {}  # The plan's state on each rank that has answered.
        self.answered: anyio.Event | None = None  # The event that all ranks have answered a request.

    async def run(self, execute: Execute, what: Any, before: Plan | None) -> BaseException | None:
        """Wait until the plan ``before`` has ended, and then run this plan.

        :returns: the exception that this plan has raised, or None. The value is None if this plan succeeded, or if
            another rank has cancelled this plan.
        """
        try:
            with self._scope:
                if before is not None:
                    await before.ended.wait()
                if self._scope.cancel_called:
                    return None
                self._begun = self._called()
                self.current.set(self)
                start = PlanStart(self.number, self._comm, clock.now() - self.called, self._carrier)
                with self._lane or contextlib.nullcontext(), self._watch.begin(start):
                    await self._carry_out(execute(what))
            return None
        except BaseException as error:
            if ends_task(error):
                raise
            given_up = self._lane and self._core.given_up.get(number_of(self._lane.key))
            if not given_up or given_up.peer == self._core.rank:
                return error
            self.given_up = True
            return None
        finally:
            self.in_step()  # This call comes before the next plan begins.
            self.ended.set()

    async def _carry_out(self, made: Awaitable[Any] | AsyncGenerator[Any]) -> None:
        if not isinstance(made, AsyncGenerator):
            self.result = await made
            if self.take is not None:
                raise ArgumentTypeError("execute is no async generator for this plan: it yields nothing to stream")
            return
        self.result = []
        take = self.take or self._keep
        async with contextlib.aclosing(made) as items:
            async for item in items:
                if self._core.rank == 0:
                    await take(item)

    async def _keep(self, item: Any) -> None:
        self.result.append(item)

    def where(self) -> str:
        """Return the plan's state on this rank as text."""
        if self.ended.is_set():
            return "has ended it"
        if self._begun is None:
            return "has not begun it"
        number = 0 if self._lane is None else number_of(self._lane.key)
        flying = [one for one in self._core.in_flight.look() if getattr(one.work, "number", 0) == number]
        if not flying:
            return "is in no operation of it"
        oldest = min(flying, key=lambda one: one.posted)
        return f"has been in {called(oldest.work.op)} for {clock.now() - oldest.posted:.2f} s"

    def give_up(self, reason: str) -> None:
        """Cancel the plan on this rank, and abort its lane on all ranks.

        A thread that waits for an op of this lane gets an error.
        """
        self.given_up = True
        self._scope.cancel()
        if self._lane is not None:
            self._lane.abort(reason)

    @property
    def in_order(self) -> bool:
        """True if the plan runs without a lane, in the order of the calls."""
        return self._lane is None

    def in_step(self, there: bool = True) -> bool:
        """Return whether all ranks still agree on the order of ops if the plan fails.

        They agree if the plan has a lane, if the plan has ended on this rank, or if the plan has called no op yet.

        :param there: the value that this method has returned on another rank, on which the plan has ended.
        """
        here = self._lane is not None or self.ended.is_set() or self._begun in (None, self._called())
        self._in_step &= here and there
        return self._in_step

    def _called(self) -> int:
        return self._core.ledger.issued - self._core.ledger.laned


class Worker(Handle):
    """The part of a service on every rank except rank 0.

    The class ``Driver`` inherits from this class. The driver gets plans from its callers, not from messages.
    """

    _drives = False
    _leaving = False
    _recovering: anyio.CancelScope | None = None

    def __init__(
        self, current: CurrentComm, recover: Recover | None, numbers: Iterator[int], watch: Watch, execute: Execute
    ) -> None:
        self._current, self._recover, self._numbers, self._execute = current, recover, numbers, execute
        self._comm, self._watch, self._counts = current.current, watch, watch.counts
        self._plans: dict[int, Plan] = {}
        self._last: Plan | None = None  # The last plan that runs in order.
        self._turn = anyio.Event()  # The event that there is another communicator, or that there will be none.

    async def _serve(self) -> None:
        """Run plans until the service ends. After each recovery, continue on the new communicator.

        :raises CommError: the communicator was lost, and the service has no ``recover`` or no driver. The error may
            also come from ``recover``.
        """
        while True:
            failure: CommError | None = None
            comm = self._comm = self._current.current
            self._expected = Expected(comm._core.in_flight, "the service")
            comm._core.recorder.plans = self._plans
            if comm.rank == 0 and not self._drives:  # The ranks that have recovered keep their roles.
                why = "the driver is lost, and a worker has become rank 0 without a driver"
                comm._core.lose(DriverLostError(why, peer=0))
            async with anyio.create_task_group() as self._tasks:
                for rank in [0] if comm.rank else range(1, comm.size):
                    self._tasks.start_soon(self._hear, comm, rank)
                self._opened()
                failure = await comm.lost()
                self._fail(PlanLostError(f"the plan is lost: {failure}", comm=comm.name, rank=comm.rank), failure)
            if failure is None:
                return
            if self._recover is None or isinstance(failure, DriverLostError):
                raise failure.about()
            _log.warning("recovering: %s", failure)
            next_one = None if self._leaving else await self._recovered(comm, self._recover)
            if next_one is None:
                supervised.report_leaves(comm.rank, comm.size)
                return
            self._current.turn_to(next_one)
            self._watch.follow(self._current.current)

    def _opened(self) -> None:
        """Record that the service has a communicator, at the start or after a recovery."""
        self._turn.set()
        self._turn = anyio.Event()

    def leave(self, *, all_end: bool = False) -> None:
        """Ask rank 0 to release this rank when no plan runs. Leave at once if the communicator is lost.

        :param all_end: True if all ranks of the job are about to end. In this case, this rank does not ask rank 0,
            because rank 0 ends the service.
        """
        self._leaving = True
        if self._recovering is not None:
            self._recovering.cancel()
        if not all_end:
            self._tell([0], LEAVES)

    async def _recovered(self, comm: Communicator, recover: Recover) -> Communicator | None:
        """Call the program's ``recover`` in a separate task, which :meth:`leave` can cancel.

        :returns: the next communicator, or None if this rank leaves.
        """
        formed: list[Communicator] = []
        failures: list[BaseException] = []

        async def call() -> None:
            try:
                formed.append(await recover(comm))
            except BaseException as error:
                if ends_task(error):
                    raise
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            self._recovering = tasks.cancel_scope
            tasks.start_soon(call)
        self._recovering = None
        if self._leaving and not formed:
            return None
        if not failures:
            return formed[0]
        if isinstance(failures[0], Exception):
            raise failures.pop()
        raise CommAbortedError(f"recover raised {as_reason(failures[0])}") from failures.pop()

    async def _hear(self, comm: Communicator, rank: int) -> None:
        try:
            while message := await self._next(comm, rank):
                if message[0] == LEAVES and comm.rank:  # Unlike the end of the service, this asks for a successor.
                    supervised.report_leaves(comm.rank, comm.size)
                    break
                self._heard(rank, *message)
            self._tasks.cancel_scope.cancel()
        except CommError:
            comm.abort(f"rank {rank} has left the service")

    def _next(self, comm: Communicator, rank: int) -> Work[Any]:
        work = comm.lane(SERVICE_LANE).recv_object(rank, timeout=None)
        # This receive belongs to the service, so that reports do not show the rank as waiting in an op.
        self._expected.note(rank, cast("StartedWork[Any]", work))
        work.add_done_callback(Work.exception)  # At the end no task awaits the receive, and the peer may close first.
        return work

    def _tell(self, ranks: Iterable[int], *message: Any) -> None:
        """Send a message to ranks.

        Ignore the loss of a rank, because the pending receive from that rank reports this loss.
        """
        for rank in ranks:
            with contextlib.suppress(CommAbortedError, PeerDiedError):
                self._comm.lane(SERVICE_LANE).send_object(message, rank).add_done_callback(Work.exception)

    def _begin(self, plan: Plan, what: Any) -> None:
        self._plans[plan.number] = plan
        self._tasks.start_soon(self._carry_out, plan, what, self._last if plan.in_order else None)
        self._last = plan if plan.in_order else self._last

    async def _carry_out(self, plan: Plan, what: Any, before: Plan | None) -> None:
        try:
            error = await plan.run(self._execute, what, before)
        except (KeyboardInterrupt, SystemExit) as reason:  # This process ends, and the other ranks get the reason.
            self._comm.abort(reason)
            raise
        if not self._comm.aborted:  # A plan on a lost communicator is lost, whatever its outcome here.
            self._ended(plan, error)

    def _fail(self, error: CommError, cause: CommError | None = None) -> None:
        """Fail all running plans, because the communicator is lost."""
        error.__cause__ = cause
        for plan in self._plans.values():
            plan.error = plan.error or error.about()
            plan.give_up("the communicator is lost")
            plan.over.set()
            if not self._drives:
                self._counts.fail(plan.error)
        self._plans.clear()

    def _heard(self, rank: int, number: int, *plan: Any) -> None:
        """Handle a message of rank 0: a new plan, a request for a plan's state, or the cancellation of a plan."""
        if len(plan) > 1:
            in_order, what, *carrier = plan
            self._begin(Plan(self._comm, self._watch, number, in_order, *carrier), what)
        elif plan:
            self._tell([0], number, self._plans[number].where() if number in self._plans else "has ended it")
        elif number in self._plans:  # Rank 0 is about to receive the end of a plan that is not here.
            self._plans[number].give_up("rank 0 has given it up")

    def _ended(self, plan: Plan, error: BaseException | None) -> None:
        """Record that a plan has ended on this rank, and report the end to rank 0."""
        if error is not None:
            self._counts.fail(error)
        elif plan.given_up:
            self._counts.cancelled += 1
        else:
            self._counts.finish(plan.called)
        texts = ["", ""]
        if error is not None:
            raised = ["".join(format_exception_only(error)).strip(), "".join(format_exception(error))]
            texts = [as_reason(text) for text in raised]
        self._tell([0], plan.number, *texts, plan.in_step())
        del self._plans[plan.number]
