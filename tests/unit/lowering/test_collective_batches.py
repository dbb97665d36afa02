"""Batches of collectives in the core: tags, versions, the ranks they wait for, interruptions, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiocomms import ReduceOp, ops
from aiocomms.lowering.tags import collective_tag
from aiocomms.ops import size_of
from aiocomms.testing import local_world
from aiocomms.testing.injecting import _nbytes

pytestmark = pytest.mark.deterministic

SUM, MAX = (ops.AllReduce(torch.ones(2), ReduceOp(kind)) for kind in ("sum", "max"))
FIRST, SECOND = (ops.Broadcast(torch.ones(2), root) for root in range(2))


class Interruption(BaseException):
    """An exception that a signal handler raises."""


def batch(*parts: ops.Op) -> ops.CollectiveBatch:
    return ops.CollectiveBatch(parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (batch(SUM), batch(MAX)),
        (batch(FIRST, SUM), batch(SECOND, SUM)),
        (batch(FIRST, SUM), batch(SUM, FIRST)),
        (batch(FIRST), batch(FIRST, FIRST)),
        (batch(SUM), SUM),
    ],
    ids=["operator", "root", "order", "count", "no batch"],
)
def test_messages_of_different_batches_never_match(one: ops.Op, other: ops.Op) -> None:
    assert collective_tag(7, one) != collective_tag(7, other)
    assert collective_tag(7, one) == collective_tag(7, one)


@pytest.mark.parametrize("lane", [False, True])
@pytest.mark.asyncio
async def test_batched_broadcast_leaves_the_version_of_the_roots_tensor(lane: bool) -> None:
    async with local_world(2) as world:
        tensors, sums = [torch.ones(2) for _ in world], [torch.ones(2) for _ in world]
        before = [tensor._version for tensor in (*tensors, *sums)]
        places: list[Any] = [comm.lane(1) if lane else comm for comm in world]
        works = [
            place.batch().broadcast(tensor, 0).all_reduce(total).issue()
            for place, tensor, total in zip(places, tensors, sums, strict=True)
        ]
        for work in works:
            await work
        after = [tensor._version for tensor in (*tensors, *sums)]
        assert [one > other for one, other in zip(after, before, strict=True)] == [False, True, True, True]


@pytest.mark.asyncio
async def test_batch_waits_for_the_ranks_that_have_not_called_it() -> None:
    async with local_world(3) as world:
        works = [comm.batch().all_reduce(torch.ones(2)).broadcast(torch.ones(2), 0).issue() for comm in world[:2]]
        assert list(world[0]._core.waiting_for(works[0])) == [2]
        works.append(world[2].batch().all_reduce(torch.ones(2)).broadcast(torch.ones(2), 0).issue())
        for work in works:
            await work


@pytest.mark.asyncio
async def test_interruption_amid_a_batch_loses_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_world(2) as world:
        (transport,) = world[0]._core.transports
        post, posted = transport.post, []

        def interrupted(op: ops.Op, work: Any) -> float | None:
            if posted:
                raise Interruption
            posted.append(op)
            return post(op, work)

        monkeypatch.setattr(transport, "post", interrupted)
        world[0]._core.router.decide_anew()
        with pytest.raises(Interruption):
            world[0].batch().all_reduce(torch.ones(2)).all_reduce(torch.ones(2)).issue()
        assert world[0].aborted


def test_size_of_a_batch_is_the_size_of_its_parts() -> None:
    gathered = ops.AllGatherSingle(torch.ones(8), torch.ones(4))
    assert size_of(batch(SUM, gathered)) == 8 + 16
    assert size_of(ops.Batch((ops.Send(torch.ones(3), 1), ops.Recv(torch.ones(1), 1)))) == 12 + 4
    assert _nbytes(batch(SUM, gathered)) == 8 + 16
