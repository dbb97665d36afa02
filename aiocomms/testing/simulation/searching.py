"""The search for a seed with which a program fails, and for the fewest faults with which the program still fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from aiocomms.arguments import as_int
from aiocomms.errors import ArgumentError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.faults import SimulatedFault, kept
from aiocomms.testing.simulation.trial import SimulatedTrial

_HALVINGS: Final = 15
"""The largest number of times that a duration is halved: 20 s become 0.6 ms."""
_PATIENCE: Final = 1.0
"""A limit for the duration of histories, in seconds of real (not virtual) time.

If a longer history ends with an error that is not an :class:`Exception`, the error may be pytest's timeout. The search
then does not repeat the history, because the next run would also hang.
"""
_FOR_CALLER = (KeyboardInterrupt, SystemExit, GeneratorExit)


class FailedHistory(NamedTuple):
    """A history that has failed: its seed, its faults and its error."""

    seed: str
    plan: list[SimulatedFault]
    error: BaseException


def read_seed(seed: int | str) -> tuple[int, dict[int, int] | None]:
    """Return the number of a seed, and a dict of the kept faults. The dict is None if all faults are kept.

    A key of the dict is the number of a kept fault. The value says how many times the duration of this fault is halved.

    :raises ArgumentError: the seed is wrong.
    """
    head, slash, rest = str(seed).partition("/")
    try:
        if not isinstance(seed, str) and type(as_int(seed)) is not int:
            raise ValueError
        pairs = [one.partition("~") for one in rest.split(",") if one]
        chosen = {int(number): int(times or 0) for number, _, times in pairs}
        if not all(0 <= times <= _HALVINGS for times in chosen.values()):
            raise ValueError
        return int(head), chosen if slash else None
    except ValueError:
        raise ArgumentError(f"seed is {seed!r}, wanted an int, or a text such as '7/0,2'") from None


def write_seed(seed: int, chosen: Mapping[int, int]) -> str:
    """Return the text of a seed and its kept faults, in the format that :func:`read_seed` reads."""
    return f"{seed}/" + ",".join(f"{number}~{times}" if times else f"{number}" for number, times in chosen.items())


def read_seeds(seeds: int | Iterable[int]) -> Iterable[int]:
    """Return the seeds. An int ``n`` stands for the seeds from 0 to ``n - 1``.

    :raises ArgumentError: ``seeds`` is neither an int of at least 1 nor an iterable of seeds.
    """
    wanted = f"seeds is {seeds!r}, wanted how many as an int of at least 1, or the seeds"
    if type(as_int(seeds)) is int:
        if seeds < 1:  # type: ignore[operator]
            raise ArgumentError(wanted)
        return range(seeds)  # type: ignore[arg-type]
    if isinstance(seeds, (str, bytes, bool)) or not isinstance(seeds, Iterable):
        raise ArgumentError(wanted)
    return seeds


def search(trial: SimulatedTrial, seeds: Iterable[int]) -> tuple[int, FailedHistory | None]:
    """Run histories until one fails. Return the number of passed histories, and the reduced failed history or None.

    :raises ArgumentError: there is no seed.
    """
    count = 0
    for seed in seeds:
        number, chosen = read_seed(seed)
        if (failure := attempt(trial, number, chosen)) is not None:
            return count, failure
        count += 1
    if not count:
        raise ArgumentError("seeds has no seed, wanted at least one: an iterator yields its seeds only once")
    return count, None


def attempt(trial: SimulatedTrial, seed: int, chosen: Mapping[int, int] | None) -> FailedHistory | None:
    """Run the history of one seed.

    If the history fails, and the seed does not choose faults, reduce the faults of the history.

    :raises ArgumentError: the seed names the number of a fault that the history does not have.
    """
    plan: list[SimulatedFault] = []
    kept(trial.faults.plan(seed, trial.ranks, 1.0), chosen)  # A fault that does not exist is the caller's mistake.
    began, text = clock.now(), write_seed(seed, {})
    try:
        plan = trial.plan(seed)
        text = str(seed) if chosen is None else write_seed(seed, chosen)
        trial.run(seed, kept(plan, chosen), text)
    except _FOR_CALLER:
        raise
    except BaseException as error:  # pytest.fail raises no Exception.
        failure = FailedHistory(text, kept(plan, chosen) if plan else plan, error)
    else:
        return None
    hangs = not isinstance(failure.error, Exception) and clock.now() - began > _PATIENCE
    if chosen is not None or not plan or hangs:
        return failure
    return _shrunk(trial, seed, plan, failure)


def _shrunk(trial: SimulatedTrial, seed: int, plan: list[SimulatedFault], failure: FailedHistory) -> FailedHistory:
    """Leave out one fault after the other and halve durations, as long as the history fails in the same way."""

    def less(chosen: Mapping[int, int]) -> FailedHistory | None:
        fewer, text = kept(plan, chosen), write_seed(seed, chosen)
        try:
            trial.run(seed, fewer, text)
        except _FOR_CALLER:
            raise
        except BaseException as error:
            return FailedHistory(text, fewer, error) if type(error) is type(failure.error) else None
        return None

    chosen = dict.fromkeys(range(len(plan)), 0)
    for number in range(len(plan)):
        fewer = {one: times for one, times in chosen.items() if one != number}
        if (found := less(fewer)) is not None:
            chosen, failure = fewer, found
    for number in chosen:
        while plan[number].lasts and chosen[number] < _HALVINGS:
            shorter = {**chosen, number: chosen[number] + 1}
            if (found := less(shorter)) is None:
                break
            chosen, failure = shorter, found
    return failure
