"""The ranks as a pipeline: a ring of tensor streams with a stage of the model in each rank.

    rank 0                     rank 1              ...    rank n-1
    Batcher.feed -> stage 0 -> stage 1 -> ...  ->         stage n-1
    Batcher.collect <------------------------------------------'

What travels is a micro-batch: two tensors, one behind the other. The first is its header, int64
`[1 + texts]`: the number of the micro-batch and the tokens of each text. The second is the data, whose
shape and dtype change from stage to stage and from micro-batch to micro-batch: token ids, hidden states,
vectors. The streams keep the order, hold a sender back when the receiver is slow, and have an end: closing
the server is to let the end of the stream travel once round the ring.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from anyio.abc import ObjectStream
from anyio.streams.stapled import StapledObjectStream
from torch import Tensor

if TYPE_CHECKING:
    from aiocomms import Communicator

    from .model import Stage


async def open_ring(comm: Communicator) -> tuple[ObjectStream[Tensor], ObjectStream[Tensor]]:
    """Connect every rank with the rank before it and the rank behind it.

    :returns: the stream to receive from and the stream to send to
    """
    if comm.size == 1:
        loop = loopback()
        return loop, loop
    ends: dict[str, ObjectStream[Tensor]] = {}

    async def connect(end: str, peer: int, name: str) -> None:
        ends[end] = await comm.open_stream(peer, name=name)

    before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    async with anyio.create_task_group() as opening:
        opening.start_soon(connect, "in", before, f"{before} to {comm.rank}")
        opening.start_soon(connect, "out", behind, f"{comm.rank} to {behind}")
    return ends["in"], ends["out"]


def loopback() -> ObjectStream[Tensor]:
    """Return a stream within this process: what is sent into it is received from it."""
    return StapledObjectStream(*anyio.create_memory_object_stream[Tensor](math.inf))


async def run_stage(stage: Stage, inbound: ObjectStream[Tensor], outbound: ObjectStream[Tensor]) -> None:
    """Take each micro-batch from `inbound` through `stage` and on to `outbound`, until the stream ends."""
    async for header in inbound:
        data = await inbound.receive()
        # The event loop stays free meanwhile; if the ring breaks, nobody waits for the result.
        data = await to_thread.run_sync(stage, data, header[1:], abandon_on_cancel=True)
        await outbound.send(header)
        await outbound.send(data)
    await outbound.send_eof()
