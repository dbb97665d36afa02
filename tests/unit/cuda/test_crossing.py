"""Copies between the host and a GPU, over the fake GPU: none of them waits for what the program runs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeEvent, FakeStream, Gate

from aiocomms.cuda import crossing, ipc
from aiocomms.ops import writing

pytestmark = pytest.mark.deterministic

GPU = torch.device("cuda", 0)


class OnGpu:
    """A tensor on the GPU: its copy to the host blocks until the current stream is idle, as torch's does."""

    is_cuda = True
    device = GPU

    def __init__(self, cuda: FakeCuda, value: int) -> None:
        self._cuda, self.data = cuda, torch.tensor([value], dtype=torch.uint8)

    def cpu(self) -> torch.Tensor:
        there = torch.empty_like(self.data)
        blocking(self._cuda, lambda: there.copy_(self.data))
        return there


def blocking(cuda: FakeCuda, copy: Callable[[], object]) -> None:
    """Copy as torch does: enqueue the copy on the current stream, and wait for that stream."""
    stream, end = cuda.current_stream(), cuda.event()
    cuda.enqueue(stream, copy)
    end.record(stream)
    end.synchronize()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    aside = FakeStream(cuda.gpu)

    class Event(FakeEvent):
        def __init__(self) -> None:
            super().__init__(cuda.gpu)

        def record(self, stream: FakeStream) -> None:
            self.mark = None  # CUDA may record an event again at any time
            super().record(stream)

        def wait(self) -> None:
            cuda.current_stream().wait_event(self)

    def to(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        there = torch.empty_like(host)
        blocking(cuda, lambda: there.copy_(host))
        return there

    monkeypatch.setattr(FakeStream, "device_index", 0, raising=False)
    monkeypatch.setattr(ipc, "_nothing", lambda index: aside)
    monkeypatch.setattr(writing, "_copies", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: cuda.on(cuda.current_stream()))
    monkeypatch.setattr(torch.cuda, "stream", cuda.on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.current_stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", cuda.capturing)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return cuda


def test_copies_do_not_wait_for_the_current_stream(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[FakeStream] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: readers.append(stream))
    gate = Gate(cuda.current_stream())
    assert crossing.to_tensor(b"ab", GPU).tolist() == [97, 98]
    assert readers == [cuda.current_stream()]
    tensor: Any = OnGpu(cuda, 7)
    assert crossing.to_bytes(tensor) == b"\7"
    gate.open()


def test_a_copy_to_the_host_follows_copies_within_the_process(cuda: FakeCuda) -> None:
    """An op ends when such a copy is enqueued. A copy that is captured is in no stream."""
    tensor: Any = OnGpu(cuda, 1)
    gate = Gate(cuda.current_stream())
    cuda.enqueue(cuda.current_stream(), lambda: tensor.data.fill_(2))
    writing.note_copy(tensor)
    with cuda.graph():
        writing.note_copy(tensor)
    (copy,) = writing.copies_under_way(tensor.device.index)
    assert not copy.query()
    other = FakeStream(cuda.gpu)
    cuda.enqueue(other, gate.open)
    with cuda.on(other):
        assert crossing.to_bytes(tensor) == b"\2"


def test_the_cpu_needs_no_copy() -> None:
    data = bytearray(b"ab")
    tensor = crossing.to_tensor(data, torch.device("cpu"))
    data[0] = 99
    assert crossing.to_bytes(tensor) == b"cb"
