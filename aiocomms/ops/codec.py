"""The encoding of tensors and Python objects as bytes.

The encoding supports a fixed set of types. If both ends ask for pickle, the whole object is pickled, and may be of any
type.

The decoder checks received bytes before it uses these bytes. The decoder rejects an encoded length that is larger than
the number of received bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from aiocomms.arguments import short
from aiocomms.errors import ArgumentError, ArgumentTypeError, ProtocolError
from aiocomms.ops.apart import APART_BYTES, MAX_APART, Item, Landing, new_tensor, size_of
from aiocomms.ops.checks import DTYPES, PLAIN
from aiocomms.ops.modes import stands_for_others, unaffected
from aiocomms.ops.writing import octets

MAX_DIMS = 14
MAX_DEPTH = 100
"""The largest number of levels of a nested object."""

MAX_OBJECT_BYTES = 64 * 2**20
"""The largest size of an encoded object in bytes. The size includes the values that are sent separately."""

MAX_ITEMS = 2**20
"""The largest number of values in an object. A value of one encoded byte can need 100 bytes after decoding."""

_encoder = msgspec.msgpack.Encoder()
_DTYPES = sorted(DTYPES, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_TENSOR = struct.Struct(f"<BB6x{MAX_DIMS}q")  # The fields are dtype, number of dimensions, and dimensions.

_SMALL = frozenset({type(None), bool, int, float})
_LENGTH = struct.Struct("<Q")

TENSOR_BYTES = _TENSOR.size
"""The size of a tensor's description, in bytes."""

_TUPLE, _TENSOR_EXT, _DTYPE, _DEVICE, _SIZE, _TENSOR_APART, _BYTES_APART, _STR_APART = range(1, 9)

Apart = list[Item]
"""The values of an object that are sent separately; see :mod:`aiocomms.ops.apart`."""


def describe_tensor(tensor: Tensor, name: str = "tensor") -> bytes:
    """Encode a tensor's dtype and shape as :data:`TENSOR_BYTES` bytes.

    :raises ArgumentError: the tensor has more than :data:`MAX_DIMS` dimensions.
    """
    if tensor.dim() > MAX_DIMS:
        raise ArgumentError(f"{name} has {tensor.dim()} dimensions, wanted at most {MAX_DIMS}")
    padding = [0] * (MAX_DIMS - tensor.dim())
    return _TENSOR.pack(_CODES[tensor.dtype], tensor.dim(), *tensor.shape, *padding)


def parse_tensor(data: bytes) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Decode a description that :func:`describe_tensor` made.

    :returns: the dtype, the shape, and the size in bytes.
    :raises ProtocolError: the bytes describe no tensor.
    """
    if len(data) != TENSOR_BYTES:
        raise ProtocolError(f"a tensor's description has {len(data)} bytes, wanted {TENSOR_BYTES}")
    code, dims, *sizes = _TENSOR.unpack(data)
    if code >= len(_DTYPES) or dims > MAX_DIMS or any(n < 0 for n in sizes) or any(sizes[dims:]):
        raise ProtocolError(f"a tensor's description makes no sense: dtype {code}, dimensions {dims}, sizes {sizes}")
    nbytes = math.prod(sizes[:dims]) * _DTYPES[code].itemsize
    if nbytes >= 2**62:
        raise ProtocolError(f"a tensor's description asks for {nbytes} bytes")
    return _DTYPES[code], tuple(sizes[:dims]), nbytes


@unaffected
def encode(value: Any, *, pickle: bool = False, apart: Apart | None = None) -> bytearray:
    """Encode an object as bytes.

    :param value: an object that consists of None, bool, int (64 bits), float, str, bytes, list, tuple, dict, and
        torch's Tensor, dtype, device and Size.
    :param pickle: whether to use pickle, which accepts any object. The receiver must ask for pickle, too.
    :param apart: a list. The function appends the large tensors, bytes and ASCII strings, and all tensors that are not
        on the CPU. The encoding contains only descriptions of these values. If ``apart`` is None, the encoding contains
        all values.
    :raises ArgumentError: the object holds a value of another type, or the object is nested too deep or is too large.
    """
    if pickle:
        from aiocomms.ops.pickles import dumps  # Few programs need this module.

        try:
            data = dumps(value, MAX_OBJECT_BYTES)
        except ArgumentError:
            raise
        except Exception as error:  # The object's methods may raise any error.
            raise ArgumentTypeError(f"obj cannot be pickled: {type(error).__name__}: {error}") from error
    else:
        try:
            _encoder.encode_into(_pack(value, 0, apart), data := bytearray())
        except OverflowError as error:
            raise ArgumentError(f"obj holds an integer of more than 64 bits: {error}") from None
        except UnicodeEncodeError as error:
            raise ArgumentError(f"obj holds a str that is no Unicode text: {error}") from None
    nbytes = len(data) + sum(map(size_of, apart or ()))
    if nbytes > MAX_OBJECT_BYTES:
        raise ArgumentError(f"obj takes {nbytes} bytes encoded, wanted at most {MAX_OBJECT_BYTES}; send it as a tensor")
    if apart is not None and len(apart) > MAX_APART:
        raise ArgumentError(f"obj holds {len(apart)} tensors, wanted at most {MAX_APART} that are large or on a GPU")
    if len(data) > MAX_ITEMS and not pickle and count_items(data) > MAX_ITEMS:
        raise ArgumentError(f"obj holds more than {MAX_ITEMS} values; send them as a tensor")
    return data


@unaffected
def decode(data: bytes | bytearray | memoryview, *, pickle: bool = False, landing: Landing | None = None) -> Any:
    """Decode an object that :func:`encode` encoded.

    :param pickle: True if the bytes are a pickle. The program on this rank must have asked for pickle.
    :param landing: the object that allocates memory for values that are sent separately; None if there are no such
        values.
    :raises ProtocolError: the bytes do not encode an object.
    """
    if pickle:
        import pickle as pickling

        try:
            return pickling.loads(data)  # noqa: S301 - The program asked for pickle on both ends.
        except Exception as error:  # The object's methods may raise any error.
            raise ProtocolError(f"an object cannot be unpickled: {type(error).__name__}: {error}") from error
    if len(data) > MAX_ITEMS and count_items(data) > MAX_ITEMS:
        raise ProtocolError(f"an object of more than {MAX_ITEMS} values came")
    return _Decoder(landing).decode(data)


_HEAD: Final = {
    **dict.fromkeys((0xC4, 0xD9, 0xC7), 1), **dict.fromkeys((0xC5, 0xDA, 0xC8), 2),
    **dict.fromkeys((0xC6, 0xDB, 0xC9), 4), 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""The size in bytes of the length field that follows a value's first byte in msgpack; the key is the first byte."""
_FIXED: Final = {
    **dict.fromkeys((0xC0, 0xC1, 0xC2, 0xC3), 0), **dict.fromkeys((0xCC, 0xD0), 1), **dict.fromkeys((0xCD, 0xD1), 2),
    **dict.fromkeys((0xCE, 0xD2, 0xCA), 4), **dict.fromkeys((0xCF, 0xD3, 0xCB), 8), 0xD4: 2, 0xD5: 3, 0xD6: 5,
    0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""The number of bytes after the first byte of a value without a length field; the key is the first byte."""


def count_items(data: bytes | bytearray | memoryview, depth: int = 0) -> int:
    """Count the values in a msgpack message, including the values in its tuples.

    The function stops when the count exceeds :data:`MAX_ITEMS`. The function reads the type and the length of each
    value, and creates no objects. The decoder later rejects invalid bytes.
    """
    view, at, count = memoryview(data), 0, 0
    while at < len(view) and count <= MAX_ITEMS:
        first = view[at]
        at += 1
        count += 1
        head = _HEAD.get(first, 0)
        length = int.from_bytes(view[at : at + head], "big")
        at += head
        if first in (0xDC, 0xDD, 0xDE, 0xDF) or 0x80 <= first <= 0x9F or first < 0x80 or first >= 0xE0:
            continue  # The items of lists and dicts follow the head. A small integer consists of the head alone.
        if first in (0xC7, 0xC8, 0xC9):
            if view[at : at + 1] == bytes([_TUPLE]) and depth < MAX_DEPTH:
                count += count_items(view[at + 1 : at + 1 + length], depth + 1)
            at += 1
        at += first & 0x1F if 0xA0 <= first <= 0xBF else length + _FIXED.get(first, 0)
    return count


def _pack(value: Any, depth: int, apart: Apart | None) -> Any:
    if depth > MAX_DEPTH:
        raise ArgumentError(f"obj is nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if kind in _SMALL:
        return value
    if kind is bytes or kind is str:
        return _pack_text(value, apart)
    if kind is list:
        return value if _SMALL.issuperset(map(type, value)) else [_pack(item, depth + 1, apart) for item in value]
    if kind is dict:
        return {_key(key): _pack(item, depth + 1, apart) for key, item in value.items()}
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_pack(item, depth + 1, apart) for item in value]))
    if kind is torch.Size:
        return msgspec.msgpack.Ext(_SIZE, msgspec.msgpack.encode(list(value)))
    if kind is torch.dtype and value in _CODES:
        return msgspec.msgpack.Ext(_DTYPE, bytes([_CODES[value]]))
    if kind is torch.device:
        return msgspec.msgpack.Ext(_DEVICE, str(value).encode())
    if kind in PLAIN:
        return _pack_plain(value, apart)
    raise _unknown(value)


def _pack_plain(tensor: Tensor, apart: Apart | None) -> msgspec.msgpack.Ext:
    if (what := stands_for_others(tensor)) is not None:
        raise ArgumentError(f"obj holds {what}, wanted tensors with memory of their own: call it outside")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.dtype not in _CODES:
        raise _unknown(tensor)
    _has_memory(tensor)
    if apart is not None and (tensor.nbytes >= APART_BYTES or not tensor.is_cpu):
        return _pack_apart(tensor.detach(), apart)
    return msgspec.msgpack.Ext(_TENSOR_EXT, _pack_tensor(tensor))


def _unknown(value: Any) -> ArgumentTypeError:
    kind = type(value)
    advice = "did you forget `await`?" if isinstance(value, Awaitable) else "or pickle=True at both ends"
    return ArgumentTypeError(
        f"obj holds {short(value)} ({kind.__module__}.{kind.__qualname__}), wanted only None, bool, int, float, str, "
        f"bytes, list, tuple, dict, and torch's Tensor, dtype, device and Size; {advice}"
    )


def _pack_text(value: bytes | str, apart: Apart | None) -> Any:
    if apart is None or len(value) < APART_BYTES or not (isinstance(value, bytes) or value.isascii()):
        return value
    return _pack_apart(value, apart)


def _key(key: Any) -> Any:
    if key is None or type(key) in (bool, int, float, str, bytes):
        return key
    raise ArgumentTypeError(f"obj holds a dict with the key {short(key)}, wanted None, bool, int, float, str or bytes")


def _has_memory(tensor: Tensor) -> None:
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        raise ArgumentError(f"obj holds {short(tensor)}, which has no memory: its storage was freed or resized")


def _pack_apart(item: Item, apart: Apart) -> msgspec.msgpack.Ext:
    apart.append(item)
    if not isinstance(item, Tensor):
        return msgspec.msgpack.Ext(_BYTES_APART if isinstance(item, bytes) else _STR_APART, _LENGTH.pack(len(item)))
    return msgspec.msgpack.Ext(_TENSOR_APART, describe_tensor(item) + bytes([not item.is_cpu]))


def _pack_tensor(tensor: Tensor) -> bytearray:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytearray(TENSOR_BYTES + plain.nbytes)
    data[:TENSOR_BYTES] = describe_tensor(plain)
    if plain.nbytes:
        torch.frombuffer(data, dtype=torch.uint8, offset=TENSOR_BYTES).copy_(octets(plain))
    return data


class _Decoder:
    """The decoder of one object. The decoder counts the levels of nested extension types."""

    def __init__(self, landing: Landing | None) -> None:
        self._depth = 0
        self._landing = landing

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:
            raise ProtocolError(f"an object is nested more than {MAX_DEPTH} deep")
        try:
            # A stored msgspec decoder would refer back to this object through its hook. Only a garbage collection
            # would then free the received memory, and it would delay the loop.
            return msgspec.msgpack.decode(data, ext_hook=self._ext)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError) as error:
            raise ProtocolError(f"an object's bytes make no sense: {error}") from None
        finally:
            self._depth -= 1

    def _ext(self, code: int, data: memoryview) -> Any:
        if code == _TUPLE:
            return tuple(self._list(data))
        if code == _SIZE:
            sizes = self._list(data)
            if all(type(n) is int and 0 <= n < 2**62 for n in sizes):
                return torch.Size(sizes)
        elif code == _DTYPE and len(data) == 1 and data[0] < len(_DTYPES):
            return _DTYPES[data[0]]
        elif code == _DEVICE and len(data) < 32:
            try:
                return torch.device(bytes(data).decode("ascii"))
            except (RuntimeError, UnicodeDecodeError):
                pass
        elif code == _TENSOR_EXT:
            return _unpack_tensor(data)
        elif code == _TENSOR_APART and self._landing is not None and len(data) == TENSOR_BYTES + 1:
            return self._landing.tensor(*parse_tensor(bytes(data[:TENSOR_BYTES])), bool(data[TENSOR_BYTES]))
        elif code == _BYTES_APART and self._landing is not None and len(data) == _LENGTH.size:
            return self._landing.bytes(*_LENGTH.unpack(data))
        elif code == _STR_APART and self._landing is not None and len(data) == _LENGTH.size:
            return self._landing.text(*_LENGTH.unpack(data))
        raise ProtocolError(f"an object's bytes make no sense: extension {code} of {len(data)} bytes")

    def _list(self, data: memoryview) -> list[Any]:
        items = self.decode(data)
        if not isinstance(items, list):
            raise ProtocolError(f"an object's bytes make no sense: a {type(items).__name__} in place of a list")
        return items


def _unpack_tensor(data: memoryview) -> Tensor:
    dtype, shape, nbytes = parse_tensor(bytes(data[:TENSOR_BYTES]))
    if len(data) - TENSOR_BYTES != nbytes:
        raise ProtocolError(f"a tensor's description asks for {nbytes} bytes, and {len(data) - TENSOR_BYTES} came")
    if not nbytes:
        return new_tensor(dtype, shape)
    return torch.frombuffer(bytearray(data[TENSOR_BYTES:]), dtype=dtype).view(shape)
