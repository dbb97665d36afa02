"""Windows of the ucx transport, between real processes of one host."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from processes import LARGE, Rank, Run, in_turn, numbers
from simulated import NET

import aiocomms
from aiocomms.errors import UnsupportedOperation
from aiocomms.testing import local_world

pytestmark = pytest.mark.real


@pytest.fixture
def transport() -> str:
    return "ucx"


async def share_memory(place: Rank) -> None:
    """Check that the mapped tensor is the memory itself, in both directions, and that an older view still is one."""
    rank, peer = place.rank, 1 - place.rank
    async with place.open() as comm:
        storage = torch.zeros(3 * LARGE, dtype=torch.int64)
        tensor = storage[LARGE : 2 * LARGE].view(1, LARGE)
        view = storage[LARGE + 5 :]
        window = await comm.new_window(tensor)
        remote = await window.map_remote_tensor(peer)
        assert remote.shape == tensor.shape
        assert (await window.map_remote_tensor(rank)).data_ptr() == tensor.data_ptr()
        await comm.barrier()
        tensor[0, 5] = 10 + rank  # here, seen there
        remote[0, 6] = 20 + rank  # there, seen here
        await window.put(torch.tensor([30 + rank]), peer, offset=7)
        await window.flush()
        await comm.barrier()
        assert remote[0, 5:8].tolist() == [10 + peer, 20 + rank, 30 + rank]
        assert tensor[0, 5:8].tolist() == [10 + rank, 20 + peer, 30 + peer]
        assert view[:3].tolist() == [10 + rank, 20 + peer, 30 + peer]
        assert storage.sum() == tensor.sum()
        await window.aclose()
        del window
        await comm.barrier()
        assert remote[0, 5] == 10 + peer  # the memory lives for as long as it is held


async def lend_foreign_memory(place: Rank) -> None:
    """Memory that torch did not make serves as well, but cannot be mapped."""
    rank, peer = place.rank, 1 - place.rank
    async with place.open() as comm:
        array = np.zeros(LARGE, dtype=np.int64)
        window = await comm.new_window(torch.from_numpy(array) if rank == 0 else torch.zeros(LARGE, dtype=torch.int64))
        await window.put(numbers(LARGE - 10, rank), peer, offset=10)
        assert await window.fetch_add(peer, 0, 5 + rank) == 0
        assert await window.compare_swap(peer, 1, 0, 7 + rank) == 0
        await window.signal(peer)
        await window.wait_signal(peer)
        assert torch.equal(window.tensor[10:], numbers(LARGE - 10, peer))
        assert window.tensor[:2].tolist() == [5 + peer, 7 + peer]
        assert torch.equal(await window.get(torch.zeros(10, dtype=torch.int64), peer, offset=10), numbers(10, rank))
        if rank == 0:
            assert array[0] == 5 + peer
            assert (await window.map_remote_tensor(peer))[0] == 5
        else:
            with pytest.raises(UnsupportedOperation, match=r"rank 0 .* no memory of torch's own"):
                await window.map_remote_tensor(peer)
        await window.aclose()


async def contend(place: Rank, turns: int, foreign: bool) -> list[int]:
    """All ranks add to the same elements at once, and each takes what nobody else does."""
    async with place.open() as comm:
        array = np.zeros(2, dtype=np.int64)
        window = await comm.new_window(torch.from_numpy(array) if foreign else torch.from_numpy(array).clone())
        taken = []
        await comm.barrier()
        for turn in range(turns):
            dst = turn % place.size
            taken.append((await window.fetch_add(dst, 0, 1)) * place.size + dst)
            seen = await window.get(torch.zeros(1, dtype=torch.int64), dst, offset=1)
            old = int(seen)
            while (now := await window.compare_swap(dst, 1, old, old + 3)) != old:
                old = now
                await asyncio.sleep(0)
        await comm.barrier()
        each = turns // place.size * place.size
        assert window.tensor.tolist() == [each, 3 * each]
        await window.aclose()
        return taken


@pytest.mark.parametrize("foreign", [False, True])
def test_contending_atomics_lose_no_update(ranks: Run, foreign: bool) -> None:
    taken = [number for rank in ranks(4, contend, 200, foreign) for number in rank]
    assert sorted(taken) == list(range(4 * 200))


async def wait_in_vain(place: Rank) -> None:
    """A signal that was awaited, and withdrawn, goes to the next who waits."""
    rank, peer = place.rank, 1 - place.rank
    async with place.open() as comm:
        window = await comm.new_window(torch.zeros(4))
        if rank == 0:
            waiting = window.wait_signal(peer)
            assert await waiting.cancel()
            place.tell("withdrawn")
            await window.wait_signal(peer)
            assert window.tensor.tolist() == [1, 1, 1, 1]
        else:
            await place.heard("withdrawn")
            await window.put(torch.ones(4), peer)
            await window.signal(peer)
        await window.aclose()


@pytest.mark.parametrize("transport", [NET, "ucx"])
def test_withdrawn_wait_signal_leaves_the_signal_for_the_next(ranks: Run, transport: str) -> None:
    ranks(2, wait_in_vain)


@pytest.mark.deterministic
@pytest.mark.fault(76)
@pytest.mark.parametrize(("transport", "by_name"), [("local", False), ("c10d", False), ("ucx", False), ("ucx", True)])
def test_new_window_does_not_move_memory_of_another_communicators_op(
    transport: str, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it move what processes share by a name, which torch would move once more to have a descriptor of it."""
    if by_name:
        monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_system")

    async def main() -> None:
        async with local_world(2, transport) as (one, two), local_world(2, "ucx") as (here, there):
            tensor = torch.zeros(2**16)
            if by_name:
                tensor.share_memory_()
            place = tensor.data_ptr()
            work = one.recv(tensor, 1)
            window, remote = await asyncio.gather(here.new_window(tensor), there.new_window(torch.zeros(4)))
            assert tensor.data_ptr() == place
            await asyncio.gather(two.send(torch.ones(2**16), 0), work)
            assert (tensor == 1).all()
            assert (remote.mapped(0), remote.mapped(1), window.mapped(1)) == (False, True, True)
            with pytest.raises(UnsupportedOperation, match="rank 0 was in use when the window was opened"):
                await remote.map_remote_tensor(0)
            await remote.put(torch.full((4,), 7.0), 0, offset=1)
            await remote.flush()
            assert tensor[:6].tolist() == [1, 7, 7, 7, 7, 1]
            await asyncio.gather(window.aclose(), remote.aclose())

    asyncio.run(main())


@pytest.mark.deterministic
@pytest.mark.fault(76, transport="ucx")
def test_new_window_does_not_move_memory_of_another_window() -> None:
    """The first window's communicator shares no memory, and so did not move it."""

    async def main() -> None:
        async with aiocomms.new_comm("ucx") as alone, local_world(2, "ucx") as (here, there):
            tensor = torch.zeros(2**16)
            place = tensor.data_ptr()
            first = await alone.new_window(tensor)
            window, remote = await asyncio.gather(here.new_window(tensor), there.new_window(torch.zeros(4)))
            assert tensor.data_ptr() == place
            await first.put(torch.full((4,), 7.0), 0, offset=1)
            assert tensor[:6].tolist() == [0, 7, 7, 7, 7, 0]
            await asyncio.gather(window.aclose(), remote.aclose())
            await first.aclose()

    asyncio.run(main())


@pytest.mark.deterministic
def test_part_without_elements_is_mapped_too() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as (one, two):
            windows = await asyncio.gather(one.new_window(torch.zeros(4)), two.new_window(torch.zeros(0, 3)))
            for window in windows:
                assert [window.mapped(rank) for rank in (0, 1)] == [True, True]
                assert (await window.map_remote_tensor(1)).shape == (0, 3)
                await window.put(torch.zeros(0), 1)
            await asyncio.gather(*(window.aclose() for window in windows))

    asyncio.run(main())


async def put_more_than_a_slice(place: Rank) -> None:
    """Puts that are called one upon the other, of which the engine's thread copies the later ones; a small one last."""
    rank, peer, count, blocks = place.rank, 1 - place.rank, 2**16, 128
    async with place.open() as comm:
        window = await comm.new_window(torch.zeros(count, dtype=torch.int64))
        sources = [torch.full((count,), 1 + number) for number in range(blocks)]
        for _ in range(3):
            if rank == 0:
                works = [window.put(source, peer) for source in sources]
                works.append(window.put(torch.tensor([-1]), peer, offset=count - 1))
                works.append(window.signal(peer))
                await asyncio.gather(*works)
                back = await window.get(torch.empty(count, dtype=torch.int64), peer)
                assert (back[:-1] == blocks).all()
                assert back[-1] == -1
                await window.signal(peer)
            else:
                await window.wait_signal(peer)
                assert (window.tensor[:-1] == blocks).all()
                assert window.tensor[-1] == -1
                await window.wait_signal(peer)
                window.tensor.zero_()
            await comm.barrier()
        await window.aclose()


def test_windows_are_mapped_or_foreign_and_bursts_of_puts_keep_their_order(ranks: Run) -> None:
    ranks(2, in_turn, share_memory, lend_foreign_memory, put_more_than_a_slice)
