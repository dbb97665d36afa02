"""The writing of one source rank: it copies into memory that it shares with a target rank; to others it puts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import anyio
import anyio.lowlevel
import torch
from torch import Tensor

from aiocomms.arguments import short
from aiocomms.endpoints.peer import Peer
from aiocomms.endpoints.regions import RemoteRegion
from aiocomms.errors import ArgumentError, CommError, MoveLostError
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.copying import YieldingCopy
from aiocomms.ops.buffers import empty
from aiocomms.ops.modes import unaffected
from aiocomms.progress.work import Work
from aiocomms.resharding.chunks import Chunk, view_of
from aiocomms.resharding.plan import BLOCK, Copy
from aiocomms.resharding.words import DTYPES

Convert = Callable[[str, Tensor, torch.dtype], Tensor]
"""A function of a name, a part of that tensor, and the target's dtype, which returns the part in that dtype."""
AT_ONCE: Final = 2
"""Blocks that are put at once, each with its own memory: one is packed while another one is on its way."""
TOGETHER: Final = 8
"""Blocks that one thread copies: some ms of work."""
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
    shared: dict[int, Tensor] = {}
    for target, (peer, descriptor) in buffers.items():
        with _to(target):
            region = regions[target] = await peer.attach(descriptor)
            memory = await region._memory()
            if memory is not None and memory.device.type == "cpu":
                shared[target] = memory
    far = [copy for copy in copies if copy.target not in shared]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_copy, [copy for copy in copies if copy.target in shared], chunks, shared, regions, convert)
        left = iter(far)
        for _ in range(min(AT_ONCE, len(far))):
            tasks.start_soon(_put_each, left, chunks, regions, convert)
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


def _converted(copy: Copy, tensor: Tensor, convert: Convert | None) -> Tensor:
    """Return a part, converted where somebody else than torch does it."""
    part, dtype = tensor[copy.box.slices()], DTYPES[copy.chunk.dtype]
    if convert is None:
        return part
    shape, part = part.shape, convert(copy.chunk.name, part, dtype)
    if not isinstance(part, Tensor) or part.shape != shape or part.dtype != dtype:
        wanted = f"a tensor of {dtype} and shape {[*shape]}"
        raise ArgumentError(f"convert returned {short(part)} for {copy.chunk.name!r}, wanted {wanted}")
    return part


# ------------------------------------------------------------------------------------------ where memory is shared


async def _copy(
    copies: Sequence[Copy],
    chunks: Mapping[str, Chunk],
    shared: Mapping[int, Tensor],
    regions: Mapping[int, RemoteRegion],
    convert: Convert | None,
) -> None:
    """Copy into the targets' memory, at the lowest priority: a target may answer requests on the same processors."""
    copying = YieldingCopy()

    @unaffected
    @torch.no_grad()
    def call() -> None:
        copying.copy(
            (
                view_of(shared[it.target], it.chunk)[it.there.slices()],
                _converted(it, chunks[it.chunk.name].tensor, convert),
            )
            for it in together
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_when_cancelled, copying)
        for at in range(0, len(copies), TOGETHER):
            together = copies[at : at + TOGETHER]
            if any(regions[it.target].closed for it in together):
                break  # The flush says why.
            with anyio.CancelScope(shield=True):  # The thread would read the tensors after the caller has gone on.
                await run_in_thread(call)
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def _stop_when_cancelled(copying: YieldingCopy) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        copying.stop()


# --------------------------------------------------------------------------------------------------- where it is not


async def _put_each(
    copies: Iterator[Copy],
    chunks: Mapping[str, Chunk],
    regions: Mapping[int, RemoteRegion],
    convert: Convert | None,
) -> None:
    device = next((chunk.tensor.device for chunk in chunks.values()), torch.device("cpu"))
    scratch = empty(BLOCK, dtype=torch.uint8, device=device)
    for copy in copies:
        data = await _packed(copy, chunks[copy.chunk.name].tensor, scratch, convert)
        with _to(copy.target):
            await _put(regions[copy.target], copy, data)


async def _packed(copy: Copy, tensor: Tensor, scratch: Tensor, convert: Convert | None) -> Tensor:
    """Return the bytes of a part as the target wants them."""

    @unaffected
    @torch.no_grad()
    def call() -> Tensor:
        part, dtype = _converted(copy, tensor, convert), DTYPES[copy.chunk.dtype]
        if not _lies_so(part, dtype):
            part = scratch[: copy.nbytes].view(dtype).view(part.shape).copy_(part)
        return part.reshape(-1).view(torch.uint8)

    if convert is None and (copy.nbytes < _IN_THREAD or _lies_so(tensor[copy.box.slices()], DTYPES[copy.chunk.dtype])):
        return call()
    with anyio.CancelScope(shield=True):  # The thread would read the tensor after the caller has gone on.
        return await run_in_thread(call)
    raise AssertionError  # The scope swallows nothing.


def _lies_so(part: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a part lies in memory as it is to be sent."""
    return part.is_contiguous() and part.dtype == dtype and not part.is_conj() and not part.is_neg()


async def _put(region: RemoteRegion, copy: Copy, data: Tensor) -> None:
    starts, run = copy.runs()
    work = region.put_v(data, starts, list(range(0, copy.nbytes, run)), run)
    try:
        await work
    except BaseException:
        with anyio.CancelScope(shield=True):  # Until then the memory is theirs.
            await work.wait()
            work.exception()
        raise
