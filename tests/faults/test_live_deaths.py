"""A live group of four processes with a hundred tasks each: every second one is killed and replaced, or stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

pytestmark = [pytest.mark.real, pytest.mark.search, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("live_rank.py")
SIZE = 4
DEATHS = int(os.environ.get("LIVE_DEATHS", "30"))


class Group:
    """The processes of all ranks, of which some have begun."""

    def __init__(self, log: Path) -> None:
        self.log, self._started = log, 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers: dict[int, int] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(SIZE):
            self.start(rank)

    def start(self, rank: int) -> None:
        self._started += 1
        self._numbers[rank] = self._started
        given = map(str, (self._store.port, rank, SIZE, self._started, self.log))
        self.processes[rank] = subprocess.Popen([sys.executable, PROGRAM, *given])

    def begun(self) -> list[int]:
        """Return the ranks whose processes are in the group."""
        return [rank for rank, number in self._numbers.items() if Path(f"{self.log}.{number}").exists()]

    def kill(self, rank: int) -> None:
        assert self.processes[rank].poll() is None, "a rank has ended that was not killed"
        self.processes[rank].kill()
        self.processes[rank].wait()

    def stop(self, rank: int) -> None:
        """Have a process stand still for longer than a call takes."""
        self.processes[rank].send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        self.processes[rank].send_signal(signal.SIGCONT)


def test_results_are_right_for_the_ranks_that_they_carry_while_ranks_die(tmp_path):
    group = Group(tmp_path / "log")
    deaths = 0
    try:
        while deaths < DEATHS:
            time.sleep(1)
            if len(begun := group.begun()) > SIZE // 2:  # The memory ends with the last process that has it.
                victim = random.choice(begun)
                if random.random() < 0.3:
                    group.stop(victim)
                else:
                    group.kill(victim)
                    group.start(victim)
                    deaths += 1
        for process in group.processes.values():
            process.terminate()
        codes = {process.wait(60) for process in group.processes.values()}
        assert codes <= {0, -signal.SIGTERM}, "some may not have begun"
    finally:
        for process in group.processes.values():
            process.kill()
            process.wait()
    judge(group.log.read_text().splitlines())


def judge(lines: list[str]) -> None:
    """Compare the results of all ranks, and print how long calls took."""
    results: dict[tuple[str, int], object] = {}
    calls: dict[int, tuple[str, int]] = {}
    times, partial = [], 0
    for line in lines:
        lane, number, ranks, values, first, rank, took = json.loads(line)
        call = lane, number
        assert results.setdefault(call, (ranks, values)) == (ranks, values)
        assert [it for it, value in enumerate(values) if value] == ranks
        for it in ranks:
            assert calls.setdefault(values[it], call) == call, "a contribution is in two calls"
        assert not first or rank in ranks, "a new process was not in its first call"
        times.append(took)
        partial += len(ranks) < SIZE
    assert partial
    times.sort()
    print(
        f"{len(results)} calls, {len(lines)} results, {partial} without all ranks; "
        f"median {statistics.median(times):.4f} s, p99 {times[int(len(times) * 0.99)]:.4f} s, at most {times[-1]:.4f} s"
    )
