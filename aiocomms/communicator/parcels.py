"""The messages of an object: a header of fixed size, the encoding, and one message for each large value.

If the encoding is small, the header contains it. The encoding describes large tensors, bytes and strings, but does not
contain their data. The sender sends this data directly from the memory of the values, and the receiver writes it into
new memory; see :mod:`aiocomms.ops.apart`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aiocomms.cuda import crossing
from aiocomms.errors import ProtocolError
from aiocomms.lowering.runs import Offload, Steps
from aiocomms.lowlevel.versions import Dialect
from aiocomms.ops import apart, buffers, codec

HEADER_BYTES = 256
_HEADER = struct.Struct("<6sBxIIQQ")  # head, flags, tag of the other messages, bytes here, bytes encoded, bytes apart
_OBJECTS = Dialect("objects", b"aioO", 3)
_INLINE = HEADER_BYTES - _HEADER.size
_PICKLED = 1

# The tags of objects' further messages differ between one pair of ranks. All ranks of a process share one count.
_tags = itertools.count()


class Parcel:
    """An encoded object: the header, the encoding, and the values that are sent separately.

    If the encoding is small, the header contains it.
    """

    __slots__ = ("_copied", "_device", "_items", "body", "header", "nbytes", "tag", "tensors")

    def __init__(self, obj: Any, device: torch.device, *, pickle: bool) -> None:
        items: codec.Apart = []
        data = codec.encode(obj, pickle=pickle, apart=items)
        inline = data if len(data) <= _INLINE else b""
        self.tag: int = next(_tags) & 0x7FFFFFFF
        flags, beside = (_PICKLED if pickle else 0), sum(map(apart.size_of, items))
        self.nbytes: int = len(data) + beside
        head = _HEADER.pack(_OBJECTS.head, flags, self.tag, len(inline), len(data), beside)
        self.header: Tensor = crossing.to_tensor((head + inline).ljust(HEADER_BYTES, b"\0"), device)
        # These bytes are not copied: no other code has them.
        self.body: Tensor = crossing.to_tensor(b"" if inline else data, device)
        self.tensors: list[Tensor] = [item for item in items if isinstance(item, Tensor)]
        """The program's tensors that are sent separately."""
        self._device = device
        self._copied = False
        # A copy from a GPU starts now, in the order of the caller's stream. A thread makes a copy on the CPU.
        self._items = [apart.message(i, device) if _at_once(i, device) else i for i in items if apart.size_of(i)]

    @property
    def late(self) -> bool:
        """True if :meth:`prepare` must copy something before the object can be sent."""
        return any(not _at_once(item, self._device) for item in self._items)

    @property
    def messages(self) -> list[Tensor]:
        """The values that are sent separately, as flat tensors of bytes on the communicator's device."""
        return [apart.message(item, self._device) for item in self._items]

    def prepare(self) -> None:
        """Copy each value that is not contiguous or is not on the communicator's device. The call blocks."""
        self._copied = True
        self._items = [apart.message(item, self._device) for item in self._items]
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def prepared(self) -> Steps:
        """Yield the step that calls :meth:`prepare`, if the call is needed."""
        if self.late:
            yield [Offload(self.prepare)]

    def let_go(self) -> None:
        """Free the copies that :meth:`prepare` has made.

        The call blocks: the kernel takes some milliseconds to free 64 MiB.
        """
        self._items = []

    def released(self) -> Steps:
        """Yield the steps that free the copies of :meth:`prepare`, to be run after all messages have been sent."""
        if self._copied:
            yield [Offload(int)]  # One turn of the loop later no caller holds the last message.
            yield [Offload(self.let_go)]


class ArrivingObject:
    """An object that this rank receives: its parsed header, and memory for its encoding and its large values.

    :raises ProtocolError: the header is invalid.
    """

    __slots__ = ("_landing", "_value", "body", "inline", "nbytes", "pickled", "tag")

    tag: int

    def __init__(self, data: bytes, device: torch.device) -> None:
        _OBJECTS.check(data, "the sender of an object")
        _, flags, self.tag, here, total, beside = _HEADER.unpack(data[: _HEADER.size])
        if flags > _PICKLED or here not in (0, total) or here > _INLINE or self.tag > 0x7FFFFFFF:
            raise ProtocolError(f"an object's header makes no sense: {data[: _HEADER.size].hex()}")
        if total + beside > codec.MAX_OBJECT_BYTES:
            raise ProtocolError(
                f"an object of {total + beside} bytes was announced, at most {codec.MAX_OBJECT_BYTES} are taken"
            )
        self.nbytes: int = total + beside
        self.pickled: bool = bool(flags & _PICKLED)
        self.inline: bytes = data[_HEADER.size : _HEADER.size + here]
        self.body: Tensor = buffers.empty(total - here, dtype=torch.uint8, device=device)
        self._landing = apart.Landing(device, beside)
        self._value: Any = None

    def unpack(self) -> list[Tensor]:
        """Decode the object, and return memory for the values that are sent separately.

        Receive :attr:`body` before this call.

        The call does not decode a pickle.

        :raises ProtocolError: the bytes encode no object.
        """
        if not self.pickled:
            self._value = codec.decode(self.inline or crossing.to_bytes(self.body), landing=self._landing)
        if self._landing.left:
            raise ProtocolError(f"an object's header announced {self._landing.left} bytes more than its values take")
        return self._landing.messages

    @property
    def settle(self) -> Callable[[], None] | None:
        """The blocking function to call after all messages have arrived; None if there is nothing to do."""
        return self._landing.settle if self._landing.unsettled else None

    def settled(self) -> Steps:
        """Yield the step that calls :attr:`settle`, if a call is needed."""
        if self.settle is not None:
            yield [Offload(self.settle)]

    def open(self, *, pickle: bool) -> Any:
        """Return the object. Before this call, call :meth:`unpack`, and receive the values that are sent separately.

        :raises ProtocolError: one end uses pickle and the other does not, or the object cannot be unpickled.
        """
        if self.pickled != pickle:
            how = ("pickled", "not pickled")[:: 1 if self.pickled else -1]
            raise ProtocolError(f"the object was {how[0]} by its sender, wanted {how[1]}: give both the same pickle=")
        if pickle:
            return codec.decode(self.inline or crossing.to_bytes(self.body), pickle=True)
        return self._value


def own_copy(parcel: Parcel, arrival: ArrivingObject) -> Steps:
    """Copy an object that a rank sends to itself, because the program may change the original."""
    arrival.body = parcel.body
    into = arrival.unpack()
    if into and into[0].device.type == "cpu":
        yield [Offload(lambda: apart.copy(parcel.messages, into))]
    else:
        apart.copy(parcel.messages, into)  # The copy on a GPU is only started here.
    yield from arrival.settled()


def _at_once(item: apart.Item, device: torch.device) -> bool:
    return (isinstance(item, Tensor) and not item.is_cpu) or apart.is_message(item, device)
