"""A tensor that requires grad may be sent: the other rank gets its values, and no part of its graph."""

from __future__ import annotations

import anyio
import pytest
import torch
from aiocomms_local import LocalTransport
from concurrency import ranks

from aiocomms import ops
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities

pytestmark = pytest.mark.deterministic


class Plain(LocalTransport):
    """A transport that only sends and receives, so that every other op is made of messages."""

    capabilities = Capabilities(ops=frozenset({ops.Send, ops.Recv}), in_process=True)

    def __init__(self, matcher, rank):
        super().__init__(matcher, rank)
        self._solo = False


def leaf(rank):
    return torch.full((2,), float(rank + 1), requires_grad=True)


async def message(comm):
    out = torch.zeros(2)
    if comm.size > 1:
        await comm.batch().send(leaf(comm.rank), 1 - comm.rank).recv(out, 1 - comm.rank).issue()
    return [out]


async def stream(comm):
    if comm.size == 1:
        return []
    stream = await comm.open_stream(1 - comm.rank)
    await stream.send(leaf(comm.rank))
    return [await stream.receive()]


async def window(comm):
    window = await comm.new_window(torch.zeros(2))
    await window.put(leaf(comm.rank), comm.size - 1 - comm.rank)
    await window.put(leaf(comm.rank), comm.rank)
    await window.flush()
    await window.aclose()
    return [window.tensor]


async def collectives(comm):
    mine, size = leaf(comm.rank), comm.size
    both = torch.ones(2 * size, requires_grad=True)
    lists = [[torch.zeros(2) for _ in range(size)] for _ in range(2)]
    outs = [torch.zeros(2 * size) for _ in range(3)]
    few = [torch.zeros(2) for _ in range(2)]
    await comm.all_gather(lists[0], mine)
    await comm.all_gather_single(outs[0], mine)
    await comm.all_to_all(lists[1], [mine] * size)
    await comm.all_to_all_single(outs[1], both)
    await comm.gather_single(outs[2] if comm.rank == 0 else None, mine, 0)
    await comm.scatter(few[0], [mine] * size if comm.rank == 0 else None, 0)
    await comm.reduce_scatter_single(few[1], both)
    assert lists[0][-1].tolist() == [float(size)] * 2
    assert few[1].tolist() == [float(size)] * 2
    return [*lists[0], *lists[1], *outs, *few]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("transport", ["local", "plain", "c10d"])
@pytest.mark.parametrize("each", [message, stream, window, collectives])
def test_results_carry_no_autograd_graph(install, transport, size, each):
    install(plain=Plain)

    async def main():
        async with local_world(size, transport) as world:
            for got in await ranks(world, each):
                assert [tensor.grad_fn for tensor in got] == [None] * len(got)

    anyio.run(main)
