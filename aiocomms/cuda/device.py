"""The interface to a CUDA device with its streams and events, and the implementation of this interface with torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import torch

from aiocomms.arguments import wrong_type
from aiocomms.cuda import ipc, runtime
from aiocomms.cuda.ipc import Mapped, Shared
from aiocomms.errors import ArgumentError

_THREAD_LOCAL: Final = 1  # cudaStreamCaptureModeThreadLocal


class Event(Protocol):
    """The methods of a ``torch.cuda.Event`` that this package uses."""

    def record(self, stream: Any) -> None:
        """Make the event fire when the stream has done all work that was enqueued so far."""

    def query(self) -> bool:
        """Return whether the event has fired. Holds the GIL."""

    def synchronize(self) -> None:
        """Sleep until the event has fired. The sleep releases the GIL, and uses no CPU."""


class Stream(Protocol):
    """The methods of a ``torch.cuda.Stream`` that this package uses."""

    @property
    def cuda_stream(self) -> int:
        """The ``cudaStream_t``."""

    def wait_event(self, event: Any) -> None:
        """Make all later work on the stream wait for the event."""


class Cuda(Protocol):
    """The interface to a CUDA device. Tests use a substitute if there is no GPU."""

    @property
    def index(self) -> int:
        """The number of the device in this process."""

    def functions(self) -> Mapping[str, int] | None:
        """Return the addresses of the runtime's functions, for native code; None if some function is not found."""

    def activate(self) -> None:
        """Make this device the current device of this thread."""

    def stream(self, priority: int) -> Stream:
        """Return a stream that no other code uses.

        :param priority: the GPU serves lower numbers first; 0 is the default.
        """

    def current_stream(self) -> Stream:
        """Return this thread's current stream."""

    def current_handle(self) -> int:
        """Return the ``cudaStream_t`` of this thread's current stream, faster than :meth:`current_stream`."""

    def copy(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy of ``nbytes`` bytes between two addresses of the device, on a stream."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Make a stream the current stream of this thread, within the context."""

    def event(self) -> Event:
        """Return a new event without timing. A thread that waits for the event sleeps, and does not spin."""

    def capturing(self, stream: Stream | None = None) -> bool:
        """Return whether a stream, by default this thread's current stream, is being captured into a graph."""

    def enqueue(self, stream: Stream, call: Callable[[], object]) -> None:
        """Run ``call``, which enqueues torch operations, while ``stream`` is the current stream."""

    def empty_like(self, stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate a tensor with the shape and dtype of ``tensor``, in the memory pool of a stream.

        :raises torch.OutOfMemoryError: no memory is left.
        """

    def share(self, storage: torch.UntypedStorage) -> Shared | None:
        """Return a record with which one other process can map this memory; None if CUDA cannot share the memory."""

    def map(self, shared: Shared) -> Mapped | None:
        """Map another process's memory. The call blocks, so do not call this method on the event loop.

        :returns: the memory; None if this process does not see the memory's GPU, or if CUDA refuses the mapping.
        """

    def harmless(self) -> contextlib.AbstractContextManager[None]:
        """Prevent this thread's calls from invalidating another thread's capture (thread-local capture mode)."""


class TorchCuda:
    """The implementation of :class:`Cuda` with torch and the CUDA runtime."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._exchange: Callable[[Any], int] = runtime.library().cudaThreadExchangeStreamCaptureMode
        self.index: int = torch.cuda.current_device() if device.index is None else device.index
        self._current: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def functions(self) -> Mapping[str, int] | None:
        """See :meth:`Cuda.functions`."""
        return runtime.addresses(runtime.library(), runtime.FUNCTIONS)

    def activate(self) -> None:
        """See :meth:`Cuda.activate`."""
        torch.cuda.set_device(self.device)

    def stream(self, priority: int) -> Stream:
        """See :meth:`Cuda.stream`."""
        stream: Stream = runtime.own_stream(self.device, priority)
        return stream

    def current_stream(self) -> Stream:
        """See :meth:`Cuda.current_stream`."""
        return torch.cuda.current_stream(self.device)

    def current_handle(self) -> int:
        """See :meth:`Cuda.current_handle`."""
        return self.current_stream().cuda_stream if self._current is None else self._current(self.index)

    def copy(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        """See :meth:`Cuda.copy`."""
        runtime.copy(stream.cuda_stream, to, source, nbytes)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """See :meth:`Cuda.on`."""
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        """See :meth:`Cuda.event`."""
        return runtime.RuntimeEvent(blocking=True)  # type: ignore[no-untyped-call]

    def capturing(self, stream: Stream | None = None) -> bool:
        """See :meth:`Cuda.capturing`."""
        if stream is None:
            return self._capturing()
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            return self._capturing()

    def enqueue(self, stream: Stream, call: Callable[[], object]) -> None:
        """See :meth:`Cuda.enqueue`."""
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            call()

    def empty_like(self, stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Cuda.empty_like`."""
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            return torch.empty_like(tensor)

    def share(self, storage: torch.UntypedStorage) -> Shared | None:
        """See :meth:`Cuda.share`."""
        return ipc.share(storage)

    def map(self, shared: Shared) -> Mapped | None:
        """See :meth:`Cuda.map`."""
        return ipc.map_shared(self.index, shared)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        """See :meth:`Cuda.harmless`."""
        mode = ctypes.c_int(_THREAD_LOCAL)
        self._exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange(ctypes.byref(mode))


def no_gpu(device: torch.device) -> str | None:
    """Return why torch cannot use the GPU ``device``, or None if torch can use it."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA: install a CUDA build of torch, which plain `torch` on PyPI is"
    if not torch.cuda.is_available():
        why = _why_no_gpu()
        return f"torch finds no GPU{why}: check nvidia-smi, the driver, and CUDA_VISIBLE_DEVICES; or use device='cpu'"
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        return f"device is {device}, and this process sees {count} GPU(s): use cuda:0 to cuda:{count - 1}"
    return None


def _why_no_gpu() -> str:
    """Return torch's error text, which distinguishes outdated and missing drivers; empty if there is no error."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f" ({str(error).partition(chr(10))[0].partition('. ')[0]})"
    return ""


def check_stream(cuda: Cuda, stream: Any) -> None:
    """Check a stream that will wait for an op.

    :raises ArgumentTypeError: the value is no stream.
    :raises ArgumentError: the stream and the op are on different devices.
    """
    if not hasattr(stream, "cuda_stream"):
        raise wrong_type("stream", stream, "a torch.cuda.Stream, or None for the current one")
    device = getattr(stream, "device", None)
    if device is not None and device.index != cuda.index:
        raise ArgumentError(
            f"stream is of {device}, wanted one of cuda:{cuda.index}, the communicator's device: "
            "let that one wait, and your stream wait for it"
        )
