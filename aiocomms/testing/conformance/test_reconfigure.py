"""Reconfiguration of a communicator that is not lost. The new communicator has all ranks or fewer ranks."""

from __future__ import annotations

import pytest
import torch

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommClosedError, CommTimeoutError
from aiocomms.testing.conformance.case import Case, ranks

SHAPE = (6,)
LATE = 0.3
"""A deadline in seconds, which passes during the check."""


async def works(comm: Communicator) -> None:
    total = await comm.all_reduce(torch.ones(SHAPE, device=comm.device))
    assert (total == comm.size).all()


@pytest.mark.loops
@pytest.mark.memory
@ranks(2, 3, more=(1,))
async def test_reconfigure_closes_its_predecessor_and_can_be_repeated(comm: Communicator, case: Case) -> None:
    """The call closes the old communicator, as ``aclose`` does. A matched op completes, and an unmatched op fails."""
    first = await case.open("first")
    summing = first.all_reduce(torch.ones(SHAPE, device=comm.device))
    waiting = None
    if "p2p" in comm.transports and comm.size > 1:
        waiting = first.recv(torch.ones(SHAPE, device=comm.device), (comm.rank + 1) % comm.size)
    second = await first.reconfigure(timeout=case.place.deadline)
    assert (await summing == comm.size).all()
    assert first.closed and not first.aborted
    if waiting is not None:
        # Either this rank has closed the predecessor, or the other rank has closed it first.
        with pytest.raises((CommClosedError, CommAbortedError), match="closed"):
            await waiting
    assert (second.name, second.rank, second.size) == ("first@2", comm.rank, comm.size)
    await works(second)
    third = await second.reconfigure(range(comm.size), timeout=case.place.deadline)
    assert (third.name, third.rank, third.size) == ("first@3", comm.rank, comm.size)
    await works(third)
    await third.aclose()
    await comm.barrier()


@pytest.mark.memory
@ranks(3, more=(4,))
async def test_reconfigure_to_fewer_ranks_shuts_out_the_others(comm: Communicator, case: Case) -> None:
    """The ops of an excluded rank fail, because the other ranks have closed the communicator.

    The excluded rank cannot reconfigure the communicator.
    """
    old = await case.open("old")
    left = [rank for rank in range(comm.size) if rank != 1]
    if comm.rank == 1:
        await case.told("formed")
        with pytest.raises(CommAbortedError, match="closed by rank"):
            await old.barrier()
        with pytest.raises(CommAbortedError, match="this rank is excluded"):
            await old.reconfigure(timeout=case.place.deadline)
        await old.aclose()
    else:
        new = await old.reconfigure(left, timeout=case.place.deadline)
        assert (new.rank, new.size) == (left.index(comm.rank), len(left))
        await works(new)
        case.tell("formed")
        await new.aclose()
    await comm.barrier()


@pytest.mark.clock
@ranks(2, more=(3,))
async def test_reconfigure_without_a_rank_times_out_and_keeps_the_communicator(comm: Communicator, case: Case) -> None:
    """The communicator stays usable after the timeout, and a second attempt with all ranks succeeds."""
    old = await case.open("old")
    if comm.rank:
        await case.told("late", 0)
    else:
        with pytest.raises(CommTimeoutError):
            await old.reconfigure(list(range(comm.size)), timeout=LATE)
        case.tell("late")
    await works(old)
    new = await old.reconfigure(list(range(comm.size)), timeout=case.place.deadline)
    await works(new)
    await new.aclose()
