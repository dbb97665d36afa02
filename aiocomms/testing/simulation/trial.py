"""The trial of a program: the arguments that all histories (simulated runs) share, and the run of one history."""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aiocomms import loading
from aiocomms.arguments import as_int
from aiocomms.bootstrap import directory
from aiocomms.errors import ArgumentError, ArgumentTypeError, SimulationError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.faults import Faults, SimulatedFault, changed
from aiocomms.testing.simulation.refusing import calls_audited, watch
from aiocomms.testing.simulation.surroundings import simulated_surroundings
from aiocomms.testing.simulation.threads import on_one_processor
from aiocomms.testing.simulation.tracing import write_trace
from aiocomms.testing.simulation.world import SimulatedWorld

FAULTLESS = Faults()
LATENCY = (2e-5, 2e-3)
"""The smallest and the largest latency of a message, in seconds."""
LONGEST = 86_400.0
"""The largest number of virtual seconds that a history may take."""
Program = Callable[[], Awaitable[Any]]
"""An async function that each rank runs, as if each rank were a process."""


@dataclass(frozen=True)
class History:
    """The record of one run of a program in a simulation.

    :param seed: the seed as text. If faults were left out, the text also has the numbers of the kept faults:
        ``"7/0,2"``.
    :param seconds: the virtual seconds that the history took.
    :param results: the result of the program on each rank; None for a rank that has died.
    :param faults: the faults, as text.
    :param trace: the events, as lines of text.
    """

    seed: str
    seconds: float
    results: list[Any]
    faults: list[str]
    trace: list[str]


@dataclass(frozen=True)
class SimulatedTrial:
    """A program, and the arguments of :func:`simulate` except the seed."""

    program: Program
    ranks: int
    faults: Faults = FAULTLESS
    latency: tuple[float, float] = LATENCY
    longest: float = LONGEST

    def __str__(self) -> str:
        """Return the text of a call of :func:`simulate`, without the program and without default arguments."""
        return changed(self, 1)

    def __post_init__(self) -> None:
        """Check the arguments, and check that a simulation may start now.

        :raises ArgumentError: an argument is wrong.
        :raises SimulationError: this process has open communicators, or another simulation runs.
        """
        if not callable(self.program):
            raise ArgumentTypeError(f"program is {self.program!r}, wanted an async function without arguments")
        if type(as_int(self.ranks)) is not int or self.ranks < 1:
            raise ArgumentError(f"ranks is {self.ranks!r}, wanted at least 1 rank as an int")
        if not isinstance(self.faults, Faults):
            raise ArgumentTypeError(f"faults is {self.faults!r}, wanted Faults(deaths=1) or the like, or None")
        if self.ranks == 1 and (self.faults.cuts or self.faults.partitions):
            raise ArgumentError("faults has cuts or partitions, wanted none where there is only 1 rank")
        if not _is_latency(self.latency):
            raise ArgumentError(f"latency is {self.latency!r}, wanted the least and the most seconds, above 0")
        if not _is_seconds(self.longest):
            raise ArgumentError(f"longest is {self.longest!r}, wanted seconds above 0")
        if clock.simulation is not None:
            raise SimulationError("a simulation runs already: one cannot be in another")
        if directory.every_open():
            raise SimulationError("this process has open communicators, wanted none during a simulation: close them")

    def plan(self, seed: int) -> list[SimulatedFault]:
        """Draw the faults of a seed.

        If ``within`` is not set, first run the program without faults to measure its time.
        """
        if not self.faults.any:
            return []
        within = self.faults.within
        if within is None:
            within = self.run(seed, [], f"{seed}/").seconds
        return self.faults.plan(seed, self.ranks, within)

    def run(self, seed: int, plan: list[SimulatedFault], text: str, trace: Path | None = None) -> History:
        """Run one history.

        :param text: the history's seed and the numbers of its faults, as :attr:`History.seed` has them.
        :param trace: the folder for the trace files if the history fails.
        :raises Exception: the error that a rank has raised, with notes.
        """
        for name in ("aiocomms.communicator.formation", "aiocomms.endpoints.endpoint"):
            loading.load_now(name)
        with _repeatable(seed):
            return self._run(SimulatedWorld(seed, self.ranks, self.latency), plan, text, trace)

    def _run(self, world: SimulatedWorld, plan: list[SimulatedFault], text: str, trace: Path | None) -> History:
        # This is a function of its own: variables of run() would be in an older generation, and keep the world alive.
        around = simulated_surroundings(lambda: world.current, world.now, world.wall)
        with clock.simulated_by(world), calls_audited(), around, on_one_processor():
            before = watch(True)
            try:
                for fault in plan:
                    world.at(fault.time, None, fault.happen, world)
                world.run(self.program, self.longest)
                return _history(world, plan, text)
            except BaseException as error:
                watch(False)
                for note in _notes(self, world, plan, text, error):
                    error.add_note(note)
                if trace is not None:
                    write_trace(world, trace, text, error)
                raise
            finally:
                world.end()
                watch(before)


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and value > 0  # type: ignore[operator]


def _is_latency(value: object) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_seconds, value))
    return pair and value[0] <= value[1] < float("inf")  # type: ignore[index]


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Make the program's own random draws depend on the seed, and turn the garbage collector off."""
    gc.collect(1)  # The end of the previous history has left its objects in the second generation.
    collecting, state, torchs = gc.isenabled(), random.getstate(), torch.get_rng_state()
    gc.disable()
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would keep a stack for each other device.
    try:
        with torch.inference_mode(False):  # Processes begin without the caller's modes.
            yield
    finally:
        random.setstate(state)
        torch.set_rng_state(torchs)
        if collecting:
            gc.enable()


def _history(world: SimulatedWorld, plan: list[SimulatedFault], seed: str) -> History:
    """Return the history, or raise the error of the first rank that has failed."""
    if world.failed is not None:
        error = world.failed.error
        assert error is not None
        raise error
    last = {process.rank: process for process in world.processes}
    results = [last[rank].result for rank in range(world.ranks)]
    return History(seed, world.time, results, [str(fault) for fault in plan], world.lines())


def _notes(
    trial: SimulatedTrial, world: SimulatedWorld, plan: list[SimulatedFault], seed: str, error: BaseException
) -> Iterator[str]:
    failed = world.failed
    for process in [*([] if failed is None else [failed]), *world.alive()]:
        world.enter(process)
        yield from process.notes(error)
    if failed is not None:
        yield f"it was raised on {failed} of {world.ranks} ranks, after {world.time:.6f} s of the simulation"
    yield f"the seed of this history is {seed!r}, with {trial}"
    for fault in plan:
        yield f"fault: {fault}"
