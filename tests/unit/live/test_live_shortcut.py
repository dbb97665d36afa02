"""The native code for the rounds of live groups, which does what the Python code does and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

import aiocomms
from aiocomms import ReduceOp
from aiocomms.errors import MismatchError
from aiocomms.live.lane import LiveLane, Partial
from aiocomms.ops.reductions import SUPPORTED

pytestmark = pytest.mark.deterministic

pytest.importorskip("aiocomms_words", reason="the part with native code is not installed")

OPERATORS = [*(getattr(ReduceOp, kind.upper()) for kind in SUPPORTED if kind != "premul_sum"), ReduceOp.PREMUL_SUM(0.3)]


@contextlib.asynccontextmanager
async def lanes(size: int) -> AsyncIterator[list[LiveLane]]:
    store = HashStore()
    openings = [aiocomms.live_group(store=store, rank=rank, size=size) for rank in range(size)]
    async with contextlib.AsyncExitStack() as stack:
        opened = await asyncio.gather(*openings)
        for group in opened:
            await stack.enter_async_context(group)
        yield [await group.lane() for group in opened]


def values(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (count, dtype.itemsize), dtype=torch.uint8, generator=random)
    if dtype == torch.bool:
        return drawn[:, 0] > 100
    if dtype.is_floating_point or dtype.is_complex:
        return drawn[:, 0].to(dtype) / 3
    return drawn.view(dtype)[:, 0]


def kept_from_native(lane: LiveLane) -> None:
    """Let the rounds of a lane run in Python."""
    lane._rounds._shortcut = None


async def reduced(lanes: list[LiveLane], tensors: list[Tensor], op: ReduceOp) -> list[Partial[Tensor]]:
    return list(await asyncio.gather(*(it.all_reduce(tensors[rank], op) for rank, it in enumerate(lanes))))


@pytest.mark.parametrize("op", OPERATORS, ids=str)
@pytest.mark.parametrize("native", [(0, 1, 2, 3, 4), (1, 4)], ids=["all", "some"])
@pytest.mark.asyncio
async def test_native_reductions_are_those_in_python(op, native):
    async with lanes(5) as plain, lanes(5) as quick:
        for rank, lane in enumerate(quick):
            if rank not in native:
                kept_from_native(lane)
        for lane in plain:
            kept_from_native(lane)
        for dtype, count, _ in itertools.product(sorted(SUPPORTED[op.kind], key=str), (1, 3, 700), range(2)):
            tensors = [values(dtype, count, seed) for seed in range(5)]
            wanted = await reduced(plain, [it.clone() for it in tensors], op)
            found = await reduced(quick, tensors, op)
            for one, other in zip(found, wanted, strict=True):
                assert (one.ranks, one.number) == (other.ranks, other.number)
                assert torch.equal(one.value.view(torch.uint8), other.value.view(torch.uint8)), dtype


def at_once(call: Any) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    with pytest.raises(StopIteration) as ended:
        call.send(None)
    return ended.value.value


@pytest.mark.asyncio
async def test_known_call_is_done_by_native_code_in_place(monkeypatch):
    async with lanes(1) as (lane,):
        tensor = torch.tensor([3.0])
        for _ in range(2):  # The first rounds of a lane run in Python.
            await lane.all_reduce(tensor)
        monkeypatch.setattr(lane, "_call", None)
        found = at_once(lane.all_reduce(tensor, timeout=5))
        assert found.value is tensor
        assert found == (tensor, (0,), 2)
        assert tensor._version > 0
        with pytest.raises(TypeError):  # Python code handles unknown calls, and tensors that are not contiguous.
            at_once(lane.all_reduce(torch.ones(2)))
        with pytest.raises(TypeError):
            at_once(lane.all_reduce(torch.ones(4, 2).t()))


@pytest.mark.asyncio
async def test_many_calls_are_known_at_a_time():
    async with lanes(2) as two:
        for size in [*range(1, 40), *range(1, 40)]:
            for found in await reduced(two, [torch.full((size,), 1.0 + rank) for rank in range(2)], ReduceOp.SUM):
                assert found.value.tolist() == [3.0] * size


@pytest.mark.asyncio
async def test_mismatch_leaves_the_tensors_as_they_are():
    async with lanes(2) as two:
        await reduced(two, [torch.ones(2), torch.ones(2)], ReduceOp.SUM)
        await reduced(two, [torch.ones(3), torch.ones(3)], ReduceOp.SUM)
        given = [torch.ones(2), torch.ones(3)]
        calls = [it.all_reduce(given[n]) for n, it in enumerate(two)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, MismatchError)
        assert [it.tolist() for it in given] == [[1.0] * 2, [1.0] * 3]
        for found in await reduced(two, [torch.ones(2), torch.ones(2)], ReduceOp.SUM):
            assert found.value.tolist() == [2.0] * 2


@pytest.mark.asyncio
async def test_tensor_that_autograd_tracks_is_refused():
    async with lanes(1) as (lane,):
        await lane.all_reduce(torch.ones(2))
        with pytest.raises(aiocomms.errors.ArgumentError, match="requires grad"):
            await lane.all_reduce(torch.ones(2, requires_grad=True))
