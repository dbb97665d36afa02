"""Simulated histories bite: without a mutant they pass, and most mutants of the project break one of them soon."""

from __future__ import annotations

import os
import time

import mutations
import oracle
import pytest

pytestmark = [pytest.mark.real, pytest.mark.search]

SECONDS = 2.0
"""How long a mutant has to be caught, of a processor's time."""
WANTED = 35


def caught(mutant: str | None) -> str:
    """Run histories with a mutant; return the seed and the error of the one that fails, or nothing."""
    if mutant is not None:
        mutations.apply(mutant)
    ends, seed = time.process_time() + SECONDS, 0
    while time.process_time() < ends:
        try:
            oracle.check(seed)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {str(error)[:150]}"
        seed += 1
    return ""


def in_a_fork(mutant: str | None) -> str:
    """Do that in another process, which is forked from this one: it has imported all."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writes, caught(mutant).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        found = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return found


def test_histories_catch_mutants() -> None:
    assert in_a_fork(None) == ""
    found = {name: in_a_fork(name) for name in mutations.NAMES}
    for name, how in found.items():
        print(f"{name}: {how or 'not caught'}")
    assert sum(map(bool, found.values())) >= WANTED
