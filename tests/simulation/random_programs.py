"""Random programs, drawn from a seed: each rank runs the same steps, and they go on with those that are left.

A program has phases. A phase is a list of steps on one communicator, and may end by an *ending*, which loses that.
Then, as after a fault, the ranks that are left reconfigure it, and the next phase begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

import collectives
import endings
import torch
import traffic
from ledger import Ledger, Process, me
from place import BrokenPromiseError, Place

import aiocomms
from aiocomms.bootstrap import directory
from aiocomms.errors import CommError
from aiocomms.testing.simulation import Faults, here
from aiocomms.testing.simulation import threads as simulated_threads

STEPS = (*collectives.STEPS, *traffic.STEPS)
FORMING, PATIENCE, RECOVERING, CLOSING = traffic.FORMING, 2.0, 6.0, 5.0
"""Seconds that a communicator has to form, an operation to end, ranks to reconfigure, and a close to end."""
PHASES = 3


@dataclass(frozen=True)
class Program:
    """The program that a seed has drawn."""

    seed: int
    ranks: int
    phases: tuple[tuple[Any, ...], ...]
    """The steps of each phase."""
    endings: tuple[Any, ...]
    """The step that loses the communicator at the end of each phase; None: nothing does."""
    faults: Faults | None
    latency: tuple[float, float] = (2e-5, 2e-3)

    @property
    def replacing(self) -> bool:
        """True if ranks that die are started anew, and join those that are left."""
        return self.faults is not None and self.faults.restarts

    @classmethod
    def drawn(cls, seed: int, *, steps: int = 10, faulty: bool | None = None) -> Program:
        """Draw a program.

        :param steps: how many the first phase has at most.
        :param faulty: whether faults strike it; None: that is drawn, too.
        """
        draw = Random(f"program {seed}")
        ranks = draw.choice((2, 2, 3, 3, 4))
        counts = [draw.randint(1, steps), *(draw.randint(1, 3) for _ in range(PHASES - 1))]
        phases = tuple(tuple(draw.choice(STEPS) for _ in range(count)) for count in counts)
        struck = draw.random() < 0.5 if faulty is None else faulty
        chosen = tuple(draw.choice(endings.ENDINGS) if draw.random() < 0.25 else None for _ in range(PHASES))
        latency = draw.choice(((2e-5, 2e-3), (2e-5, 2e-3), (1e-3, 1.1e-3), (1e-6, 2e-2)))
        return cls(seed, ranks, phases, chosen, _faults(draw) if struck else None, latency)

    def struck(self) -> list[Any]:
        """Return the faults of its history."""
        return [] if self.faults is None else self.faults.plan(self.seed, self.ranks, self.faults.within or 0.0)

    def __str__(self) -> str:
        steps = [[step.__name__ for step in phase] for phase in self.phases]
        ends = [None if one is None else one.__name__ for one in self.endings]
        return (
            f"program {self.seed}: {self.ranks} ranks, {steps}, endings {ends}, faults {list(map(str, self.struck()))}"
        )


def _faults(draw: Random) -> Faults:
    numbers = dict.fromkeys(("deaths", "pauses", "slow", "cuts", "partitions"), 0)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        numbers[draw.choice(list(numbers))] += 1
    restarts = numbers["deaths"] > 0 and draw.random() < 0.4
    return Faults(**numbers, restarts=restarts, stores=int(draw.random() < 0.05), within=0.002 * 50 ** draw.random())


@dataclass
class Loss:
    """The loss of a communicator on a rank."""

    comm: str
    error: CommError | None
    """The error that the program has seen first; None: its own ending."""
    lost: CommError | None
    """The result of ``comm.lost()``; None: the rank has left it."""


@dataclass
class Report:
    """The report of a rank that lives."""

    rank: int
    process: Process
    losses: list[Loss] = field(default_factory=list)
    members: dict[str, int] = field(default_factory=dict)
    """The rank on each communicator."""
    sizes: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    """The communicators that it has aborted, for an operation of it had failed, or a part of it."""
    ended: str = ""
    """The end: ``"done"``, ``"left"``, or the error by which no communicator was formed."""
    error: CommError | None = None
    steps: int = 0


class Rank:
    """One rank's run of a program."""

    def __init__(self, program: Program, ledger: Ledger) -> None:
        self.program, self.ledger = program, ledger
        self.report = Report(here().rank, me())
        struck = [it for it in program.struck() if it.arguments and it.arguments[0] == here().rank]
        self.slack = sum(it.arguments[1] for it in struck if it.kind == "pauses")
        self.slack += sum(100 * it.arguments[1] for it in struck if it.kind == "slow")
        self.comm: Any = None

    async def run(self) -> Report:
        """Run it to its end."""
        try:
            forming = aiocomms.new_comm(timeout=FORMING, join=here().restarts > 0)
            if await self._formed(forming, FORMING):
                await self._phases()
        finally:
            if self.comm is not None:
                with self._place(0, 0).timely(CLOSING, "aclose"):
                    await self.comm.aclose()
        for _ in range(6):  # A partition may hold up a call, or a goodbye, for 20 s.
            await asyncio.sleep(5)
            if not self._left():
                return self.report
        raise BrokenPromiseError(f"rank {here().rank} has left behind {self._left()}")

    async def _phases(self) -> None:
        size = self.program.ranks if self.program.replacing else None
        while (phase := _phase_of(self.comm.name)) < PHASES:
            ended = await self._phase(phase)
            if ended is not None:
                self.report.ended = ended
                return
            if not await self._formed(self.comm.reconfigure(size=size, timeout=RECOVERING), RECOVERING):
                return
        self.report.ended = "done"

    async def _formed(self, forming: Any, seconds: float) -> bool:
        """Wait for a communicator; return whether it has been formed."""
        try:
            with self._place(0, 0).timely(seconds + 1, f"forming after {self.comm}"):
                new = await forming
        except CommError as error:
            self.report.ended, self.report.error = type(error).__name__, error
            return False
        self.comm = new
        self.report.members[new.name], self.report.sizes[new.name] = new.rank, new.size
        self.ledger.join(new)
        new.set_timeout(PATIENCE)
        return True

    async def _phase(self, phase: int) -> str | None:
        """Run a phase; return how the program ends on this rank, and None if it goes on with the next phase."""
        program, comm = self.program, self.comm
        ending = program.endings[phase]
        try:
            for number, step in enumerate(program.phases[phase]):
                await step(self._place(phase, number))
                self.report.steps += 1
            if ending is None:
                return "done"
            if await ending(self._place(phase, 60)):
                self.report.losses.append(Loss(comm.name, None, None))
                return "left"
            raise BrokenPromiseError(f"{ending.__name__} has ended without an error on rank {comm.rank}")
        except CommError as error:
            if not comm.aborted:
                await self._give_up(error, parts=traffic.split in program.phases[phase])
            with self._place(0, 0).timely(1.0, "lost"):
                lost = await comm.lost()
            self.report.losses.append(Loss(comm.name, error, lost))
        return None

    async def _give_up(self, error: CommError, *, parts: bool) -> None:
        """Have the communicator be lost. If a part of it is, this rank waits whether the same loses the whole."""
        if parts:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(traffic.SILENCE):
                    await self.comm.lost()
        if not self.comm.aborted:
            self.report.aborted.append(self.comm.name)
            self.comm.abort(error)

    def _place(self, phase: int, number: int) -> Place:
        comm, seed = self.comm, f"step {self.program.seed} {phase} {number}"
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        draw = Random(seed)
        members, calm = self.report.members, self.program.faults is None
        number += phase * 64 + 1
        return Place(comm, rank, size, draw, number, PATIENCE, self.slack, self.ledger, members, seed, calm=calm)

    def _left(self) -> dict[str, list[Any]]:
        """Return what this process still has, when it has closed all."""
        process, network = here().world.process, here().world.network
        left = {
            "tasks": [task for task in process.loop.tasks() if task is not asyncio.current_task()],
            "threads": [thread.target for thread in simulated_threads._alive if thread.timeline is process],
            "connections": [it for it in network._conduits if it.process is process and not it.over],
            "listeners": [it for it, (owner, _) in network._listeners.items() if owner is process],
            "communicators": list(directory._opened()),
        }
        return {what: those for what, those in left.items() if those}


async def run(program: Program, ledger: Ledger) -> Report:
    """Run a program on one rank."""
    return await Rank(program, ledger).run()


def _phase_of(name: str) -> int:
    """Return the phase that runs on a communicator: "world" has the first, and "world@2" the second."""
    return int(name.partition("@")[2] or 1) - 1


torch.set_num_threads(1)
