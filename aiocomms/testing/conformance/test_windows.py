"""Windows: memory that other ranks write, read, and update atomically, without help of the owner."""

from __future__ import annotations

import contextlib
import itertools
import unittest
from collections.abc import Callable
from typing import Any, cast

import anyio
import pytest
import torch

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    CommClosedError,
    MismatchError,
    UnsupportedOperation,
)
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks, window

PART = 11
"""The number of elements that each rank writes in another rank's part of a window."""


@pytest.mark.memory
@ranks(1, 2, 3, more=(4, 7))
async def test_every_rank_puts_every_dtype_to_every_rank(comm: Communicator, case: Case) -> None:
    """Every rank writes its own section of every rank's window, for every dtype."""
    for dtype in data.ALL_DTYPES:
        slot, win = await window(comm, case, dtype, PART * comm.size)
        contents = [case.bits(dtype, (PART,), r) for r in range(comm.size)]
        given = case.full(contents[comm.rank])
        for work in [win.put(given.tensor, r, PART * comm.rank) for r in range(comm.size)]:
            assert await work is given.tensor
        await win.flush()
        await comm.barrier()
        slot.expect(torch.cat(contents))
        given.expect_untouched()
        await win.aclose()


@pytest.mark.memory
@ranks(1, 2, 3, more=(4, 7))
async def test_every_rank_gets_from_every_rank(comm: Communicator, case: Case) -> None:
    for dtype in data.ALL_DTYPES:
        slot, win = await window(comm, case, dtype, PART)
        slot.tensor.copy_(case.bits(dtype, (PART,), comm.rank))
        await comm.barrier()
        outs = [case.empty(dtype, (PART - 3,)) for _ in range(comm.size)]
        for work, out in [(win.get(out.tensor, r, 2), out) for r, out in enumerate(outs)]:
            assert await work is out.tensor
        for r, out in enumerate(outs):
            out.expect(case.bits(dtype, (PART,), r)[2:-1])
        await win.aclose()
        slot.expect(case.bits(dtype, (PART,), comm.rank))


@pytest.mark.memory
@ranks(1, 2, 3)
async def test_runs_are_put_and_got_each_between_its_own_places(comm: Communicator, case: Case) -> None:
    """A ``put_v`` writes runs of a tensor at different offsets of a rank's window, and a ``get_v`` reads these runs.

    A run is a sequence of consecutive elements. The list of runs may be empty, and a run may be empty.
    """
    there = (comm.rank + 1) % comm.size
    for dtype in (torch.uint8, torch.int16, torch.float64):
        slot, win = await window(comm, case, dtype, 4 * PART)
        slot.tensor.zero_()
        await comm.barrier()
        content = case.bits(dtype, (4, PART), comm.rank)
        given = case.full(content)
        offsets, starts = (3 * PART, 0, 2 * PART), (0, 2 * PART, 3 * PART)
        assert await win.put_v(given.tensor, there, offsets, starts, PART) is given.tensor
        for work in (win.put_v(given.tensor, there, (), (), PART), win.get_v(given.tensor, there, (1, 2), (0, 5), 0)):
            await work
        await win.flush()
        await comm.barrier()
        came = case.bits(dtype, (4, PART), (comm.rank - 1) % comm.size)
        slot.expect(torch.cat([came[2], torch.zeros(PART, dtype=dtype), came[3], came[0]]))
        got = case.empty(dtype, (4, PART))
        got.tensor.zero_()
        assert await win.get_v(got.tensor, there, list(offsets), list(starts), PART) is got.tensor
        got.expect(torch.cat([content[:1], torch.zeros(1, PART, dtype=dtype), content[2:]]))
        given.expect_untouched()
        await win.aclose()


@pytest.mark.memory
@ranks(2, 3, more=(1, 7))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
async def test_concurrent_fetch_add_loses_no_addition(comm: Communicator, case: Case, dtype: torch.dtype) -> None:
    """No addition is lost, and each addition returns the value before the addition."""
    case.need_atomics()
    slot, win = await window(comm, case, dtype, 3)
    works = [win.fetch_add(comm.size - 1, 1, 1) for _ in range(20)]
    before = [await work for work in works]
    assert before == sorted(set(before)), before
    everything = await comm.all_gather_object(before)
    assert sorted(itertools.chain.from_iterable(everything)) == list(range(20 * comm.size))
    await comm.barrier()
    if comm.rank == comm.size - 1:
        slot.expect(torch.tensor([0, 20 * comm.size, 0], dtype=dtype))
    await win.aclose()


@ranks(2, more=(1,))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
async def test_fetch_add_wraps_around(comm: Communicator, case: Case, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    case.need_atomics()
    slot, win = await window(comm, case, dtype, 1)
    if comm.rank == 0:
        last = comm.size - 1
        assert await win.fetch_add(last, 0, info.max) == 0
        assert await win.fetch_add(last, 0, 2) == info.max
        assert await win.fetch_add(last, 0, info.min) == info.min + 1
        assert await win.compare_swap(last, 0, 1, info.min) == 1
    await comm.barrier()
    if comm.rank == comm.size - 1:
        slot.expect(torch.tensor([info.min], dtype=dtype))
    await win.aclose()


@pytest.mark.memory
@ranks(3, more=(2, 7))
async def test_concurrent_compare_swap_succeeds_on_one_rank(comm: Communicator, case: Case) -> None:
    case.need_atomics()
    slot, win = await window(comm, case, torch.int64, 2)
    await comm.barrier()
    before = await win.compare_swap(0, 1, 0, comm.rank + 1)
    everything = await comm.all_gather_object(before)
    winners = [r for r, value in enumerate(everything) if value == 0]
    assert len(winners) == 1, everything
    assert all(value == winners[0] + 1 for r, value in enumerate(everything) if r != winners[0])
    if comm.rank == 0:
        slot.expect(torch.tensor([0, winners[0] + 1]))
    await win.aclose()


@pytest.mark.memory
@ranks(2, more=(3,))
async def test_window_calls_of_one_rank_take_effect_in_call_order(comm: Communicator, case: Case) -> None:
    """One rank's calls on another rank's part take effect in the order of the calls, even without awaits."""
    _, win = await window(comm, case, torch.int64, comm.size)
    peer = (comm.rank + 1) % comm.size
    got = [torch.empty(1, dtype=torch.int64, device=comm.device) for _ in range(10)]
    counted = case.atomics()
    works: list[tuple[Work[torch.Tensor], Work[torch.Tensor], Work[int] | None]] = [
        (
            win.put(torch.full_like(out, turn), peer, comm.rank),
            win.get(out, peer, comm.rank),
            win.fetch_add(peer, comm.rank, 100) if counted else None,
        )
        for turn, out in enumerate(got)
    ]
    for turn, (put, get, add) in enumerate(works):
        await put
        await get
        assert got[turn].item() == turn
        assert add is None or await add == turn
    await win.aclose()


@ranks(3, more=(2,))
async def test_put_up_to_the_last_element_succeeds_and_beyond_it_is_refused(comm: Communicator, case: Case) -> None:
    """Ranks expose parts of different sizes.

    A put up to the last element succeeds. An empty put also succeeds. A put beyond the end of a rank's part fails.
    """
    sizes = [5 * r for r in range(comm.size)]
    slot, win = await window(comm, case, torch.int16, sizes[comm.rank])
    assert win.sizes == sizes
    for r, size in enumerate(sizes):
        await win.put(torch.empty(0, dtype=torch.int16, device=comm.device), r, size)
        with pytest.raises(ArgumentError, match="offset"):
            win.put(torch.ones(1, dtype=torch.int16, device=comm.device), r, size)
        with pytest.raises(ArgumentError, match="offset"):
            win.get(torch.ones(size + 1, dtype=torch.int16, device=comm.device), r)
    last = comm.size - 1
    if comm.rank == 0:
        await win.put(torch.full((1,), 7, dtype=torch.int16, device=comm.device), last, sizes[last] - 1)
        await win.flush(last)
    await comm.barrier()
    slot.expect(
        torch.tensor([0] * (sizes[last] - 1) + [7] if comm.rank == last else [0] * sizes[comm.rank]).to(torch.int16)
    )
    await win.aclose()


@ranks(2, more=(3,))
async def test_accesses_of_two_windows_stay_apart(comm: Communicator, case: Case) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    opened = [await window(comm, case, torch.int32, 4) for _ in range(3)]
    for i, (_, win) in enumerate(opened):
        win.put(case.bits(torch.int32, (4,), comm.rank, i).to(comm.device), right)
        win.signal(right)
    for i, (slot, win) in reversed(list(enumerate(opened))):
        await win.wait_signal(left)
        slot.expect(case.bits(torch.int32, (4,), left, i))
    for _, win in opened:
        await win.aclose()


@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
async def test_cancelled_window_access_happens_once(comm: Communicator, case: Case) -> None:
    """A cancelled put, get or addition is not withdrawn, and happens once."""
    slot, win = await window(comm, case, torch.int64, 3)
    if comm.rank == 0:
        content, got = case.bits(torch.int64, (2,)), case.empty(torch.int64, (2,))
        works: list[Work[Any]] = [win.put(content.to(comm.device, copy=True), 1), win.get(got.tensor, 1)]
        works += [win.fetch_add(1, 2, 5)] if case.atomics() else []
        for work in works:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await work
            assert await work.cancel() is False and work.exception() is None
        await win.flush()
        got.expect(content)
    await win.aclose()
    if comm.rank == 1:
        slot.expect(torch.cat([case.bits(torch.int64, (2,)), torch.tensor([5 if case.atomics() else 0])]))


@pytest.mark.fault(70)
@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("how", ["aclose", "async with"])
async def test_window_close_waits_for_accesses_of_all_ranks(comm: Communicator, case: Case, how: str) -> None:
    slot, win = await window(comm, case, torch.int32, PART)
    async with contextlib.AsyncExitStack() as stack:
        if how == "async with":
            assert await stack.enter_async_context(win) is win
        if comm.rank == 0:
            for i in range(PART):
                win.put(torch.full((1,), i, dtype=torch.int32, device=comm.device), 1, i)
    assert win.closed == (how == "async with")
    await win.aclose()
    await win.aclose()
    if comm.rank == 1:
        slot.expect(torch.arange(PART, dtype=torch.int32))
    calls: list[Callable[[], object]]
    calls = [lambda: win.put(slot.tensor, 0), lambda: win.put_signal(slot.tensor, 0), lambda: win.signal(0)]
    calls += [win.flush, lambda: win.fetch_add(0, 0, 1)]
    for call in calls:
        with pytest.raises(CommClosedError, match="window"):
            call()
    await comm.barrier()


@ranks(2)
async def test_exception_in_the_window_block_leaves_without_waiting_for_peers(comm: Communicator, case: Case) -> None:
    """Rank 0 raises an error in its ``async with`` block, and leaves the block without a wait for rank 1.

    Rank 1 is still in its own block, and can still write to rank 0's part of the window.
    """
    slot, win = await window(comm, case, torch.int32, PART)
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError):
            async with win:
                raise ZeroDivisionError
        assert win.closed and not comm.aborted
        with pytest.raises(CommClosedError, match="window"):
            win.signal(1)
        case.tell("left")
    else:
        async with win:
            await case.told("left", 0)
            await win.put(case.bits(torch.int32, (PART,)).to(comm.device), 0)
    await comm.barrier()
    if comm.rank == 0:
        slot.expect(case.bits(torch.int32, (PART,)))


@ranks(2)
async def test_exception_leaves_the_window_block_of_a_lost_communicator(comm: Communicator, case: Case) -> None:
    _, win = await window(comm, case, torch.int32, 1)
    case.tell("open")
    await case.told("open", 0, 1)
    with pytest.raises(ZeroDivisionError):
        async with win:
            comm.abort("for the test")
            raise ZeroDivisionError
    assert win.closed


@pytest.mark.fault(70)
@pytest.mark.core
@ranks(2)
async def test_wrong_arguments_of_a_window_are_refused(comm: Communicator, case: Case) -> None:
    slot, win = await window(comm, case, torch.int32, 4)
    other = torch.zeros(2, dtype=torch.int32, device=comm.device)
    none, real = cast("Any", None), cast("Any", 1.0)
    calls: dict[Callable[[], object], str] = {
        lambda: win.put(other, 2): "dst is 2",
        lambda: win.put(other, True): "dst is True",
        lambda: win.put(other, 0, -1): "offset is -1",
        lambda: win.put(other, 0, 3): "offset is 3",
        lambda: win.put(other, 0, real): "offset is 1.0",
        lambda: win.put(other.float(), 0): "tensor has dtype",
        lambda: win.put_signal(none, 0): "tensor",
        lambda: win.put(torch.zeros(4, dtype=torch.int32, device=comm.device)[::2], 0): "tensor",
        lambda: win.get(other, -1): "src is -1",
        lambda: win.get(other, 0, 2**62): "offset is",
        lambda: win.fetch_add(0, 4, 1): "offset is 4",
        lambda: win.fetch_add(0, 0, real): "value is 1.0",
        lambda: win.fetch_add(0, 0, 2**31): "value is 2147483648",
        lambda: win.compare_swap(0, 0, none, 1): "expected is None",
        lambda: win.signal(7): "dst is 7",
        lambda: win.wait_signal(none): "src is None",
        lambda: win.flush(5): "dst is 5",
        lambda: win.put(other, 0, timeout=-1): "timeout is -1",
    }
    for call, text in calls.items():
        with pytest.raises(ArgumentError, match=text):
            call()
    await win.put(other, 1 - comm.rank)
    await win.aclose()
    slot.expect_untouched()


@pytest.mark.core
@ranks(2)
async def test_wrong_runs_are_refused(comm: Communicator, case: Case) -> None:
    slot, win = await window(comm, case, torch.int32, 4)
    other, real = torch.zeros(4, dtype=torch.int32, device=comm.device), cast("int", 1.0)
    calls: dict[Callable[[], Work[Any]], str] = {
        lambda: win.put_v(other, 0, (0, 3), (0, 0), 2): "offsets are from 0 to 3 for runs of 2 elements",
        lambda: win.put_v(other, 0, (0,), (3,), 2): "starts are from 3 to 3",
        lambda: win.get_v(other, 0, (0, 1), (-1, 0), 1): "starts are from -1 to 0",
        lambda: win.get_v(other, 0, (0, 1), (0,), 1): "offsets are 2 and starts 1",
        lambda: win.get_v(other, 0, (0,), (0,), real): "count is 1.0",
        lambda: win.get_v(other, 0, (0,), (0,), 5): "count is 5, wanted at most 4",
        lambda: win.get_v(other, 0, (real,), (0,), 1): "offsets",
        lambda: win.get_v(other.float(), 0, (0,), (0,), 1): "tensor has dtype",
    }
    for call, text in calls.items():
        with pytest.raises(ArgumentError, match=text):
            call()
    await win.put_v(other, 1 - comm.rank, (0, 2), (2, 0), 2)
    await win.aclose()
    slot.expect_untouched()


@pytest.mark.core
@ranks(2)
async def test_fetch_add_on_a_float_window_is_refused(comm: Communicator, case: Case) -> None:
    _, win = await window(comm, case, torch.float32, 4)
    with pytest.raises(UnsupportedOperation, match="float32"):
        win.fetch_add(0, 0, 1)
    await win.aclose()
    with pytest.raises(ArgumentError, match="tensor"):
        await comm.new_window(torch.zeros(4, device=comm.device)[::2])


@pytest.mark.memory
@ranks(2)
async def test_write_to_a_mapped_window_reaches_its_owner(comm: Communicator, case: Case) -> None:
    slot, win = await window(comm, case, torch.int32, 4)
    if not win.mapped(1 - comm.rank):
        with pytest.raises(UnsupportedOperation):
            await win.map_remote_tensor(1 - comm.rank)
        await win.aclose()
        raise unittest.SkipTest("the ranks share no memory")
    mapped = await win.map_remote_tensor(1 - comm.rank)
    mapped[2] = comm.rank + 5
    await comm.barrier()
    slot.expect(torch.tensor([0, 0, 6 - comm.rank, 0], dtype=torch.int32))
    await win.aclose()


@ranks(1, 3)
async def test_mapped_tells_whether_map_remote_tensor_succeeds(comm: Communicator, case: Case) -> None:
    """A rank can map its own part of a window. The result of ``mapped`` is right for every part."""
    slot, win = await window(comm, case, torch.int32, 4)
    assert win.mapped(comm.rank)
    for rank in range(comm.size):
        if win.mapped(rank):
            assert (await win.map_remote_tensor(rank)).shape == slot.tensor.shape
        else:
            with pytest.raises(UnsupportedOperation):
                await win.map_remote_tensor(rank)
    for wrong in (comm.size, -1, True, "0"):
        with pytest.raises(ArgumentError, match=r"mapped on .*rank is"):
            win.mapped(cast("Any", wrong))
    await win.aclose()
    with pytest.raises(CommClosedError, match="window is closed"):
        win.mapped(comm.rank)


@pytest.mark.core
@ranks(2)
async def test_window_whose_dtypes_differ_between_ranks_is_refused(comm: Communicator, case: Case) -> None:
    if not {"rma", "p2p"} & set(comm.transports):
        raise unittest.SkipTest("no windows")
    for dtype in (torch.int32, torch.int64):  # One of these has as many bytes as the other rank's dtype.
        with pytest.raises(MismatchError, match="dtype"):
            await comm.new_window(torch.zeros(4, dtype=dtype if comm.rank else torch.float32, device=comm.device))
    _, win = await window(comm, case, torch.int32, 1)  # the communicator stays usable
    await win.aclose()
