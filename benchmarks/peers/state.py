"""The states of a virtual machine: another one slows a core down, or the two cores' caches are far apart.

Both come and go for minutes, and cost small operations half as much again; so each trial is labelled. A probe is an
empty loop on two cores at once, and round trips of a cache line between them: the shortest of each, within 1 ms.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

from benchmarks.peers.worker import cores, die_with_parent

BATCHES, TRIPS, STEPS = 10, 20, 300
LINE = 128
"""Bytes between the two sides' words: two cache lines, for some processors fetch them in pairs."""
MOST_LOOKS = 100_000_000
SLOW, FAR = 1.25, 1.35
"""Times the best of the run from which a core counts as slowed down, and caches as far: half of what was seen."""


class State(NamedTuple):
    """What a probe has found, in ns; of a trial the worse of the probe before and the one after it."""

    loop: float
    """An empty loop's step, on the slower core."""
    trip: float
    """From one core to the other and back, with what Python takes for it; 0 where there is one core."""

    def worst(self, other: State) -> State:
        """The worse of both."""
        return State(max(self.loop, other.loop), max(self.trip, other.trip))


def kinds(trials: Sequence[Sequence[float]], best: State) -> dict[str, int]:
    """How many trials were in which state, of which there are up to four."""
    counts = {"quiet": 0, "slow": 0, "far": 0, "slow and far": 0}
    for loop, trip in trials:
        slow, far = loop > SLOW * best.loop, trip > FAR * best.trip
        counts["slow and far" if slow and far else "slow" if slow else "far" if far else "quiet"] += 1
    return counts


class Probe:
    """The driver on the first core, and a process on the last, which sleeps but during a probe."""

    def __init__(self) -> None:
        self._cores = sorted(cores())
        spawn = multiprocessing.get_context("spawn")
        self._words = RawArray("b", 2 * LINE)
        self._first = 1  # the number of the next round trip
        self._process = self._end = None
        if len(self._cores) > 1:
            self._end, theirs = spawn.Pipe()
            self._process = spawn.Process(target=answer, args=(theirs, self._words, self._cores[-1]), daemon=True)
            self._process.start()
            self._end.recv()

    def begin(self) -> None:
        """Before the first trial of a row."""
        self.trials: list[State] = []
        self._last = self.look()

    def note_trial(self) -> None:
        """After each trial."""
        last, self._last = self._last, self.look()
        self.trials.append(last.worst(self._last))

    def look(self) -> State:
        """The host's state now. The ranks must stand still."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._cores[0]})
        try:
            if self._end is None:
                return State(loop(), 0.0)
            self._end.send(self._first)
            mine, theirs = halves(self._words)
            trip = min(batch(mine, theirs, self._first + n * TRIPS) for n in range(BATCHES))
            self._first += BATCHES * TRIPS
            return State(max(loop(), self._end.recv()), trip)
        finally:
            os.sched_setaffinity(0, before)

    def kill(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def halves(words: Any) -> tuple[memoryview, memoryview]:
    """The driver's word and the other's."""
    view = memoryview(words).cast("B").cast("q")
    return view[:1], view[LINE // 8 : LINE // 8 + 1]


def batch(mine: memoryview, theirs: memoryview, first: int) -> float:
    """Nanoseconds for a round trip, the mean of some."""
    began = time.perf_counter_ns()
    for number in range(first, first + TRIPS):
        mine[0] = number
        await_word(theirs, number)
    return (time.perf_counter_ns() - began) / TRIPS


def await_word(word: memoryview, number: int) -> None:
    """Wait for the other core."""
    for _ in range(MOST_LOOKS):
        if word[0] == number:
            return
    raise TimeoutError("the other core does not answer")


def loop() -> float:
    """Nanoseconds for a step of an empty loop, the shortest of some."""
    times = []
    for _ in range(BATCHES):
        began = time.perf_counter_ns()
        for _ in range(STEPS):
            pass
        times.append(time.perf_counter_ns() - began)
    return min(times) / STEPS


def answer(driver: Connection, words: Any, core: int) -> None:
    """The other side of the probes."""
    die_with_parent()
    os.sched_setaffinity(0, {core})
    theirs, mine = halves(words)
    driver.send(None)
    while True:
        first = driver.recv()
        for number in range(first, first + BATCHES * TRIPS):
            await_word(theirs, number)
            mine[0] = number
        driver.send(loop())
