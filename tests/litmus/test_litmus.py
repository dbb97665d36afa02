"""Litmus tests of the protocols in shared memory: `transports/ucx/litmus`, and docs/memory-model.md.

Each test names its memory model, the observation that herd7 must make, and its mutants. A mutant replaces an order by a
weaker one or by nothing. On a mutant, herd7 must make another observation, or find undefined behaviour.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from herd import command

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "transports" / "ucx" / "litmus").glob("*.litmus"))
PAGE = ROOT / "docs" / "memory-model.md"
HERD = command(Path(os.environ["AIOCOMMS_HERD"]))
UNDEFINED = "Undefined"
"""The observation of a data race in C++."""


def meta(test: str, key: str) -> str:
    found = re.search(rf"^{key}=(.*)$", test, re.MULTILINE)
    assert found, f"it does not say {key}="
    return found[1]


def mutants(path: Path) -> list[tuple[str, str]]:
    """Return the mutants of a test: the text that each replaces, and its replacement."""
    return re.findall(r"^Mutant\d+=(.*) =>(?: (.*))?$", path.read_text(), re.MULTILINE)


def observation(test: str, where: Path) -> str:
    """Return how often a test's final state occurs: Never, Sometimes or Always; UNDEFINED for a data race."""
    file = where / "mutated.litmus"
    file.write_text(test)
    done = subprocess.run(
        [*HERD, "-model", meta(test, "Model"), str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    found = re.search(r"^Observation \S+ (\w+)", done.stdout, re.MULTILINE)
    assert found is not None, f"herd7 cannot run it:\n{test}\n{done.stdout}{done.stderr}"
    return UNDEFINED if "Undef" in done.stdout.split() else found[1]


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_what_is_relied_on(path: Path, tmp_path: Path) -> None:
    test = path.read_text()
    assert observation(test, tmp_path) == meta(test, "Expect")
    assert mutants(path), "nothing shows that it can fail"


@pytest.mark.parametrize(
    ("path", "what", "instead"),
    [
        pytest.param(path, *mutant, id=f"{path.stem}-{number}")
        for path in TESTS
        for number, mutant in enumerate(mutants(path), 1)
    ],
)
def test_what_is_less_does_not_do(path: Path, what: str, instead: str, tmp_path: Path) -> None:
    head, brace, body = path.read_text().partition("\n{")
    mutated, times = re.subn(re.escape(what) + r"(?!\w)", lambda _: instead, body)
    assert times, f"there is no {what!r}"
    assert observation(head + brace + mutated, tmp_path) != meta(head, "Expect")


def test_the_documentation_names_every_test() -> None:
    assert set(re.findall(r"`([a-z-]+)\.litmus`", PAGE.read_text())) == {path.stem for path in TESTS}


def test_the_documentation_names_every_source_with_atomics() -> None:
    sources = ROOT / "transports" / "ucx" / "src"
    ordered = {
        str(path.relative_to(sources))
        for path in sources.glob("*/*.?pp")
        if re.search(r"std::atomic|memory_order", path.read_text())
    }
    assert set(re.findall(r"`([a-z]+/[a-z_]+\.[ch]pp)`", PAGE.read_text())) == ordered
