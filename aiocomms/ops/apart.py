"""Values that travel beside an object's encoding, in messages of their own: large tensors, bytes and ASCII strings.

Nothing here copies them. A tensor that is contiguous and on the communicator's device is its own message, and so are
bytes and strings. A message is received straight into a new tensor, bytes or str that no other code has yet.
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
"""The size in bytes from which on a tensor, bytes or ASCII string is a message of its own."""

MAX_APART = 2**14
"""The number of messages that an object may have beside its encoding."""

Item = Tensor | bytes | str
"""A value that is a message of its own."""

# Python's own way to make bytes and strings that are filled before any other code sees them.
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
    """Return the memory of an item as a flat uint8 tensor on ``device``: its own memory where that is so."""
    if not isinstance(item, Tensor):
        return _shown(item).to(device)
    return octets(item.resolve_conj().resolve_neg().contiguous().to(device))


def is_message(item: Item, device: torch.device) -> bool:
    """Return whether :func:`message` copies nothing."""
    if not isinstance(item, Tensor):
        return device.type == "cpu"
    return item.device == device and item.is_contiguous() and not item.is_conj() and not item.is_neg()


def copy(messages: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Copy messages, as for the rank itself that sends them."""
    for source, target in zip(messages, into, strict=True):
        write(target, source)


def new_tensor(dtype: torch.dtype, shape: Sequence[int], device: buffers.Device = "cpu") -> Tensor:
    """Return a new tensor.

    :raises ProtocolError: no tensor can have that shape, or there is no memory for it.
    """
    try:
        return buffers.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise ProtocolError(f"a tensor was announced that cannot be: {error}") from error


class Landing:
    """The memory that messages are received into; it is taken while an object's encoding is decoded.

    :param device: the communicator's.
    :param nbytes: how much may be taken.
    """

    left: int

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.left = nbytes
        """The number of bytes that may still be taken."""
        self.messages: list[Tensor] = []
        """The messages to be received, in the order sent."""
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._texts: list[Tensor] = []
        self._count = 0

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], nbytes: int, on_device: bool) -> Tensor:
        """Return a new tensor, whose data is to come: on the communicator's device, or on the CPU.

        :raises ProtocolError: more is asked for than was announced.
        """
        self._take(nbytes)
        fresh = new_tensor(dtype, shape, self.device if on_device else "cpu")
        self._expect(octets(fresh))
        return fresh

    def bytes(self, nbytes: int) -> bytes:
        """Return a new bytes object, whose content is to come.

        :raises ProtocolError: more is asked for than was announced.
        """
        self._take(nbytes)
        fresh: bytes = _new_bytes(None, nbytes)
        self._expect(_shown(fresh))
        return fresh

    def text(self, nbytes: int) -> str:
        """Return a new ASCII string, whose characters are to come; no other code may see it before :meth:`settle`.

        :raises ProtocolError: more is asked for than was announced.
        """
        self._take(nbytes)
        fresh: str = _new_str(nbytes, _ASCII)
        self._texts.append(_shown(fresh))
        self._expect(self._texts[-1])
        return fresh

    @property
    def unsettled(self) -> bool:
        """True if :meth:`settle` has something to do."""
        return bool(self._staged or self._texts)

    def settle(self) -> None:
        """Copy what has arrived on another device to the CPU, and look at the strings. Blocks.

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
    """Return a view of bytes or of an ASCII string. The tensor keeps them alive."""
    if not data:
        return buffers.empty(0, dtype=torch.uint8, device="cpu")
    place = _place_of_bytes(data) if isinstance(data, bytes) else _place_of_ascii(data, None)
    memory: Any = (ctypes.c_ubyte * len(data)).from_address(place)
    memory.owner = data
    return torch.frombuffer(memory, dtype=torch.uint8)
