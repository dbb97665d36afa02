"""The conformance suite bites: it passes for the local transport, and fails for each of its mutants."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mutants
import pytest
from processes import SUITE_HANGS

pytestmark = [pytest.mark.real, pytest.mark.search]

Outcomes = dict[str, Future[tuple[int | None, str]]]
"""pytest's exit code and output, by mutant."""

SUITE = "aiocomms.testing.conformance"
MODULES = sorted(set(mutants.OPTIONS.values()))

CHILDREN = threading.Lock()
"""The lock of this process's children.

The start of one reads the exit codes of the others, which are to be read once.
"""

QUICK = ["-x", "-q", "--assert=plain", "-Wignore", *(f"-pno:{name}" for name in ("hypothesispytest", "cacheprovider"))]
"""The options that leave out what takes longer to start than the checks take to run."""


def run_suite(mutant: str, modules: list[str], folder: str) -> None:
    """Install a mutant as a transport in a process of its own, and run parts of the suite against it."""
    info = Path(folder) / "mutant-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mutant\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[aiocomms.transports]\nmutant = mutants:with_{mutant}\n")
    sys.path[:0] = [folder, str(Path(__file__).parents[1] / "support")]
    os.chdir(folder)
    deadline = 1.5 if mutant in mutants.OPTIONS else 100  # a mutant that hangs takes all of it
    options = ["--transport=mutant", "--loops=asyncio", "--ranks=2,3", f"--deadline={deadline}", "--seed=1"]
    chosen = [f"{SUITE}.{module}" for module in modules]
    with (
        (Path(folder) / "output").open("w") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        code = pytest.main(["--pyargs", *chosen, *options, *QUICK])
    sys.exit(code)


def outcome(mutant: str, modules: list[str], folder: Path) -> tuple[int | None, str]:
    """pytest's exit code and output for a mutant."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", f"{SUITE}.tasks"])
    process = context.Process(target=run_suite, args=(mutant, modules, str(folder)))
    with CHILDREN:
        process.start()
    multiprocessing.connection.wait([process.sentinel], SUITE_HANGS)
    with CHILDREN:
        process.kill()
        process.join()
    return process.exitcode, (folder / "output").read_text()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Yield the outcomes of the mutants that are asked for; as many run at a time as there are processors."""
    pool = ThreadPoolExecutor(os.cpu_count())
    chosen = [item.callspec.params.get("mutant") for item in request.session.items if hasattr(item, "callspec")]
    runs = {"control": MODULES, **{name: [mutants.OPTIONS[name]] for name in chosen if name in mutants.OPTIONS}}
    yield {name: pool.submit(outcome, name, modules, tmp_path_factory.mktemp(name)) for name, modules in runs.items()}
    pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(2 * SUITE_HANGS)
def test_transport_without_a_mutation_passes(outcomes: Outcomes) -> None:
    code, output = outcomes["control"].result()
    assert code == pytest.ExitCode.OK, output


@pytest.mark.timeout(2 * SUITE_HANGS)
@pytest.mark.parametrize("mutant", mutants.OPTIONS)
def test_mutant_is_caught(mutant: str, outcomes: Outcomes) -> None:
    code, output = outcomes[mutant].result()
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert not re.search("NameError|AttributeError|TypeError", output), f"the mutant is broken: {output}"
