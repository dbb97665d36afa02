"""The c10d transport: what is particular to it, between real processes. See also `test_processes.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import LARGE, Rank, Run, listening, numbers

import aiocomms


@pytest.fixture
def transport() -> str:
    return "c10d"


def group_of(place: Rank) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.FileStore(str(place.folder / "group"), place.size)
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


async def adopt(place: Rank) -> None:
    rank, size = place.rank, place.size
    group = await asyncio.to_thread(group_of, place)
    async with await aiocomms.from_process_group(group, timeout=20) as comm:
        assert (comm.rank, comm.size) == (rank, size)
        for dtype in (torch.int64, torch.int16):
            for count in (3, LARGE):
                total = await comm.all_reduce(numbers(count, rank).to(dtype))
                assert torch.equal(total, sum(numbers(count, r) for r in range(size)).to(dtype))
        right, left = (rank + 1) % size, (rank - 1) % size
        sent = comm.send(numbers(LARGE, rank), right)
        assert torch.equal(await comm.recv(torch.zeros(LARGE, dtype=torch.int64), left), numbers(LARGE, left))
        await sent
        other = await aiocomms.from_process_group(group, name="other", timeout=20)
        child = await comm.split([2, 0, 1])
        at_once = [
            it.all_reduce(torch.full((LARGE,), 1.0)) for it in ((comm, child, other), (other, child, comm))[rank % 2]
        ]
        for work in at_once:
            assert (await work == size).all()
        await other.aclose()
        await child.aclose()
        for how in ("close", "abort"):
            tensor = torch.ones(2)
            await asyncio.to_thread(lambda tensor=tensor: group.allreduce([tensor]).wait())
            assert (tensor == size).all(), how
            if how == "close":
                lost = await aiocomms.from_process_group(group, name="lost", timeout=20)
                await lost.barrier()
                place.tell(f"met {rank}")
                await place.all_told("met", *range(size))
                lost.abort("it stays its owner's")
                await lost.aclose()


def test_an_adopted_group(ranks: Run) -> None:
    ranks(3, adopt)


async def listeners(place: Rank) -> list[str]:
    async with place.open():
        return listening()[0]


def test_no_rank_listens_on_every_interface(ranks: Run) -> None:
    for addresses in ranks(2, listeners):
        assert addresses
        assert all(address.startswith("0100007F:") for address in addresses), addresses
