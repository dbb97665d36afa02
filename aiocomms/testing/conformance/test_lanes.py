"""Lanes: collectives and messages match by the lane's key, even if the ranks use the lanes in different orders."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import anyio
import pytest
import torch
from torch import Tensor

from aiocomms import ReduceOp, Work, functional
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommTimeoutError,
)
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.trials import EVERY, Setting

KEYS = (
    "1",
    b"1",
    1,
    -1,
    0,
    "",
    b"",
    "a",
    "A",
    "\u00e4",
    "\ud800",
    b"\xff" * 300,
    2**70,
    -(2**70),
    10**5000,
    "x" * 5000,
)
SHORT = 0.2
"""A deadline, in seconds, that passes during the check."""


def number(comm: Communicator, value: float, count: int = 3) -> Tensor:
    return torch.full((count,), float(value), device=comm.device)


async def reduced(comm: Any, value: float, count: int = 3) -> None:
    """Check an all_reduce in which rank ``r`` contributes ``value + r``."""
    tensor = await comm.all_reduce(number(comm, value + comm.rank, count))
    want = comm.size * value + comm.size * (comm.size - 1) // 2
    assert tensor.tolist() == [want] * count, f"{tensor[:3]} of {comm!r}, wanted {want}"


def shuffled(case: Case, things: Any, *key: object) -> list[Any]:
    """Return the items in a different order on each rank."""
    mixed = list(things)
    random.Random(f"{case.seed} {case.rank} {key}").shuffle(mixed)
    return mixed


@pytest.mark.memory
@ranks(2, 3, more=(1, 4, 7))
async def test_lanes_match_collectives_called_in_another_order_on_each_rank(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    started = []
    for i, name in shuffled(case, enumerate(EVERY)):
        lane = cast("Communicator", comm.lane(name))
        for k, shape in enumerate(((5,), data.SHAPES[i % len(data.SHAPES)], data.LARGE)):
            setting = Setting(torch.float32, shape, (i + k) % comm.size, ReduceOp.SUM, (name, k))
            started.append((name, setting, EVERY[name](lane, case, setting)))
    for name, setting, trial in started:
        try:
            await trial.check()
        except Exception as error:
            error.add_note(f"{name}: {setting}")
            raise


@pytest.mark.core
@ranks(3, more=(2, 7))
async def test_lanes_awaited_in_another_order_on_each_rank_never_deadlock(comm: Communicator, case: Case) -> None:
    """Each rank begins the lanes in a different order, and awaits the collectives of a lane one after the other."""
    case.need_any_order()

    async def follow(key: str) -> None:
        for k in range(3):
            await reduced(comm.lane(key), hash_of(key) + k)

    async with anyio.create_task_group() as tasks:
        for key in shuffled(case, "abcdef"):
            tasks.start_soon(follow, key)


def hash_of(key: object) -> int:
    """Return a small number for a key.

    Different keys get different numbers. All ranks get the same number for a key.
    """
    return KEYS.index(key) if key in KEYS else sum(map(ord, str(key)))


@pytest.mark.core
@ranks(2, more=(1, 3))
async def test_keys_of_different_types_are_different_lanes(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    keys = KEYS[::-1] if comm.rank % 2 else KEYS  # In these orders two keys would match if they named one lane.
    works = {key: comm.lane(key).all_reduce(number(comm, 10 * hash_of(key) + comm.rank)) for key in keys}
    for key, work in works.items():
        want = comm.size * 10 * hash_of(key) + sum(range(comm.size))
        assert (await work).tolist() == [want] * 3, key


@pytest.mark.core
@ranks(2, more=(3,))
async def test_equal_keys_name_one_lane(comm: Communicator, case: Case) -> None:
    """All ranks use the same lane.

    Rank 0 calls ``comm.lane`` for each collective, and the other ranks reuse the object of one such call.
    """
    case.need_any_order()
    kept = comm.lane("one")
    for i in range(5):
        await reduced(kept if comm.rank else comm.lane("one"), i)


@ranks(2, 3)
async def test_collectives_of_one_lane_match_in_call_order(comm: Communicator, case: Case) -> None:
    """Each rank calls small and large collectives of one lane, all at once."""
    case.need_any_order()
    lane = comm.lane("ordered")
    sizes = [(1, 20_011, 0, 300)[i % 4] for i in range(40)]
    works = [lane.all_reduce(number(comm, i + comm.rank, n)) for i, n in enumerate(sizes)]
    for i, (work, count) in enumerate(zip(works, sizes, strict=True)):
        assert (await work).tolist() == [comm.size * i + sum(range(comm.size))] * count


@ranks(2, more=(3,))
async def test_thousands_of_concurrent_lanes_stay_apart(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    works = {key: comm.lane(key).all_reduce(number(comm, key + comm.rank)) for key in shuffled(case, range(1500))}
    for key, work in works.items():
        assert (await work)[0].item() == comm.size * key + sum(range(comm.size))


@ranks(2, more=(3,))
async def test_collectives_of_the_communicator_keep_their_order_beside_lanes(comm: Communicator, case: Case) -> None:
    """The communicator's own collectives keep their order, even if a rank calls collectives of lanes between them."""
    case.need_any_order()
    lanes = [comm.lane(i) for i in shuffled(case, range(6))]
    works: list[tuple[Work[Tensor], int]] = []
    for i in range(6):
        if comm.rank % 2:
            works.append((comm.all_reduce(number(comm, i)), i))
        works.append((lanes[i].all_reduce(number(comm, 100 + int(lanes[i].key))), 100 + int(lanes[i].key)))
        if not comm.rank % 2:
            works.append((comm.all_reduce(number(comm, i)), i))
    for work, value in works:
        assert (await work).tolist() == [comm.size * value] * 3


@pytest.mark.loops
@ranks(2, more=(3,))
async def test_cancelled_awaiter_leaves_the_lanes_order_intact(comm: Communicator, case: Case) -> None:
    """A cancelled await does not stop a collective, so the lane's next collectives match on all ranks."""
    case.need_any_order()
    lane = comm.lane("late")
    if comm.rank == 0:
        first, second = lane.all_reduce(number(comm, 1)), lane.all_reduce(number(comm, 2))
        for work in (first, second):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await work
        await reduced(comm.lane("other"), 5)  # A cancelled await does not hold up another lane, either.
        case.tell("cancelled")
    else:
        await reduced(comm.lane("other"), 5)
        await case.told("cancelled", 0)
        first, second = lane.all_reduce(number(comm, 1)), lane.all_reduce(number(comm, 2))
    await reduced(lane, 3)
    assert first.done() and second.done()
    assert (await first).tolist() == [comm.size] * 3 and (await second).tolist() == [2 * comm.size] * 3


@pytest.mark.clock
@ranks(2)
async def test_recv_in_a_lane_is_withdrawn_alone(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    lane = comm.lane("messages")
    if comm.rank == 1:
        slot = case.empty(torch.float32, (3,))
        work = lane.recv(slot.tensor, 0, 4)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await work
        assert work.done()
        with pytest.raises(CommTimeoutError, match="lane messages"):
            await lane.recv(slot.tensor, 0, 4, timeout=SHORT)
        slot.expect_untouched()
        case.tell("withdrawn")
        assert (await lane.recv(number(comm, 0), 0, 4)).tolist() == [4.0] * 3
    else:
        await case.told("withdrawn", 1)
        await lane.send(number(comm, 4), 1, 4)
    await reduced(lane, 1)


@pytest.mark.core
@ranks(2, more=(3,))
async def test_batches_and_objects_of_lanes_stay_apart(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    async def exchange(key: int) -> None:
        lane = comm.lane(key)
        there = number(comm, -1)
        await lane.batch().send(number(comm, 10 * key + comm.rank), right).recv(there, left).issue()
        assert there.tolist() == [10 * key + left] * 3
        sending = lane.send_object([key, "x" * 1000 * (key % 2)], right, 3)
        assert await lane.recv_object(left, 3) == [key, "x" * 1000 * (key % 2)]
        await sending
        assert await lane.broadcast_object({"key": key}, key % comm.size) == {"key": key}
        assert await lane.all_gather_object((key, comm.rank)) == [(key, r) for r in range(comm.size)]

    async with anyio.create_task_group() as tasks:
        for key in shuffled(case, range(8)):
            tasks.start_soon(exchange, key)


@pytest.mark.loops
@pytest.mark.core
@ranks(2, more=(3,))
async def test_ops_of_a_task_use_its_current_lane(comm: Communicator, case: Case) -> None:
    """Each task has its own current lane. The functions that the task calls do not name this lane.

    The tasks run in a different order on each rank, but their results do not mix.
    """
    case.need_any_order()
    other = await case.open("other")

    async def layer(value: int) -> None:
        await reduced(comm, value)
        if value % 2:
            tensor = await functional.all_reduce(number(comm, value), group=comm)
            assert tensor.tolist() == [comm.size * value] * 3

    async def request(key: int) -> None:
        with comm.lane(key) as lane:
            assert lane.key == key
            async with anyio.create_task_group() as children:
                children.start_soon(layer, 100 * key)
            with comm.lane(f"inner {key}"):
                await layer(100 * key + 1)
            with other.lane(key):  # This lane belongs to another communicator.
                await layer(100 * key + 2)
            await layer(100 * key + 3)

    async with anyio.create_task_group() as tasks:
        for key in shuffled(case, range(10)):
            tasks.start_soon(request, key)
    await reduced(comm, 7)
    await other.aclose()


@pytest.mark.core
@ranks(2)
async def test_split_window_and_stream_opened_within_a_lane_match_by_call_order(comm: Communicator, case: Case) -> None:
    """A split, a window and a stream are opened while a lane is the current lane of the task."""
    case.need_any_order()
    with comm.lane("request"):
        child = await comm.split([0, 1])
        assert child is not None
        await reduced(child, 3)
        await child.aclose()
        stream = await comm.open_stream(1 - comm.rank)
        await stream.send(number(comm, comm.rank))
        assert (await stream.receive()).tolist() == [1.0 - comm.rank] * 3
        await stream.aclose()
        if "rma" in comm.transports:
            window = await comm.new_window(number(comm, comm.rank))
            await window.put(number(comm, 5), 1 - comm.rank)
            await window.flush()
            await comm.barrier()
            assert window.tensor.tolist() == [5.0] * 3
            await window.aclose()
    await reduced(comm, 1)


@pytest.mark.core
@ranks(2)
async def test_lane_blocks_left_in_another_order_raise_runtime_error(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    first, second = comm.lane(1), comm.lane(2)
    with pytest.raises(RuntimeError, match="not the current lane"):
        first.__exit__(None, None, None)
    with first, second, pytest.raises(RuntimeError, match="not the current lane"):
        first.__exit__(None, None, None)
    await reduced(comm, 1)


@pytest.mark.core
@ranks(2)
async def test_wrong_arguments_leave_lane_and_communicator_usable(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    wrong: tuple[Any, ...] = (None, 1.5, True, ["a"], ("a", 1))
    for key in wrong:
        with pytest.raises(ArgumentTypeError, match=r"key is .* wanted a str, bytes or an int"):
            comm.lane(key)
    lane = comm.lane("k")
    calls: list[Callable[[], object]] = [
        lambda: lane.all_reduce(cast("Tensor", "x")),
        lambda: lane.broadcast(number(comm, 1), 9),
        lambda: lane.send(number(comm, 1), comm.size),
        lambda: lane.recv(number(comm, 1), 1 - comm.rank, 2**31),
        lambda: lane.all_reduce(number(comm, 1), timeout=-1),
        lambda: lane.set_timeout(0),
    ]
    for wrong_call in calls:
        with pytest.raises(ArgumentError):
            wrong_call()
    with pytest.raises(ArgumentError, match="lane k") as caught:
        lane.broadcast(number(comm, 1), 9)
    assert caught.value.op == "broadcast" and comm.name in str(caught.value)
    await reduced(lane, 1)
    await reduced(comm, 2)


@ranks(3)
async def test_overtaking_requests_with_cancellations_get_right_results(comm: Communicator, case: Case) -> None:
    """Each task runs several collectives, and some tasks stop waiting. Every result is right."""
    case.need_any_order()
    mix = random.Random(f"{case.seed} {comm.rank}")

    async def request(key: int) -> None:
        lane = comm.lane(key)
        for step in range(8):
            for _ in range(mix.randrange(3)):
                await anyio.lowlevel.checkpoint()
            if mix.random() < 0.2:
                work = lane.all_reduce(number(comm, key + step))
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await work
                await work.wait()
                assert (await work).tolist() == [comm.size * (key + step)] * 3
            else:
                tensor = number(comm, key + step)
                assert (await lane.all_reduce(tensor)).tolist() == [comm.size * (key + step)] * 3

    async with anyio.create_task_group() as tasks:
        for key in shuffled(case, range(60)):
            tasks.start_soon(request, key)
