"""The class ``Driver`` of rank 0, which sends plans to all ranks and gathers the results."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiocomms import arguments
from aiocomms.bootstrap import supervised
from aiocomms.core.postmortem import PATIENCE
from aiocomms.diagnosis.hang_report import NO_ANSWER
from aiocomms.errors import (
    CommClosedError,
    CommError,
    LaneAbortedError,
    PlanLostError,
    PlanTimeoutError,
    ServiceBusyError,
    WorkerError,
    as_reason,
)
from aiocomms.lowlevel import clock
from aiocomms.serving.admission import Admission
from aiocomms.serving.current import CurrentComm
from aiocomms.serving.plans import LEAVES, Execute, Plan, Recover, Take, Worker
from aiocomms.serving.watch import Watch

T = TypeVar("T")
ATTEMPTS: Final = 3
"""The maximum number of attempts for a plan with ``retry``.

Without this limit, a plan that kills a rank in each attempt would run again without end.
"""
GRACE: Final = 1.0
"""The number of seconds for which the driver waits before it releases a worker that asks to leave.

If SIGTERM was sent to all ranks, it also reaches rank 0 within this time. Rank 0 then ends the service instead.
"""
_SHOWN: Final = 8
_log = logging.getLogger("aiocomms")


class _TimeLimit(NamedTuple):
    """The time limit of a plan: the limit in seconds, and the loop's time at which the limit is reached."""

    seconds: float
    ends: float

    @classmethod
    def of(cls, timeout: arguments.Timeout) -> _TimeLimit:
        seconds = arguments.deadline("timeout", timeout)
        return cls(seconds, anyio.current_time() + seconds)

    async def wait(self, call: Callable[[], Awaitable[T]]) -> tuple[T] | None:
        """Await a call. Cancel the call and return None if the call has not ended when the limit is reached."""
        if self.ends == math.inf:  # A scope costs some microseconds.
            return (await call(),)
        with anyio.CancelScope(deadline=self.ends):
            return (await call(),)
        return None


class DriverState(NamedTuple):
    """The state of a driver, for health probes."""

    doing: Literal["serves", "recovers", "ends", "ended"]
    """The current activity of the driver.

    * ``serves``: the driver accepts plans.
    * ``recovers``: the driver will accept plans after the current recovery.
    * ``ends``: the driver finishes the accepted plans, and accepts no new plans.
    * ``ended``: the driver runs no plans any more.
    """
    reason: Exception | None
    """The reason for the recovery or the end; None in the states ``serves`` and ``ends``."""


class Driver(Worker):
    """The part of a service that runs on rank 0 and sends plans to all ranks. :meth:`Service.drive` creates it."""

    _drives = True
    _draining = False
    _ending = False  # Whether this process was told to end.
    _over: Exception | None = None  # The reason why there will be no other communicator.

    def __init__(
        self,
        current: CurrentComm,
        recover: Recover | None,
        numbers: Iterator[int],
        watch: Watch,
        execute: Execute,
        most: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        super().__init__(current, recover, numbers, watch, execute)
        self._most_running, self._most_waiting = most
        self._turns = Admission(self._room)
        self._parting: set[int] = set()  # The workers that are about to leave.

    @property
    def failure(self) -> CommError | None:
        """The reason for the loss of the communicator; None if the current communicator is not lost.

        After a recovery, the value is None again.
        """
        failure = self._comm._core.life.failure
        return None if failure is None else failure.error

    @property
    def state(self) -> DriverState:
        """The current state, for health probes."""
        if self._over is not None:
            return DriverState("ended", self._over)
        if self._draining or self._ending:
            return DriverState("ends", None)
        return DriverState("serves" if self.failure is None else "recovers", self.failure)

    async def run(
        self, plan: Any, *, priority: float = 0, timeout: arguments.Timeout = None, retry: bool = False
    ) -> Any:
        """Run a plan on every rank, in a separate lane, at the same time as other plans.

        Any task may call this method. The collectives, messages and objects of a plan match only those of the same
        plan. If the caller is cancelled, the call ends at once, and the driver cancels the plan on every rank: the
        current ``await`` in ``execute`` raises ``CancelledError``.

        :param plan: an object that :meth:`Communicator.send_object` accepts. Do not change its tensors until the plan
            has ended.
        :param priority: the priority among the waiting plans. The plan with the lowest value begins first. Plans with
            equal values begin in the order of the calls.
        :param timeout: seconds from the call to the end of the plan; None means no limit.
        :param retry: whether the plan may run more than once. With ``retry``, a plan that loses a rank runs again after
            the recovery, with at most three attempts in total. With ``retry``, a call during a recovery waits until the
            recovery has ended.
        :returns: the result of ``execute`` on this rank, once the plan has ended on all ranks. If ``execute`` is an
            async generator function, the result is the list of the yielded items.
        :raises WorkerError: ``execute`` failed on another rank, and the plan was cancelled on all ranks. If ``execute``
            raises an :class:`Exception` on this rank, ``run`` raises the same exception. If ``execute`` raises any
            other exception on this rank, such as a ``CancelledError``, ``run`` raises a ``WorkerError``.
        :raises PlanLostError: a rank was lost during the call, or a lost rank is not replaced yet.
        :raises PlanTimeoutError: the plan did not end in time, and was cancelled on all ranks.
        :raises ServiceBusyError: too many plans already wait.
        :raises CommClosedError: the driver is ending.
        :raises ArgumentError: the plan cannot be sent.
        """
        limit = _TimeLimit.of(timeout)
        with self._counts.call():
            for more in reversed(range(ATTEMPTS if retry else 1)):
                try:
                    return await self._run(plan, priority, limit, patient=retry)
                except PlanLostError:
                    if not more:
                        raise
        raise AssertionError

    async def run_in_order(self, plan: Any) -> Any:
        """Run a plan without a lane. Every rank runs plans without lanes one by one, in the order of the calls.

        The plan calls the communicator's own collectives, for which a transport may have native operations. If a plan
        fails after its first operation, the ranks no longer agree on the order of operations, and the communicator is
        lost. Therefore the plan of a cancelled caller runs to its end, unless ``execute`` calls
        :meth:`Service.cancelled`.
        """
        with self._counts.call():
            return await self._run(plan, 0, _TimeLimit.of(None), in_order=True)

    def stream(self, plan: Any, *, priority: float = 0, timeout: arguments.Timeout = None) -> AsyncGenerator[Any]:
        """Run a plan whose ``execute`` is an async generator function.

        The returned iterator yields the items that ``execute`` yields on this rank, rank 0.

        After each item, the plan waits until the caller takes the item, for at most half of the communicator's
        deadline. During this wait, the other ranks wait in their next operation. The driver ignores the items of other
        ranks. The driver cancels the plan on every rank when the iterator is closed or garbage-collected, or when the
        caller's task is cancelled. ``contextlib.aclosing`` closes the iterator at the end of its block.

        :param plan: see :meth:`run`, which also describes the other parameters and errors.
        :param timeout: seconds from the first request for an item to the end of the plan.
        :raises PlanTimeoutError: the plan did not end in time, or the caller took no item in time.
        """
        arguments.deadline("timeout", timeout)
        try:
            self._refuse(patient=False)  # At this point a web server can still answer with another status.
        except CommError as error:
            self._counts.fail(error)
            raise
        return self._stream(plan, priority, timeout)

    async def ready(self) -> None:
        """Wait until plans can run. During a recovery, wait for the end of the recovery.

        :raises CommError: the communicator was lost and will not be replaced, or ``recover`` has raised this error.
        """
        while self.failure is not None:
            if self._over is not None:
                raise self._over
            await self._turn.wait()

    async def wait_ended(self) -> None:
        """Wait until the driver can run no more plans, because the driver has ended or the ranks cannot recover."""
        while self._over is None:
            await self._turn.wait()

    # --------------------------------------------------------------------------------------------- life of one plan

    async def _run(
        self, what: Any, priority: float, limit: _TimeLimit, *, in_order: bool = False, patient: bool = False
    ) -> Any:
        plan = await self._begun(what, priority, limit, in_order=in_order, patient=patient)
        try:
            return await self._outcome(plan, limit)
        finally:
            self._leave(plan)

    async def _stream(self, what: Any, priority: float, timeout: arguments.Timeout) -> AsyncGenerator[Any]:
        limit = _TimeLimit.of(timeout)
        give, items = anyio.create_memory_object_stream[Any](0)
        with give, items, self._counts.call():
            plan = await self._begun(what, priority, limit, take=_hand_over(give, self._comm.timeout))
            try:
                self._tasks.start_soon(_close_behind, plan, give)
                with contextlib.suppress(anyio.EndOfStream):
                    while (item := await limit.wait(items.receive)) is not None:
                        yield item[0]
                await self._outcome(plan, limit)
            finally:
                self._leave(plan)

    async def _begun(
        self,
        what: Any,
        priority: float,
        limit: _TimeLimit,
        *,
        in_order: bool = False,
        patient: bool = False,
        take: Take | None = None,
    ) -> Plan:
        """Wait until the plan may begin, and begin it on all ranks."""
        await checkpoint_if_cancelled()  # The plan of a cancelled caller does not begin.
        self._refuse(patient=patient)
        called, carrier = clock.now(), self._watch.carrier()
        with self._counts.wait():
            turn = await limit.wait(lambda: self._turns.wait(priority))
        if turn is None:
            why = f"the plan has waited {limit.seconds:g} s for its turn, and {len(self._plans)} are under way"
            raise PlanTimeoutError(why, comm=self._comm.name, op="run", rank=0)
        number = next(self._numbers)
        try:
            self._tell(range(1, self._comm.size), number, in_order, what, *([carrier] if carrier else ()))
            plan = Plan(self._comm, self._watch, number, in_order, carrier)
            plan.take, plan.called = take, called
            self._begin(plan, what)
        except BaseException:
            self._turns.look()  # The plan leaves room for another one.
            raise
        return plan

    def _refuse(self, *, patient: bool) -> None:
        """Raise an error if the driver cannot accept a new plan now.

        :param patient: whether the plan may wait for a recovery.
        """
        name = self._comm.name
        if self._draining:
            raise CommClosedError("the driver is ending", comm=name, op="run", rank=0)
        if self.failure is not None and not ((patient or self._parting) and self._over is None):
            raise PlanLostError(f"the plan is lost: {self.failure}", comm=name, rank=0) from self.failure
        waiting = self._turns.waiting
        if waiting >= self._most_waiting and (waiting or not self._room()):
            why = f"{len(self._plans)} plans are under way, and {waiting} wait for their turn: try again later"
            raise ServiceBusyError(why, comm=name, op="run", rank=0)

    def _room(self) -> bool:
        """Return whether one more plan may begin now.

        :raises CommError: no plan will begin any more.
        """
        if self._over is not None:
            raise PlanLostError(f"the plan is lost: {self._over}", comm=self._comm.name, rank=0) from self._over
        held = self.failure is not None or (self._parting and not self._ending)
        return not held and len(self._plans) < self._most_running

    async def _outcome(self, plan: Plan, limit: _TimeLimit) -> Any:
        if await limit.wait(plan.over.wait) is None:
            await self._late(plan, limit)
        if plan.error is not None:
            raise plan.error
        return plan.result

    async def _late(self, plan: Plan, limit: _TimeLimit) -> None:
        """Cancel a plan whose time limit has passed.

        The caller of the plan gets an error that describes the plan's state on each rank that answers.
        """
        others = plan.waiting - {0}
        plan.answered = anyio.Event()
        self._tell(others, plan.number, None)
        if others:
            with anyio.move_on_after(PATIENCE):
                await plan.answered.wait()
        late = sorted(plan.waiting)
        plan.stands[0] = plan.where()
        words = [f"rank {rank} {plan.stands.get(rank, f'does {NO_ANSWER}')}" for rank in late]
        more = [f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
        why = f"plan {plan.number} was not done within {limit.seconds:g} s: {', '.join([*words[:_SHOWN], *more])}"
        if not plan.over.is_set():
            error = PlanTimeoutError(why, comm=self._comm.name, op="run", rank=0, late=late)
            self._give_up(plan, error, f"it was not done within {limit.seconds:g} s")

    def _leave(self, plan: Plan) -> None:
        """Record that the caller no longer waits. Cancel the plan if it still runs and has a lane."""
        plan.cancelled = True
        if not plan.over.is_set() and not plan.in_order:
            self._give_up(plan, LaneAbortedError("the plan was cancelled", rank=0, peer=0), "its caller was cancelled")

    def _give_up(self, plan: Plan, error: Exception, why: str) -> None:
        """Cancel a plan on all ranks, unless it was cancelled before."""
        if plan.error is None:
            plan.error = error
            plan.give_up(why)
            self._tell(plan.waiting - {0}, plan.number)

    # ------------------------------------------------------------------------------------------- life of the service

    async def _serve(self) -> None:
        """Run this rank's part of the plans, as the workers do.

        If the service cannot continue, send the error to the waiting tasks and to the workers.
        """
        try:
            await super()._serve()
        except Exception as error:
            _log.exception("the service cannot go on")
            self._over = error
            self._comm.abort(error)  # This does nothing if the communicator is already lost.
        finally:
            ended = CommClosedError("the driver has ended", comm=self._comm.name, op="run", rank=0)
            self._over = self._over or ended
            self._draining |= self.failure is None
            self._fail(ended)
            self._turn.set()
            self._turns.look()

    def _opened(self) -> None:
        self._parting.clear()
        super()._opened()
        self._turns.look()

    async def _drain(self) -> None:
        """Wait for the end of all plans. Then end the workers, unless another process replaces this process."""
        self._draining = True
        if self._turns.waiting:
            with contextlib.suppress(PlanLostError):
                await self._turns.wait(math.inf)
        while self._plans:
            await next(iter(self._plans.values())).over.wait()
        with anyio.move_on_after(GRACE if self._ending else math.inf):
            await self.ready()
        if self._recover is not None and supervised.is_announced(supervised.REPLACED):
            _log.warning("rank 0 is being replaced: the workers recover, and go on with the new process")
        else:
            self._tell(range(1, self._comm.size))

    def _heard(self, rank: int, number: int, *outcome: Any) -> None:
        """Handle a worker's message: the end of a plan, the state of a plan, or a request to leave."""
        if number == LEAVES:
            self._tasks.start_soon(self._let_go, self._comm, rank)
        elif number in self._plans:
            plan = self._plans[number]
            if len(outcome) == 1:
                plan.stands[rank] = arguments.short(outcome[0]) if type(outcome[0]) is not str else outcome[0]
                if plan.answered is not None and plan.waiting <= {0, *plan.stands}:
                    plan.answered.set()
                return
            raised, trace, in_step = outcome
            error = WorkerError(f"plan {number} failed on rank {rank}: {raised}", rank=0, peer=rank) if raised else None
            if error is not None:
                error.__cause__ = Exception(f"on rank {rank}:\n{trace}")
            self._ended(plan, error, rank, in_step)

    def _ended(self, plan: Plan, error: BaseException | None, rank: int = 0, in_step: bool = True) -> None:
        """Record that a rank has ended a plan. After the first failure, cancel the plan on all ranks."""
        plan.waiting.discard(rank)
        # This exception would end the caller's task, so a WorkerError takes its place.
        if error is not None and not isinstance(error, Exception):
            cause, text = error, f"plan {plan.number} failed on rank 0: {as_reason(error)}"
            error = WorkerError(text, comm=self._comm.name, rank=0, peer=0)
            error.__cause__ = cause
        if error is not None:
            self._give_up(plan, error, f"it failed on rank {rank}")
        if not plan.in_step(in_step) and plan.error is not None:  # A thread of a rank may wait without end.
            self._comm.abort(f"plan {plan.number} failed between its operations, and ran in no lane: {plan.error}")
        elif not plan.waiting:
            del self._plans[plan.number]
            plan.over.set()
            self._turns.look()
            self._see_off()

    async def _let_go(self, comm: Any, rank: int) -> None:
        """Let a worker leave: begin no new plans, and release the worker when no plan runs."""
        with anyio.move_on_after(GRACE):
            await comm.lost()  # The worker asks again on the next communicator.
            return
        if not self._ending and not self._draining:
            _log.warning("rank %d leaves, and plans wait until another process has taken its place", rank)
            self._parting.add(rank)
            self._see_off()

    def _see_off(self) -> None:
        if self._parting and not self._plans and not self._ending:
            self._tell(self._parting, LEAVES)

    def _told_to_end(self) -> None:
        """Record that this process is about to end. The workers continue until the driver has finished its plans."""
        self._ending = True
        self._turns.look()


def _hand_over(give: Any, timeout: float | None) -> Take:
    """Return a function that passes each item to the caller of :meth:`Driver.stream`."""
    seconds = math.inf if timeout is None else timeout / 2

    async def take(item: Any) -> None:
        with anyio.move_on_after(seconds):
            await give.send(item)
            return
        why = f"no item was taken for {seconds:g} s, and the other ranks wait meanwhile"
        raise PlanTimeoutError(why, op="stream", rank=0, late=[0])

    return take


async def _close_behind(plan: Plan, give: Any) -> None:
    await plan.ended.wait()
    give.close()
