"""``make soak``: ranks that work, cancel, are stopped, killed and replaced, for as long as SOAK_SECONDS says.

A parent that has loaded everything forks the ranks, so that a new one costs milliseconds. In each generation they form
a communicator over a fresh store, and do the same random ops, checked, in the same order; then one of them is killed,
or stopped for a moment, or all close. Rank 0 is spared, and its memory is watched. It ends non-zero on a hang, wrong
data, a survivor's crash, or anything that is held at the end of a generation and was not at the beginning.

    SOAK_SECONDS=3600 SOAK_SEED=7 SOAK_TRANSPORT=c10d python tests/faults/soak.py
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import psutil  # noqa: E402 - found by the path above
import torch  # noqa: E402
from oracle import holdings, settled  # noqa: E402
from processes import Rank, empty, numbers  # noqa: E402

from aiocomms.communicator import Communicator  # noqa: E402
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError, WorkCancelledError  # noqa: E402
from aiocomms.rma import Window  # noqa: E402

SIZE = 4
COUNTS = (1, 7, 400, 5_000, 60_013)
"""Elements of int64: from within a slot to the larger schedules."""
SILENCE = 15.0
"""Seconds after which a rank that says nothing hangs."""
WARM = 5
"""Generations after which a process has loaded what it keeps."""


# ------------------------------------------------------------------------------------------------------------ the ops


class Work:
    """A generation's ops on one rank; every rank draws the same ones from its seed."""

    def __init__(self, comm: Communicator, window: Window, seed: int, counts: Counter[str]) -> None:
        self.comm, self.window = comm, window
        self.rng = random.Random(seed)
        self.counts = counts
        self.turn = 0

    async def step(self) -> None:
        """Some ops at once, one of them now and then cancelled."""
        self.turn += 1
        kinds: list[Callable[[int], Awaitable[int]]] = [
            self.reduce, self.broadcast, self.gather, self.exchange, self.ring, self.objects, self.put, self.cancel
        ]  # fmt: skip
        chosen = [(self.rng.choice(kinds), self.rng.choice(COUNTS)) for _ in range(self.rng.randrange(1, 5))]
        for done in await asyncio.gather(*(kind(count) for kind, count in chosen)):
            self.counts["ops"] += done

    def mine(self, count: int, rank: int | None = None) -> torch.Tensor:
        return numbers(count, self.comm.rank if rank is None else rank, self.turn)

    def expect(self, got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        if not torch.equal(got, wanted):
            raise AssertionError(f"wrong data: {what} in turn {self.turn}")

    async def reduce(self, count: int) -> int:
        total = sum((self.mine(count, r) for r in range(SIZE)), empty(count))
        self.expect(await self.comm.all_reduce(self.mine(count)), total, "all_reduce")
        return 1

    async def broadcast(self, count: int) -> int:
        root = self.turn % SIZE
        self.expect(await self.comm.broadcast(self.mine(count), root), self.mine(count, root), "broadcast")
        return 1

    async def gather(self, count: int) -> int:
        row = torch.cat([self.mine(count, r) for r in range(SIZE)])
        work = self.comm.reduce_scatter_single(empty(count), row.clone())
        self.expect(await self.comm.all_gather_single(empty(SIZE * count), self.mine(count)), row, "all_gather")
        self.expect(await work, SIZE * self.mine(count), "reduce_scatter")
        return 2

    async def exchange(self, count: int) -> int:
        row = torch.cat([self.mine(count, r) for r in range(SIZE)])
        work = self.comm.all_to_all_single(empty(SIZE * count), self.mine(count).repeat(SIZE))
        await self.comm.barrier()
        self.expect(await work, row, "all_to_all")
        return 2

    async def ring(self, count: int) -> int:
        left, right = (self.comm.rank - 1) % SIZE, (self.comm.rank + 1) % SIZE
        given = self.comm.send(self.mine(count), right)
        self.expect(await self.comm.recv(empty(count), left), self.mine(count, left), "recv")
        await given
        return 2

    async def objects(self, count: int) -> int:
        got = await self.comm.all_gather_object({"rank": self.comm.rank, "turn": self.turn})
        assert got == [{"rank": rank, "turn": self.turn} for rank in range(SIZE)], f"wrong data: {got}"
        return 1

    async def put(self, count: int) -> int:
        """Each rank adds to one element of the next; the sums are checked at the generation's end."""
        await self.window.fetch_add((self.comm.rank + 1) % SIZE, 0, 1)
        self.counts["added"] += 1
        return 1

    async def cancel(self, count: int) -> int:
        """A receive that nothing matches, withdrawn; and a collective whose awaiter leaves, which completes."""
        reduced = self.comm.all_reduce(self.mine(count))  # at once: collectives are in one order on all ranks
        work = self.comm.recv(empty(count), (self.comm.rank + 1) % SIZE, 99)
        assert await work.cancel()
        with contextlib.suppress(WorkCancelledError):
            await work
        total = sum((self.mine(count, r) for r in range(SIZE)), empty(count))
        task = asyncio.ensure_future(wait(reduced))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.expect(await reduced, total, "all_reduce, awaited again")
        self.counts["cancellations"] += 2
        return 2


async def wait(work: Any) -> None:
    await work


# ----------------------------------------------------------------------------------------------------------- a rank


async def generation(place: Rank, seed: int, steps: int | None, counts: Counter[str]) -> dict[str, float]:
    """Form, work, and end: after so many steps, or when a peer is gone."""
    times: dict[str, float] = {}
    comm = await place.open(f"soak {seed}", timeout=SILENCE - 5)
    try:
        window = await comm.new_window(torch.zeros(8, dtype=torch.int64))
        await comm.all_reduce(torch.ones(3))
        times["formed"] = time.monotonic()
        place.tell(f"formed {place.rank}")
        work = Work(comm, window, seed, counts)
        before = counts["added"]
        while steps is None or work.turn < steps:
            await work.step()
        await comm.barrier()
        added = int(window.tensor[0])
        assert added == counts["added"] - before, f"wrong data: {added} of {counts['added'] - before}"
        await window.aclose()
    except (PeerDiedError, CommAbortedError) as error:
        if steps is not None:
            raise
        cause = error if isinstance(error, PeerDiedError) else error.__cause__
        if not isinstance(cause, PeerDiedError):
            raise
        times["noticed"] = time.monotonic()
        times["peer"] = -1 if cause.peer is None else cause.peer
        error.__traceback__ = None
    finally:
        await comm.aclose()
    return times


async def rank_main(pipe: Connection, rank: int, transport: str) -> None:
    """A rank's life: one generation after the other, as the parent asks for them."""
    loop = asyncio.get_running_loop()
    complaints: list[str] = []
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    counts: Counter[str] = Counter()
    lived, before = 0, None
    asked = asyncio.Event()
    loop.add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        folder, seed, steps = pipe.recv()
        asked.clear()
        times = await generation(Rank(transport, rank, SIZE, folder), seed, steps, counts)
        lived += 1
        gc.collect()
        if lived == WARM:
            before = holdings()
        elif before is not None:
            await settled(before)
        assert not complaints, complaints
        pipe.send((times, dict(counts), psutil.Process().memory_info().rss))
        counts.clear()


def child(pipe: Connection, rank: int, transport: str) -> None:
    torch.set_num_threads(1)
    try:
        asyncio.run(rank_main(pipe, rank, transport))
    except EOFError:
        pass  # the parent has enough
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


# ---------------------------------------------------------------------------------------------------------- the parent


class Soak:
    """The parent: forks, kills, stops, counts."""

    def __init__(self, transport: str, seed: int) -> None:
        self.transport = transport
        self.rng = random.Random(seed)
        self.pids: dict[int, int] = {}
        self.pipes: dict[int, Connection] = {}
        self.counts: Counter[str] = Counter()
        self.notices: list[float] = []
        self.recoveries: list[float] = []
        self.memory: list[tuple[float, int]] = []
        self.killed_at: float | None = None
        self.next_killed = 0.0

    def fork(self, rank: int) -> None:
        mine, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for pipe in (mine, *self.pipes.values()):
                pipe.close()
            child(theirs, rank, self.transport)
        theirs.close()
        self.pids[rank], self.pipes[rank] = pid, mine
        self.counts["processes"] += 1

    def generation(self) -> None:
        """One communicator's life, and what befalls it."""
        for rank in range(SIZE):
            if rank not in self.pids:
                self.fork(rank)
        fate = self.rng.choices(["kill", "stop", "close"], [10, 1, 10])[0]
        victim = self.rng.randrange(1, SIZE)
        steps = None if fate == "kill" else self.rng.randrange(20, 200)
        folder = tempfile.mkdtemp(prefix="soak-")
        seed = self.rng.randrange(2**31)
        try:
            for pipe in self.pipes.values():
                pipe.send((folder, seed, steps))
            self.wait_until_formed(Path(folder))
            time.sleep(self.rng.uniform(0, 0.3))
            if fate == "kill":
                self.kill(victim)
            elif fate == "stop":
                os.kill(self.pids[victim], signal.SIGSTOP)
                time.sleep(0.3)
                os.kill(self.pids[victim], signal.SIGCONT)
            self.counts[fate] += 1
            self.collect(victim if fate == "kill" else None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def wait_until_formed(self, folder: Path) -> None:
        ends = time.monotonic() + SILENCE
        while len(list(folder.glob("formed *"))) < SIZE:
            if any(pipe.poll() for pipe in self.pipes.values()):
                return  # one has failed, or all are done
            if time.monotonic() > ends:
                raise AssertionError("a hang: the ranks do not come together")
            time.sleep(0.001)

    def kill(self, victim: int) -> None:
        killed = time.monotonic()
        os.kill(self.pids[victim], signal.SIGKILL)
        os.waitpid(self.pids.pop(victim), 0)
        self.pipes.pop(victim).close()
        self.next_killed = killed

    def collect(self, victim: int | None) -> None:
        formed = 0.0
        for rank, pipe in self.pipes.items():
            if not pipe.poll(SILENCE):
                raise AssertionError(f"a hang: rank {rank}")
            try:
                said = pipe.recv()
            except EOFError:
                raise AssertionError(f"a crash: rank {rank}: {os.waitpid(self.pids[rank], 0)}") from None
            if isinstance(said, str):
                raise AssertionError(f"rank {rank}:\n{said}")
            times, counts, memory = said
            self.counts.update({key: value for key, value in counts.items() if key != "added"})
            formed = max(formed, times.get("formed", 0.0))
            if victim is not None:
                self.notices.append(times["noticed"] - self.next_killed)
                assert times["peer"] == victim, f"rank {rank} blames rank {times['peer']}, not {victim}"
            if rank == 0:
                self.memory.append((time.monotonic(), memory))
        if self.killed_at is not None:
            self.recoveries.append(formed - self.killed_at)
        self.killed_at = self.next_killed if victim is not None else None

    def slope(self) -> float:
        """MiB per hour of rank 0's memory, after the first third."""
        late = self.memory[len(self.memory) // 3 :]
        if len(late) < 3:
            return float("nan")
        return statistics.linear_regression(*zip(*late, strict=True)).slope * 3600 / 2**20

    def say(self, elapsed: float) -> None:
        counts = ", ".join(f"{value} {key}" for key, value in sorted(self.counts.items()))
        print(f"{elapsed:6.0f} s: {counts}; notice {p99(self.notices)}; recovery {p99(self.recoveries)}", flush=True)

    def end(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def p99(values: list[float]) -> str:
    if not values:
        return "-"
    worst = sorted(values)
    return f"p50 {statistics.median(worst):.3f} p99 {worst[int(len(worst) * 0.99)]:.3f} max {worst[-1]:.3f} s"


def main() -> int:
    """Run, print the counts as it goes, and say how it ended."""
    seconds = float(os.environ.get("SOAK_SECONDS", "60"))
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(2**31)))
    transport = os.environ.get("SOAK_TRANSPORT", "ucx")
    os.environ.setdefault("AIOCOMMS_RECORDER_DIR", "")
    __import__(f"aiocomms_{transport}")
    print(f"soak: SOAK_SEED={seed} SOAK_TRANSPORT={transport} SOAK_SECONDS={seconds:.0f}", flush=True)
    soak, began, said = Soak(transport, seed), time.monotonic(), 0.0
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    try:
        while (elapsed := time.monotonic() - began) < seconds:
            soak.generation()
            if elapsed - said > max(10.0, seconds / 60):
                soak.say(elapsed)
                said = elapsed
    except (AssertionError, CommError) as error:
        print(f"FAILED: {error}\n(SOAK_SEED={seed})", flush=True)
        return 1
    finally:
        soak.end()
        soak.say(time.monotonic() - began)
        print(f"rank 0's memory: {soak.slope():+.1f} MiB per hour, {soak.memory[-1][1] / 2**20:.0f} MiB", flush=True)
    if left := still_there(shared):
        print(f"FAILED: left in /dev/shm: {left}\n(SOAK_SEED={seed})", flush=True)
        return 1
    print(
        "0 hangs, 0 wrong data, 0 crashes of survivors, 0 drift of descriptors, threads and shared memory", flush=True
    )
    return 0


def still_there(before: set[str]) -> list[str]:
    """What is new in /dev/shm and stays; what another process of the machine has there goes soon."""
    ends = time.monotonic() + 20
    while left := sorted(path.name for path in Path("/dev/shm").iterdir() if path.name not in before):
        if time.monotonic() > ends:
            break
        time.sleep(0.1)
    return left


if __name__ == "__main__":
    sys.exit(main())
