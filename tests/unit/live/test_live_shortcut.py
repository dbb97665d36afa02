"""The native code for the rounds of live groups, which does what the Python code does and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from concurrency import turns
from torch import Tensor
from torch.distributed import HashStore

import aiocomms
from aiocomms import ReduceOp, arguments
from aiocomms.errors import ArgumentError, CommClosedError, CommError, MismatchError
from aiocomms.live.lane import LiveLane, Partial
from aiocomms.live.rounds import BEGIN
from aiocomms.live.shared import _sleepers
from aiocomms.ops import buffers
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


@pytest.mark.parametrize(
    "timeout",
    [-1, 0, "5", 10**400, 10**5000, True, float("nan")],
    ids=["negative", "zero", "text", "large", "huge", "bool", "nan"],
)
@pytest.mark.asyncio
async def test_native_code_leaves_bad_timeouts_to_python(timeout):
    async with lanes(1) as (lane,):
        for _ in range(2):
            await lane.barrier()
        with pytest.raises(ArgumentError, match="timeout"):
            await lane.barrier(timeout=timeout)
        assert (await lane.barrier()).number == 2


def spoilt(tensor: Tensor) -> Tensor:
    """Make a tensor that has half of the memory, as a mode of torch may."""
    return torch.zeros(tensor.numel() // 2, dtype=tensor.dtype)


@pytest.mark.parametrize("wrong", [spoilt, lambda tensor: torch.zeros(tensor.shape, dtype=torch.int8)])
@pytest.mark.asyncio
async def test_result_of_another_size_or_dtype_is_not_written(wrong, monkeypatch):
    like = buffers.like
    ways = [like]
    monkeypatch.setattr(buffers, "like", lambda tensor: ways[0](tensor))
    async with lanes(1) as (lane,):
        monkeypatch.setattr(buffers, "like", like)
        tensor = torch.arange(1000.0)
        for way in (like, like, wrong, like):
            ways[0] = way
            assert (await lane.broadcast(tensor)).value.equal(tensor)


@pytest.mark.parametrize("shape", [(1,), (2,)], ids=["known", "new"])
@pytest.mark.asyncio
async def test_call_of_code_that_native_code_runs_comes_first(shape, monkeypatch):
    like, inner = buffers.like, []

    def reenter(tensor: Tensor) -> Tensor:
        if len(calls) == 2 and not inner:
            inner.append(None)
            inner[0] = at_once(lane.all_gather(torch.full(shape, 100)))
        return like(tensor)

    monkeypatch.setattr(buffers, "like", reenter)
    async with lanes(1) as (lane,):
        calls = []
        for number in range(4):
            calls += [await lane.all_gather(torch.tensor([number]))]
        assert (inner[0].number, inner[0].value[0].tolist()) == (2, [100] * shape[0])
        assert [it.number for it in calls] == [0, 1, 3, 4]
        assert [it.value[0].item() for it in calls] == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_no_finalizer_runs_while_native_code_has_no_number():
    numbers, before = [], gc.get_threshold()

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            numbers.append(lane._rounds._shortcut.disarm())
            lane._rounds._shortcut.arm(numbers[-1])

    async with lanes(1) as (lane,):
        tensor = torch.ones(1)
        for _ in range(2):
            await lane.all_gather(tensor)
        for threshold in range(1, 20):
            gc.collect()
            Garbage()
            gc.set_threshold(threshold, 1000, 1000)
            try:
                lane._rounds.call("all_gather", tensor, None, 5)
            finally:
                gc.set_threshold(*before)
        gc.collect()
        assert len(numbers) == 19
        assert 0 not in numbers


@pytest.mark.asyncio
async def test_call_amid_one_that_has_contributed_comes_after_it(monkeypatch):
    async with lanes(2) as (first, second):
        for number in range(4):
            await asyncio.gather(*(it.all_gather(torch.tensor([number])) for it in (first, second)))
        amid = first.all_gather(torch.tensor([777]), timeout=None)
        deadline, once = arguments.op_deadline, itertools.count()

        def reenter(*given: Any) -> float:
            if not next(once):
                amid.send(None)
            return deadline(*given)

        async def others() -> list[tuple[int, int]]:
            found = [await second.all_gather(torch.tensor([10 + n])) for n in range(2)]
            return [(it.number, it.value[0].item()) for it in found]

        monkeypatch.setattr(arguments, "op_deadline", reenter)
        found = asyncio.create_task(others())
        assert (await first.all_gather(torch.tensor([5]))).value[0].item() == 5
        assert await found == [(4, 5), (5, 777)]
        amid.close()


class Interruption(BaseException):
    """The exception of a signal handler. A KeyboardInterrupt would end the event loop."""


@pytest.mark.asyncio
async def test_interrupted_contribution_in_python_is_not_made_again(monkeypatch):
    async with lanes(2) as (first, second):
        for it in (first, second):
            kept_from_native(it)
        for number in range(3):
            await asyncio.gather(*(it.all_gather(torch.tensor([number])) for it in (first, second)))
        arrive = first._rounds._arrive

        async def interrupt(*given: Any) -> bool:
            monkeypatch.setattr(first._rounds, "_arrive", arrive)
            await arrive(*given)
            raise Interruption

        monkeypatch.setattr(first._rounds, "_arrive", interrupt)
        with pytest.raises(CommError, match="Interruption has interrupted the call"):
            await first.all_gather(torch.tensor([5]))
        later = asyncio.create_task(first.all_gather(torch.tensor([6])))
        found = [await second.all_gather(torch.tensor([10 + n])) for n in range(2)]
        assert [it.value[0].item() for it in found] == [5, 6]
        assert (await later).number == found[1].number == 4


@pytest.mark.asyncio
async def test_rank_that_sleeps_is_woken_after_an_interruption(monkeypatch):
    async with lanes(2) as (first, second):
        for _ in range(3):
            await asyncio.gather(first.barrier(), second.barrier())
        sleeps = asyncio.create_task(second.barrier(timeout=None))
        await turns()
        interrupted(monkeypatch, first)
        with pytest.raises(KeyboardInterrupt):
            at_once(first.barrier())
        later = asyncio.create_task(first.barrier(timeout=None))
        assert (await sleeps).number == 3
        assert (await second.barrier()) == (await later)
