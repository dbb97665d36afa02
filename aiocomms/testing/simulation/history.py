"""The functions ``simulate``, which runs one history of a program, and ``explore``, which finds a failing history.

A history is one simulated run.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiocomms.testing.simulation.faults import Faults, kept
from aiocomms.testing.simulation.searching import read_seed, read_seeds, search
from aiocomms.testing.simulation.trial import LATENCY, LONGEST, History, Program, SimulatedTrial


def simulate(
    program: Program,
    ranks: int = 2,
    *,
    seed: int | str = 0,
    faults: Faults | None = None,
    latency: tuple[float, float] = LATENCY,
    longest: float = LONGEST,
) -> History:
    """Run one history of a program: a simulated run in one thread and in virtual time.

    :param program: an async function that each rank runs. In this function ``aiocomms.new_comm()`` forms the
        communicator.
    :param ranks: the number of ranks.
    :param seed: the seed of all random decisions. To repeat a failed history, pass the text of the seed from the notes
        of its error.
    :param faults: the faults to inject; None: no faults.
    :param latency: the smallest and the largest latency of a message, in seconds.
    :param longest: the largest duration of the history, in virtual seconds.
    :returns: the record of the history.
    :raises SimulationError: a rank waits without end, makes a call that cannot be simulated, or leaves a communicator
        open.
    :raises ArgumentError: an argument is wrong.
    :raises Exception: the error that the program raises on a rank. Notes name the rank, the seed and the faults.
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
    """Run a program with many seeds until a history fails, and reduce the faults of this history.

    A history is one simulated run. The search removes faults as long as the history fails with the same type of error.
    Then the search halves the durations of faults, such as pauses, as long as the history fails with the same type of
    error. The notes of the error name the seed with which :func:`simulate` repeats the reduced history.

    :param seeds: the seeds, or the number of seeds. The other parameters are those of :func:`simulate`.
    :returns: the number of histories, if none has failed.
    :raises Exception: the error of the reduced history, as :func:`simulate` raises it.
    """
    trial = SimulatedTrial(program, ranks, Faults() if faults is None else faults, latency, longest)
    count, failure = search(trial, read_seeds(seeds))
    if failure is not None:
        raise failure.error
    return count
