"""Random programs in simulated worlds, by fixed seeds, and by as many others as there is time for.

``SIMULATION_SEEDS=0-1000000`` says which seeds a search takes; half of them are each of two tests', for two processors.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable

import promises
import pytest
from random_programs import Program

SEEDS = 5000
PARTS = 10
SEARCHED = os.environ.get("SIMULATION_SEEDS", "1000000-2000000")

BROKEN = (2004683, 3017889, 3219184, 3283259, 3311053, 3327721, 3370703, 3457545, 3510632, 3542286, 3780649, 3996948)
"""Seeds of histories with faults that have broken a promise."""


def check_all(seeds: Iterable[int], steps: int = 10) -> None:
    """Check the histories of some seeds."""
    gc.collect()
    gc.freeze()  # The collector need not look through what tests have loaded.
    for seed in seeds:
        promises.check(seed, steps=steps)


@pytest.mark.deterministic
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part {part}")
def test_histories_of_fixed_seeds_break_no_promise(part: int) -> None:
    each = SEEDS // PARTS
    check_all(range(part * each, (part + 1) * each), steps=3)


@pytest.mark.deterministic
def test_same_seed_has_the_same_history() -> None:
    for seed in range(8):
        assert promises.check(seed).trace == promises.check(seed).trace


@pytest.mark.deterministic
@pytest.mark.parametrize(("seed", "faulty"), [(1003606, None), *((seed, True) for seed in BROKEN)])
def test_history_that_has_broken_a_promise_breaks_none(seed: int, faulty: bool | None) -> None:
    promises.check(seed, faulty=faulty)


@pytest.mark.deterministic
def test_program_is_drawn_from_its_seed() -> None:
    assert str(Program.drawn(7)) == str(Program.drawn(7))
    assert len({str(Program.drawn(seed)) for seed in range(50)}) == 50


@pytest.mark.deterministic
@pytest.mark.search
@pytest.mark.timeout(0)
@pytest.mark.parametrize("half", range(2))
def test_histories_of_new_seeds_break_no_promise(half: int) -> None:
    first, last = map(int, SEARCHED.split("-"))
    check_all(range(first + half, last, 2))
