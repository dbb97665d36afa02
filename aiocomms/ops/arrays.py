"""Arrays and numbers of other libraries as arguments of ops. An array that exports DLPack is accepted as a tensor.

An integer of another library is accepted as an int. Arrays are not copied. An op whose arguments are tensors takes no
extra time, because the code looks for arrays only after a check has failed.

torch does not check whether the exported memory is read-only, or whether the memory is a copy. A negative stride would
crash the process. So this module checks the exported memory of an array before torch gets the memory. The module knows
the structures of ``dlpack.h``, version 1.0 and the earlier versions 0.x.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import as_int
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.ops import checks
from aiocomms.ops._base import Op
from aiocomms.ops.checks import CheckedComm

Asked = TypeVar("Asked", bound=Op)

READ_ONLY, COPIED = 1, 2  # These are bits of the flags.
_SMALL: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in checks.DTYPES - {torch.float16}
    if dtype.is_floating_point and dtype.itemsize <= 2
}
"""The dtypes of one or two bytes for which NumPy uses the package ``ml_dtypes``, by name.

NumPy does not export arrays of these dtypes.
"""
_NEGATIVE: Final = 1 << 56
"""The smallest positive stride that is treated as negative.

CuPy 14 divides negative strides as unsigned numbers, so its negative strides become large positive numbers.
"""
_WORDS: Final = {1: torch.uint8, 2: torch.uint16}
_VERSIONED: Final = struct.Struct("=24xQ16xi12xQ")
"""The :mod:`struct` format of three fields of a ``DLManagedTensorVersioned``.

The fields are the flags, the number of dimensions and the address of the strides.
"""
_UNVERSIONED: Final = struct.Struct("=16xi12xQ")
"""The :mod:`struct` format of two fields of a ``DLManagedTensor``.

The fields are the number of dimensions and the address of the strides. A ``DLManagedTensor`` has no flags.
"""
_address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def checked(op: Asked, group: CheckedComm) -> Asked:
    """Check an op, and return the op with tensors in place of arrays and with ints in place of other numbers.

    The caller must take the result of the work from ``op.result()`` of the original op, which has the program's arrays.

    :raises ArgumentError: :meth:`Op.check` raises this error, or an array cannot be used as a tensor.
    """
    try:
        op.check(group)
    except ArgumentTypeError:
        written = [("tensor", op.tensor)] if op.moves else op.writes()  # type: ignore[attr-defined]
        device = group.device
        arrays = {id(it): fitting(name, it, device, write=False) for name, it in op.reads() if is_array(it)}
        arrays |= {id(it): fitting(name, it, device, write=True) for name, it in written if is_array(it)}
        op = _replaced(op, arrays)
        op.check(group)
    return op


def _replaced(value: Any, arrays: dict[int, Tensor]) -> Any:
    """Return an op, or a field of an op, with tensors in place of arrays and with ints in place of other numbers."""
    if isinstance(value, tuple):
        return tuple(_replaced(item, arrays) for item in value)
    if isinstance(value, Op):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        numbers = _numbers(type(value))
        return type(value)(*(_ints(it) if name in numbers else _replaced(it, arrays) for name, it in fields.items()))
    return arrays.get(id(value), value)


@cache
def _numbers(kind: type[Op]) -> frozenset[str]:
    """Return the names of an op type's fields that hold ints."""
    kinds = (int, int | None, tuple[int, ...])
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.type in kinds)


def _ints(value: Any) -> Any:
    return tuple(map(as_int, value)) if isinstance(value, tuple) else as_int(value)


def is_array(value: object) -> bool:
    """Return whether a value is an array and not a tensor."""
    return hasattr(type(value), "__dlpack__") and not isinstance(value, Tensor)


def as_tensor(name: str, value: Any, *, write: bool) -> Any:
    """Return a tensor that shares an array's memory and keeps the array alive.

    If the value is no array, return the value unchanged.

    :param name: the array's name in errors.
    :param write: whether the op writes the array.
    :raises ArgumentError: the op writes a read-only array, or no tensor can share the array's memory.
    """
    if not is_array(value):
        return value
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise ArgumentError(
            f"{name} is {arguments.short(value)}, whose mask would stay behind; give its data or filled()"
        )
    try:
        return torch.from_dlpack(_Exported(name, value, write))
    except ArgumentError:
        raise
    except Exception as error:
        dtype = _SMALL.get(str(getattr(value, "dtype", "")))
        if dtype is not None and isinstance(error, BufferError):
            return as_tensor(name, value.view(f"u{dtype.itemsize}"), write=write).view(dtype)
        raise ArgumentError(
            f"{name} is {arguments.short(value)}, wanted one whose memory a tensor can share: {error}"
        ) from error


def fitting(name: str, value: Any, device: torch.device, *, write: bool) -> Any:
    """Check an array that is an argument of an op, and return it as a tensor. Return a tensor unchanged.

    If the op only reads a non-contiguous array, and the array's library has ``ascontiguousarray``, the error recommends
    ``ascontiguousarray``.

    :raises ArgumentError: :func:`as_tensor` raises this error, or the array is not contiguous or not on the device.
    """
    tensor = as_tensor(name, value, write=write)
    if tensor is not value and not tensor.is_contiguous():
        library = type(value).__module__.partition(".")[0]
        copies = not write and hasattr(sys.modules.get(library), "ascontiguousarray")
        give = f"{library}.ascontiguousarray({name})" if copies else "one that is"
        raise ArgumentError(f"{name} is {arguments.short(value)}, which is not contiguous; give {give}")
    if tensor is not value and tensor.device != device:
        raise ArgumentError(
            f"{name} is {arguments.short(value)} on {tensor.device}, wanted it on {device}, the communicator's device; "
            f"give a tensor there, or form a communicator with device='{tensor.device}'"
        )
    return tensor


def like(given: Any, tensor: Tensor) -> Any:
    """Return ``tensor`` as an array of the library of ``given``, over the same memory.

    If ``given`` is no array, or its library cannot import DLPack, return ``tensor`` itself. For an instance of a
    subclass of NumPy's array, return a plain NumPy array.
    """
    if not is_array(given):
        return tensor
    numpy = sys.modules.get("numpy")
    # NumPy's from_dlpack made arrays read-only before 2.1, so this code makes a view instead.
    if numpy is not None and isinstance(given, numpy.ndarray):
        words = tensor.view(_WORDS[tensor.itemsize]) if tensor.dtype in _SMALL.values() else tensor
        return words.numpy().view(given.dtype)
    if hasattr(given, "__array_namespace__"):
        library = given.__array_namespace__()
    else:
        library = sys.modules.get(type(given).__module__.partition(".")[0])
    return library.from_dlpack(tensor) if hasattr(library, "from_dlpack") else tensor


class _Exported:
    """The memory that an array exports. This module checks the memory before torch gets it."""

    __slots__ = ("_array", "_name", "_write")

    def __init__(self, name: str, array: Any, write: bool) -> None:
        self._name, self._array, self._write = name, array, write

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> Any:
        capsule = self._array.__dlpack__(**asked)  # If this raises TypeError, torch asks again with fewer arguments.
        flags, strides = _look(capsule)
        if strides and not 0 <= min(strides) <= max(strides) < _NEGATIVE:
            raise self._wrong("which runs backwards in memory, wanted a contiguous one")
        if flags & COPIED:
            raise self._wrong("which is exported as a copy, wanted one whose memory a tensor can share")
        if flags & READ_ONLY and self._write:
            raise self._wrong("which is read-only, wanted one that can be written")
        return capsule

    def _wrong(self, why: str) -> ArgumentError:
        return ArgumentError(f"{self._name} is {arguments.short(self._array)} {why}")


def _look(capsule: object) -> tuple[int, tuple[int, ...]]:
    """Return the flags of exported memory, and the strides in elements.

    If the memory is contiguous, the export may have no strides. Then the returned strides are empty.
    """
    try:
        address = _address_of(capsule, b"dltensor_versioned")
    except ValueError:
        flags = 0
        address = _address_of(capsule, b"dltensor")
        count, place = _UNVERSIONED.unpack(ctypes.string_at(address, _UNVERSIONED.size))
    else:
        flags, count, place = _VERSIONED.unpack(ctypes.string_at(address, _VERSIONED.size))
    return flags, struct.unpack(f"={count}q", ctypes.string_at(place, 8 * count)) if place else ()
