"""The writes of one source rank: copies into target ranks' shared memory, and puts to all other target ranks."""

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
from aiocomms.ops.writing import octets
from aiocomms.progress.work import Work
from aiocomms.resharding.chunks import Chunk, view_of
from aiocomms.resharding.plan import BLOCK, Copy
from aiocomms.resharding.words import DTYPES

Convert = Callable[[str, Tensor, torch.dtype], Tensor]
"""The type of a function that gets a tensor's name, a part of the tensor and a dtype, and converts the part."""
AT_ONCE: Final = 2
"""The number of blocks that this rank puts at the same time.

Each block has its own memory. So this rank packs one block while another block is sent.
"""
TOGETHER: Final = 8
"""The number of blocks that a thread copies in one call. One call takes a few milliseconds."""
_IN_THREAD: Final = 64 << 10
"""The smallest size in bytes of a block that a thread packs."""


async def write(
    copies: Sequence[Copy],
    chunks: Mapping[str, Chunk],
    buffers: Mapping[int, tuple[Peer, bytes]],
    convert: Convert | None,
) -> None:
    """Write all copies, and wait until the written data is visible to the target.

    A cancelled call first waits for the pending operations.

    :param copies: the copies to write.
    :param chunks: this rank's chunks, by name.
    :param buffers: the connection with each target rank, and the descriptor of that rank's buffer of bytes.
    :param convert: a function that converts a part to the target's dtype; None to use torch's conversion.
    :raises MoveLostError: a connection is lost, or a buffer is gone. The message names the target rank.
    :raises Exception: an error of ``convert``.
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
            flush.add_done_callback(Work.exception)  # This marks an error as seen, even if the call is cancelled.
            await flush


@contextlib.contextmanager
def _to(target: int) -> Iterator[None]:
    """Turn an error of a connection into a MoveLostError that names the target rank."""
    try:
        yield
    except CommError as error:
        raise MoveLostError(f"target rank {target}: {error.message}") from error


def _converted(copy: Copy, tensor: Tensor, convert: Convert | None) -> Tensor:
    """Return the part of a tensor that a copy reads. If there is a ``convert``, convert the part."""
    part, dtype = tensor[copy.box.slices()], DTYPES[copy.chunk.dtype]
    if convert is None:
        return part
    shape, part = part.shape, convert(copy.chunk.name, part, dtype)
    if not isinstance(part, Tensor) or part.shape != shape or part.dtype != dtype:
        wanted = f"a tensor of {dtype} and shape {[*shape]}"
        raise ArgumentError(f"convert returned {short(part)} for {copy.chunk.name!r}, wanted {wanted}")
    return part


# --------------------------------------------------------------------------------------- copies into shared memory


async def _copy(
    copies: Sequence[Copy],
    chunks: Mapping[str, Chunk],
    shared: Mapping[int, Tensor],
    regions: Mapping[int, RemoteRegion],
    convert: Convert | None,
) -> None:
    """Copy into the targets' memory at the lowest priority, because a target may serve requests on the same cores."""
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
                break  # The flush raises the reason.
            with anyio.CancelScope(shield=True):  # Without the shield, the thread would outlive a cancelled call.
                await run_in_thread(call)
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def _stop_when_cancelled(copying: YieldingCopy) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        copying.stop()


# -------------------------------------------------------------------------------------------- puts into other memory


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
    """Return the bytes of a part, contiguous and in the target's dtype."""

    @unaffected
    @torch.no_grad()
    def call() -> Tensor:
        part, dtype = _converted(copy, tensor, convert), DTYPES[copy.chunk.dtype]
        if not _lies_so(part, dtype):
            part = scratch[: copy.nbytes].view(dtype).view(part.shape).copy_(part)
        return octets(part)

    if convert is None and (copy.nbytes < _IN_THREAD or _lies_so(tensor[copy.box.slices()], DTYPES[copy.chunk.dtype])):
        return call()
    with anyio.CancelScope(shield=True):  # Without the shield, the thread would outlive a cancelled call.
        return await run_in_thread(call)
    raise AssertionError  # Type checkers need this line; the scope swallows no exception.


def _lies_so(part: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a part can be sent from its own memory without packing."""
    return part.is_contiguous() and part.dtype == dtype and not part.is_conj() and not part.is_neg()


async def _put(region: RemoteRegion, copy: Copy, data: Tensor) -> None:
    starts, run = copy.runs()
    work = region.put_v(data, starts, list(range(0, copy.nbytes, run)), run)
    try:
        await work
    except BaseException:
        with anyio.CancelScope(shield=True):  # The transport may read the memory until the work is done.
            await work.wait()
            work.exception()
        raise
