"""The contribution of a rank to a round: tensors, and the op that it has called with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
    """The description of a call, which is the header of its contribution."""

    op: str
    """The op and its operator, as in ``all_reduce(sum)``: the same on all ranks."""
    dtype: str
    """The dtype of all tensors: the same on all ranks; empty: there are none."""
    shapes: tuple[tuple[int, ...], ...]
    alike: bool
    """True if the shapes are the same on all ranks, too."""

    @classmethod
    def of(cls, op: str, tensors: Sequence[Tensor], alike: bool) -> Self:
        """Describe a call."""
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        return cls(op, dtype, tuple(tuple(tensor.shape) for tensor in tensors), alike)

    def __str__(self) -> str:
        return f"{self.op} of {', '.join(f'{self.dtype}{list(shape)}' for shape in self.shapes) or 'nothing'}"

    def fits(self, other: Called) -> bool:
        """Return whether both may be calls of one op."""
        return (self.op, self.dtype) == (other.op, other.dtype) and (not self.alike or self.shapes == other.shapes)


CALLED: Final = ControlCodec[Called](Called, "what a rank has called")


class Contribution(NamedTuple):
    """The contribution of a rank, as others see it."""

    called: Called
    data: Tensor

    def tensors(self) -> Iterator[Tensor]:
        """Return its tensors, of the area's own memory."""
        begin, dtype = 0, _DTYPES.get(self.called.dtype, torch.uint8)
        for shape in self.called.shapes:
            end = begin + math.prod(shape) * dtype.itemsize
            yield self.data[begin:end].view(dtype).view(shape)
            begin = end


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as bytes, as areas hold them."""
    return [octets(tensor) for tensor in tensors]


def contributions(mine: Called, encoded: bytes, given: Mapping[int, tuple[bytes, Tensor]]) -> dict[int, Contribution]:
    """Decode what the ranks have contributed to a round.

    :param mine: what this rank has called.
    :param encoded: the same, as its own header.
    :raises MismatchError: it is not of one op.
    :raises ProtocolError: it makes no sense.
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
        raise ProtocolError(f"a contribution has dtype {called.dtype!r}, which there is not", peer=rank)
    return 1 if dtype is None else dtype.itemsize
