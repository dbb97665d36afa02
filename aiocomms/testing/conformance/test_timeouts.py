"""The deadlines of operations. A deadline is independent of a timeout around an ``await``."""

from __future__ import annotations

import threading
import time
import unittest
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
import torch

from aiocomms import COMM_TIMEOUT, Work, ops
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.transport import Transport

SHAPE = (6,)

SHORT = 0.1
"""A short deadline of ops, in seconds."""
ASKED_AGAIN = 0.6
"""A longer deadline of ops, in seconds.

The deadline is longer than the pause that a rank must make before it asks the other ranks for their state again.
"""
ATTEMPTS = 20


def ones(comm: Communicator) -> torch.Tensor:
    return torch.ones(4, device=comm.device)


async def expect_timeout(otherwise: float | None, start: Callable[[], Work[Any]]) -> CommTimeoutError:
    """Start an operation with its own deadline, and verify that the operation fails when this deadline passes.

    :param otherwise: the communicator's default deadline, which is far in the future.
    """
    began = time.monotonic()
    with pytest.raises(CommTimeoutError) as caught:
        await start()
    took = time.monotonic() - began
    assert took >= SHORT, f"it failed {SHORT - took} s before its deadline"
    assert otherwise is not None and took < otherwise, f"it failed {took - SHORT} s after its deadline"
    return caught.value


@pytest.mark.loops
@pytest.mark.clock
@ranks(2)
@pytest.mark.parametrize("timeout", [SHORT, timedelta(seconds=SHORT)], ids=["float", "timedelta"])
async def test_unmatched_recv_past_its_deadline_fails_alone(
    comm: Communicator, case: Case, timeout: float | timedelta
) -> None:
    """The next receive gets the message, and the communicator stays usable."""
    case.need("p2p")
    if comm.rank == 0:
        await case.told("late", 1)
        await comm.send(case.bits(torch.int32, SHAPE).to(comm.device), 1, 9)
    else:
        slot = case.empty(torch.int32, SHAPE)
        error = await expect_timeout(comm.timeout, lambda: comm.recv(slot.tensor, 0, 9, timeout=timeout))
        assert isinstance(error, TimeoutError) and (error.op, error.rank) == ("recv", 1)
        case.tell("late")
        following = case.empty(torch.int32, SHAPE)
        await comm.recv(following.tensor, 0, 9)
        following.expect(case.bits(torch.int32, SHAPE))
        slot.expect_untouched()
    await comm.barrier()
    assert not comm.aborted


@pytest.mark.core
@pytest.mark.clock
@ranks(2)
async def test_recv_object_past_its_deadline_fails_alone(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    if comm.rank == 0:
        await case.told("late", 1)
        await comm.send_object("late", 1)
    else:
        await expect_timeout(comm.timeout, lambda: comm.recv_object(0, timeout=SHORT))
        case.tell("late")
        assert await comm.recv_object(0) == "late"
    assert not comm.aborted


@pytest.mark.fault(17, 47, 91, 124)
@pytest.mark.loops
@pytest.mark.memory
@pytest.mark.clock
@ranks(2, 3, more=(7,))
async def test_late_collective_aborts_the_communicator_on_all_ranks(comm: Communicator, case: Case) -> None:
    """Every waiting rank gets a timeout that names the late ranks.

    Later operations fail with the reason of the first abort.
    """
    if comm.rank == 0:
        await case.told("waiting")
        error = await expect_timeout(comm.timeout, lambda: comm.all_reduce(ones(comm), timeout=SHORT))
        assert (error.op, error.rank, error.comm) == ("all_reduce", 0, comm.name)
    else:
        waiting = comm.recv(ones(comm), 0) if "p2p" in comm.transports else comm.broadcast(ones(comm), 0)
        case.tell("waiting")
        with pytest.raises(CommTimeoutError, match="all_reduce") as caught:
            await waiting
        error = caught.value
        assert isinstance(error, TimeoutError) and error.teller == 0
    if case.carrier("collectives").waiting_for is not Transport.waiting_for:
        late = tuple(range(1, comm.size))
        assert (error.late, error.peer) == (late, 1 if comm.size == 2 else None)
    with pytest.raises(CommAbortedError, match="all_reduce"):
        await comm.all_reduce(ones(comm))
    assert comm.aborted and not comm.closed


@pytest.mark.fault(48)
@pytest.mark.loops
@pytest.mark.clock
@ranks(2)
@pytest.mark.parametrize("first", ["the deadline", "an abort", "either"])
async def test_first_reason_of_abort_or_deadline_stays(comm: Communicator, case: Case, first: str) -> None:
    """Works and later calls report the same reason.

    The check has three cases: a deadline comes first, an abort comes first, or both come at the same time.
    """
    if comm.rank == 1:
        await case.told("lost", 0)
        return
    last = COMM_TIMEOUT if first == "an abort" else SHORT
    works = [comm.all_reduce(ones(comm), timeout=timeout) for timeout in (COMM_TIMEOUT, last)]
    if first == "an abort":
        comm.abort("enough")
    elif first == "either":
        timer = threading.Timer(SHORT, comm.abort, ("enough",))
        timer.start()
    reasons = set()
    for work in works:
        await work.wait()
        reasons.add("enough" if "enough" in str(work.exception()) else "the deadline")
    if first == "either":
        timer.join()
    comm.abort("enough")
    with pytest.raises(CommAbortedError) as caught:
        comm.barrier()
    reasons.add("enough" if "enough" in str(caught.value) else "the deadline")
    assert len(reasons) == 1 and (first == "either" or reasons == {"enough" if first == "an abort" else first}), reasons
    case.tell("lost")


@pytest.mark.fault(16, 124)
@pytest.mark.memory
@ranks(3, more=(2,))
async def test_late_collective_names_the_missing_rank(comm: Communicator, case: Case) -> None:
    """All ranks but the last call the collective.

    The error names the missing rank, if the transport knows this rank.
    """
    if not case.native(ops.Barrier) or case.carrier("collectives").waiting_for is Transport.waiting_for:
        raise unittest.SkipTest(f"{case.place.transport} cannot tell which ranks an operation waits for")
    last = comm.size - 1
    if comm.rank == last:
        await case.told("failed")
        return
    work = comm.barrier()
    if comm.rank == 0:
        (pending,) = comm._core.in_flight
        while list(comm._core.waiting_for(pending)) != [last]:
            await anyio.lowlevel.checkpoint()
        comm._core.expire(pending)  # The watchdog makes the same call.
    with pytest.raises((CommTimeoutError, CommAbortedError)) as caught:
        await work
    case.tell("failed")
    assert f"waiting for rank {last}" in str(caught.value), caught.value
    assert caught.value.peer == last
    if isinstance(caught.value, CommTimeoutError):
        assert caught.value.late == (last,)


async def expect_in_timeout(comm: Communicator, *expected: str) -> None:
    """Let receives from rank 1 miss their deadlines, one after another, until an error has the expected text.

    On a busy machine, several attempts may be necessary.
    """
    for _ in range(ATTEMPTS):
        error = await expect_timeout(comm.timeout, lambda: comm.recv(ones(comm), 1, 9, timeout=ASKED_AGAIN))
        assert "recv(src=1, tag=9)" in error.message
        assert (error.late, error.peer) == ((1,), 1)
        if all(part in error.message for part in expected):
            return
    raise AssertionError(f"the error does not say {expected}: {error}")


def need_notes(case: Case) -> None:
    case.need("p2p")
    if case.carrier("p2p").say is Transport.say:
        raise unittest.SkipTest(f"{case.place.transport} does not carry notes")


@pytest.mark.memory
@pytest.mark.clock
@ranks(2, more=(3,))
@pytest.mark.parametrize("what", ["a collective", "nothing"])
async def test_late_recv_says_what_the_source_is_doing(comm: Communicator, case: Case, what: str) -> None:
    need_notes(case)
    if comm.rank > 0:
        barrier = comm.barrier() if what == "a collective" else None
        await case.meet("called")
        await case.told("said", 0)
        await (comm.barrier() if barrier is None else barrier)
        return
    await case.meet("called")
    doing = "no operation" if what == "nothing" else "barrier"
    await expect_in_timeout(comm, "rank 1 has finished ", f" and is in {doing}")
    case.tell("said")
    await comm.barrier()
    assert not comm.aborted


@pytest.mark.clock
@ranks(3)
async def test_late_recv_names_the_circle_of_waiting_ranks(comm: Communicator, case: Case) -> None:
    """The other ranks' receives have no deadline."""
    need_notes(case)
    slot = case.empty(torch.float32, (4,))
    if comm.rank == 0:
        await case.told("waiting")
        circle = "they waited in a circle: rank 0 -> rank 1 -> rank 2 -> rank 0"
        await expect_in_timeout(comm, "is in recv(src=2, tag=3)", "is in recv_object(src=0, tag=4)", circle)
        await comm.send_object("go on", 2, 4)
    elif comm.rank == 1:
        work = comm.recv(slot.tensor, 2, 3, timeout=None)
        case.tell("waiting")
        await work
    else:
        object_work = comm.recv_object(0, 4, timeout=None)
        case.tell("waiting")
        assert await object_work == "go on"
        await comm.send(ones(comm), 1, 3)
    await comm.barrier()
    assert not comm.aborted


@pytest.mark.core
@pytest.mark.clock
@ranks(2)
async def test_communicator_timeout_is_the_default_of_its_ops(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    before = comm.timeout
    comm.set_timeout(timedelta(seconds=SHORT))
    if comm.rank == 1:
        await expect_timeout(before, lambda: comm.recv(ones(comm), 0))
        await expect_timeout(before, lambda: comm.recv_object(0))
    comm.set_timeout(before)
    await case.meet("timed out")
    await comm.barrier()


@pytest.mark.clock
@ranks(2, more=(3,))
@pytest.mark.parametrize("said", ["by the operation", "by the communicator"])
async def test_op_without_a_deadline_outlives_the_deadline_of_others(comm: Communicator, case: Case, said: str) -> None:
    """The other ranks call ops without a deadline, and these ops wait for rank 0.

    Rank 0 calls the matching ops after another op of the other ranks has missed its deadline.
    """
    case.need("p2p")
    content, timeout = case.bits(torch.int32, SHAPE).to(comm.device), comm.timeout
    own = None if said == "by the operation" else COMM_TIMEOUT
    comm.set_timeout(SHORT if own is None else None)
    if comm.rank == 0:
        await case.told("idle")
        comm.set_timeout(timeout)
        for dst in range(1, comm.size):
            await comm.send(content, dst, 9)
            await comm.send_object("work", dst)
        await comm.broadcast(content, 0)
        await comm.broadcast_object("more", 0)
    else:
        slots = [case.empty(torch.int32, SHAPE) for _ in range(2)]
        works: list[Work[Any]] = [comm.recv(slots[0].tensor, 0, 9, timeout=own), comm.recv_object(0, timeout=own)]
        works += [comm.broadcast(slots[1].tensor, 0, timeout=own), comm.broadcast_object(None, 0, timeout=own)]
        await expect_timeout(timeout, lambda: comm.recv(ones(comm), 0, 10, timeout=SHORT))
        assert not any(work.done() for work in works)
        case.tell("idle")
        _, message, _, more = [await work for work in works]
        assert (message, more) == ("work", "more")
        for slot in slots:
            slot.expect(case.bits(torch.int32, SHAPE))
    comm.set_timeout(timeout)
    await comm.barrier()
    assert not comm.aborted


@pytest.mark.loops
@ranks(2, more=(3,))
async def test_op_without_a_deadline_fails_when_the_communicator_aborts(comm: Communicator, case: Case) -> None:
    """A rank that awaits a work gets the error of an abort.

    A rank that only awaits ``comm.lost()`` gets this error too.
    """
    if comm.rank == 0:
        await case.told("waiting")
        comm.abort("enough")
    else:
        work = comm.all_reduce(ones(comm), timeout=None)
        case.tell("waiting")
        with pytest.raises(CommAbortedError, match="enough"):
            await work
    error = await comm.lost()
    assert isinstance(error, CommAbortedError)
    assert (error.message, error.peer) == ("aborted by rank 0: enough", 0)
    assert error is await comm.lost()


@pytest.mark.loops
@ranks(2)
async def test_abandoned_await_leaves_the_collective_pending(comm: Communicator, case: Case) -> None:
    """A collective continues when an await of the collective is cancelled."""
    slot = case.full(case.numbers(torch.int32, SHAPE, comm.rank))
    if comm.rank == 0:
        work = comm.all_reduce(slot.tensor)
        with pytest.raises(TimeoutError) as caught:
            with anyio.fail_after(0):
                await work
        assert not isinstance(caught.value, CommError) and not comm.aborted
        case.tell("gave up")
        await work
    else:
        await case.told("gave up", 0)
        await comm.all_reduce(slot.tensor)
    slot.expect(case.numbers(torch.int32, SHAPE, 0) + case.numbers(torch.int32, SHAPE, 1))


@pytest.mark.memory
@pytest.mark.clock
@ranks(2)
async def test_deadline_passes_while_the_loop_is_busy(comm: Communicator, case: Case) -> None:
    """The peer gets the timeout while rank 0 blocks its loop.

    Rank 0 blocks until the peer writes a key to the store, or until rank 0's wait for this key ends.
    """
    case.need_processes()
    if comm.rank == 0:
        work = comm.all_reduce(ones(comm), timeout=SHORT)
        case.wait_blocking("heard")
        with pytest.raises(CommTimeoutError):
            await work
        return
    work = comm.recv(ones(comm), 0) if "p2p" in comm.transports else comm.broadcast(ones(comm), 0)
    with pytest.raises(CommTimeoutError):
        await work
    case.tell_blocking("heard")


@pytest.mark.core
@ranks(1)
async def test_deadline_that_is_not_reached_leaves_the_communicator_usable(comm: Communicator, case: Case) -> None:
    for timeout in (0.5, 5, 3600.0, timedelta(days=1)):
        await comm.all_reduce(ones(comm), timeout=timeout)
    assert not comm.aborted
