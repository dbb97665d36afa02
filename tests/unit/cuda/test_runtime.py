"""Direct calls of CUDA's runtime, with a stand-in for its library."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiocomms.cuda import runtime

pytestmark = pytest.mark.deterministic

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stand-in for ``torch.cuda.ExternalStream``."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream = handle


class Library:
    """A stand-in for the runtime, which makes streams and returns a status."""

    def __init__(self) -> None:
        self.status = 0
        self.made: list[tuple[int, int]] = []
        self.waited: list[int | None] = []
        self.cudaGetErrorString = lambda status: b"unspecified launch failure"

    def cudaStreamCreateWithPriority(self, made: Any, flags: int, priority: int) -> int:  # noqa: N802
        self.made.append((flags, priority))
        made._obj.value = 100 + len(self.made)
        return self.status

    def cudaEventSynchronize(self, event: ctypes.c_void_p) -> int:  # noqa: N802
        self.waited.append(event.value)
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(runtime, "library", lambda: library)
    monkeypatch.setattr(runtime, "_idle", {})  # Otherwise these streams live as long as the process.
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    return library


def test_own_stream_is_unique_and_reused_once_garbage(library: Library) -> None:
    """Forty streams differ, whereas torch repeats one after 32; the stream of a freed object is used again."""
    streams = [runtime.own_stream(DEVICE, 0) for _ in range(40)]
    high = runtime.own_stream(DEVICE, -1)
    assert len({stream.cuda_stream for stream in [*streams, high]}) == 41
    assert set(library.made) == {(1, 0), (1, -1)}
    gone = streams.pop(7).cuda_stream
    gc.collect()
    assert runtime.own_stream(DEVICE, 0).cuda_stream == gone
    assert len(library.made) == 41


def test_event_synchronize_waits_and_raises_the_cuda_error(library: Library) -> None:
    event: Any = SimpleNamespace(cuda_event=7)
    runtime.RuntimeEvent.synchronize(event)
    assert library.waited == [7]
    library.status = 719
    with pytest.raises(RuntimeError, match=r"CUDA error: unspecified launch failure \(waiting for an event, 719\)"):
        runtime.RuntimeEvent.synchronize(event)
    with pytest.raises(RuntimeError, match="a new stream"):
        runtime.own_stream(DEVICE, 0)
