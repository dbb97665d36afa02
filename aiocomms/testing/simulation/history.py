"""One history of a distributed program, and the search for one that breaks a promise."""

from __future__ import annotations

from collections.abc import Iterable

from aiocomms.testing.simulation.faults import Faults, kept
from aiocomms.testing.simulation.searching import read_seed, read_seeds, search
from aiocomms.testing.simulation.trial import History, Program, SimulatedTrial

LATENCY = (2e-5, 2e-3)
"""Seconds that a message takes at least and at most."""
LONGEST = 86_400.0
"""Seconds of its time that a history may take."""


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
    :raises SimulationError: a rank waits for ever, does what cannot be simulated, or leaves a communicator open.
    :raises ArgumentError: an argument is wrong.
    :raises Exception: whatever the program raises on a rank, with notes that say which one, and how to repeat it.
    """
    trial = SimulatedTrial(program, ranks, Faults() if faults is None else faults, latency, longest)
    number, chosen = read_seed(seed)
    return trial.run(number, kept(trial.plan(number), chosen), str(seed))


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

    Faults are left out as long as it fails with the same type of error, and then pauses, partitions and the like are
    halved. Its notes name the seed by which :func:`simulate` repeats it.

    :param seeds: the seeds, or how many; the other parameters are those of :func:`simulate`.
    :returns: the number of histories.
    :raises Exception: as :func:`simulate` does, of the shrunk history.
    """
    trial = SimulatedTrial(program, ranks, Faults() if faults is None else faults, latency, longest)
    count, failure = search(trial, read_seeds(seeds))
    if failure is not None:
        raise failure.error
    return count
