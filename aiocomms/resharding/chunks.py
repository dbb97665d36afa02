"""Chunks: the parts of tensors that a rank holds, as in ``torch.distributed.checkpoint``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from aiocomms.arguments import as_int, describe, short, wrong_type
from aiocomms.errors import ArgumentError
from aiocomms.ops import checks
from aiocomms.resharding.boxes import Box
from aiocomms.resharding.words import DTYPES, ChunkRecord

ALIGNMENT: Final = 64
"""The alignment of chunks in a buffer, in bytes; torch's own allocator aligns CPU tensors in the same way."""


class Chunk(NamedTuple):
    """The part of a tensor that a rank holds: a box of the tensor, as in ``torch.distributed.checkpoint``.

    :param tensor: the part itself; it may be a view.
    :param shape: the shape of the whole tensor, in elements.
    :param offsets: the beginning of the part in each dimension of the whole tensor, in elements.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class _OnDevice:
    """A substitute for a communicator in the checks of tensors. The checks use only the communicator's device."""

    rank, size = 0, 1
    fast_check: Callable[[object, bool], bool] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device


def chunks_of(tensors: object, device: torch.device) -> dict[str, Chunk]:
    """Check tensors, and return them as chunks, by name.

    :param tensors: a mapping of names to tensors, DTensors or chunks.
    :param device: the device on which the chunks must be.
    :raises ArgumentError: ``tensors`` is not a mapping as described, or a chunk does not lie within its tensor.
    """
    if not isinstance(tensors, Mapping):
        raise wrong_type("tensors", tensors, "a mapping of names to tensors, DTensors or chunks")
    found: dict[str, Chunk] = {}
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise wrong_type("a name of tensors", name, "a str")
        label = f"tensors[{short(name)}]"
        tensor, shape, offsets = _chunk_of(label, value)
        _check_memory(f"{label}.tensor", tensor, device)
        found[name] = Chunk(tensor.detach(), shape, offsets)
    return found


def _chunk_of(name: str, value: Any) -> Chunk:
    if isinstance(value, Chunk):
        return _within(name, value)
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        return _of_dtensor(name, value)
    if not isinstance(value, Tensor):
        raise wrong_type(name, value, "a tensor, a DTensor or a Chunk")
    return Chunk(value, tuple(value.shape), (0,) * value.dim())


def _of_dtensor(name: str, value: Any) -> Chunk:
    """Return this rank's chunk of a DTensor.

    :raises ArgumentError: this rank is not in the mesh, a placement is partial, or this rank's part is not contiguous.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = value.device_mesh, value.placements
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"{name} is a DTensor of a mesh without this rank, wanted one with it")
    if any(placement.is_partial() for placement in placements):
        raise ArgumentError(f"{name} has placements {placements}, wanted none that is Partial: redistribute it")
    later: dict[int, int] = {}
    for size, placement in reversed([*zip(mesh.shape, placements, strict=True)]):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        factor = getattr(placement, "split_factor", None)
        later[dim] = later.get(dim, 1) * size
        if factor is not None and (factor * size != later[dim] or value.shape[dim] % later[dim]):
            raise ArgumentError(f"{name} is a DTensor with placements {placements} whose shards are not contiguous")
    shape, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    local = value.to_local()
    if tuple(local.shape) != tuple(shape):
        raise ArgumentError(f"{name} has a local tensor of shape {[*local.shape]}, wanted {[*shape]}")
    return Chunk(local, tuple(value.shape), tuple(offsets))


def _check_memory(name: str, tensor: Tensor, device: torch.device) -> None:
    plain = type(tensor) in checks.PLAIN and tensor.layout == torch.strided and not tensor.is_nested
    if not plain or tensor.dtype not in checks.DTYPES or tensor.device != device:
        checks.readable(name, tensor, _OnDevice(device))
    if not checks.has_memory(tensor):
        raise ArgumentError(f"{name} ({describe(tensor)}) has no memory: its storage was freed or resized")


def _within(name: str, chunk: Chunk) -> Chunk:
    """Return a copy of a chunk with plain ints as its shape and offsets.

    :raises ArgumentError: the chunk does not lie within its tensor.
    """
    checks.is_tensor(f"{name}.tensor", chunk.tensor)
    shape, offsets = (
        _ints(f"{name}.{what}", value) for what, value in (("shape", chunk.shape), ("offsets", chunk.offsets))
    )
    sizes = tuple(chunk.tensor.shape)
    fits = len(sizes) == len(shape) == len(offsets) and all(
        0 <= at <= whole - size for at, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not fits:
        raise ArgumentError(
            f"{name} has offsets {[*offsets]} and a tensor of shape {[*sizes]}, wanted a part of shape {[*shape]}"
        )
    return Chunk(chunk.tensor, shape, offsets)


def unchanged(tensors: object, device: torch.device, records: Sequence[ChunkRecord]) -> dict[str, Chunk]:
    """Check tensors against their records from ``open``. Return the tensors as chunks, by name.

    The chunks use the memory that the tensors have at the time of this call.

    :param records: the records of the same tensors at ``open``.
    :raises ArgumentError: a tensor has another shape, dtype or device than at ``open``, or has no memory.
    """
    chunks = chunks_of(tensors, device)
    for was, now in zip(records, records_of(chunks), strict=True):
        if was != now:
            found = describe(chunks[was.name].tensor)
            raise ArgumentError(f"tensors[{short(was.name)}] is {found}, wanted {was.dtype}{[*was.sizes]} as before")
    return chunks


def _ints(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or any(type(as_int(it)) is not int for it in value):
        raise wrong_type(name, value, "a tuple of ints")
    return tuple(map(as_int, value))


def box_of(record: ChunkRecord) -> Box:
    """Return the box of a chunk."""
    return Box(record.offsets, record.sizes)


def nbytes_of(record: ChunkRecord) -> int:
    """Return the size of a chunk in bytes."""
    return math.prod(record.sizes) * DTYPES[record.dtype].itemsize


def view_of(flat: Tensor, record: ChunkRecord) -> Tensor:
    """Return a view of the part of a byte buffer that holds a chunk. The view has the chunk's dtype and shape."""
    part = flat[record.place : record.place + nbytes_of(record)]
    return part.view(DTYPES[record.dtype]).view(record.sizes)


def records_of(chunks: Mapping[str, Chunk]) -> tuple[ChunkRecord, ...]:
    """Return the records of chunks that lie one after the other in a buffer."""
    records: list[ChunkRecord] = []
    place = 0
    for name, (tensor, shape, offsets) in chunks.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        records.append(ChunkRecord(name, dtype, shape, offsets, tuple(tensor.shape), place))
        place += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(records)


def size_of(records: Iterable[ChunkRecord]) -> int:
    """Return the size in bytes of a buffer for some chunks."""
    return max((record.place + nbytes_of(record) for record in records), default=0)
