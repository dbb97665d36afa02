"""One history of a distributed program, and the search for one that breaks a promise."""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from aiocomms import loading
from aiocomms.arguments import as_int
from aiocomms.bootstrap import directory
from aiocomms.errors import ArgumentError, ArgumentTypeError, SimulationError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.faults import Fault, Faults, kept
from aiocomms.testing.simulation.refusing import watch
from aiocomms.testing.simulation.surroundings import simulated_surroundings
from aiocomms.testing.simulation.world import World

Program = Callable[[], Awaitable[Any]]
"""An async function that each rank runs, as a process of its own would."""

LATENCY = (2e-5, 2e-3)
"""Seconds that a message takes at least and at most."""
LONGEST = 3600.0
"""Seconds of its time that a history may take."""


@dataclass(frozen=True)
class History:
    """What has happened.

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


def simulate(
    program: Program,
    ranks: int = 2,
    *,
    seed: int | str = 0,
    faults: Faults | None = None,
    latency: tuple[float, float] = LATENCY,
    longest: float = LONGEST,
) -> History:
    """Run a distributed program in one thread and in virtual time, as one seed says.

    :param program: an async function that each rank runs. ``aiocomms.new_comm()`` in it forms the communicator.
    :param ranks: how many there are.
    :param seed: decides all that is left to chance. It may be the text that a failing history gives.
    :param faults: what goes wrong; None: nothing.
    :param latency: the least and the most seconds that a message takes.
    :param longest: the seconds of its own time that the history may take.
    :returns: the history.
    :raises SimulationError: a rank waits for ever, or does what cannot be simulated.
    :raises ArgumentError: an argument is wrong.
    :raises Exception: whatever the program raises on a rank, with notes that say which one, and how to repeat it.
    """
    _check(program, ranks, latency)
    number, chosen = read_seed(seed)
    plan = _planned(program, ranks, number, faults or Faults(), latency, longest)
    return _run(program, ranks, number, kept(plan, chosen), latency, longest, text=str(seed))


def explore(
    program: Program,
    ranks: int = 2,
    *,
    seeds: int | Iterable[int] = 100,
    faults: Faults | None = None,
    latency: tuple[float, float] = LATENCY,
    longest: float = LONGEST,
) -> int:
    """Run a program by many seeds, until one fails. That history is shrunk to the faults that it needs.

    :param seeds: the seeds, or how many; the other parameters are those of :func:`simulate`.
    :returns: the number of histories.
    :raises Exception: as :func:`simulate` does, of the shrunk history.
    """
    _check(program, ranks, latency)
    count, chosen = 0, faults or Faults()
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        plan = _planned(program, ranks, seed, chosen, latency, longest)
        try:
            _run(program, ranks, seed, plan, latency, longest, text=str(seed))
        except Exception as error:
            raise _shrunk(program, ranks, seed, plan, latency, longest, error) from error.__cause__
        count += 1
    return count


def read_seed(seed: int | str) -> tuple[int, set[int] | None]:
    """Read a seed: its number, and the numbers of the faults that are kept; None: all are.

    :raises ArgumentError: it is none.
    """
    text, _, rest = str(seed).partition("/")
    try:
        number = int(text)
        return number, {int(one) for one in rest.split(",") if one} if "/" in str(seed) else None
    except ValueError:
        raise ArgumentError(f"seed is {seed!r}, wanted an int, or a text such as '7/0,2'") from None


def _check(program: Program, ranks: int, latency: tuple[float, float]) -> None:
    if not callable(program):
        raise ArgumentTypeError(f"program is {program!r}, wanted an async function without arguments")
    if type(as_int(ranks)) is not int or ranks < 1:
        raise ArgumentError(f"ranks is {ranks!r}, wanted at least 1 rank as an int")
    if not 0 < latency[0] <= latency[1]:
        raise ArgumentError(f"latency is {latency!r}, wanted the least and the most seconds, above 0")
    if clock.simulation is not None:
        raise SimulationError("a simulation runs already: one cannot be in another")
    if directory.any_open():
        raise SimulationError("this process has open communicators, and a simulation needs it for itself: close them")


def _planned(
    program: Program, ranks: int, seed: int, faults: Faults, latency: tuple[float, float], longest: float
) -> list[Fault]:
    """Draw the faults of a seed."""
    if not faults.any:
        return []
    within = faults.within
    if within is None:
        within = _run(program, ranks, seed, [], latency, longest, text=f"{seed}/").seconds
    return faults.plan(seed, ranks, within)


def _run(
    program: Program, ranks: int, seed: int, plan: list[Fault], latency: tuple[float, float], longest: float, text: str
) -> History:
    """Run one history."""
    for name in ("aiocomms.communicator.formation", "aiocomms.endpoints.endpoint"):
        loading.load_now(name)
    with _repeatable(seed):
        world = World(seed, ranks, latency)
        with clock.simulated_by(world), simulated_surroundings(lambda: world.current, world.now, world.wall):
            before = watch(True)
            try:
                for fault in plan:
                    world.at(fault.time, None, fault.happen, world)
                world.run(program, longest)
                return _history(world, plan, text)
            except Exception as error:
                for note in _notes(world, plan, text, error):
                    error.add_note(note)
                raise
            finally:
                world.end()
                watch(before)


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Have what a program draws by itself depend on the seed, and nothing on when memory is collected."""
    gc.collect(1)  # The history before, which its end has left in the second generation.
    collecting, state, torchs = gc.isenabled(), random.getstate(), torch.get_rng_state()
    gc.disable()
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        torch.set_rng_state(torchs)
        if collecting:
            gc.enable()


def _history(world: World, plan: list[Fault], seed: str) -> History:
    """Return what has happened, or raise what a rank has."""
    if world.failed is not None:
        assert world.failed.error is not None
        raise world.failed.error
    last = {process.rank: process for process in world.processes}
    results = [last[rank].result for rank in range(world.ranks)]
    return History(seed, world.time, results, [str(fault) for fault in plan], world.lines())


def _notes(world: World, plan: list[Fault], seed: str, error: Exception) -> Iterator[str]:
    failed = world.failed
    if failed is not None and failed.error is error:
        yield f"it was raised on {failed}, after {world.time:.6f} s of the simulation"
    yield f"the seed of this history is {seed!r}"
    for fault in plan:
        yield f"fault: {fault}"


def _shrunk(
    program: Program, ranks: int, seed: int, plan: list[Fault], latency: tuple[float, float], longest: float,
    error: Exception,
) -> Exception:  # fmt: skip
    """Leave out one fault after the other, as long as the history fails; return the error of the least one."""
    chosen = list(range(len(plan)))
    for number in list(chosen):
        fewer = [one for one in chosen if one != number]
        text = f"{seed}/{','.join(map(str, fewer))}"
        try:
            _run(program, ranks, seed, kept(plan, fewer), latency, longest, text=text)
        except Exception as smaller:
            chosen, error = fewer, smaller
    return error
