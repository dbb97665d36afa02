"""Live groups: the contributions in a result, the ranks that a call waits for, and refused calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from concurrency import turns, until
from torch import Tensor
from torch.distributed import HashStore

import aiocomms
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommClosedError,
    CommTimeoutError,
    LeftBehindError,
    MismatchError,
)
from aiocomms.live import forming, shared
from aiocomms.live.group import LiveGroup
from aiocomms.live.lane import LiveLane, Partial

pytestmark = pytest.mark.deterministic

SIZES = (1, 1_000, 400_000)
"""The elements of tensors that native code, Python code and a thread copy."""
SHORT = 0.05
"""The seconds for which a call waits for an absent rank."""


@pytest.fixture
def memory() -> HashStore:
    """Return a store for a group whose ranks share memory. Deadlines over a store are simulated elsewhere."""
    pytest.importorskip("aiocomms_words", reason="the part with native code is not installed")
    return HashStore()


@pytest.fixture(params=["memory", "store"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """Return a store for a group whose ranks share memory, or have only the store."""
    if request.param == "store":
        monkeypatch.setattr(forming, "native", lambda: None)
    else:
        pytest.importorskip("aiocomms_words", reason="the part with native code is not installed")
    return HashStore()


@contextlib.asynccontextmanager
async def groups(store: HashStore, size: int, **options: Any) -> AsyncIterator[list[LiveGroup]]:
    """Open all ranks of a group in this process."""
    openings = [aiocomms.live_group(store=store, rank=rank, size=size, **options) for rank in range(size)]
    async with contextlib.AsyncExitStack() as stack:
        opened = await asyncio.gather(*openings)
        for group in opened:
            await stack.enter_async_context(group)
        yield list(opened)


@contextlib.asynccontextmanager
async def lanes(store: HashStore, size: int, **options: Any) -> AsyncIterator[list[LiveLane]]:
    async with groups(store, size, **options) as opened:
        yield [await group.lane() for group in opened]


def number(value: float) -> Tensor:
    return torch.tensor([value])


async def sums(lanes: Sequence[LiveLane], **options: Any) -> list[Partial[Tensor]]:
    """Let some ranks add 1, 2, 4 and so on, by rank; return their results."""
    calls = [lane.all_reduce(number(2.0**lane._place.rank), **options) for lane in lanes]
    return list(await asyncio.gather(*calls))


@pytest.mark.asyncio
async def test_each_collective_gives_what_it_says(store):
    async with lanes(store, 3) as three:
        ranks = (0, 1, 2)
        for found in await sums(three):
            assert (found.value.item(), found.ranks, found.number) == (7.0, ranks, 0)
        for found in await sums(three, op="mean"):
            assert found.value.item() == pytest.approx(7 / 3)
        for found in await asyncio.gather(*(it.all_gather(torch.full((n,), n)) for n, it in enumerate(three))):
            assert {rank: value.tolist() for rank, value in found.value.items()} == {0: [], 1: [1], 2: [2, 2]}
        ins = [[torch.tensor([10 * n + to]) for to in ranks] for n in ranks]
        for n, found in enumerate(await asyncio.gather(*(it.all_to_all(ins[n]) for n, it in enumerate(three)))):
            assert {rank: value.item() for rank, value in found.value.items()} == {r: 10 * r + n for r in ranks}
        for n, found in enumerate(await asyncio.gather(*(it.reduce_scatter(ins[n]) for n, it in enumerate(three)))):
            assert found.value.item() == 30 + 3 * n
        for found in await asyncio.gather(*(it.broadcast(torch.tensor([n])) for n, it in enumerate(three))):
            assert (found.value.item(), found.ranks, found.number) == (0, ranks, 5)
        for found in await asyncio.gather(*(it.barrier() for it in three)):
            assert found == (None, ranks, 6)


@pytest.mark.real
@pytest.mark.search
@pytest.mark.asyncio
async def test_call_ends_by_its_deadline_with_those_that_have_come(memory):
    async with lanes(memory, 3) as three:
        await sums(three)
        for found in await sums(three[1:], timeout=SHORT):
            assert (found.value.item(), found.ranks) == (6.0, (1, 2))
        [late] = await sums(three[:1])
        assert (late.value.item(), late.ranks, late.number) == (6.0, (1, 2), 1)
        rejoins = asyncio.create_task(sums(three[:1]))
        await turns()
        for found in [*await sums(three[1:]), *await rejoins]:  # The late rank is waited for again.
            assert (found.value.item(), found.ranks, found.number) == (7.0, (0, 1, 2), 2)


@pytest.mark.real
@pytest.mark.search
@pytest.mark.asyncio
async def test_rank_that_was_late_is_not_waited_for(memory):
    async with lanes(memory, 2) as (first, last):
        await sums([first, last])
        await sums([first], timeout=SHORT)
        for _ in range(2):
            [found] = await sums([first], timeout=None)
            assert found.ranks == (0,)
        with pytest.raises(LeftBehindError, match="two rounds late"):
            await sums([last])
        for found in await sums([first, last], timeout=None):
            assert (found.value.item(), found.ranks, found.number) == (3.0, (0, 1), 4)


@pytest.mark.asyncio
async def test_rank_that_has_left_is_not_waited_for(store):
    async with groups(store, 2) as (first, last):
        one, other = await first.lane(), await last.lane()
        await sums([one, other])
        waiting = asyncio.create_task(one.all_reduce(number(1.0), timeout=None))
        await asyncio.sleep(0)
        await last.aclose()
        assert (await waiting).ranks == (0,)
        with pytest.raises(CommClosedError):
            await other.barrier()


@pytest.mark.asyncio
async def test_new_process_in_a_place_is_in_the_next_call(store):
    async with groups(store, 2) as (first, last):
        one = await first.lane()
        await sums([one, await last.lane()])
        await last.aclose()
        await sums([one], timeout=None)
        async with aiocomms.live_group(store=store, rank=1, size=2) as new:
            other = await new.lane()
            called = asyncio.create_task(other.all_reduce(number(2.0), timeout=None))
            await until(lambda: other._rounds._next)
            for found in (await one.all_reduce(number(1.0), timeout=None), await called):
                assert (found.value.item(), found.ranks, found.number) == (3.0, (0, 1), 2)


@pytest.mark.asyncio
async def test_place_of_another_process(store, request):
    async with groups(store, 2) as (_, last):
        again = aiocomms.live_group(store=store, rank=1, size=2)
        if "memory" in request.node.name:
            with pytest.raises(ArgumentError, match="rank is 1, which"):
                await again
        else:  # A store does not tell which processes live, so the earlier process learns of the later one.
            async with again:
                with pytest.raises(CommClosedError, match="another process"):
                    await (await last.lane()).barrier(timeout=SHORT)


@pytest.mark.asyncio
async def test_lanes_have_orders_of_their_own(store):
    async with groups(store, 2) as (first, last):
        (one, two), (other_one, other_two) = [[await it.lane(name) for name in ("one", "two")] for it in (first, last)]
        waits = asyncio.create_task(one.all_reduce(number(1.0)))
        for found in await asyncio.gather(two.barrier(), other_two.barrier()):
            assert found.number == 0
        assert not waits.done()
        assert (await other_one.all_reduce(number(2.0))).value.item() == 3
        assert (await waits).value.item() == 3
        assert await first.lane("one") is one


@pytest.mark.asyncio
async def test_cancelled_call_has_contributed(memory):
    async with lanes(memory, 2) as (first, last):
        await sums([first, last])
        cancelled = asyncio.create_task(first.all_reduce(number(1.0)))
        await until(lambda: first._rounds._next == 4)
        cancelled.cancel()
        following = asyncio.create_task(first.all_reduce(number(8.0)))
        assert (await last.all_reduce(number(2.0))).value.item() == 3
        assert (await last.all_reduce(number(16.0))).value.item() == 24
        assert (await following).value.item() == 24


@pytest.mark.asyncio
async def test_call_that_is_cancelled_during_its_copy_ends_behind_the_copy(memory, monkeypatch):
    copies, copy = threading.Lock(), shared.SharedRegisters._copy

    def later(registers: Any, at: int, parts: Sequence[Tensor]) -> None:
        with copies:
            copy(registers, at, parts)

    async with lanes(memory, 2) as (first, last):
        await sums([first, last])
        monkeypatch.setattr(shared.SharedRegisters, "_copy", later)
        tensors = [torch.full((3 * 2**18,), value) for value in (1.0, 2.0)]
        with copies:
            cancelled = asyncio.create_task(first.all_reduce(tensors[0]))
            await until(lambda: first._rounds._registers._writes)
            cancelled.cancel()
            await turns(20)
            assert not cancelled.done()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        tensors[0].fill_(9.0)
        found = await last.all_reduce(tensors[1])
        assert (found.value == 3).all()
        assert [it.number for it in await sums([first, last])] == [2, 2]
        assert (tensors[0] == 9).all()


@pytest.mark.asyncio
async def test_calls_keep_their_order_however_many_are_cancelled(memory):
    draw, results = random.Random(1), []

    async def call(lane: LiveLane, number: int) -> None:
        tensor = torch.full((SIZES[number % 3],), float(number))
        found = await lane.all_reduce(tensor)
        assert (found.number, found.ranks) == (number, (0, 1, 2))
        assert (found.value == 3 * number).all()
        results.append(number)

    async def calls(lane: LiveLane) -> None:
        tasks = []
        for number in range(60):
            tasks.append(asyncio.create_task(call(lane, number)))
            await turns(draw.randrange(1, 8))
            if draw.random() < 0.3:
                draw.choice(tasks[-4:]).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not [task for task in tasks if not task.cancelled() and task.exception()]

    async with lanes(memory, 3) as three:
        await asyncio.gather(*map(calls, three))
    assert 60 < len(results) < 180


@pytest.mark.asyncio
async def test_close_that_is_cancelled_closes_the_group(memory):
    async with groups(memory, 2) as (first, last):
        lane, _ = await first.lane(), await last.lane()
        calls = [asyncio.create_task(lane.barrier(timeout=None)) for _ in range(3)]
        await turns(20)
        closing = asyncio.create_task(first.aclose())
        await turns(1)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(ended, CommClosedError)
        assert first._registers._fd < 0


@pytest.mark.asyncio
async def test_failed_call_that_has_waited_for_its_lane_keeps_no_tensor(memory):
    async with lanes(memory, 2) as (first, last):
        tensor = torch.ones(3)
        freed = weakref.ref(tensor)
        calls = [asyncio.create_task(it) for it in (first.barrier(), first.all_reduce(tensor))]
        del tensor
        await turns(20)
        await last.barrier()
        with pytest.raises(MismatchError):
            await last.all_reduce(torch.ones(2))
        await calls[0]
        gc.disable()
        try:
            with pytest.raises(MismatchError):
                await calls[1]
            calls.clear()
            await turns()
            assert freed() is None
        finally:
            gc.enable()


@pytest.mark.asyncio
async def test_child_of_a_fork_does_not_use_the_group(store):
    async with groups(store, 1) as (group,):
        lane = await group.lane()
        group._disown()
        with pytest.raises(CommClosedError):
            await lane.barrier()
        group._place.closed = False


@pytest.mark.asyncio
async def test_different_calls_are_told_on_all_ranks_and_the_lane_goes_on(store):
    async with lanes(store, 2) as (first, last):
        calls = first.all_reduce(number(1.0)), last.all_reduce(torch.ones(2))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, MismatchError)
            assert "float32[1]" in str(error)
            assert "float32[2]" in str(error)
        assert [found.value.item() for found in await sums([first, last])] == [3, 3]


@pytest.mark.asyncio
async def test_bad_arguments_are_refused_before_anything_is_contributed(store):
    async with lanes(store, 2, capacity=64) as (first, last):
        wrong: list[tuple[Any, type[Exception], str]] = [
            (lambda: first.all_reduce([1.0]), ArgumentTypeError, "tensor is"),
            (lambda: first.all_reduce(torch.ones(4, 4).t()), ArgumentError, "contiguous"),
            (lambda: first.all_reduce(torch.ones(17)), ArgumentError, "68 bytes are given, wanted at most"),
            (lambda: first.all_reduce(number(1.0), "most"), ArgumentError, "op is 'most'"),
            (lambda: first.all_reduce(number(1.0), aiocomms.ReduceOp.BAND), ArgumentError, "op is band"),
            (lambda: first.all_reduce(number(1.0), timeout=0), ArgumentError, "timeout is 0"),
            (lambda: first.all_to_all([number(1.0)]), ArgumentError, "1 tensors, wanted one per rank: 2"),
            (lambda: first.all_to_all(number(1.0)), ArgumentTypeError, "inputs is"),
            (lambda: first.all_gather(torch.zeros([1] * 5000)), ArgumentError, "the shapes take 5025 bytes, wanted at"),
        ]
        for call, kind, text in wrong:
            with pytest.raises(kind, match=text):
                await call()
        assert [found.number for found in await sums([first, last])] == [0, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": ""}, "name has 0"), ({"capacity": 0}, "capacity is 0"), ({"capacity": "1"}, "capacity is '1'"),
        ({"rank": 2, "size": 2}, "rank is 2"), ({"timeout": -1}, "timeout is -1"),
    ],
)  # fmt: skip
def test_bad_arguments_of_the_group_are_refused(options, text):
    with pytest.raises(ArgumentError, match=text):
        aiocomms.live_group(**({"store": HashStore(), "rank": 0, "size": 1} | options))


@pytest.mark.asyncio
async def test_other_threads_are_refused(store):
    async with groups(store, 1) as (group,):
        lane = await group.lane()
        for call in (lane.barrier, group.lane, group.aclose):
            with pytest.raises(RuntimeError, match="another thread"):
                await asyncio.to_thread(lambda call=call: call().send(None))


@pytest.mark.asyncio
async def test_too_many_ranks_are_refused(store):
    with pytest.raises(ArgumentError, match="size is 21, wanted at most 20"):
        await aiocomms.live_group(store=store, rank=0, size=21)


@pytest.mark.asyncio
async def test_memory_that_cannot_be_had_is_a_wrong_capacity(memory):
    with pytest.raises(ArgumentError, match="capacity is 1099511627776, and the memory for 1 such"):
        await aiocomms.live_group(store=memory, rank=0, size=1, capacity=2**40)


@pytest.mark.asyncio
async def test_other_capacities_and_absent_ranks_are_named(store):
    with pytest.raises(CommTimeoutError, match=r"ranks \[1\] have not joined"):
        await aiocomms.live_group(store=store, rank=0, size=2, timeout=SHORT)
    with pytest.raises(ArgumentError, match="size and capacity are 2 64, and those of another rank 2 4194304"):
        await aiocomms.live_group(store=store, rank=1, size=2, capacity=64)


@pytest.mark.asyncio
async def test_large_tensors_are_copied_off_the_loop(store):
    async with lanes(store, 2) as two:
        tensors = [torch.arange(3 * 2**18, dtype=torch.float32) * (n + 1) for n in range(2)]
        for found in await asyncio.gather(*(it.all_reduce(tensors[n]) for n, it in enumerate(two))):
            assert torch.equal(found.value, torch.arange(3 * 2**18, dtype=torch.float32) * 3)


@pytest.mark.asyncio
async def test_call_that_waits_ends_when_its_group_is_closed(store):
    async with groups(store, 2) as (first, last):
        lane, _ = await first.lane(), await last.lane()
        waiting = asyncio.create_task(lane.barrier(timeout=None))
        await until(lambda: lane._rounds._next)
        await first.aclose()
        with pytest.raises(CommClosedError, match="the group was closed"):
            await waiting
        assert first.closed
        assert "closed" in repr(first)


@pytest.mark.asyncio
async def test_closed_group_maps_no_memory_while_its_handles_live(memory):
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("aiocomms live group")

    before = mapped()
    async with lanes(memory, 2) as (first, second):
        for _ in range(2):
            await sums([first, second])
        waits = asyncio.create_task(second.all_reduce(number(1)))  # This rank is the first to close.
        await turns()
        assert mapped() > before
    with pytest.raises(CommClosedError):
        await waits
    for lane in (first, second):
        with pytest.raises(CommClosedError):
            await lane.all_reduce(number(1))
    assert mapped() == before
