"""``make soak``: ranks that work, cancel, are stopped, killed and replaced, for as long as SOAK_SECONDS says.

A parent that has loaded everything forks the ranks, so that a new one costs milliseconds. In each communicator they do
the same random ops, checked, in the same order. Then one of them is killed, or stopped for a moment, or all close.
After a SIGKILL the survivors reconfigure: with a new process at once, or without one, which they admit later. After a
close all form a communicator over a fresh store. Any rank may be killed, also rank 0; but one process is spared, and
its memory is measured. The soak ends non-zero on a hang, wrong data, a survivor's crash, a leak after a close, or a
broken bound of those below.

    SOAK_SECONDS=3600 SOAK_SEED=7 SOAK_TRANSPORT=c10d python tests/faults/soak.py
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from soak_rank import Heard, Order, child  # noqa: E402 - found by the path above

SIZE = 4
SILENCE = 60.0
"""Seconds after which a silent rank counts as hung; an op that hangs has an earlier deadline of its own."""
NOTICE, RECOVERY = 1.0, 3.0
"""The bounds of the 99th percentiles, in seconds."""
SLOPE = 2.0
"""The bound of a process's growth, in MiB per hour; a run of less than LONG seconds cannot show it."""
LONG = 1800.0
_M_ARENA_MAX = -8
"""The option of malloc.h for the number of heaps from which threads allocate."""


@dataclass
class Process:
    """A rank's process, as its parent sees it."""

    pid: int
    pipe: Connection
    memory: list[tuple[float, int]] = field(default_factory=list)

    def hear(self) -> Heard | str:
        """Return the next report of the process, or the text of its failure."""
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return f"a crash: process {os.waitpid(self.pid, 0)}"
        assert isinstance(said, Heard | str)
        return said

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # The process has crashed already.
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.pipe.close()


def hear(processes: list[Process]) -> list[Heard]:
    """Return the next report of each process; if one fails, raise with the failures of all."""
    heard: dict[int, Heard | str] = {}
    ends = time.monotonic() + SILENCE
    while missing := {it.pipe: it for it in processes if it.pid not in heard}:
        ready = wait(list(missing), max(0.0, ends - time.monotonic()))
        for pipe in ready:
            process = missing[pipe]  # type: ignore[index]  # All are connections.
            heard[process.pid] = process.hear()
            if isinstance(heard[process.pid], str):
                ends = min(ends, time.monotonic() + 2)
        if not ready:
            heard.update({it.pid: f"a hang: process {it.pid}" for it in missing.values()})
    failures = [said for said in heard.values() if isinstance(said, str)]
    assert not failures, "\n".join(failures)
    return [said for it in processes if isinstance(said := heard[it.pid], Heard)]


class Soak:
    """The parent, which forks, kills and stops ranks, and counts."""

    def __init__(self, transport: str, seed: int) -> None:
        self.transport = transport
        self.rng = random.Random(seed)
        self.ranks: list[Process | None] = [None] * SIZE
        self.counts: Counter[str] = Counter()
        self.notices: list[float] = []
        self.recoveries: list[float] = []
        self.folder = ""
        self.fill()
        self.spared = self.present()[1]

    def present(self) -> list[Process]:
        return [it for it in self.ranks if it is not None]

    def fill(self) -> list[int]:
        """Fork a process for each free rank, and return these ranks."""
        free = [rank for rank, process in enumerate(self.ranks) if process is None]
        for rank in free:
            mine, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                for pipe in (mine, *(it.pipe for it in self.present())):
                    pipe.close()
                child(theirs, self.transport)
            theirs.close()
            self.ranks[rank] = Process(pid, mine)
            self.counts["processes"] += 1
        return free

    def life(self) -> None:
        """Run communicators from a fresh store to the close of the last one on it."""
        old, self.folder = self.folder, tempfile.mkdtemp(prefix="soak-")
        killed: float | None = None
        came: list[int] = []
        while True:
            grows = len(self.ranks) < SIZE
            fate = self.rng.choices(["kill", "stop", "close"], [10, 1, 6])[0]
            killed = self.communicator(came, fate, grows, killed)
            if fate != "kill" and not grows:
                break
            came = self.replace(may_shrink=fate == "kill" and not grows)
        # The current folder stays: a FileStore that ends would look for a vanished file until its timeout, 300 s.
        shutil.rmtree(old, ignore_errors=True)

    def replace(self, may_shrink: bool) -> list[int]:
        """Fork processes for all free ranks and return these ranks; or shrink to the survivors, and return none."""
        if may_shrink and self.rng.random() < 0.3:
            self.ranks = [it for it in self.ranks if it is not None]
            self.counts["shrunk"] += 1
            return []
        self.ranks += [None] * (SIZE - len(self.ranks))
        return self.fill()

    def communicator(self, came: list[int], fate: str, grows: bool, killed: float | None) -> float | None:
        """Run one communicator to its end; return when one of its ranks was killed, or None."""
        steps = None if fate == "kill" else self.rng.randrange(20, 200)
        order = Order(self.folder, 0, len(self.ranks), self.rng.randrange(2**31), steps, bool(came), grows)
        victim = self.rng.choice([rank for rank, it in enumerate(self.ranks) if it is not self.spared])
        pause = self.rng.uniform(0, 0.5)
        for rank, it in enumerate(self.present()):
            it.pipe.send(order._replace(rank=rank))
        formed = max(said.at for said in hear(self.present()))
        if killed is not None:
            self.recoveries.append(formed - killed)
        self.counts[fate if fate != "close" or not grows else "grown"] += 1
        self.counts["communicators"] += 1
        time.sleep(pause)
        if fate == "kill":
            return self.kill(victim)
        if fate == "stop":
            self.stop(victim)
        self.collect()
        return None

    def kill(self, victim: int) -> float:
        process, self.ranks[victim] = self.ranks[victim], None
        assert process is not None
        killed = time.monotonic()
        process.kill()
        for said in self.collect():
            self.notices.append(said.at - killed)
            assert said.peer == victim, f"rank {said.peer} is blamed, not {victim}"
        return killed

    def stop(self, victim: int) -> None:
        process = self.ranks[victim]
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGCONT)

    def collect(self) -> list[Heard]:
        """Return how the communicator ended on each remaining rank."""
        heard = hear(self.present())
        for it, said in zip(self.present(), heard, strict=True):
            self.counts.update(said.counts or {})
            if said.memory is not None:
                it.memory.append((said.at, said.memory))
        return heard

    def say(self, elapsed: float) -> None:
        counts = ", ".join(f"{value} {key}" for key, value in sorted(self.counts.items()))
        print(
            f"{elapsed:6.0f} s: {counts}; notice {times(self.notices)}; recovery {times(self.recoveries)}", flush=True
        )

    def broken(self, elapsed: float) -> list[str]:
        """Return the bounds that the run has broken."""
        found = [
            f"the p99 of {what} is {value:.3f} s"
            for what, bound, values in (("notice", NOTICE, self.notices), ("recovery", RECOVERY, self.recoveries))
            if values and (value := p99(values)) >= bound
        ]
        if elapsed >= LONG and not (grows := slope(self.spared.memory)) < SLOPE:
            found.append(f"the spared process grows by {grows:.1f} MiB/h")
        return found

    def end(self) -> None:
        for it in self.present():
            it.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def times(values: list[float]) -> str:
    if not values:
        return "-"
    return f"p50 {statistics.median(values):.3f} s, p99 {p99(values):.3f} s, max {max(values):.3f} s"


def slope(samples: list[tuple[float, int]]) -> float:
    """Return the growth after the first third, in MiB per hour: the median slope between 100 medians (Theil-Sen).

    A few large values at either end do not tilt it, unlike a least-squares line.
    """
    late = samples[len(samples) // 3 :]
    width = max(1, len(late) // 100)
    chunks = [late[at : at + width] for at in range(0, len(late), width)]
    points = [(statistics.median(at for at, _ in it), statistics.median(held for _, held in it)) for it in chunks]
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)]
    return statistics.median(pairs) * 3600 / 2**20 if pairs else float("nan")


def summary(soak: Soak, elapsed: float) -> str:
    """Return the figures of a run for docs/benchmarks/core.md."""
    n = soak.counts
    held = [value / 2**20 for _, value in soak.spared.memory]
    sixths = [held[len(held) * sixth // 6 :][: max(1, len(held) // 6)] for sixth in range(6)]
    return (
        f"{elapsed:.0f} s, `{soak.transport}`: {n['ops']:,} verified ops on the ranks together, "
        f"{n['cancellations']:,} cancellations, {n['kill']:,} SIGKILLs, {n['stop']:,} SIGSTOPs, "
        f"{n['close'] + n['stop']:,} orderly closes and fresh communicators, {n['processes']:,} processes; "
        f"{n['shrunk']:,} times {SIZE - 1} ranks went on without a new one.\n"
        f"Notice of a SIGKILL, on each survivor: {times(soak.notices)}.\n"
        f"Recovery, from a SIGKILL to the first verified op on the last rank of the new communicator: "
        f"{times(soak.recoveries)}.\n"
        f"Memory of the process that lived through all, with no communicator open: {held[0]:.1f} MiB at first; "
        f"{', '.join(f'{statistics.median(it):.2f}' for it in sixths)} in each sixth of the run; "
        f"{slope(soak.spared.memory):+.2f} MiB/h "
        f"(Theil-Sen, of {len(held):,} samples without the first third; anonymous memory, after gc and malloc_trim)."
    )


def main() -> int:
    """Run the soak, print the counts meanwhile, and print the outcome."""
    seconds = float(os.environ.get("SOAK_SECONDS", "60"))
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(2**31)))
    transport = os.environ.get("SOAK_TRANSPORT", "ucx")
    os.environ.setdefault("AIOCOMMS_RECORDER_DIR", "")
    # Each of several heaps keeps pages of which little is in use, and their sum would hide a leak, or look like one.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    __import__(f"aiocomms_{transport}")
    gc.freeze()  # The collector need not look through what the ranks inherit.
    print(f"soak: SOAK_SEED={seed} SOAK_TRANSPORT={transport} SOAK_SECONDS={seconds:.0f}", flush=True)
    # UCX's files in this folder are the soak's own, so a file left there is a leak. Others use /dev/shm, too.
    shared = os.environ["UCX_POSIX_DIR"] = tempfile.mkdtemp(prefix="soak-", dir="/dev/shm")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # A SIGTERM of the search leaves no folder.
    soak, began, said = Soak(transport, seed), time.monotonic(), 0.0
    failures: list[str] = []
    try:
        while (elapsed := time.monotonic() - began) < seconds:
            soak.life()
            if elapsed - said > max(10.0, seconds / 60):
                soak.say(elapsed)
                said = elapsed
    except AssertionError as error:
        failures.append(str(error))
    finally:
        soak.end()
        left = [path.name for path in Path(shared).iterdir()]
        shutil.rmtree(shared)
    elapsed = time.monotonic() - began
    failures += soak.broken(elapsed)
    if left:
        failures.append(f"left in {shared}: {left}")
    return conclude(soak, elapsed, failures, seed)


def conclude(soak: Soak, elapsed: float, failures: list[str], seed: int) -> int:
    soak.say(elapsed)
    if soak.spared.memory:
        print(summary(soak, elapsed), flush=True)
    for failure in failures:
        print(f"FAILED: {failure}\n(SOAK_SEED={seed})", flush=True)
    if not failures:
        print(
            "0 hangs, 0 wrong data, 0 crashes of survivors, 0 drift of descriptors, threads, shared memory and tasks."
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
