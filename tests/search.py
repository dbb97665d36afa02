"""Search for defects with new seeds, beside the gate: ``make search SEARCH_MINUTES=60 CAMPAIGNS=fuzz,soak``.

The gate (``make test``) has fixed seeds. The search runs everything else, one campaign after the other, until its time
is over. It begins with the campaign that was run longest ago, so that the next call goes on where this one ends. Each
cycle first repeats the seeds of ``tests/seeds.txt``. Logs, state and summary are in ``build/search``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import fcntl
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PYTHON = ".venv/bin/python"
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
LINES = 15  # the number of last lines of a failure's log that are shown
PASSED, FAILED, CUT_OFF = "passed", "failed", "cut off"
COLUMNS = ("campaign", "runs", "failed", "cut off", "seconds", "seeds a minute", "all runs", "all failed")


class Campaign(NamedTuple):
    """One way to look for defects. ``{seed}`` and ``{seconds}`` stand for values in its command and environment."""

    name: str
    what: str
    command: Sequence[str]
    estimate: float  # seconds that a run takes, until one has shown it
    seeds: int = 0  # the number of new seeds in a turn; 0: the campaign has no seeds, and runs once
    environment: Mapping[str, str] = {}
    needs: Sequence[str] = ()  # see has()
    limit: float = 3600.0  # seconds after which a run is ended, and counts as failed


class Run(NamedTuple):
    """A run that ended."""

    campaign: Campaign
    seed: int | None
    outcome: str
    why: str
    seconds: float
    last: str  # lines of its log


def _tests(name: str, what: str, *options: str, estimate: float, seeds: int = 0, **rest: Any) -> Campaign:
    """Make a campaign of tests on all loops, with new examples of hypothesis if it has seeds."""
    seeded = ("--hypothesis-seed={seed}",) if seeds else ()
    environment = {"AIOCOMMS_SEARCH": "1"} | ({"AIOCOMMS_FAULTS": "full"} if name == "faults" else {})
    return Campaign(name, what, (PYTHON, "-m", "pytest", *options, *seeded), estimate, seeds, environment, **rest)


def _make(name: str, what: str, arguments: str, estimate: float, needs: str = "", **rest: Any) -> Campaign:
    """Make a campaign of targets of the Makefile."""
    every = ("make", *(f"make {it}" for it in arguments.split() if "=" not in it), *needs.split())
    return Campaign(name, what, ("make", *arguments.split()), estimate, needs=every, **rest)


OWN = ("tests/transports/test_mutations.py", "tests/transports/test_lanes_stress.py", "tests/faults/test_fuzz.py")
# Kinds of tests: the name, the marks, the estimate, the number of seeds, and the folders.
KINDS = (
    ("drawn", "deterministic and not search", 300, 2, "unit transports faults"),
    ("real", "real and not search", 300, 0, "unit transports examples project torch_backend gpu"),
    ("searched", "search", 400, 1, "unit transports faults examples project gpu"),
)
CAMPAIGNS = (
    *(Campaign(f"conformance-{on}-{loop}", f"Runs all checks of the conformance suite on {on} and {loop}.",
               (PYTHON, "-m", "pytest", "--pyargs", "aiocomms.testing.conformance", f"--transport={on}",
                f"--loops={loop}", "--full", "--seed={seed}", "--deadline=100"), estimate=100, seeds=1)
      for on in ("local", "c10d", "ucx", "ucx@processes") for loop in ("asyncio", "uvloop", "trio")),
    *(_tests(f"{kind}-{folder}", f"Runs the tests of tests/{folder} that are {marks}.", "-m", marks, f"tests/{folder}",
             *(f"--ignore={path}" for path in OWN), estimate=estimate, seeds=seeds)
      for kind, marks, estimate, seeds, folders in KINDS for folder in folders.split()),
    _tests("searched-launchers", "Runs jobs by MPI and torchrun.", "-m", "search", "tests/launchers", estimate=300,
           needs=[f"{ROOT}/build/launchers/{mpi}/bin/mpiexec" for mpi in ("openmpi-5.0", "mpich-5.0")]),
    _tests("faults", "Runs the fault catalogue with all victims and delays.", "-m", "real or fault",
           "tests/faults", estimate=1800, limit=7200),
    Campaign("differential", "Looks for programs that end otherwise by gloo, the backend and communicators.",
             (PYTHON, "tests/torch_backend/differential.py", "--seed={seed}", "--programs=2000"), 80, 1),
    _tests("mutants", "Looks for mutants of a transport that the suite does not notice.", OWN[0], estimate=300),
    _tests("stress", "Looks for lanes that lose or mix requests when hundreds are at work.", OWN[1], estimate=120),
    _tests("fuzz", "Looks for bytes and texts that a reader does not refuse properly.", OWN[2], estimate=15, seeds=5),
    *(Campaign(f"soak-{on}", "Looks for hangs, wrong data and leaks when ranks are killed and replaced.",
               (PYTHON, "tests/faults/soak.py"), 75, 1,
               {"SOAK_TRANSPORT": on, "SOAK_SEED": "{seed}", "SOAK_SECONDS": "{seconds}"}) for on in ("ucx", "c10d")),
    Campaign("chaos", "Looks for hangs and crashes when all around the ranks goes wrong.",
             (PYTHON, "tests/faults/chaos.py"), 75, 1, {"CHAOS_SEED": "{seed}", "CHAOS_SECONDS": "{seconds}"}),
    _make("engine", "Looks for data races and wrong memory in the engine of ucx, under sanitizers.",
          "test-sanitizers ENGINE_SECONDS={seconds} SEED={seed}", 1200, needs="g++", seeds=1, limit=7200),
    _make("hosts", "Runs torch's own tests and Ray's programs with aiocomms.", "test-hosts", 900),
    _make("cupy", "Looks for differences between the nccl transport and the real wheels.", "test-cupy", 120),
    _make("launchers", "Runs jobs by every launcher.", "test-launchers", 600, "munged slurmctld slurmd srun ip root"),
    _make("wheels", "Runs new wheels in empty environments.", "wheels test-wheels WHEEL_PYTHONS=3.11", 900),
    _make("litmus", "Looks for outcomes of shared memory that nobody should see.", "litmus", 120),
    _make("aarch64", "Runs the engine for aarch64.", "test-aarch64", 600, "aarch64-linux-gnu-g++ qemu-aarch64"),
    _make("shipping", "Reads the site.", "test-shipping verifytypes", 300, "chromium|chromium-browser|google-chrome"),
    _make("types", "Looks for public names whose types a checker does not know.", "verifytypes", 120),
    _make("serve", "Looks for wrong answers of the server under load.", "bench-serve SECONDS=2", 300),
    _make("kills", "Looks for wrong answers while ranks are killed.", "bench-serve-kills SECONDS={seconds}", 120),
)  # fmt: skip


def has(need: str) -> bool:
    """Return whether there is a program (of ``a|b``, one of them), or ``make TARGET``, or the user ``root``."""
    if need.startswith("make "):
        return f"\n{need[5:]}:" in (ROOT / "Makefile").read_text()
    return os.geteuid() == 0 if need == "root" else any(map(shutil.which, need.split("|")))


def filled(campaign: Campaign, seed: int | None) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a run."""
    values = {"seed": seed, "seconds": 60}
    environment = {name: it.format(**values) for name, it in campaign.environment.items()}
    return [it.format(**values) for it in campaign.command], environment


def repeat_command(campaign: Campaign, seed: int | None) -> str:
    """Return the line for a shell, in the root of the checkout, that repeats a run."""
    command, environment = filled(campaign, seed)
    return " ".join([*(f"{name}={shlex.quote(it)}" for name, it in environment.items()), shlex.join(command)])


def read_seeds(text: str, table: Sequence[Campaign]) -> list[tuple[Campaign, int]]:
    """Read tests/seeds.txt."""
    seeded, found = {it.name: it for it in table if it.seeds}, []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) == 2 and words[0] in seeded and re.fullmatch("[0-9]+", words[1]):
            found.append((seeded[words[0]], int(words[1])))
        elif words:
            wanted = "'<campaign> <seed>  # <date> <what failed>', with a campaign that has seeds"
            raise ValueError(f"tests/seeds.txt, line {number}: got {line!r}, wanted {wanted}: {', '.join(seeded)}")
    return found


def read_state(path: Path) -> dict[str, Any]:
    """Read where the last call ended: when its cycle began, what it repeated, and the numbers of each campaign."""
    new = {"cycle": 0.0, "repeated": [], "campaigns": {}}
    try:
        return new | json.loads(path.read_text()) if path.exists() else new
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: got {error}, wanted what a search wrote; delete it to begin anew") from None


def numbers(state: dict[str, Any], campaign: Campaign) -> dict[str, Any]:
    """Return the numbers of a campaign: ``when`` its last turn ended, how many seconds a run ``took``, and others."""
    new = {"runs": 0, "failures": 0, "seconds": 0.0, "seed": None, "when": 0.0, "took": campaign.estimate}
    return state["campaigns"].setdefault(campaign.name, new)


def choose(campaigns: Sequence[Campaign], state: dict[str, Any], left: float) -> Campaign:
    """Choose the campaign that fits into the seconds left and ran longest ago; of new campaigns, the quickest."""
    by_length = sorted(campaigns, key=lambda it: numbers(state, it)["took"])
    fitting = [it for it in by_length if numbers(state, it)["took"] <= left]
    return min(fitting or by_length[:1], key=lambda it: numbers(state, it)["when"])


def count(state: dict[str, Any], run: Run) -> None:
    """Add a run to the state. One that was cut off says only that it takes longer."""
    it = numbers(state, run.campaign)
    it["took"] = max(it["took"], run.seconds) if run.outcome == CUT_OFF else run.seconds
    if run.outcome != CUT_OFF:
        it |= {"runs": it["runs"] + 1, "failures": it["failures"] + (run.outcome == FAILED)}
        it |= {"seconds": it["seconds"] + run.seconds, "seed": run.seed}


def judge(campaign: Campaign, status: int | None, cut_off: bool) -> tuple[str, str]:
    """Say how a run ended, and why it failed, from its exit status; None: its time was over."""
    if status is None:
        return (CUT_OFF, "") if cut_off else (FAILED, f"it took more than its limit of {campaign.limit:.0f} s")
    if status == 5 and "pytest" in campaign.command:
        return FAILED, "the campaign is defined wrongly: pytest collected no tests, exit status 5"
    return (FAILED, f"exit status {status}") if status else (PASSED, "")


def execute(command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float) -> int | None:
    """Run a command in a process group of its own, and return its exit status; None: it was ended at the limit."""
    inherited = {name: it for name, it in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    with log.open("w") as file:
        rest = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env={**inherited, **environment}, **rest)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # ends processes that the command has left too
            for ends in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, ends)
                    process.wait(GRACE)


class Search:
    """A call: it runs campaigns until its time is over."""

    def __init__(self, campaigns: Sequence[Campaign], seeds: Sequence[tuple[Campaign, int]], folder: Path) -> None:
        self.folder, self.state, self.ends = folder, read_state(folder / "state.json"), 0.0
        needs = [(it, [need for need in it.needs if not has(need)]) for it in campaigns]
        self.not_run = {it.name: f"needs {', '.join(missing)}" for it, missing in needs if missing}
        self.live = [it for it, missing in needs if not missing]
        self.seeds = [pair for pair in seeds if pair[0] in self.live]
        self.runs: list[Run] = []

    def go_on(self, seconds: float, cycles: int) -> None:
        """Run campaigns until the time is over. A campaign that has failed does not run again."""
        self.ends = time.monotonic() + seconds
        while self.live and cycles > 0 and time.monotonic() < self.ends:
            again = [it for it in self.seeds if f"{it[0].name} {it[1]}" not in self.state["repeated"]]
            if all(numbers(self.state, it)["when"] > self.state["cycle"] for it in self.live):
                self.state |= {"cycle": time.time(), "repeated": []}
                cycles -= 1
            elif not again:
                self.turn(choose(self.live, self.state, self.ends - time.monotonic()))
            elif self.run(*again[0]) != CUT_OFF:
                self.state["repeated"].append(f"{again[0][0].name} {again[0][1]}")

    def turn(self, campaign: Campaign) -> None:
        """Run a campaign with as many new seeds as it has in its turn."""
        seeds = [random.SystemRandom().randrange(2**31) for _ in range(campaign.seeds)] or [None]
        outcome = next((it for it in (self.run(campaign, seed) for seed in seeds) if it != PASSED), PASSED)
        if outcome == FAILED:
            self.live.remove(campaign)
        if outcome != CUT_OFF:
            numbers(self.state, campaign)["when"] = time.time()

    def run(self, campaign: Campaign, seed: int | None) -> str:
        """Run a command once, print a line, and return the outcome."""
        name = campaign.name if seed is None else f"{campaign.name}-{seed}"
        print(f"{name}: ", end="", flush=True)
        log, began, outcome, why = self.folder / f"{name}.log", time.monotonic(), CUT_OFF, ""
        limit = min(campaign.limit, max(0.0, self.ends - began))
        self.save()
        log.touch()
        try:
            status = execute(*filled(campaign, seed), log, limit)
            outcome, why = judge(campaign, status, limit < campaign.limit)
        finally:  # runs after Ctrl-C too
            last = "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
            self.runs.append(Run(campaign, seed, outcome, why, time.monotonic() - began, last))
            count(self.state, self.runs[-1])
            print(f"{outcome}{why and ': '}{why}, {self.runs[-1].seconds:.1f} s", flush=True)
        return outcome

    def save(self) -> None:
        """Write the state atomically: a reader finds the new state or the previous one."""
        new = self.folder / "state.new"
        new.write_text(json.dumps(self.state, indent=1))
        new.replace(self.folder / "state.json")


def summary(runs: Sequence[Run], not_run: Mapping[str, str], state: dict[str, Any], today: dt.date) -> str:
    """Return what a call has found, as Markdown."""
    lines = [f"Search of {today}.\n", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for campaign in {run.campaign.name: run.campaign for run in runs}.values():
        own = [run for run in runs if run.campaign == campaign]
        ended = [run for run in own if run.outcome != CUT_OFF]
        seconds, failed = sum(run.seconds for run in own), sum(run.outcome == FAILED for run in own)
        rate = f"{60 * len(ended) / seconds:.1f}" if campaign.seeds and ended else ""
        total = numbers(state, campaign)
        cells = [len(ended), failed, len(own) - len(ended), f"{seconds:.0f}", rate, total["runs"], total["failures"]]
        lines.append(f"| {' | '.join(map(str, [campaign.name, *cells]))} |")
    lines += [f"\nNot run: {name}: {why}." for name, why in not_run.items()]
    return "\n".join([*lines, *(failure(run, today) for run in runs if run.outcome == FAILED)]) + "\n"


def failure(run: Run, today: dt.date) -> str:
    """Return what there is to know of a run that failed, as Markdown."""
    name, seeded = run.campaign.name, run.seed is not None
    line = f"\nLine for tests/seeds.txt, if it is new: `{name} {run.seed}  # {today} {run.why}`\n" if seeded else ""
    return (
        f"\n**{name}{f', seed {run.seed}' if seeded else ''}: {run.why}.** {run.campaign.what} It ended with:\n\n"
        f"```\n{run.last}\n```\n\nThis repeats it:\n\n```\n{repeat_command(run.campaign, run.seed)}\n```\n{line}"
    )


def arguments(given: Sequence[str] | None, table: Sequence[Campaign]) -> argparse.Namespace:
    """Read the command line."""
    known = {it.name: it for it in table}
    parser = argparse.ArgumentParser(description="Search for defects with new seeds.")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to end; 60 if not given")
    parser.add_argument("--campaigns", default=",".join(known), metavar="A,B", help="only these")
    parser.add_argument("--cycles", type=int, default=sys.maxsize, metavar="N", help="end after so many")
    options = parser.parse_args(given)
    names = options.campaigns.split(",")
    for option in ("minutes", "cycles"):
        if not getattr(options, option) > 0:
            parser.error(f"argument --{option}: got {getattr(options, option)}, wanted a number above 0")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"argument --campaigns: got {', '.join(map(repr, unknown))}, wanted some of {','.join(known)}")
    options.campaigns = [it for name, it in known.items() if name in names]
    return options


def main(given: Sequence[str] | None = None, table: Sequence[Campaign] = CAMPAIGNS, root: Path = ROOT) -> int:
    """Search, and say what was found."""
    options, folder = arguments(given, table), root / "build" / "search"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seeds = root / "tests" / "seeds.txt"
            known = read_seeds(seeds.read_text(), table) if seeds.exists() else []
            search = Search(options.campaigns, known, folder)
        except BlockingIOError:
            print(f"search: another search writes into {folder}: wait for its end", file=sys.stderr)
            return 2
        except ValueError as error:
            print(f"search: {error}", file=sys.stderr)
            return 2
        with contextlib.suppress(KeyboardInterrupt):
            search.go_on(60 * options.minutes, options.cycles)
        search.save()
        began = [run.campaign for run in search.runs]
        late = {it.name: numbers(search.state, it)["took"] for it in search.live if it not in began}
        search.not_run |= {name: f"its turn did not come; it takes about {took:.0f} s" for name, took in late.items()}
        text = summary(search.runs, search.not_run, search.state, dt.datetime.now(dt.UTC).date())
        (folder / "summary.md").write_text(text)
    print(f"\n{text}")
    return int(any(run.outcome == FAILED for run in search.runs))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
