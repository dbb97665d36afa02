"""The writing of one source rank: its parts are packed where they do not lie as the target wants them, and put."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import anyio
import torch
from torch import Tensor

from aiocomms.arguments import short
from aiocomms.endpoints.peer import Peer
from aiocomms.endpoints.regions import RemoteRegion
from aiocomms.errors import ArgumentError, CommError, MoveLostError
from aiocomms.lowlevel import run_in_thread
from aiocomms.ops.buffers import empty
from aiocomms.ops.modes import unaffected
from aiocomms.progress.work import Work
from aiocomms.resharding.chunks import Chunk
from aiocomms.resharding.plan import BLOCK, Copy
from aiocomms.resharding.words import DTYPES

Convert = Callable[[str, Tensor, torch.dtype], Tensor]
"""A function of a name, a part of that tensor, and the target's dtype, which returns the part in that dtype."""
AT_ONCE: Final = 2
"""Blocks that are under way at once, each with its own memory: one is packed while another one is put."""
_IN_THREAD: Final = 64 << 10
"""Bytes from which on a block is packed in a thread."""


async def write(
    copies: Sequence[Copy],
    chunks: Mapping[str, Chunk],
    buffers: Mapping[int, tuple[Peer, bytes]],
    convert: Convert | None,
) -> None:
    """Write all, and wait until it is visible to the target. A cancelled call waits for what it has begun.

    :param buffers: the connection with each target rank, and the descriptor of the buffer there, of bytes.
    :raises MoveLostError: a connection is lost, or a buffer is not there any more; says which target rank's.
    :raises Exception: what ``convert`` raises.
    """
    regions: dict[int, RemoteRegion] = {}
    for target, (peer, descriptor) in buffers.items():
        with _to(target):
            regions[target] = await peer.attach(descriptor)
    left = iter(copies)
    device = next((chunk.tensor.device for chunk in chunks.values()), torch.device("cpu"))

    async def work() -> None:
        scratch = empty(BLOCK, dtype=torch.uint8, device=device)
        for copy in left:
            data = await _packed(copy, chunks[copy.name].tensor, scratch, convert)
            with _to(copy.target):
                await _put(regions[copy.target], copy, data)

    async with anyio.create_task_group() as tasks:
        for _ in range(min(AT_ONCE, len(copies))):
            tasks.start_soon(work)
    for target, region in regions.items():
        with _to(target):
            flush = region.flush()
            flush.add_done_callback(Work.exception)  # A cancelled call does not ask what becomes of it.
            await flush


@contextlib.contextmanager
def _to(target: int) -> Iterator[None]:
    """Name the target rank in an error of its connection."""
    try:
        yield
    except CommError as error:
        raise MoveLostError(f"target rank {target}: {error.message}") from error


async def _packed(copy: Copy, tensor: Tensor, scratch: Tensor, convert: Convert | None) -> Tensor:
    """Return the bytes of a part as the target wants them."""

    def call() -> Tensor:
        return _pack(copy, tensor, scratch, convert)

    part = tensor[copy.box.slices()]
    if convert is None and (copy.nbytes < _IN_THREAD or _lies_so(part, copy.dtype)):
        return call()
    with anyio.CancelScope(shield=True):  # The thread would read the tensor after the caller has gone on.
        return await run_in_thread(call)
    raise AssertionError  # The scope swallows nothing.


def _lies_so(part: Tensor, dtype: str) -> bool:
    """Return whether a part lies in memory as it is to be sent."""
    return part.is_contiguous() and part.dtype == DTYPES[dtype] and not part.is_conj() and not part.is_neg()


@unaffected
@torch.no_grad()
def _pack(copy: Copy, tensor: Tensor, scratch: Tensor, convert: Convert | None) -> Tensor:
    part, dtype = tensor[copy.box.slices()], DTYPES[copy.dtype]
    if convert is not None:
        shape, part = part.shape, convert(copy.name, part, dtype)
        if not isinstance(part, Tensor) or part.shape != shape or part.dtype != dtype:
            wanted = f"a tensor of {dtype} and shape {[*shape]}"
            raise ArgumentError(f"convert returned {short(part)} for {copy.name!r}, wanted {wanted}")
    if not _lies_so(part, copy.dtype):
        part = scratch[: copy.nbytes].view(dtype).view(part.shape).copy_(part)
    return part.reshape(-1).view(torch.uint8)


async def _put(region: RemoteRegion, copy: Copy, data: Tensor) -> None:
    works: list[Work[Tensor]] = []
    try:
        for number, start in enumerate(copy.starts):
            works.append(region.put(data[number * copy.run : (number + 1) * copy.run], start))
        for work in works:
            await work
    except BaseException:
        with anyio.CancelScope(shield=True):  # Until then the memory is theirs.
            for work in works:
                await work.wait()
                work.exception()
        raise
