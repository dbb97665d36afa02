"""Many leases between five processes that are killed, and stand still, at any time: none lost, freed twice, or foreign.

``LEASES=1000000`` sets how many there are, ``LEASES_SEED`` what is drawn. It prints what has become of them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lease_rank
import pytest
from lease_rank import BORROWERS, COUNTS, LENDERS, PATIENCE, Counts, Place

pytestmark = [pytest.mark.real, pytest.mark.search, pytest.mark.timeout(0)]

LEASES = int(os.environ.get("LEASES", "4000"))
SEED = int(os.environ.get("LEASES_SEED", "1"))
PAUSE = float(os.environ.get("LEASES_PAUSE", "0.4"))
"""Seconds between two disturbances, in the mean."""
IN_VAIN = 100
"""Disturbances without a lease in between, after which the processes hang."""
STANDS = (0.02, 0.3, 0.6)
"""Seconds for which a process stands still: from the second on it is given up, if it has a lease."""


class Crowd:
    """The processes in all slots."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.draw, self.events = folder, random.Random(SEED), Counter[str]()
        self.counts = Counts(folder / "counts")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pytest", "aiocomms_ucx", "aiocomms.communicator.opening", "lease_rank"])
        self.processes: dict[int, Any] = {}
        for slot in (*LENDERS, *BORROWERS):
            self.start(slot)

    def start(self, slot: int) -> None:
        self.events["processes"] += 1
        place = Place(slot, self.events["processes"], self.folder, SEED)
        self.processes[slot] = self._context.Process(target=lease_rank.main, args=(place,))
        self.processes[slot].start()

    def disturb(self) -> None:
        """Kill a process and start another one, or have it stand still for a while."""
        slot = self.draw.choice((*LENDERS, *BORROWERS))
        process = self.processes[slot]
        kind = "lender" if slot in LENDERS else "borrower"
        if self.draw.random() < 0.5:
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, self.failures()
            self.events[f"a {kind} was killed"] += 1
            self.start(slot)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(self.draw.choice(STANDS))
            os.kill(process.pid, signal.SIGCONT)
            self.events[f"a {kind} stood still"] += 1

    def check(self) -> None:
        """Check that no process has ended that was not killed."""
        assert all(process.exitcode is None for process in self.processes.values()), self.failures()

    def failures(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("failed *")) or "a process has ended"

    def end(self, slots: tuple[int, ...]) -> None:
        """Have processes look at what they have, and end."""
        self.counts.end(slots)
        for slot in slots:
            self.processes[slot].join(2 * PATIENCE)
            assert self.processes[slot].exitcode == 0, f"{slot}: {self.failures()}"

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    crowd = Crowd(tmp_path)
    yield crowd
    crowd.kill()
    crowd.counts.close()


def test_no_lease_is_lost_or_freed_twice_or_written_afterwards(crowd: Crowd) -> None:
    began = said = time.monotonic()
    before, in_vain = 0, 0
    while (leases := crowd.counts.total("leases")) < LEASES:
        before, in_vain = leases, 0 if leases > before else in_vain + 1
        assert in_vain < IN_VAIN, f"no lease was made between {IN_VAIN} disturbances: {report(crowd)}"
        time.sleep(crowd.draw.expovariate(1 / PAUSE))
        crowd.disturb()
        crowd.check()
        if (now := time.monotonic()) - said > 30:
            print(f"{now - began:.0f} s: {report(crowd)}", flush=True)
            said = now
    for slot in crowd.processes:
        os.kill(crowd.processes[slot].pid, signal.SIGCONT)
    crowd.end(LENDERS)
    crowd.end(BORROWERS)
    print(f"seed {SEED}: {report(crowd)} in {time.monotonic() - began:.0f} s")
    assert crowd.counts.total("reads")
    assert crowd.counts.total("writes")


def report(crowd: Crowd) -> str:
    counts = {name: crowd.counts.total(name) for name in COUNTS} | crowd.events
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
