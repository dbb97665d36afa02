"""Deaths of ranks. The transport reports each dead rank, and does not report a living rank."""

from __future__ import annotations

import time

import anyio
import pytest
import torch

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import PeerDiedError
from aiocomms.testing.conformance.case import Case, ranks

pytestmark: pytest.MarkDecorator = pytest.mark.memory


@ranks(2, 3)
async def test_death_of_a_rank_ends_pending_ops_with_its_number(comm: Communicator, case: Case) -> None:
    case.need_processes()
    last = comm.size - 1
    if comm.rank == last:
        await case.told("waiting")
        case.die()
    work = comm.all_reduce(torch.ones(4, device=comm.device))
    case.tell("waiting")
    with pytest.raises(PeerDiedError) as caught:
        await work
    assert caught.value.peer == last


@pytest.mark.clock
@ranks(2)
async def test_living_rank_gives_new_signs_of_life(comm: Communicator, case: Case) -> None:
    """The transport's ``last_heard`` returns None, or after some time returns a newer time for the other rank.

    A transport that returns None does not ask ranks for answers. Such a transport detects deaths by its connections.
    """
    for transport in dict.fromkeys(comm._core.by_family.values()):
        began = time.monotonic()
        while (signs := transport.last_heard()) is not None and signs[1 - comm.rank] <= began:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    await case.meet("heard")
