"""The processors of the ranks: their number, their current speed, and the processes that compete for them.

Other virtual machines on the same processor may slow a rank down. Two processors may also have no common cache. Each
of these states can last for minutes. During these minutes, small operations take 1.5 times their usual time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aiocomms.communicator.communicator import Communicator

BATCHES, TRIPS, STEPS = 10, 20, 300
_LINE = 128
"""The distance in bytes between the memory words of the two ranks.

The distance is two cache lines, because some processors load cache lines in pairs.
"""
_LOOKS = 10_000_000
_NEIGHBOUR = "import ctypes\nctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"
"""A Python program that runs an endless loop, so it competes for a processor.

The kernel kills the process of this program when the parent process ends (``PR_SET_PDEATHSIG``).
"""

_processors = sorted(os.sched_getaffinity(0))


def processors() -> int:
    """Return the number of processors that this process could use at its start."""
    return len(_processors)


def bind(rank: int, size: int) -> None:
    """Bind all threads of this process to one processor. Each rank gets its own processor.

    If there are more ranks than processors, the threads stay unbound. If two ranks were bound to one processor, a rank
    of MPICH would have to wait for the end of the other rank's time slice.
    """
    if size <= len(_processors):
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), {_processors[rank]})


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """Run processes that compete with the ranks for processors. Each process has its own session.

    At the end of the context, kill the processes.

    :returns: the process IDs.
    """
    command = [sys.executable, "-S", "-c", _NEIGHBOUR]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]  # noqa: S603
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


class HostState(NamedTuple):
    """The speed of the processors of the first two ranks, as times in nanoseconds.

    Each time is the shortest of several measurements within 1 ms.
    """

    loop: float
    """The time of one iteration of an empty ``for`` loop in nanoseconds, on the slower of the two processors."""
    trip: float
    """The time in nanoseconds of a round trip through shared memory; 0 if the two ranks share no memory.

    In a round trip, each rank writes one word that the other rank polls. The time includes Python's overhead.
    """

    def worst(self, other: HostState) -> HostState:
        """Return a state that has, in each field, the larger value of this state and ``other``."""
        return HostState(max(self.loop, other.loop), max(self.trip, other.trip))


class HostProbe:
    """The object that measures the host's state while no operations are pending.

    All ranks call the methods of the object at the same time.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._words: mmap.mmap | None = None
        self._trips = 0

    async def open(self) -> None:
        """Map shared memory on the first two ranks, if they are two processes of one host."""
        comm = self._comm
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(2 * _LINE)
            places = await comm.all_gather_object((os.getpid(), file.fileno()))
            apart = len({pid for pid, _ in places}) == comm.size > 1
            mapped = _map("/proc/{}/fd/{}".format(*places[0])) if comm.rank < 2 and apart else None
            shared = await comm.all_gather_object(mapped is not None)
        self._words = mapped if shared[:2] == [True, True] else None

    async def look(self) -> HostState:
        """Return the current state, which is the same on all ranks.

        The measurement blocks the event loops of the first two ranks for some ms.
        """
        comm = self._comm
        await comm.barrier()
        mine = HostState(0.0, 0.0)
        if comm.rank < 2:
            with _on_own_processor(comm.rank):
                trip = self._round_trips()
                mine = HostState(_loop(), trip)
        states = await comm.all_gather_object(tuple(mine))
        return HostState(*map(max, zip(*states, strict=True)))

    def _round_trips(self) -> float:
        if self._words is None:
            return 0.0
        view = memoryview(self._words).cast("q")
        mine, theirs = view[:1], view[_LINE // 8 : _LINE // 8 + 1]
        if self._comm.rank == 1:
            mine, theirs = theirs, mine
        best = min(self._batch(mine, theirs) for _ in range(BATCHES))
        for part in (mine, theirs, view):
            part.release()
        return best

    def _batch(self, mine: memoryview, theirs: memoryview) -> float:
        """Return the time of one round trip in nanoseconds, as the mean of several round trips."""
        began, leads = time.perf_counter_ns(), self._comm.rank == 0
        for _ in range(TRIPS):
            self._trips += 1
            if leads:
                mine[0] = self._trips
            for _ in range(_LOOKS):
                if theirs[0] >= self._trips:
                    break
            if not leads:
                mine[0] = self._trips
        return (time.perf_counter_ns() - began) / TRIPS


def _map(path: str) -> mmap.mmap | None:
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), 2 * _LINE)
    except OSError:  # The file belongs to another host or to another user.
        return None


@contextlib.contextmanager
def _on_own_processor(rank: int) -> Iterator[None]:
    """Bind this thread to one processor until the context ends.

    Of the processors that the thread may use, rank 0 uses the first, and rank 1 uses the last.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[-rank]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _loop() -> float:
    """Return the time of one iteration of an empty ``for`` loop in nanoseconds.

    The time is the shortest of several measurements.
    """
    times = []
    for _ in range(BATCHES):
        began = time.perf_counter_ns()
        for _ in range(STEPS):
            pass
        times.append(time.perf_counter_ns() - began)
    return min(times) / STEPS
