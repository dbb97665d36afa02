"""The base class of all operation records, the channels of messages, and helpers that the records share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, overload

import msgspec
from torch import Tensor

from aiocomms.ops.checks import CheckedComm

Family = Literal["p2p", "collectives", "rma"]

USER, COLLECTIVE, STREAM, STREAM_DATA, OBJECT, OBJECT_DATA, RMA_REQUEST, RMA_DATA, RMA_REPLY = range(9)
"""The channels of messages. There can be at most 16 channels.

Channels keep the messages of the library's own protocols apart from the user's messages.
"""

Buffers = list[tuple[str, Tensor]]
"""A list of pairs. In each pair, a tensor follows the name that error messages use for the tensor."""


class TensorLike(Protocol):
    """A ``torch.Tensor``, or an array of NumPy, CuPy or another library with DLPack.

    torch must be able to share the array's memory.
    """

    def __dlpack__(self) -> Any:
        """Export the memory, as the Python array API standard defines it."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return the device of the memory."""


if TYPE_CHECKING:

    class AsTensor:
        """The type of a field for a tensor. A program may set the field to an array, but the library reads a tensor.

        :func:`aiocomms.ops.arrays.checked` replaces the array by a tensor. Before this replacement, only the check of
        the arguments reads the field.
        """

        @overload
        def __get__(self, op: None, cls: type[Any]) -> AsTensor: ...
        @overload
        def __get__(self, op: Op, cls: type[Any]) -> Tensor: ...
        def __get__(self, op: Op | None, cls: type[Any]) -> Tensor | AsTensor: ...
        def __set__(self, op: Op, value: TensorLike) -> None: ...
else:
    AsTensor = Tensor


class Op(msgspec.Struct, frozen=True, eq=False):
    """One operation that was called on a communicator, with its arguments; the base class of every record."""

    name: ClassVar[str]
    kind: ClassVar[str]
    family: ClassVar[Family] = "collectives"
    withdrawable: ClassVar[bool] = False
    """True if one rank may withdraw the op while the op is unmatched, as a receive, a probe or a wait for a signal."""
    moves: ClassVar[bool] = False
    """True if the op may move its tensors to other memory, as the opening of a window does."""
    sends: ClassVar[bool] = False
    """True if the op completes when rank ``dst`` has received the op's message."""

    def check(self, group: CheckedComm) -> None:
        """Check the arguments, before anything is sent.

        :raises ArgumentError: an argument is wrong.
        :raises UnsupportedOperation: no transport can execute the op with these arguments.
        """

    def result(self) -> Any:
        """Return the result of the op's work, unless the transport completes the work with its own value."""
        return None

    def reads(self) -> Buffers:
        """Return the tensors that the op reads, with their names."""
        return []

    def writes(self) -> Buffers:
        """Return the tensors that the op writes, with their names."""
        return []

    def signature(self) -> tuple[object, ...]:
        """Return the values on which all ranks of a collective must agree."""
        return (self.name,)


def chunks(tensor: Tensor, size: int) -> list[Tensor]:
    """Split a tensor's elements into ``size`` equal flat views, one per rank."""
    flat = tensor.view(-1)
    n = flat.numel() // size
    return [flat[i * n : (i + 1) * n] for i in range(size)]


def named(name: str, tensors: Sequence[Tensor]) -> Buffers:
    """Name the tensors of a list by their index: ``name[0]``, ``name[1]``, and so on."""
    return [(f"{name}[{i}]", t) for i, t in enumerate(tensors)]


def shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the tensors' shapes as tuples, which can be compared between ranks."""
    return tuple(tuple(t.shape) for t in tensors)


@cache
def tensor_of(cls: type[Op]) -> str | None:
    """Return the name of the field that holds an op type's main tensor; None if the type has no such field.

    For example, the main tensor of all_gather is the input.
    """
    return next((name for name in ("tensor", "input", "output") if name in cls.__struct_fields__), None)


_READ_SIZE: dict[type[Op], Callable[[Any], int]] = {}


def size_of(op: Op) -> int:
    """Return the size in bytes of an op's main tensor on this rank.

    The size of a batch is the sum of the sizes of its parts. The size of a barrier, or of an object without a tensor,
    is 0.
    """
    try:
        return _READ_SIZE[type(op)](op)
    except KeyError:
        _READ_SIZE[type(op)] = _reader(type(op))
        return size_of(op)
    except AttributeError:  # The field holds no tensor.
        return 0


def _reader(cls: type[Op]) -> Callable[[Any], int]:
    if "parts" in cls.__struct_fields__:
        return lambda op: sum(map(size_of, op.parts))
    name = tensor_of(cls)
    return (lambda _: 0) if name is None else attrgetter(f"{name}.nbytes")
