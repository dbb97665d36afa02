"""The conversion of a stream's items to messages, and of messages to items.

An item is a header of fixed size and, if needed, more messages. A tensor is sent as a header, which describes the
tensor, and one message of data. A mapping or a dataclass is sent like an object; :mod:`aiocomms.communicator.parcels`
describes the messages of an object.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.communicator.parcels import HEADER_BYTES, ArrivingObject, Parcel
from aiocomms.cuda import crossing
from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.ops import buffers, checks, codec
from aiocomms.ops.arrays import fitting
from aiocomms.ops.checks import CheckedComm

T = TypeVar("T")

DATA: Final = 0
_TENSOR_BYTES: Final = 8 + codec.TENSOR_BYTES

Arriving = Generator[list[Tensor] | Callable[[], None], None, tuple[Any, int]]
"""A generator that yields the steps with which its caller receives an item.

A step is a list of tensors or a function. The caller receives messages into the tensors, or calls the function in a
thread. The caller resumes the generator when the step is done. The generator returns the argument of :meth:`Kind.make`,
and the item's size in bytes.
"""


class Packed(NamedTuple):
    """The header and the messages that represent one item."""

    header: Tensor
    messages: list[Tensor]
    nbytes: int
    """The number of bytes that the item needs at the receiving end."""
    prepare: Callable[[], Packed] | None
    """The blocking function that prepares the messages, and that the caller calls in a thread.

    The value is None if the messages need no preparation.
    """


class Kind(ABC, Generic[T]):
    """The type of a stream's items."""

    header_bytes: int

    def __init__(self, items: type[T], text: str) -> None:
        self.items = items
        self.text = text
        """A text that describes the type. Both ends of a stream must have equal texts."""

    @property
    def digest(self) -> bytes:
        """The digest of the text. Both ends of a stream compare their digests."""
        return hashlib.blake2b(self.text.encode(), digest_size=8).digest()

    @abstractmethod
    def pack(self, item: T, group: CheckedComm) -> Packed:
        """Turn an item into messages.

        :raises ArgumentError: the item cannot be sent.
        """

    @abstractmethod
    def arriving(self, header: bytes, device: torch.device) -> Arriving:
        """Return a generator whose steps receive the item that a header describes.

        :raises ProtocolError: the header or a message is invalid. The returned generator raises this error.
        """

    @abstractmethod
    def make(self, arrived: Any) -> T:
        """Make the program's item from the value that has arrived."""


class Tensors(Kind[Tensor]):
    """Tensors of any shape and dtype."""

    header_bytes = _TENSOR_BYTES

    def __init__(self) -> None:
        super().__init__(Tensor, "tensors")

    def pack(self, item: Tensor, group: CheckedComm) -> Packed:
        """See :meth:`Kind.pack`."""
        item = fitting("item", item, group.device, write=False)
        checks.readable("item", item, group)
        header = bytes([DATA]).ljust(8, b"\0") + codec.describe_tensor(item, "item")
        messages = [item] if item.numel() else []
        return Packed(crossing.to_tensor(header, group.device), messages, item.nbytes, None)

    def arriving(self, header: bytes, device: torch.device) -> Arriving:
        """See :meth:`Kind.arriving`."""
        if header[0] != DATA:
            raise ProtocolError(f"a message of the unknown kind {header[0]} came")
        dtype, shape, nbytes = codec.parse_tensor(header[8:])
        try:
            tensor = buffers.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ProtocolError(f"a tensor of {nbytes} bytes was announced: {error}") from error
        if nbytes:
            yield [tensor]
        return tensor, nbytes

    def make(self, arrived: Any) -> Tensor:
        """See :meth:`Kind.make`."""
        tensor: Tensor = arrived
        return tensor


class Mappings(Kind[T]):
    """Mappings of tensors and small values. The receiving end gets a dict."""

    header_bytes = HEADER_BYTES

    def __init__(self, items: type[T], text: str = "mappings") -> None:
        super().__init__(items, text)

    def pack(self, item: T, group: CheckedComm) -> Packed:
        """See :meth:`Kind.pack`."""
        try:
            parcel = Parcel(self.taken_apart(item), group.device, pickle=False)
        except ArgumentError as error:
            raise type(error)(re.sub(r"^obj\b", "item", error.message)) from None

        def prepare() -> Packed:
            parcel.prepare()
            return _packed(parcel)

        return _packed(parcel)._replace(prepare=prepare) if parcel.late else _packed(parcel)

    def taken_apart(self, item: T) -> dict[Any, Any]:
        """Return the item as a dict.

        :raises ArgumentTypeError: the item is not a mapping.
        """
        if not isinstance(item, Mapping):
            raise arguments.wrong_type("item", item, "a mapping, as the stream was opened for")
        return dict(item)

    def arriving(self, header: bytes, device: torch.device) -> Arriving:
        """See :meth:`Kind.arriving`."""
        arrival = ArrivingObject(header, device)
        if arrival.body.numel():
            yield [arrival.body]
        if messages := arrival.unpack():
            yield messages
        if arrival.settle is not None:
            yield arrival.settle
        return self.checked(arrival.open(pickle=False)), arrival.nbytes

    def checked(self, arrived: Any) -> Any:
        """Check a value that has arrived, and return it.

        :raises ProtocolError: the value is not an item of this kind.
        """
        if not isinstance(arrived, dict):
            raise ProtocolError(f"a {type(arrived).__name__} came on a stream of {self.text}")
        return arrived

    def make(self, arrived: Any) -> T:
        """See :meth:`Kind.make`."""
        item: T = arrived
        return item


class Dataclasses(Mappings[T]):
    """Dataclasses of tensors and small values."""

    def __init__(self, items: type[T]) -> None:
        self._names = [field.name for field in dataclasses.fields(items) if field.init]  # type: ignore[arg-type]
        super().__init__(items, f"{items.__name__}({', '.join(self._names)})")

    def taken_apart(self, item: T) -> dict[Any, Any]:
        """Return the item's fields as a dict.

        :raises ArgumentTypeError: the item is of another class.
        """
        if type(item) is not self.items:
            raise arguments.wrong_type("item", item, f"a {self.items.__name__}, as the stream was opened for")
        return {name: getattr(item, name) for name in self._names}

    def checked(self, arrived: Any) -> Any:
        """See :meth:`Mappings.checked`."""
        if not isinstance(arrived, dict) or list(arrived) != self._names:
            raise ProtocolError(f"{arguments.short(arrived)} came on a stream of {self.text}")
        return arrived

    def make(self, arrived: Any) -> T:
        """See :meth:`Kind.make`."""
        return self.items(**arrived)


def kind_of(items: Any) -> Kind[Any]:
    """Return the :class:`Kind` for a type of items.

    :raises ArgumentTypeError: streams do not support items of this type.
    """
    origin = typing.get_origin(items) or items
    if origin is Tensor:
        return Tensors()
    if origin in (dict, Mapping):
        return Mappings(items)
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        return Dataclasses(origin)
    raise arguments.wrong_type("items", items, "torch.Tensor, dict, collections.abc.Mapping or a dataclass")


def _packed(parcel: Parcel) -> Packed:
    messages = [parcel.body, *parcel.messages] if parcel.body.numel() else parcel.messages
    return Packed(parcel.header, messages, parcel.nbytes, None)
