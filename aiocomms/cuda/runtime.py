"""Calls of the CUDA runtime that torch does not wrap, or wraps in an unsuitable way."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

_NON_BLOCKING: Final = 1  # With cudaStreamNonBlocking, the stream and the default stream do not wait for each other.

FUNCTIONS: Final = (
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaThreadExchangeStreamCaptureMode",
    "cudaGetErrorString",
    "cudaGetLastError",
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaStreamWaitEvent",
    "cudaMemcpyAsync",
)
"""The functions whose addresses native code gets."""
_DEVICE_TO_DEVICE: Final = 3  # cudaMemcpyDeviceToDevice
_LAZY_PEERS: Final = 1  # cudaIpcMemLazyEnablePeerAccess
HANDLE_BYTES: Final = 64
"""The size of a ``cudaIpcMemHandle_t``."""

_idle: dict[tuple[int | None, int], list[int]] = {}  # The values are streams without an owner; keys: device, priority.


@functools.cache
def library() -> Any:
    """Load the CUDA runtime library that torch itself uses."""
    version = torch.version.cuda
    return ctypes.CDLL(None if version is None else f"libcudart.so.{version.split('.')[0]}")


def check(status: int, what: str) -> None:
    """Raise the error that torch would raise, if a call has failed.

    :param status: the ``cudaError_t`` that the call returned.
    :param what: a description of the call, for the message.
    :raises RuntimeError: the call has failed.
    """
    if status:
        text = library().cudaGetErrorString
        text.restype = ctypes.c_char_p
        raise RuntimeError(f"CUDA error: {text(status).decode()} ({what}, {status})")


def addresses(loaded: Any, names: Iterable[str]) -> dict[str, int]:
    """Return the addresses of functions of a loaded library, for native code.

    :raises AttributeError: the library has no such function.
    """
    found = {name: ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in names}
    return {name: address for name, address in found.items() if address is not None}


def copy(stream: int, to: int, source: int, nbytes: int) -> None:
    """Enqueue a copy within a device's memory."""
    to_, source_, stream_ = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_void_p(stream)
    status = library().cudaMemcpyAsync(to_, source_, ctypes.c_size_t(nbytes), _DEVICE_TO_DEVICE, stream_)
    check(status, "a copy")


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def map_handle(handle: bytes) -> int:
    """Map another process's memory for the current device.

    If the memory is already mapped, count one more mapping. Releases the GIL.

    :param handle: a ``cudaIpcMemHandle_t``.
    :returns: the address, for :func:`unmap`.
    """
    made = ctypes.c_void_p()
    by_value = _IpcHandle.from_buffer_copy(handle)
    status = library().cudaIpcOpenMemHandle(ctypes.byref(made), by_value, ctypes.c_uint(_LAZY_PEERS))
    check(status, "mapping another process's memory")
    assert made.value is not None
    return made.value


def unmap(address: int) -> None:
    """Undo one call of :func:`map_handle`. Releases the GIL."""
    check(library().cudaIpcCloseMemHandle(ctypes.c_void_p(address)), "giving another process's memory back")


def reach(index: int) -> None:
    """Let the current device access another device's memory, if this is possible.

    If this is not possible, CUDA copies through the host.
    """
    if library().cudaDeviceEnablePeerAccess(ctypes.c_int(index), ctypes.c_uint(0)):
        library().cudaGetLastError()  # This clears the error, which torch would otherwise raise later.


def own_stream(device: torch.device, priority: int) -> Any:
    """Return a ``torch.cuda.Stream`` that no other code gets while the object exists.

    ``torch.cuda.Stream()`` returns 32 streams in rotation, so two callers could get the same stream, and wait for each
    other.
    """
    idle = _idle.setdefault((device.index, priority), [])
    try:
        handle = idle.pop()
    except IndexError:
        handle = _new_stream(device, priority)
    stream = torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]
    weakref.finalize(stream, idle.append, handle).atexit = False
    return stream


def _new_stream(device: torch.device, priority: int) -> int:
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        check(library().cudaStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, priority), "a new stream")
    assert made.value is not None
    return made.value


class RuntimeEvent(torch.cuda.Event):
    """A CUDA event for which a daemon thread can wait."""

    def synchronize(self) -> None:
        """Sleep until the event has fired.

        torch's own method reacquires the GIL in a C++ destructor. During the interpreter's finalization, this
        reacquisition kills the process.
        """
        check(library().cudaEventSynchronize(ctypes.c_void_p(self.cuda_event)), "waiting for an event")
