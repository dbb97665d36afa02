"""The memory of ops that the engine has, whatever their program does to the storages meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from concurrency import ranks, run_on, together, turns

from aiocomms import Communicator, Work
from aiocomms.errors import CommAbortedError, CommError
from aiocomms.testing import local_world

pytestmark = [pytest.mark.deterministic, pytest.mark.fault(49, 77, 132, transport="ucx")]

pytest.importorskip("aiocomms_ucx._engine", reason="needs the ucx transport", exc_type=ImportError)
if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
    pytest.skip("this torch cannot exchange the memory of storages", allow_module_level=True)

COUNT = 2**14
"""Elements. Messages of so many are copied by their receiver, once that has matched them."""

Start = Callable[[Communicator, torch.Tensor], Work[Any]]
Pair = tuple[Start, Start]


class Owner(bytearray):
    """An owner of memory that a tensor shows; it lives for as long as the tensor does."""


def owned() -> tuple[torch.Tensor, weakref.ref[Owner]]:
    owner = Owner(4 * COUNT)
    return torch.frombuffer(owner, dtype=torch.float32), weakref.ref(owner)


PAIRS: dict[str, Pair] = {
    "recv": (lambda comm, t: comm.recv(t, 0), lambda comm, t: comm.send(t, 1)),
    "recv, by Python": (lambda comm, t: comm.recv(t, 0, timeout=9), lambda comm, t: comm.send(t, 1)),
    "send": (lambda comm, t: comm.send(t, 0), lambda comm, t: comm.recv(t, 1)),
    "all_reduce": (lambda comm, t: comm.all_reduce(t), lambda comm, t: comm.all_reduce(t)),
    "all_gather's input": (
        lambda comm, t: comm.all_gather_single(torch.empty(2 * COUNT), t),
        lambda comm, t: comm.all_gather_single(torch.empty(2 * COUNT), t),
    ),
    "gather": (
        lambda comm, t: comm.gather([torch.empty(COUNT), t], torch.empty(COUNT), 1),
        lambda comm, t: comm.gather([], t, 1),
    ),
    "a lane's recv": (lambda comm, t: comm.lane("k").recv(t, 0), lambda comm, t: comm.lane("k").send(t, 1)),
    "a lane's all_reduce": (
        lambda comm, t: comm.lane("k").all_reduce(t),
        lambda comm, t: comm.lane("k").all_reduce(t),
    ),
    "a lane's reduce": (lambda comm, t: comm.lane("k").reduce(t, 1), lambda comm, t: comm.lane("k").reduce(t, 1)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_moved_memory_stays_alive_until_the_op_is_done(pair: Pair) -> None:
    late, other = pair

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            tensor, owner = owned()
            work = late(comms[1], tensor)
            tensor.share_memory_()
            gc.collect()
            assert owner() is not None
            beside = other(comms[0], torch.ones(COUNT))
            with pytest.raises(CommError, match="the storage of a tensor was resized"):
                await work
            await beside
            await turns()
            assert owner() is None

    run_on("asyncio", main)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_storage_in_use_by_an_op_cannot_be_resized(pair: Pair) -> None:
    late, other = pair

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            tensor = torch.zeros(COUNT)
            work = late(comms[1], tensor)
            with pytest.raises(RuntimeError, match="not resizable"):
                tensor.untyped_storage().resize_(0)
            beside = other(comms[0], torch.ones(COUNT))
            await work
            await beside
            del work
            await turns()
            tensor.resize_(COUNT + 1)

    run_on("asyncio", main)


def test_storage_shared_by_ops_is_resizable_after_the_last_one() -> None:
    """The storage may be resized again when the last of them is done, in whichever order that is."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            whole = torch.zeros(4)
            works = [comms[1].recv(whole[i : i + 2], 0, tag=i) for i in (0, 2)]
            for tag in (2, 0):
                with pytest.raises(RuntimeError, match="not resizable"):
                    whole.untyped_storage().resize_(32)
                await comms[0].send(torch.full((2,), tag + 1.0), 1, tag=tag)
                await works[tag // 2]
            assert whole.tolist() == [1, 1, 3, 3]
            whole.resize_(8)

    run_on("asyncio", main)


def test_moved_storage_can_be_received_into_again() -> None:
    """One op has the former memory while another one has the new memory; either stays where it was."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            tensor = torch.zeros(2)
            first = comms[1].recv(tensor, 0, tag=1)
            tensor.share_memory_()
            second = comms[1].recv(tensor, 0, tag=2)
            for tag in (1, 2):
                await comms[0].send(torch.full((2,), float(tag)), 1, tag=tag)
            with pytest.raises(CommError, match="the storage of a tensor was resized"):
                await first
            await second
            assert tensor.tolist() == [2, 2]

    run_on("asyncio", main)


def test_aborted_or_withdrawn_op_releases_its_memory() -> None:
    """Its work may be kept for longer."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            tensor, withdrawn = torch.zeros(2), torch.zeros(2)
            works = [comms[1].recv(tensor, 0), comms[1].recv(withdrawn, 0)]
            assert await works[1].cancel()
            withdrawn.resize_(8)
            comms[1].abort("enough")
            with pytest.raises(CommAbortedError):
                await works[0]
            await turns()
            tensor.resize_(8)

    run_on("asyncio", main)


@pytest.mark.parametrize("size", [1, 2], ids=["private", "shared"])
def test_storage_of_an_open_window_cannot_be_resized(size: int) -> None:
    async def main() -> None:
        async with local_world(size, "ucx") as comms:
            tensor = torch.zeros(COUNT)
            windows = await ranks(comms, lambda comm: comm.new_window(tensor if comm.rank == 0 else torch.zeros(1)))
            for count in (0, 2 * COUNT):
                with pytest.raises(RuntimeError, match="not resizable"):
                    tensor.untyped_storage().resize_(4 * count)
            assert tensor.untyped_storage().is_shared() == (size > 1)
            await windows[-1].put(torch.ones(1), 0)
            await windows[-1].flush()
            assert tensor[0] == 1
            await together(*(window.aclose for window in windows))
            if size == 1:
                tensor.resize_(COUNT + 1)

    run_on("asyncio", main)


def test_shared_memory_stays_in_place_when_a_window_opens() -> None:
    """Another thread may use it at this moment."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            tensors = [torch.zeros(COUNT).share_memory_() for _ in comms]
            places = [tensor.data_ptr() for tensor in tensors]
            windows = await ranks(comms, lambda comm: comm.new_window(tensors[comm.rank]))
            assert [tensor.data_ptr() for tensor in tensors] == places
            await together(*(window.aclose for window in windows))

    run_on("asyncio", main)


@pytest.mark.parametrize("move", ["data", "set_"])
def test_moved_memory_stays_alive_until_the_window_is_closed(move: str) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            tensor, owner = owned()
            windows = await ranks(comms, lambda comm: comm.new_window(tensor if comm.rank == 0 else torch.zeros(1)))
            if move == "data":
                tensor.data = torch.zeros(1)
            else:
                tensor.set_(torch.zeros(1).untyped_storage())
            gc.collect()
            assert owner() is not None
            for window in windows:
                await window.put(torch.full((2,), 7.0), 0, offset=1)
                await window.flush()
                assert (await window.get(torch.ones(4), 0)).tolist() == [0, 7, 7, 0]
            await together(*(window.aclose for window in windows))
            del window
            windows.clear()
            await turns()
            gc.collect()
            assert owner() is None

    run_on("asyncio", main)
