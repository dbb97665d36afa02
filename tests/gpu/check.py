"""Run the steps of `make gpu-check` on a machine with one GPU: ``python -m tests.gpu.check``.

Every step is a process with a time limit, so a step that hangs or breaks the GPU does not stop the others. The results
are ``check.json``, ``check.md`` and each step's output, in ``build/gpu/``. The exit status is 1 if a step failed. The
report lists the skipped tests with their reasons.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
OWN_HOST = Path(__file__).parent / "own_host"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Step(NamedTuple):
    """One program, with its time limit."""

    name: str
    command: Sequence[str]
    limit: float
    """The time limit in seconds."""
    environment: Mapping[str, str] = {}
    tests: bool = False
    """True if the step is pytest; it writes each test's result to the file whose path replaces ``{junit}``."""
    why_not: Callable[[], str] = lambda: ""
    """The function that returns why the step cannot run here, or "". It is called when the step's turn comes."""


class Result(NamedTuple):
    """The result of a step."""

    name: str
    status: str
    seconds: float
    detail: str
    skips: dict[str, int] = {}  # noqa: RUF012 - never changed
    """The reasons of skipped tests, with the number of tests for each."""


# -------------------------------------------------------------------------------------------------------------- steps


def conformance(transport: str, ranks: int, environment: Mapping[str, str]) -> Step:
    """Return the step of the conformance suite: on every loop with one rank, on asyncio with several."""
    where = transport if ranks == 1 else f"{transport}@processes"
    options = [f"--transport={where}", "--device=cuda", f"--ranks={ranks}", "--deadline=60", "--timeout=150"]
    loops = [] if ranks == 1 else ["--loops=asyncio"]
    command = ["-m", "pytest", "--pyargs", "aiocomms.testing.conformance", *options, *loops, "--junitxml={junit}"]
    name = f"conformance, {transport}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    return Step(name, [sys.executable, *command], 1200.0, environment if ranks > 1 else {}, tests=True)


def in_python(environment: Mapping[str, str]) -> Step:
    """Return the step of the conformance suite's collectives and messages over NCCL's launcher in Python."""
    step = conformance("nccl", 2, {**environment, "AIOCOMMS_PURE": "1"})
    chosen = "-k=test_collectives or test_messages"
    return step._replace(name=f"{step.name}, launcher in Python", command=[*step.command, chosen])


def pytest(name: str, environment: Mapping[str, str], *files: str) -> Step:
    """Return a step that runs some of this repository's tests."""
    command = [sys.executable, "-m", "pytest", *files, "--timeout=200", "--junitxml={junit}"]
    return Step(name, command, 1200.0, environment, tests=True)


def sanitizer(tool: str) -> Step:
    """Return a step that runs compute-sanitizer on a short program."""
    # memcheck reports no errors that calls return: NCCL and torch ask the driver for functions that it may lack.
    api = ["--report-api-errors=no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", f"--tool={tool}", *api, "--target-processes=all", "--error-exitcode=99"]
    run = [*command, sys.executable, "-m", "tests.gpu.short_run"]
    return Step(f"compute-sanitizer, {tool}", run, 600.0, why_not=no_sanitizer)


def no_sanitizer() -> str:
    """Return why compute-sanitizer is missing or does not work with this GPU and driver; "" if it works."""
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not installed"
    program = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').add_(1).item()"]
    try:
        probe = subprocess.run(
            ["compute-sanitizer", "--error-exitcode=99", *program],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "compute-sanitizer does not come to an end with the smallest of programs"
    last = (probe.stdout + probe.stderr).strip().splitlines()[-1:]
    return f"compute-sanitizer does not work here: {' '.join(last)}" if probe.returncode else ""


def all_steps(nccl: tuple[int, ...], out: Path) -> list[Step]:
    """Return all steps for a version of NCCL."""
    from benchmarks.gpu.onegpu import SWITCH, environment

    shared = {name: value for name, value in environment(nccl, 0).items() if name != "NCCL_HOSTID"}
    if nccl < SWITCH:
        shared["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OWN_HOST), os.environ.get("PYTHONPATH")]))
    return [
        *(conformance(transport, ranks, shared) for transport in ("nccl", "ucx") for ranks in (1, 2, 4)),
        in_python(shared),
        pytest("faults G1 to G12", {}, "tests/gpu/test_faults.py"),
        pytest("CUDA graphs", {}, "tests/gpu/test_graphs.py"),
        pytest("arrays of CuPy", {}, "tests/gpu/test_arrays.py"),
        pytest("examples", shared, "tests/examples/test_tensor_parallel.py"),
        *(sanitizer(tool) for tool in ("memcheck", "racecheck")),
        Step("benchmarks", [sys.executable, "-m", "benchmarks.gpu", f"--out={out}"], 1000.0),
    ]


# ------------------------------------------------------------------------------------------------------------ running


def run(step: Step, out: Path) -> Result:
    """Run a step, and return its result."""
    why = step.why_not()
    if why:
        return Result(step.name, SKIPPED, 0.0, why)
    stem = "".join(c if c.isalnum() else "-" for c in step.name)
    junit = out / f"{stem}.xml"
    junit.unlink(missing_ok=True)
    command = [part.replace("{junit}", str(junit)) for part in step.command]
    began = time.monotonic()
    with (out / f"{stem}.log").open("wb") as log:
        code = execute(command, step, log)
    seconds = time.monotonic() - began
    if code is None:
        return Result(step.name, FAILED, seconds, f"killed after {step.limit:.0f} s; see {log.name}")
    status = FAILED if code else PASSED
    detail, skips = f"ended with {code}; see {log.name}" if code else "", {}
    if step.tests:
        counts, skips = read_junit(junit)
        if not counts[PASSED]:
            status = FAILED  # a step that tests nothing proves nothing
        told = ", ".join(f"{counts[kind]} {kind}" for kind in (PASSED, FAILED, SKIPPED) if counts[kind])
        detail = "; ".join(filter(None, [told or "no test ran", detail]))
    return Result(step.name, status, seconds, detail, skips)


def execute(command: Sequence[str], step: Step, log: Any) -> int | None:
    """Run a program, then end all that it has started; return its exit code, or None if it exceeded its limit."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | step.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(step.limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # ends processes that the program has left too
        except ProcessLookupError:
            pass  # no process is left
        process.wait()


def read_junit(path: Path) -> tuple[Counter[str], dict[str, int]]:
    """Return how many tests passed, failed and were skipped, and the reasons of the skips."""
    counts: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    if not path.exists():
        return counts, {}
    for case in ET.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts[FAILED] += 1
        elif (skip := case.find("skipped")) is not None:
            counts[SKIPPED] += 1
            skips[str(skip.get("message")).removeprefix("Skipped: ")] += 1
        else:
            counts[PASSED] += 1
    return counts, dict(skips)


# ---------------------------------------------------------------------------------------------------------- reporting


def markdown(results: Sequence[Result]) -> str:
    """Return the table of the steps, and below it the reasons of skipped tests."""
    from benchmarks.tables import table

    rows = [[r.name, r.status, f"{r.seconds:.0f} s", r.detail] for r in results]
    skips = [f"* skipped in {r.name}: {count} times: {why}" for r in results for why, count in r.skips.items()]
    return "\n\n".join(filter(None, [table(["step", "", "took", ""], rows, 4), "\n".join(skips)])) + "\n"


def check(steps: Sequence[Step], out: Path) -> int:
    """Run all steps, also after a failure, and write the report; return 1 if a step failed, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.json", "gpu.md", "check.json", "check.md"):
        (out / name).unlink(missing_ok=True)  # figures of an earlier run must not appear in this report
    results = []
    for step in steps:
        results.append(run(step, out))
        print(f"{results[-1].status:8}{step.name}: {results[-1].detail}", flush=True)
    (out / "check.json").write_text(json.dumps([result._asdict() for result in results], indent=1) + "\n")
    text = markdown(results)
    figures = out / "gpu.md"  # the benchmarks write this file
    text += f"\n{figures.read_text()}" if figures.exists() else ""
    (out / "check.md").write_text(text)
    failed = [result.name for result in results if result.status == FAILED]
    print(f"\n{text}\n{'failed: ' + ', '.join(failed) if failed else 'nothing failed'}")
    return int(bool(failed))


def main() -> int:
    """Look for a GPU, then run all steps, or those of ``--only``."""
    from tests.gpu.look import why_not

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="TEXT", help="only steps whose name has this text")
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"gpu-check needs a torch that can use the GPU, and torch {torch.__version__} cannot")
    from benchmarks.gpu.onegpu import nccl_version

    steps = [step for step in all_steps(nccl_version(), options.out.absolute()) if options.only in step.name]
    if not steps:
        sys.exit(f"--only {options.only!r} leaves no step")
    return check(steps, options.out.absolute())


if __name__ == "__main__":
    sys.exit(main())
