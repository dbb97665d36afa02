"""The writings of a hostile rank: the formats of the wire once more, so that any value can be put there."""

from __future__ import annotations

import struct

import torch
from inside import issue
from torch import Tensor

from aiocomms import Work, ops
from aiocomms.communicator import parcels
from aiocomms.communicator.communicator import Communicator
from aiocomms.cuda import crossing
from aiocomms.ops import codec
from aiocomms.ops.codec import MAX_DIMS

_TENSOR = struct.Struct(f"<BB6x{MAX_DIMS}q")  # dtype, number of dimensions, dimensions
_OBJECT = struct.Struct("<4sHBxIIQQ")  # magic, version, flags, tag of the other messages, bytes here, encoded, apart
_REQUEST = struct.Struct("<B7xqqq")  # a window's request: what, offset, count or first operand, second operand
_SWAP = 3

STREAM_HEADER_BYTES = 8 + _TENSOR.size
assert _TENSOR.size == codec.TENSOR_BYTES


def code_of(dtype: torch.dtype) -> int:
    """The number of a dtype."""
    return codec.describe_tensor(torch.empty(0, dtype=dtype))[0]


def tensor(code: int, dims: int, *sizes: int) -> bytes:
    """The description of a tensor."""
    return _TENSOR.pack(code, dims, *sizes, *[0] * (MAX_DIMS - len(sizes)))


def object_header(flags: int, tag: int, inline: bytes, total: int, apart: int = 0) -> bytes:
    """The first message of an object."""
    head = _OBJECT.pack(b"aioO", 3, flags, tag, len(inline), total, apart) + inline
    return head.ljust(parcels.HEADER_BYTES, b"\0")


def swap(offset: int, expected: int, value: int) -> bytes:
    """A rank's request to a window's owner."""
    return _REQUEST.pack(_SWAP, offset, expected, value)


def send(comm: Communicator, data: bytes | Tensor, dst: int, tag: int, channel: int) -> Work[None]:
    """Send a message on one of the library's own channels."""
    payload = crossing.to_tensor(data, comm.device) if isinstance(data, bytes) else data
    return issue(comm, ops.Send(payload, dst, tag, channel))
