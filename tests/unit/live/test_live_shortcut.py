"""The native code for the rounds of live groups, which does what the Python code does and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from concurrency import turns
from torch import Tensor
from torch.distributed import HashStore

import aiocomms
from aiocomms import ReduceOp
from aiocomms.errors import ArgumentError, CommClosedError, MismatchError
from aiocomms.live.lane import LiveLane, Partial
from aiocomms.live.rounds import BEGIN
from aiocomms.live.shared import _sleepers
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
    lane.release_native()


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


CALLS: dict[str, Any] = {
    "reduce_scatter": lambda lane, own, parts: lane.reduce_scatter(parts, op=ReduceOp.MAX),
    "all_gather": lambda lane, own, parts: lane.all_gather(own),
    "all_to_all": lambda lane, own, parts: lane.all_to_all(tuple(parts)),
    "broadcast": lambda lane, own, parts: lane.broadcast(own),
    "barrier": lambda lane, own, parts: lane.barrier(),
}


def plain(value: Any) -> Any:
    """Return a result in a form that can be compared."""
    if isinstance(value, dict):
        return [(rank, plain(each)) for rank, each in value.items()]
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("native", [(0, 1, 2), (1, 2)], ids=["all", "some"])
@pytest.mark.asyncio
async def test_native_results_are_those_in_python(kind, native):
    async with lanes(3) as slow, lanes(3) as quick:
        for rank, lane in enumerate([*quick, *slow]):
            if rank not in native:
                kept_from_native(lane)
        for dtype, count, seed in itertools.product((torch.int8, torch.float64), (0, 1, 3, 5000), range(3)):
            own = [values(dtype, count, 10 * seed + rank) for rank in range(3)]
            parts = [
                [values(dtype, count + 2 * to, 100 * seed + 10 * rank + to) for to in range(3)] for rank in range(3)
            ]
            given = [[it.clone() for it in own], [[it.clone() for it in each] for each in parts]]
            calls = [CALLS[kind](lane, own[n % 3], parts[n % 3]) for n, lane in enumerate([*slow, *quick])]
            found = [(plain(it.value), it.ranks, it.number) for it in await asyncio.gather(*calls)]
            assert found[:3] == found[3:]
            assert [plain(it) for it in own] == [plain(it) for it in given[0]], "the call has changed its tensors"
            for rank in range(3):
                assert [plain(it) for it in parts[rank]] == [plain(it) for it in given[1][rank]]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.asyncio
async def test_known_calls_are_done_by_native_code(kind, monkeypatch):
    async with lanes(1) as (lane,):
        own = torch.tensor([3.0])
        for _ in range(2):
            await CALLS[kind](lane, own, [own])
        monkeypatch.setattr(lane, "_call", None)
        with torch.inference_mode():
            found = at_once(CALLS[kind](lane, own, [own]))
        value = found.value[0] if isinstance(found.value, dict) else found.value
        if kind != "barrier":
            assert value.tolist() == [3.0]
            assert value.data_ptr() != own.data_ptr()
            assert not value.is_inference()
        with pytest.raises(TypeError):
            at_once(lane.all_gather(torch.ones(4, 2).t()))
        with pytest.raises(ArgumentError, match="one per rank"):
            await lane.all_to_all([own, own])


def interrupted(monkeypatch: pytest.MonkeyPatch, lane: LiveLane) -> None:
    """Have the lane's next native call raise after it has contributed, as a signal handler may."""
    call = lane._rounds.call

    def interrupt(*arguments: Any) -> None:
        monkeypatch.setattr(lane._rounds, "call", call)
        call(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(lane._rounds, "call", interrupt)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.asyncio
async def test_call_that_is_interrupted_after_its_contribution_counts(size, monkeypatch):
    async with lanes(size) as all_lanes:
        first, *others = all_lanes
        for number in range(3):
            await asyncio.gather(*(it.all_gather(torch.tensor([number])) for it in all_lanes))
        interrupted(monkeypatch, first)
        with pytest.raises(KeyboardInterrupt):
            at_once(first.all_gather(torch.tensor([3])))
        for it in others:
            found = await it.all_gather(torch.tensor([3]))
            assert (found.number, found.value[0].item()) == (3, 3)
        for number in range(4, 7):
            for found in await asyncio.gather(*(it.all_gather(torch.tensor([number])) for it in all_lanes)):
                assert found.number == number
                assert {value.item() for value in found.value.values()} == {number}


@pytest.mark.asyncio
async def test_calls_stay_known_beside_operators_that_are_made_anew(monkeypatch):
    async with lanes(1) as (lane,):
        await lane.barrier()
        for _ in range(40):
            await lane.all_reduce(torch.ones(1), ReduceOp.PREMUL_SUM(0.5))
        monkeypatch.setattr(lane, "_call", None)
        assert at_once(lane.barrier()).number == 41


@pytest.mark.asyncio
async def test_rank_that_died_in_its_sleep_is_not_woken(monkeypatch):
    async with lanes(1) as (lane,):
        for _ in range(3):
            await lane.barrier()
        for number in range(2):
            lane._rounds._registers._words.swap(_sleepers(lane._rounds._register(number)), 0, 0b10)
        monkeypatch.setattr(lane, "_call", None)
        assert [at_once(lane.barrier()).number for _ in range(3)] == [3, 4, 5]


@pytest.mark.asyncio
async def test_results_are_contiguous():
    async with lanes(1) as (lane,):
        tensor = torch.ones(2, 1, 3, 3).to(memory_format=torch.channels_last)
        strides = {(await lane.broadcast(tensor)).value.stride() for _ in range(4)}
        assert strides == {(9, 9, 3, 1)}


@pytest.mark.asyncio
async def test_shapes_that_differ_are_gathered_in_python():
    async with lanes(2) as two:
        for counts in ((2, 2), (2, 2), (2, 3), (3, 3), (3, 2)):
            given = [torch.full((count,), float(rank)) for rank, count in enumerate(counts)]
            for found in await asyncio.gather(*(it.all_gather(given[rank]) for rank, it in enumerate(two))):
                assert [it.tolist() for it in found.value.values()] == [it.tolist() for it in given]


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


@pytest.mark.asyncio
async def test_native_code_makes_no_call_before_the_pending_ones():
    async with lanes(2) as (first, second):
        for _ in range(2):
            await asyncio.gather(first.barrier(), second.barrier())
        pending = [asyncio.create_task(first.barrier()) for _ in range(3)]
        await turns()
        assert first._rounds.call("barrier", None, None, 5) is None
        others = [await second.barrier() for _ in range(3)]
        assert [await task for task in pending] == others
        assert first._rounds._shortcut.disarm() == second._rounds._shortcut.disarm() == BEGIN + 5


@pytest.mark.asyncio
async def test_call_beside_the_end_of_the_group_contributes_nothing():
    store = HashStore()
    group, other = await asyncio.gather(*(aiocomms.live_group(store=store, rank=rank, size=2) for rank in range(2)))
    lane, stays = await group.lane(), await other.lane()
    for _ in range(3):
        await asyncio.gather(lane.barrier(), stays.barrier())
    closing = asyncio.create_task(group.aclose())
    await turns(1)
    with pytest.raises(CommClosedError):
        await lane.barrier()
    await closing
    assert (await stays.barrier()).ranks == (1,)
    await other.aclose()


@pytest.mark.parametrize("timeout", [-1, 0, "5", 10**400, True, float("nan")])
@pytest.mark.asyncio
async def test_native_code_leaves_bad_timeouts_to_python(timeout):
    async with lanes(1) as (lane,):
        for _ in range(2):
            await lane.barrier()
        with pytest.raises(ArgumentError, match="timeout"):
            await lane.barrier(timeout=timeout)
        assert (await lane.barrier()).number == 2
