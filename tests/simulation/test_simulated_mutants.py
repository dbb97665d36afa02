"""Simulated histories bite: without a mutant they pass, and most mutants of the project break one of them soon."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import promises
import pytest
import simulated_mutants

pytestmark = [pytest.mark.real, pytest.mark.search]

SECONDS = 2.0
"""Seconds of a processor within which a mutant is to be caught."""
PROCESSORS = 2
WANTED, WANTED_IN_THE_LIBRARY, WANTED_AS_THEY_ARE = 35, 22, 7
"""The mutants that are caught at least; of these, such as break the library; of these, such as are the project's own.

The project has 57, most of which break the transport `local`, which no simulation uses. Some of those are made anew.
"""


def caught(mutant: str | None) -> str:
    """Run histories with a mutant; return the seed and the error of the one that fails, or nothing."""
    if mutant is not None:
        simulated_mutants.apply(mutant)
    ends, seed = time.process_time() + SECONDS, 0
    while time.process_time() < ends:
        try:
            promises.check(seed)
        except (AttributeError, NameError):
            raise  # The mutant itself is wrong.
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {str(error)[:150]}"
        seed += 1
    return ""


def begin(call: Callable[[], str]) -> Callable[[], str]:
    """Make a call in another process, which is forked from this one: it has imported all. Return what waits for it."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writes, call().encode())
        finally:
            os._exit(0)
    os.close(writes)

    def end() -> str:
        with os.fdopen(reads) as file:
            found = file.read()
        assert os.waitpid(pid, 0)[1] == 0
        return found

    return end


def catch(mutants: list[str]) -> str:
    """Look which mutants are caught, each in a process of its own."""
    return json.dumps({name: begin(lambda name=name: caught(name))() for name in mutants})


def test_histories_catch_mutants() -> None:
    assert begin(lambda: caught(None))() == ""
    began = time.monotonic()
    names = [name for kind in simulated_mutants.KINDS.values() for name in kind]
    parts = [begin(lambda n=n: catch(names[n::PROCESSORS])) for n in range(PROCESSORS)]
    found = {name: how for part in parts for name, how in json.loads(part()).items()}
    counts = {kind: sum(bool(found[name]) for name in names) for kind, names in simulated_mutants.KINDS.items()}
    for name, how in found.items():
        print(f"{name}: {how or 'not caught'}")
    for kind, names in simulated_mutants.KINDS.items():
        print(f"{kind}: {counts[kind]} of {len(names)}")
    print(f"in {time.monotonic() - began:.0f} s, by {PROCESSORS} processes")
    assert counts["as it is"] >= WANTED_AS_THEY_ARE
    assert counts["as it is"] + counts["anew, in the library"] >= WANTED_IN_THE_LIBRARY
    assert sum(counts.values()) >= WANTED
