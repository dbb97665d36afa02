"""The ways in which a lane ends: close, deadline, abort, and disagreement of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aiocomms import ReduceOp, Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    CommAbortedError,
    CommClosedError,
    CommTimeoutError,
    MismatchError,
)
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.test_lanes import SHORT, number, reduced, shuffled


@pytest.mark.core
@ranks(2)
async def test_closing_a_lane_withdraws_recvs_and_waits_for_collectives(comm: Communicator, case: Case) -> None:
    """The close withdraws receives, and waits for collectives. Other lanes and later lanes with this key still work."""
    case.need_any_order()
    lane, other = comm.lane("closing"), comm.lane("other")
    collective = lane.all_reduce(number(comm, comm.rank))
    receive, kept = lane.recv(number(comm, 0), 1 - comm.rank), other.recv(number(comm, 0), 1 - comm.rank)
    await lane.aclose()
    await lane.aclose()
    assert lane.closed and not other.closed and not comm.lane("closing").closed
    assert (await collective).tolist() == [1.0] * 3
    with pytest.raises(CommClosedError, match="the lane was closed"):
        await receive
    with pytest.raises(CommClosedError, match="the lane was closed"):
        lane.barrier()
    assert not kept.done()
    await case.meet("closed")
    await other.send(number(comm, 6), 1 - comm.rank)
    assert (await kept).tolist() == [6.0] * 3
    await reduced(comm.lane("closing"), 2)


@pytest.mark.core
@pytest.mark.clock
@ranks(2, more=(3,))
async def test_late_collective_names_its_lane_and_missing_ranks(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    if comm.rank:
        work = comm.recv(number(comm, 0), 0)
        case.tell("begun")
        with pytest.raises(TimeoutError):
            await work
    else:
        lane = comm.lane("req-17")
        assert lane.timeout == comm.timeout
        lane.set_timeout(SHORT)
        assert lane.timeout == SHORT != comm.timeout
        await case.told("begun")
        with pytest.raises(CommTimeoutError, match=r"lane req-17.*waiting for rank") as caught:
            await lane.all_reduce(number(comm, 1))
        assert caught.value.op == "all_reduce"
    with pytest.raises(CommAbortedError, match="req-17"):
        comm.lane("req-18").barrier()
    assert comm.aborted


@ranks(3, more=(2,))
async def test_collective_sizes_that_differ_lose_the_communicator(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    # The call itself raises if the other ranks have already found the mismatch.
    with pytest.raises((MismatchError, CommAbortedError), match="lane sizes"):
        await comm.lane("sizes").all_reduce(number(comm, 1, 4 + (comm.rank == comm.size - 1)))
    with pytest.raises(CommAbortedError, match="lane sizes"):
        comm.lane("waits").barrier()
    assert comm.aborted


@pytest.mark.core
@pytest.mark.clock
@ranks(2, more=(3,))
@pytest.mark.parametrize("what", ["operation", "root", "reduction"])
async def test_different_collectives_in_one_lane_fail_and_never_mix_data(
    comm: Communicator, case: Case, what: str
) -> None:
    """Different collectives of the same size would silently mix their data if ranks did not compare their calls.

    Instead, each rank gets an error: the calls differ, the deadline has passed, or the communicator is aborted.
    """
    case.need_any_order()
    calls: dict[str, tuple[Callable[[Any], Work[Any]], Callable[[Any], Work[Any]]]] = {
        "operation": (lambda c: c.all_reduce(number(comm, 1)), lambda c: c.broadcast(number(comm, 1), 0)),
        "root": (lambda c: c.reduce(number(comm, 1), 0), lambda c: c.reduce(number(comm, 1), comm.size - 1)),
        "reduction": (
            lambda c: c.all_reduce(number(comm, 1)),
            lambda c: c.all_reduce(number(comm, 1), ReduceOp.MAX),
        ),
    }
    lane = comm.lane("differs")
    lane.set_timeout(SHORT)
    with pytest.raises((MismatchError, CommTimeoutError, CommAbortedError), match="lane differs"):
        await calls[what][comm.rank == comm.size - 1](lane)
        await lane.barrier()  # A rank that only sends has done its part.
    assert comm.aborted


@ranks(2, more=(3,))
async def test_communicator_abort_fails_pending_ops_of_all_lanes(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    works: list[Work[Any]] = []
    if comm.rank == 0:
        for i in range(20):
            lane = comm.lane(i)
            works += [lane.all_reduce(number(comm, 1)), lane.barrier(), lane.recv(number(comm, 1), 1)]
        case.tell("called")
    else:
        await case.told("called", 0)
    if comm.rank == 1:
        comm.abort("enough")
    for work in works:
        with pytest.raises(CommAbortedError, match="enough"):
            await work
    with anyio.move_on_after(case.place.deadline):
        while not comm.aborted:
            await anyio.lowlevel.checkpoint()
    with pytest.raises(CommAbortedError, match=r"lane 3.*enough"):
        comm.lane(3).barrier()


@ranks(2, more=(3,))
async def test_closing_the_communicator_waits_for_pending_ops_of_lanes(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    other = await case.open("closed")
    works = [other.lane(key).all_reduce(number(comm, key)) for key in shuffled(case, range(20))]
    await other.aclose()
    assert all(work.done() for work in works)
    for work in works:
        await work
    with pytest.raises(CommClosedError, match="lane 1"):
        other.lane(1).barrier()
