"""The statistics of a communicator. The statistics must be correct with every transport."""

from __future__ import annotations

import anyio.to_thread
import msgspec
import pytest
import torch

from aiocomms.communicator.communicator import Communicator
from aiocomms.diagnosis.statistics import Failures
from aiocomms.errors import CommAbortedError, CommError, WorkCancelledError
from aiocomms.testing.conformance.case import Case, ranks

pytestmark: pytest.MarkDecorator = pytest.mark.core

SHAPE = (6,)


def ones(comm: Communicator, count: int = 4) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32, device=comm.device)


@ranks(2, more=(1, 3))
async def test_statistics_count_completed_ops_as_done(comm: Communicator, case: Case) -> None:
    before = comm.statistics()
    assert before.transports == comm.transports
    for _ in range(5):
        await comm.all_reduce(ones(comm))
    await comm.lane("statistics").barrier()
    after = comm.statistics()
    assert after.issued - before.issued == after.done - before.done == 6
    assert after.collectives - before.collectives == 5 and after.in_lanes - before.in_lanes == 1
    assert (after.pending, after.pending_bytes, after.pending_lanes, after.oldest) == (0, 0, 0, None)
    assert after.failed == before.failed and after.refused == before.refused
    assert after.shared_memory is None or after.shared_memory >= 0
    with pytest.raises(AttributeError, match="immutable"):
        after.pending = 1  # type: ignore[misc]


@ranks(2, more=(3,))
async def test_statistics_show_pending_ops_on_any_thread(comm: Communicator, case: Case) -> None:
    """Rank 1's ops wait for rank 0, which sends only after rank 1 has read the statistics."""
    if comm.rank > 1:
        case.need("p2p")
        return
    case.need_any_order()
    if comm.rank == 0:
        await case.told("seen", 1)
        await comm.send(ones(comm), 1, 1)
        await comm.lane(7).send(ones(comm), 1, 1)
        return
    before = comm.statistics()
    works = [comm.recv(ones(comm), 0, 1), comm.lane(7).recv(ones(comm), 0, 1)]
    first = comm.statistics()
    then = await anyio.to_thread.run_sync(comm.portal().statistics)
    case.tell("seen")
    for work in works:
        await work
    assert first.issued - before.issued == 2 and first.done == before.done
    for seen in (first, then):
        assert seen.pending - before.pending == 2 and seen.pending_bytes - before.pending_bytes == 32
        assert seen.pending_lanes - before.pending_lanes == 1
    assert first.oldest is not None and then.oldest is not None and then.oldest >= first.oldest >= 0
    assert all(rank != comm.rank and seconds >= 0 for rank, seconds in then.silence.items())
    assert comm.statistics().done - before.done == 2 and comm.statistics().pending == before.pending


@ranks(2)
async def test_statistics_count_withdrawn_ops_neither_as_done_nor_as_failed(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    if comm.rank == 0:
        before = comm.statistics()
        work = comm.recv(ones(comm), 1, 5)
        assert await work.cancel()
        with pytest.raises(WorkCancelledError):
            await work
        after = comm.statistics()
        assert (after.withdrawn - before.withdrawn, after.done - before.done) == (1, 0)
        assert after.failed == before.failed and after.pending == before.pending
    await comm.barrier()


@ranks(2, more=(3,))
async def test_statistics_count_ops_that_a_hook_refused(comm: Communicator, case: Case) -> None:
    before = comm.statistics()

    def refuse(op: object, seq: int) -> None:
        raise CommError("not now")

    hook = comm.register_pre_hook(refuse)
    with pytest.raises(CommError, match="not now"):
        comm.barrier()
    hook.remove()
    await comm.barrier()
    after = comm.statistics()
    assert (after.refused - before.refused, after.done - before.done) == (1, 1)
    assert after.collectives - before.collectives == 1


@ranks(2, more=(3,))
async def test_statistics_count_failed_ops_by_reason(comm: Communicator, case: Case) -> None:
    """Rank 0 aborts the communicator while ops of the other ranks are pending.

    After the abort, the statistics are still available.
    """
    own = await case.open("to be aborted")
    if comm.rank == 0:
        await case.told("pending")
        own.abort("for its statistics")
        await own.lost()
        assert own.statistics().failed == []
    else:
        works = [own.barrier(), own.broadcast(ones(comm), 0)]
        case.tell("pending")
        for work in works:
            with pytest.raises(CommAbortedError):
                await work
        seen = own.statistics()
        assert seen.failed == [Failures("CommAbortedError", 0, 2)]
        assert seen.pending == 0 and msgspec.json.decode(msgspec.json.encode(seen))["issued"] == seen.issued
    await own.aclose()
    assert own.statistics().pending == 0
