"""The contributions of ranks to a round (one collective). A contribution has tensors and a description of the call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from aiocomms.errors import MismatchError, ProtocolError
from aiocomms.lowlevel import ControlCodec
from aiocomms.ops.checks import DTYPES
from aiocomms.ops.writing import octets

_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class Called(msgspec.Struct, array_like=True, frozen=True):
    """The description of a call, which is the header of the call's contribution."""

    op: str
    """The op and its operator, such as ``all_reduce(sum)``. All ranks must pass the same op and operator."""
    dtype: str
    """The dtype of all tensors, or an empty string if there are no tensors. All ranks must pass the same dtype."""
    shapes: tuple[tuple[int, ...], ...]
    alike: bool
    """True if the tensors must have the same shapes on all ranks."""

    @classmethod
    def of(cls, op: str, tensors: Sequence[Tensor], alike: bool) -> Self:
        """Describe a call."""
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        return cls(op, dtype, tuple(tuple(tensor.shape) for tensor in tensors), alike)

    def __str__(self) -> str:
        return f"{self.op} of {', '.join(f'{self.dtype}{list(shape)}' for shape in self.shapes) or 'nothing'}"

    def fits(self, other: Called) -> bool:
        """Return whether this call and another rank's call can belong to the same collective."""
        return (self.op, self.dtype) == (other.op, other.dtype) and (not self.alike or self.shapes == other.shapes)


CALLED: Final = ControlCodec[Called](Called, "what a rank has called")


class Contribution(NamedTuple):
    """The decoded contribution of one rank."""

    called: Called
    data: Tensor

    def tensor(self, number: int) -> Tensor:
        """Return the tensor with this number, as a view of the data."""
        shapes, dtype = self.called.shapes, _DTYPES.get(self.called.dtype, torch.uint8)
        begin = sum(map(math.prod, shapes[:number])) * dtype.itemsize
        end = begin + math.prod(shapes[number]) * dtype.itemsize
        return self.data[begin:end].view(dtype).view(shapes[number])


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of tensors as flat byte tensors."""
    return [octets(tensor) for tensor in tensors]


def contributions(mine: Called, encoded: bytes, given: Mapping[int, tuple[bytes, Tensor]]) -> dict[int, Contribution]:
    """Decode the contributions of all ranks to a round.

    :param mine: the description of this rank's call.
    :param encoded: this rank's header, which is ``mine`` in encoded form.
    :param given: the header and the data of each rank's contribution.
    :raises MismatchError: the calls of the ranks do not match.
    :raises ProtocolError: a contribution is malformed.
    """
    found = {}
    for rank, (header, data) in given.items():
        if header == encoded:
            found[rank] = Contribution(mine, data)
            continue
        called = CALLED.decode(header, rank)
        if not called.fits(mine) or sum(map(math.prod, called.shapes)) * _itemsize(called, rank) != len(data):
            raise MismatchError(f"this rank has called {mine}, and rank {rank} {called}", peer=rank)
        found[rank] = Contribution(called, data)
    return found


def _itemsize(called: Called, rank: int) -> int:
    dtype = _DTYPES.get(called.dtype)
    if dtype is None and called.dtype:
        raise ProtocolError(f"a contribution has dtype {called.dtype!r}, which does not exist", peer=rank)
    return 1 if dtype is None else dtype.itemsize
