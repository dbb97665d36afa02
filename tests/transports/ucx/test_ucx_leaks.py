"""Communicators of the ucx transport come and go, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import LARGE, Rank, Run, allocated, held, let_go

pytestmark = pytest.mark.real

CYCLES, SPLITS = 400, 1000
SLOPE = 4096
"""Bytes that a cycle may seem to leave behind when half of all are over: Python's caches still grow a little, and the
ranks' store keeps what a child's ranks have told each other, some 900 bytes."""


@pytest.fixture
def transport() -> str:
    return "ucx"


class Census:
    """A census of what a process and its machine hold."""

    def __init__(self) -> None:
        self.held = held()
        self.maps = len(Path("/proc/self/maps").read_text().splitlines())
        self.memory = allocated()

    async def grown(self, cycles: int) -> float:
        """The bytes that each of so many cycles has left since; nothing else of theirs may be there."""
        await let_go(self.held)
        now = Census()
        # Every fourth takes all that a cycle may take. The kernel keeps a few stacks of threads that have ended.
        assert now.maps - self.maps <= cycles / 20, (self.maps, now.maps)
        return (now.memory - self.memory) / cycles


SHM = Path("/dev/shm")


class Names:
    """The names of the ranks' shared memory.

    Other processes of this machine have names too, and leave them when they are killed.

    UCX's are in a folder of the ranks, and torch's have the number of the process that made them.
    """

    def __init__(self, ucx: Path) -> None:
        self.ucx = ucx

    def __call__(self, rank: int) -> None:
        """A rank's process begins."""
        os.environ["UCX_POSIX_DIR"] = str(self.ucx)

    def left(self, pids: list[int]) -> list[str]:
        """Return the names that are there, though the ranks have ended."""
        torchs = (path for pid in pids for path in SHM.glob(f"torch_{pid}_*"))
        return [path.name for path in (*torchs, *self.ucx.iterdir())]


@pytest.fixture
def names() -> Iterator[Names]:
    folder = Path(tempfile.mkdtemp(prefix="leaks-", dir=SHM))
    yield Names(folder)
    shutil.rmtree(folder)


async def use(place: Rank, name: str, whole: bool) -> None:
    """All that takes something from the machine."""
    store = dist.FileStore(str(place.folder / name), place.size)  # a file that grows would take memory, too
    async with place.open(store=store) as comm:
        await comm.all_reduce(torch.ones(LARGE if whole else 3))
        if not whole:
            return
        right, left = (place.rank + 1) % place.size, (place.rank - 1) % place.size
        await asyncio.gather(comm.send(torch.ones(LARGE), right), comm.recv(torch.ones(LARGE), left))
        window = await comm.new_window(torch.ones(1000))
        await window.put(torch.ones(10), right)
        remote = await window.map_remote_tensor(right)
        await window.aclose()
        del remote


async def come_and_go(place: Rank, cycles: int) -> tuple[float, float, int]:
    """The bytes that each cycle leaves, and the seconds that it takes; and the number of the process."""
    warm = cycles // 2
    for turn in range(warm):
        await use(place, f"{turn}", turn % 4 == 0)
    before, began = Census(), time.monotonic()
    for turn in range(warm, cycles):
        await use(place, f"{turn}", turn % 4 == 0)
    took = time.monotonic() - began
    return await before.grown(cycles - warm), took / (cycles - warm), os.getpid()


async def split_and_close(place: Rank, splits: int) -> tuple[float, float, int]:
    """The same of a communicator's children."""
    async with place.open() as comm:

        async def use_children(count: int) -> None:
            for turn in range(count):
                child = await comm.split(range(place.size))
                await child.all_reduce(torch.ones(LARGE if turn % 4 == 0 else 3))
                await child.aclose()

        warm = splits // 2
        await use_children(warm)
        before, began = Census(), time.monotonic()
        await use_children(splits - warm)
        took, grown = time.monotonic() - began, await before.grown(splits - warm)
        await comm.barrier()  # a rank that leaves takes its connections with it
        return grown, took / (splits - warm), os.getpid()


@pytest.mark.search
@pytest.mark.fault(60, transport="ucx")
@pytest.mark.parametrize(("body", "count"), [(come_and_go, CYCLES), (split_and_close, SPLITS)])
def test_repeated_use_leaks_no_memory_or_names(ranks: Run, names: Names, body: object, count: int) -> None:
    done = ranks(2, body, count, before=names)
    for slope, seconds, _ in done:
        print(f"{count} times: {slope:.0f} bytes and {seconds * 1e3:.1f} ms each")
        assert slope < SLOPE
    assert not names.left([pid for *_, pid in done])
