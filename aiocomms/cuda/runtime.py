"""What torch does not wrap of CUDA's runtime, or wraps in a way that does not do, called in the library it uses."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any, Final

import torch

_NON_BLOCKING: Final = 1  # cudaStreamNonBlocking: the default stream and it do not wait for each other

_idle: dict[tuple[int | None, int], list[int]] = {}  # streams that nobody has any more, by device and priority


@functools.cache
def library() -> Any:
    """The runtime."""
    version = torch.version.cuda
    return ctypes.CDLL(None if version is None else f"libcudart.so.{version.split('.')[0]}")


def check(status: int, what: str) -> None:
    """Raise what torch would.

    :param status: what a call has returned.
    :raises RuntimeError: it has failed.
    """
    if status:
        text = library().cudaGetErrorString
        text.restype = ctypes.c_char_p
        raise RuntimeError(f"CUDA error: {text(status).decode()} ({what}, {status})")


def own_stream(device: torch.device, priority: int) -> Any:
    """A ``torch.cuda.Stream`` that nobody else has, until it is garbage.

    ``torch.cuda.Stream()`` gives one of 32 in turn, so that two users of one would wait for each other.
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


class Event(torch.cuda.Event):
    """One that a daemon thread can wait for."""

    def synchronize(self) -> None:
        """Sleep until it has fired.

        torch's takes the GIL back in a C++ destructor, which ends the process when the interpreter is about to end.
        """
        check(library().cudaEventSynchronize(ctypes.c_void_p(self.cuda_event)), "waiting for an event")
