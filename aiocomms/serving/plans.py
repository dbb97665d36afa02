"""One plan on one rank, and the ranks that carry out what they are given.

What goes over the wire, in lanes of its own: to each worker ``(number, in order, plan)``, ``(number,)`` to give a plan
up, and ``()`` at the end; from each worker, for each plan, ``(number, what was raised, its traceback, whether this rank
is in step)``.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aiocomms.communicator import Communicator
from aiocomms.errors import CommError, LaneAbortedError

Execute = Callable[[Any], Awaitable[Any]]
"""Carries out a plan on one rank; what it returns on rank 0 is the plan's result."""
PLANS, REPORTS = "aiocomms.serving plans", "aiocomms.serving reports"
"""The lanes of the two directions."""


class Plan:
    """One plan on one rank, while it is carried out."""

    def __init__(self, number: int, in_order: bool, comm: Communicator) -> None:
        self.number = number
        self.over = anyio.Event()
        """Set when it has ended on this rank."""
        self._comm = comm
        self._lane = None if in_order else comm.lane(f"aiocomms.serving plan {number}")
        self._scope = anyio.CancelScope()
        self._begun: int | None = None  # how many ops had been called outside of lanes
        self._ended: int | None = None

    async def run(self, execute: Execute, plan: Any, before: Plan | None) -> Any:
        """Carry it out, behind the plan ``before`` it; None if it is given up here, or by a rank that says why."""
        try:
            with self._scope:
                if before is not None:
                    await before.over.wait()
                self._begun = self._outside()
                with self._lane or contextlib.nullcontext():
                    return await execute(plan)
            return None
        except LaneAbortedError as error:
            if error.peer in (None, self._comm.rank) or self._lane is None:
                raise
            return None
        except Exception as error:
            self.give_up(f"this rank raised {type(error).__name__}")
            raise
        finally:
            self._ended = self._outside()  # before the next one begins
            self.over.set()

    def give_up(self, reason: str) -> None:
        """End it, and the ops of its lane on all ranks; a thread that waits for one of these gets an error."""
        self._scope.cancel()
        if self._lane is not None:
            self._lane.abort(reason)

    def in_step(self) -> bool:
        """Whether it has called nothing that another rank may wait for in vain, or in whose place a later op comes."""
        now = self._outside() if self._ended is None else self._ended
        return self._lane is not None or self._begun in (None, now)

    def _outside(self) -> int:
        """How many ops were called outside of lanes."""
        return self._comm._core.issued - self._comm._core.laned


class Worker:
    """A rank that carries out plans, until it is told to leave, or the communicator is lost."""

    def __init__(self, comm: Communicator, execute: Execute) -> None:
        self._comm = comm
        self._execute = execute
        self._plans: dict[int, Plan] = {}
        self._last: Plan | None = None  # of those that run in order

    async def run(self) -> CommError | None:
        """Return what it was that ended it; None: it was told to leave."""
        plans, failure = self._comm.lane(PLANS), None
        async with anyio.create_task_group() as tasks:
            try:
                while message := await plans.recv_object(0, timeout=None):
                    self._take(tasks, *message)
            except CommError as error:
                failure = await self._comm.lost() if self._comm.aborted else error
                for plan in self._plans.values():
                    plan.give_up("the communicator is lost")
                tasks.cancel_scope.cancel()
        return failure

    def _take(self, tasks: TaskGroup, number: int, in_order: bool | None = None, what: Any = None) -> None:
        if in_order is None:
            if number in self._plans:  # else its end is on the way to rank 0
                self._plans[number].give_up("rank 0 has given it up")
            return
        plan = self._plans[number] = Plan(number, in_order, self._comm)
        tasks.start_soon(self._carry_out, plan, what, self._last if in_order else None)
        if in_order:
            self._last = plan

    async def _carry_out(self, plan: Plan, what: Any, before: Plan | None) -> None:
        raised = trace = ""
        try:
            await plan.run(self._execute, what, before)
        except Exception as error:
            lines = "".join(traceback.format_exception(error)), "".join(traceback.format_exception_only(error)).strip()
            trace, raised = (line.encode(errors="backslashreplace").decode() for line in lines)
        del self._plans[plan.number]
        with contextlib.suppress(CommError):  # it is lost, which ends the worker
            await self._comm.lane(REPORTS).send_object((plan.number, raised, trace, plan.in_step()), 0)
