"""The part of a service that every rank has: it carries out plans, on one communicator after the other.

In a lane rank 0 sends each worker ``(number, in order, plan)``, and behind these the texts of carrier hooks, if there
are some; ``(number,)`` to give a plan up, ``(number, None)`` to ask where it stands, and ``()`` at the end. A worker
sends, for each plan, ``(number, what was raised, its traceback, whether it is in step)``, where it was asked ``(number,
where it stands)``, and ``(LEAVES,)`` when it is to leave, which rank 0 answers by the same to let it go.

An exception that the program's functions raise is theirs, whatever it is: also a ``CancelledError`` that was not meant
for the task.
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
from aiocomms.lowering.lane_messages import number_of
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.guard import ends_task
from aiocomms.progress.inflight import StartedWork
from aiocomms.progress.work import Work
from aiocomms.serving.current import CurrentComm
from aiocomms.serving.watch import Carrier, PlanStart, Watch

Execute = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any]]
"""A function that carries out a plan on one rank; its result on rank 0 is the plan's, or what it yields there is."""
Take = Callable[[Any], Awaitable[object]]
"""A function that is given what a plan yields on rank 0, one item after the other."""
Recover = Callable[[Communicator], Awaitable[Communicator]]
"""A function that takes a lost communicator and returns the one that goes on in its place."""
LEAVES: Final = -1
"""The number in place of a plan's when a worker is to leave, and when rank 0 lets it go."""
SERVICE_LANE = "aiocomms.serving"
_log = logging.getLogger("aiocomms")


class Plan:
    """One plan on one rank, until it has ended there; the driver's, until it has ended on all ranks."""

    number: int
    ended: anyio.Event
    over: anyio.Event
    cancelled: bool
    current: ContextVar[Plan] = ContextVar("aiocomms plan")
    """The plan that this task carries out."""

    def __init__(
        self, comm: Communicator, watch: Watch, number: int, in_order: bool, carrier: Carrier | None = None
    ) -> None:
        self.number, self._comm, self._core, self._watch = number, comm, comm._core, watch
        self._carrier: Carrier = carrier or {}
        self.called = self.posted = clock.now()  # When it was called or has arrived here; when it was given out.
        self._lane = None if in_order else comm.lane(f"{PLAN_LANE} {number}")
        self._scope = anyio.CancelScope()
        self._begun: int | None = None  # The number of ops that had been called outside of lanes.
        self._in_step = True
        self.cancelled = False  # Whether its caller has been cancelled.
        self.given_up = False  # Whether it was ended here because of what happened elsewhere.
        self.ended, self.over = anyio.Event(), anyio.Event()  # Events for the end here, and for the end on all ranks.
        self.waiting: set[int] = set(range(comm.size))  # The ranks that have not ended it yet.
        self.result: Any = None
        self.error: Exception | None = None
        self.take: Take | None = None
        self.stands: dict[int, str] = {}  # Where ranks that were asked stand.
        self.answered: anyio.Event | None = None  # An event for all their answers, once they are asked.

    async def run(self, execute: Execute, what: Any, before: Plan | None) -> BaseException | None:
        """Carry it out, behind the plan ``before`` it.

        :returns: what it has raised, unless another rank has given it up, and says why.
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
            self.in_step()  # This comes before the next plan begins.
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
        """Say where it stands on this rank."""
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
        """End it, and the ops of its lane on all ranks; a thread that waits for one of these gets an error."""
        self.given_up = True
        self._scope.cancel()
        if self._lane is not None:
            self._lane.abort(reason)

    @property
    def in_order(self) -> bool:
        """True if it is in no lane, and in the order of the calls."""
        return self._lane is None

    def in_step(self, there: bool = True) -> bool:
        """Return whether no rank has called an op that another rank may never match, or matches by a later one.

        :param there: whether that is so on a rank that has ended it; what this rank has called is known.
        """
        here = self._lane is not None or self.ended.is_set() or self._begun in (None, self._called())
        self._in_step &= here and there
        return self._in_step

    def _called(self) -> int:
        return self._core.ledger.issued - self._core.ledger.laned


class Worker(Handle):
    """Every rank but 0. The driver is one, too, whose plans come from its callers."""

    _drives = False
    _leaving = False
    _recovering: anyio.CancelScope | None = None

    def __init__(
        self, current: CurrentComm, recover: Recover | None, numbers: Iterator[int], watch: Watch, execute: Execute
    ) -> None:
        self._current, self._recover, self._numbers, self._execute = current, recover, numbers, execute
        self._comm, self._watch, self._counts = current.current, watch, watch.counts
        self._plans: dict[int, Plan] = {}
        self._last: Plan | None = None  # The last plan of those that run in order.
        self._turn = anyio.Event()  # An event that is set when there is another communicator, or will be none.

    async def _serve(self) -> None:
        """Carry out plans until there are no more, on one communicator after the other.

        :raises CommError: it was lost, and there is no ``recover``, or no rank drives; or what that raises.
        """
        while True:
            failure: CommError | None = None
            comm = self._comm = self._current.current
            self._expected = Expected(comm._core.in_flight, "the service")
            comm._core.recorder.plans = self._plans
            if comm.rank == 0 and not self._drives:  # The ranks that have recovered keep their roles.
                why = "nobody drives: the driver is lost, and a process that works has become rank 0"
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
        """Note that there is a communicator again."""
        self._turn.set()
        self._turn = anyio.Event()

    def leave(self) -> None:
        """Ask rank 0 to let this rank go once no plan is under way; go at once if the communicator is lost."""
        self._leaving = True
        if self._recovering is not None:
            self._recovering.cancel()
        self._tell([0], LEAVES)

    async def _recovered(self, comm: Communicator, recover: Recover) -> Communicator | None:
        """Have the program form the next one: in a task of its own, which tells whether it is cancelled.

        :returns: None: this rank leaves.
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
        # This receive is of a task of ours, so that no rank is said to wait for a plan.
        self._expected.note(rank, cast("StartedWork[Any]", work))
        work.add_done_callback(Work.exception)  # No task waits for it at the end, and that rank may close first.
        return work

    def _tell(self, ranks: Iterable[int], *message: Any) -> None:
        """Send to ranks. A rank that has left, or is lost, is noticed by the receive from it."""
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
        except (KeyboardInterrupt, SystemExit) as reason:  # this process ends; the others hear why
            self._comm.abort(reason)
            raise
        if not self._comm.aborted:  # A lost communicator has lost the plan, whatever has become of it here.
            self._ended(plan, error)

    def _fail(self, error: CommError, cause: CommError | None = None) -> None:
        """End the plans under way."""
        error.__cause__ = cause
        for plan in self._plans.values():
            plan.error = plan.error or error.about()
            plan.give_up("the communicator is lost")
            plan.over.set()
            if not self._drives:
                self._counts.fail(plan.error)
        self._plans.clear()

    def _heard(self, rank: int, number: int, *plan: Any) -> None:
        """Rank 0 has given out a plan, asks where it stands, or has given it up."""
        if len(plan) > 1:
            in_order, what, *carrier = plan
            self._begin(Plan(self._comm, self._watch, number, in_order, *carrier), what)
        elif plan:
            self._tell([0], number, self._plans[number].where() if number in self._plans else "has ended it")
        elif number in self._plans:  # The end of a plan that is not here is on the way to rank 0.
            self._plans[number].give_up("rank 0 has given it up")

    def _ended(self, plan: Plan, error: BaseException | None) -> None:
        """Note that a plan has ended here."""
        if error is not None:
            self._counts.fail(error)
        elif plan.given_up:
            self._counts.cancelled += 1
        else:
            self._counts.finish(plan.called)
        texts = ["", ""]
        if error is not None:
            raised = ["".join(format_exception_only(error)).strip(), "".join(format_exception(error))]
            texts = [text.encode(errors="backslashreplace").decode() for text in raised]
        self._tell([0], plan.number, *texts, plan.in_step())
        del self._plans[plan.number]
