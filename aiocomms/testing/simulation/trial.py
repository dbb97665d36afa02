"""A program to be simulated, with all that its histories have in common, and the run of one history."""

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
from aiocomms.testing.simulation.faults import Faults, SimulatedFault
from aiocomms.testing.simulation.refusing import calls_audited, watch
from aiocomms.testing.simulation.surroundings import simulated_surroundings
from aiocomms.testing.simulation.threads import on_one_processor
from aiocomms.testing.simulation.tracing import write_trace
from aiocomms.testing.simulation.world import SimulatedWorld

Program = Callable[[], Awaitable[Any]]
"""An async function that each rank runs, as a process of its own would."""


@dataclass(frozen=True)
class History:
    """A history: all that has happened.

    :param seed: the seed, with the numbers of the faults where some were left out: ``"7/0,2"``.
    :param seconds: how long it took, in its own time.
    :param results: what the program has returned on each rank; None for one that has died.
    :param faults: the faults, in words.
    :param trace: the lines of all that has happened.
    """

    seed: str
    seconds: float
    results: list[Any]
    faults: list[str]
    trace: list[str]


@dataclass(frozen=True)
class SimulatedTrial:
    """A program, and the arguments of :func:`simulate` but for the seed."""

    program: Program
    ranks: int
    faults: Faults
    latency: tuple[float, float]
    longest: float

    def __post_init__(self) -> None:
        """Check the arguments, and that there may be a simulation now.

        :raises ArgumentError: one is wrong.
        :raises SimulationError: this process has open communicators, or a simulation runs already.
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
        """Draw the faults of a seed. They are to happen while the program runs, so it runs without them at first."""
        if not self.faults.any:
            return []
        within = self.faults.within
        if within is None:
            within = self.run(seed, [], f"{seed}/").seconds
        return self.faults.plan(seed, self.ranks, within)

    def run(self, seed: int, plan: list[SimulatedFault], text: str, trace: Path | None = None) -> History:
        """Run one history.

        :param text: the seed, and which of its faults these are.
        :param trace: the folder that gets the flight recorders if it fails.
        :raises Exception: what a rank has raised, with notes.
        """
        for name in ("aiocomms.communicator.formation", "aiocomms.endpoints.endpoint"):
            loading.load_now(name)
        with _repeatable(seed):
            return self._run(SimulatedWorld(seed, self.ranks, self.latency), plan, text, trace)

    def _run(self, world: SimulatedWorld, plan: list[SimulatedFault], text: str, trace: Path | None) -> History:
        # Not one function with the above: its variables would be of an older generation, and keep all from collection.
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
                for note in _notes(world, plan, text, error):
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
    return pair and value[0] <= value[1]  # type: ignore[index]


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Have what a program draws by itself depend on the seed, and nothing on when memory is collected."""
    gc.collect(1)  # The history before, which its end has left in the second generation.
    collecting, state, torchs = gc.isenabled(), random.getstate(), torch.get_rng_state()
    gc.disable()
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack for each other device, for good.
    try:
        with torch.inference_mode(False):  # Processes begin without the caller's modes.
            yield
    finally:
        random.setstate(state)
        torch.set_rng_state(torchs)
        if collecting:
            gc.enable()


def _history(world: SimulatedWorld, plan: list[SimulatedFault], seed: str) -> History:
    """Return what has happened, or raise what a rank has."""
    if world.failed is not None:
        error = world.failed.error
        assert error is not None
        raise error
    last = {process.rank: process for process in world.processes}
    results = [last[rank].result for rank in range(world.ranks)]
    return History(seed, world.time, results, [str(fault) for fault in plan], world.lines())


def _notes(world: SimulatedWorld, plan: list[SimulatedFault], seed: str, error: BaseException) -> Iterator[str]:
    failed = world.failed
    if failed is not None:
        if uncaught := failed.note(error):
            yield uncaught
        yield f"it was raised on {failed} of {world.ranks} ranks, after {world.time:.6f} s of the simulation"
    yield f"the seed of this history is {seed!r}"
    for fault in plan:
        yield f"fault: {fault}"
