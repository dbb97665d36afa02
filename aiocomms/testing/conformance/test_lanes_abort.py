"""Lanes that one rank aborts. The abort of a lane by one rank aborts the lane on all ranks.

The communicator and its other lanes stay usable.
"""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import LaneAbortedError
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.test_lanes import number, reduced, shuffled

LARGE = 40_000
"""The number of elements of a large tensor, which no transport sends before the matching receive is posted."""


async def goes_on(comm: Communicator, case: Case) -> None:
    """Check on all ranks that operations outside the aborted lane still work."""
    await reduced(comm.lane("another"), 3)
    await reduced(comm, 4)
    assert not comm.aborted
    await case.meet("it goes on")


async def refused(comm: Communicator, key: Any, why: str) -> None:
    """Check that an op of an aborted lane fails, at the call or later.

    The error contains the reason of the first abort of the lane.
    """
    with pytest.raises(LaneAbortedError, match=why) as caught:
        await comm.lane(key).barrier()
    assert f"lane {key}" in str(caught.value)


@ranks(2, 3, more=(4,))
async def test_lane_abort_fails_pending_ops_on_other_ranks(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    lane = comm.lane("req 7")
    if comm.rank == 0:
        for rank in range(1, comm.size):
            await case.told("called", rank)
        lane.abort(ValueError("a bad request"))
    else:
        works: list[Work[Any]] = [lane.all_reduce(number(comm, 1)), lane.barrier(), lane.recv(number(comm, 0), 0)]
        works.append(lane.recv_object(0))
        case.tell("called")
        for work in works:
            with pytest.raises(LaneAbortedError, match="aborted by rank 0: ValueError: a bad request") as caught:
                await work
            assert caught.value.peer == 0
            assert "lane req 7" in str(caught.value)
    await refused(comm, "req 7", "by rank 0: ValueError: a bad request")
    await goes_on(comm, case)


@pytest.mark.core
@ranks(2, more=(3,))
async def test_exception_that_leaves_the_lane_block_aborts_the_lane(comm: Communicator, case: Case) -> None:
    case.need_any_order()

    async def handle() -> None:
        with comm.lane("failing"):
            await reduced(comm, 1)
            if comm.rank == comm.size - 1:
                raise KeyError("no such model")
            await reduced(comm, 2)

    wanted: type[Exception] = KeyError if comm.rank == comm.size - 1 else LaneAbortedError
    with pytest.raises(wanted, match="no such model"):
        await handle()
    await goes_on(comm, case)


@pytest.mark.loops
@pytest.mark.core
@ranks(2, more=(3,))
async def test_task_cancelled_in_the_lane_block_aborts_the_lane(comm: Communicator, case: Case) -> None:
    """The lane is also aborted on the other ranks.

    A server needs such an abort when a client disconnects during a request.
    """
    case.need_any_order()
    others = range(1, comm.size)
    if comm.rank == 0:
        with anyio.CancelScope() as scope:
            with comm.lane("gone"):
                for rank in others:
                    await case.told("called", rank)
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
    else:
        with pytest.raises(LaneAbortedError, match="aborted by rank 0"), comm.lane("gone"):
            work = comm.all_reduce(number(comm, 1))
            case.tell("called")
            await work
    await goes_on(comm, case)


@pytest.mark.memory
@ranks(2, 3)
async def test_lane_abort_releases_a_send_that_is_never_received(comm: Communicator, case: Case) -> None:
    """Rank 0 sends a large message, and no rank receives it.

    The abort ends the send, unless the transport has buffered the message.
    """
    case.need_any_order()
    lane, last = comm.lane("large"), comm.size - 1
    works: list[Work[Any]] = []
    if comm.rank == 0:
        works = [lane.send(number(comm, 1, LARGE), last), lane.broadcast(number(comm, 1, LARGE), 0)]
        works += [lane.broadcast(number(comm, k, LARGE), 0) for k in range(3)]
        works.append(lane.send_object({"of": "some", "size": number(comm, 1, LARGE)}, last))
    elif comm.rank != last:
        works.append(lane.recv(number(comm, 0), last))
    await case.meet("sent")
    if comm.rank == last:
        lane.abort("nobody wants it")
    for work in works:
        await work.wait()
        error = work.exception()
        assert error is None or (isinstance(error, LaneAbortedError) and "nobody wants it" in str(error)), error
    await refused(comm, "large", "nobody wants it")
    await goes_on(comm, case)


@pytest.mark.core
@ranks(2, more=(3,))
async def test_lane_abort_reaches_a_rank_that_has_used_no_lane(comm: Communicator, case: Case) -> None:
    """The rank gets the error of the abort when it uses its first lane."""
    case.need_any_order()
    if comm.rank == 0:
        comm.lane("early").abort("before anybody called")
    await case.meet("aborted")
    await refused(comm, "early", "before anybody called")
    await goes_on(comm, case)


@ranks(3, more=(2,))
async def test_simultaneous_lane_aborts_leave_the_communicator_usable(comm: Communicator, case: Case) -> None:
    """A late call raises the error of the abort. A collective that all ranks had begun may succeed on some ranks.

    No rank hangs.
    """
    case.need_any_order()
    lane = comm.lane("all")
    try:
        work = lane.all_reduce(number(comm, 1, LARGE))
        lane.abort("one reason")
        lane.abort("another reason")
        await work
    except LaneAbortedError as error:
        assert "one reason" in str(error)
    await refused(comm, "all", "one reason")
    await goes_on(comm, case)


@pytest.mark.core
@ranks(2, more=(3,))
async def test_lane_abort_carries_a_long_reason_that_is_not_utf_8(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    if comm.rank == 0:
        comm.lane("odd").abort(ValueError("\ud800 is no character" + "\ud801\U0001f600" * 500))
    await case.meet("aborted")
    await refused(comm, "odd", "ValueError: .*is no character")
    await goes_on(comm, case)


@ranks(2, more=(3,))
async def test_lane_abort_from_another_thread_ends_the_lane(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    lane = comm.lane("thread")
    if comm.rank == 0:
        await anyio.to_thread.run_sync(lane.abort, "from a thread")
    with pytest.raises(LaneAbortedError, match="from a thread"):
        await lane.all_reduce(number(comm, 1))
    await goes_on(comm, case)


@ranks(3, more=(2,))
async def test_failing_requests_leave_other_lanes_right(comm: Communicator, case: Case) -> None:
    """Every fifth request fails on one rank, before one of its collectives. All other requests get correct results."""
    case.need_any_order()
    same = random.Random(case.seed)
    plan = {key: (same.randrange(comm.size), same.randrange(4)) for key in range(0, 60, 5)}

    async def serve(key: int) -> None:
        fails_on, fails_before = plan.get(key, (-1, -1))
        count = (2, 5000, LARGE)[key % 3]
        try:
            with comm.lane(f"request {key}"):
                for step in range(4):
                    if (comm.rank, step) == (fails_on, fails_before):
                        raise ValueError(f"request {key} is bad")
                    await reduced(comm, key + step, count)
        except (ValueError, LaneAbortedError) as error:
            assert f"request {key} is bad" in str(error)
            assert key in plan
        else:
            assert key not in plan

    async with anyio.create_task_group() as tasks:
        for key in shuffled(case, range(60)):
            tasks.start_soon(serve, key)
    await goes_on(comm, case)
    assert not comm._core.in_flight
    assert not comm._core.router.turns
