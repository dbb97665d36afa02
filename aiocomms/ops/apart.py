"""The values of an object that are sent in separate messages: large tensors, bytes and ASCII strings.

This module avoids copies. A bytes object, a string, or a contiguous tensor on the communicator's device is sent
directly from its own memory. A receive writes directly into a new tensor, bytes or str that no other code uses yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aiocomms.errors import ProtocolError
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected
from aiocomms.ops.writing import octets, write

APART_BYTES = 32 * 1024
"""The smallest size, in bytes, at which a tensor, bytes object or ASCII string is sent as a separate message."""

MAX_APART = 2**14
"""The largest number of separate messages of an object. The message with the object's encoding is not counted."""

Item = Tensor | bytes | str
"""A value that is sent as a separate message."""

# Python's C functions make bytes and strings that are filled before any other code sees them.
_new_bytes: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_new_str: Any = ctypes.pythonapi.PyUnicode_New
_new_str.restype = ctypes.py_object
_new_str.argtypes = [ctypes.c_ssize_t, ctypes.c_uint32]
_place_of_bytes: Any = ctypes.pythonapi.PyBytes_AsString
_place_of_bytes.restype = ctypes.c_void_p
_place_of_bytes.argtypes = [ctypes.py_object]
_place_of_ascii: Any = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
_place_of_ascii.restype = ctypes.c_void_p
_place_of_ascii.argtypes = [ctypes.py_object, ctypes.c_void_p]
_ASCII = 127


def size_of(item: Item) -> int:
    """Return the size of a message, in bytes."""
    return item.nbytes if isinstance(item, Tensor) else len(item)


@unaffected
def message(item: Item, device: torch.device) -> Tensor:
    """Return an item's bytes as a flat uint8 tensor on ``device``, without a copy if :func:`is_message` is true."""
    if not isinstance(item, Tensor):
        return _shown(item).to(device)
    return octets(item.resolve_conj().resolve_neg().contiguous().to(device))


def is_message(item: Item, device: torch.device) -> bool:
    """Return True if an item's own memory can be sent as a message. Then :func:`message` makes no copy of the item."""
    if not isinstance(item, Tensor):
        return device.type == "cpu"
    return item.device == device and item.is_contiguous() and not item.is_conj() and not item.is_neg()


def copy(messages: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Copy messages into other tensors, for a rank that sends an object to itself."""
    for source, target in zip(messages, into, strict=True):
        write(target, source)


def new_tensor(dtype: torch.dtype, shape: Sequence[int], device: buffers.Device = "cpu") -> Tensor:
    """Return a new tensor.

    :raises ProtocolError: no tensor can have that shape, or there is no memory for the tensor.
    """
    try:
        return buffers.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise ProtocolError(f"a tensor was announced that cannot be: {error}") from error


class Landing:
    """The memory that the decoder of an object allocates for received messages.

    :param device: the communicator's device.
    :param nbytes: the number of bytes that the decoder may allocate.
    """

    left: int

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.left = nbytes
        """The number of bytes that the decoder may still allocate."""
        self.messages: list[Tensor] = []
        """The tensors to receive into, in the order in which the messages are sent."""
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._texts: list[Tensor] = []
        self._count = 0

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], nbytes: int, on_device: bool) -> Tensor:
        """Return a new tensor, on the communicator's device or on the CPU, whose data arrives later.

        :raises ProtocolError: the encoding has more bytes than its sender announced, or has too many values. The same
            error is raised if no tensor can have this shape, or if memory is lacking.
        """
        self._take(nbytes)
        fresh = new_tensor(dtype, shape, self.device if on_device else "cpu")
        self._expect(octets(fresh))
        return fresh

    def bytes(self, nbytes: int) -> bytes:
        """Return a new bytes object, whose content arrives later.

        :raises ProtocolError: the encoding has more bytes than its sender announced, or has too many values.
        """
        self._take(nbytes)
        fresh: bytes = _new_bytes(None, nbytes)
        self._expect(_shown(fresh))
        return fresh

    def text(self, nbytes: int) -> str:
        """Return a new ASCII string, whose characters arrive later.

        No other code may see the string before :meth:`settle`.

        :raises ProtocolError: the encoding has more bytes than its sender announced, or has too many values.
        """
        self._take(nbytes)
        fresh: str = _new_str(nbytes, _ASCII)
        self._texts.append(_shown(fresh))
        self._expect(self._texts[-1])
        return fresh

    @property
    def unsettled(self) -> bool:
        """True if :meth:`settle` must copy data or check strings."""
        return bool(self._staged or self._texts)

    def settle(self) -> None:
        """Copy to the CPU the data that has arrived on another device, and check the strings. Blocks.

        :raises ProtocolError: a string is not ASCII.
        """
        for source, target in self._staged:
            write(target, source)
        for text in self._texts:
            if text.numel() and int(text.max()) > _ASCII:
                raise ProtocolError("an object's bytes make no sense: a string of them is not ASCII")

    def _take(self, nbytes: int) -> None:
        self.left -= nbytes
        self._count += 1
        if self.left < 0 or self._count > MAX_APART:
            raise ProtocolError("an object's bytes make no sense: more is to come beside them than was announced")

    def _expect(self, target: Tensor) -> None:
        if not target.numel():
            return
        if target.device == self.device:
            self.messages.append(target)
        else:
            self.messages.append(torch.empty_like(target, device=self.device))
            self._staged.append((self.messages[-1], target))


def _shown(data: bytes | str) -> Tensor:
    """Return a tensor over the memory of bytes or of an ASCII string. The tensor keeps the object alive."""
    if not data:
        return buffers.empty(0, dtype=torch.uint8, device="cpu")
    place = _place_of_bytes(data) if isinstance(data, bytes) else _place_of_ascii(data, None)
    memory: Any = (ctypes.c_ubyte * len(data)).from_address(place)
    memory.owner = data
    return torch.frombuffer(memory, dtype=torch.uint8)
