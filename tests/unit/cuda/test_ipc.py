"""CUDA IPC memory that processes of a host share, with stand-ins for torch's calls and CUDA's runtime."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import UntypedStorage

from aiocomms.cuda import ipc, runtime

pytestmark = pytest.mark.deterministic

HANDLE = bytes(range(64))
SHARED = ("gpu-0", b"\x02c" + HANDLE, 12, 4, b"/counter", 3, b"e" * 64, True)
"""The record that describes shared memory of the first GPU."""
RELEASED = ("released", b"/counter", 3)
"""The call that tells the owner: this process does not map the memory."""


class Storage:
    """A torch storage that logs the end of its last reference."""

    device = torch.device("cuda", 1)

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def __del__(self) -> None:
        self._log.append("torch lets go")

    def _share_cuda_(self) -> tuple[Any, ...]:
        self._log.append("torch shares")
        return (1, *SHARED[1:])


class Ipc:
    """Two GPUs, with a log of the calls that says on which device each call is made."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.opens = self.reaches = 0
        """The statuses that two calls of the runtime return."""
        self.refused = ""
        self.inside: list[int] = []
        self.cudaGetErrorString = lambda status: b"invalid resource handle"

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.inside.append(index)
        try:
            yield
        finally:
            self.inside.pop()

    def cudaIpcOpenMemHandle(self, made: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        self.log.append(("mapped", bytes(handle), flags.value, self.inside[-1]))
        made._obj.value = 0x700
        return self.opens

    def cudaIpcCloseMemHandle(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.log.append(("unmapped", address.value, self.inside[-1]))
        return 0

    def cudaDeviceEnablePeerAccess(self, index: ctypes.c_int, flags: Any) -> int:  # noqa: N802
        self.log.append(("reaches", self.inside[-1], index.value))
        return self.reaches

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.log.append("cleared")
        return 0

    def new_shared(self, index: int, *exported: Any) -> Storage:
        self.log.append(("torch maps", index, exported))
        if self.refused:
            raise RuntimeError(self.refused)
        return Storage(self.log)

    def release_counter(self, counters: bytes, place: int) -> None:
        if type(counters) is not bytes or type(place) is not int:
            raise TypeError("a bytes object is required")
        self.log.append(("released", counters, place))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Ipc:
    gpus = Ipc()
    monkeypatch.setattr(runtime, "library", lambda: gpus)
    monkeypatch.setattr(ipc, "_nothing", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", gpus.device)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}"))
    monkeypatch.setattr(UntypedStorage, "_new_shared_cuda", staticmethod(gpus.new_shared), raising=False)
    monkeypatch.setattr(UntypedStorage, "_release_ipc_counter_cuda", staticmethod(gpus.release_counter), raising=False)
    return gpus


def test_shared_memory_names_its_gpu(gpus: Ipc) -> None:
    storage: Any = Storage(gpus.log)
    assert ipc.share(storage) == ("gpu-1", *SHARED[1:])


def test_share_returns_none_where_torch_refuses(gpus: Ipc, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Storage) -> None:
        raise RuntimeError("expandable segments")

    monkeypatch.setattr(Storage, "_share_cuda_", refuse)
    storage: Any = Storage(gpus.log)
    assert ipc.share(storage) is None


def test_shared_memory_stays_mapped_from_before_torch_maps_until_it_unmaps(gpus: Ipc) -> None:
    """Our mapping surrounds torch's: torch's own calls would hold the GIL for as long as the driver takes."""
    mapped = ipc.map_shared(0, SHARED)
    assert mapped is not None
    assert gpus.log == [("mapped", HANDLE, 1, 0), ("torch maps", 0, SHARED[1:])]
    gpus.log.clear()
    mapped.release()
    assert gpus.log == ["torch lets go", ("unmapped", 0x700, 0)]


@pytest.mark.parametrize(
    ("handle", "ours"), [(HANDLE, True), (b"\x03c" + HANDLE, True), (b"\x02e" + HANDLE, False), (b"\x02e", False)]
)
def test_only_a_cudamalloc_handle_is_opened_directly(gpus: Ipc, handle: bytes, ours: bool) -> None:
    """A handle of ``cudaMalloc`` memory is opened directly, in torch's formats with and without a version."""
    mapped = ipc.map_shared(0, ("gpu-0", handle, *SHARED[2:]))
    assert mapped is not None
    assert (("mapped", HANDLE, 1, 0) in gpus.log) == ours
    mapped.release()
    assert (("unmapped", 0x700, 0) in gpus.log) == ours


def test_map_shared_of_an_invisible_gpu_returns_none(gpus: Ipc) -> None:
    assert ipc.map_shared(0, ("gpu-7", *SHARED[1:])) is None
    assert gpus.log == [RELEASED]


def test_map_shared_unmaps_where_torch_refuses(gpus: Ipc) -> None:
    gpus.refused = "invalid device context"
    assert ipc.map_shared(0, SHARED) is None
    assert gpus.log[-2:] == [("unmapped", 0x700, 0), RELEASED]


def test_map_shared_returns_none_where_cuda_refuses(gpus: Ipc) -> None:
    gpus.opens = 400
    assert ipc.map_shared(0, SHARED) is None
    assert not any(entry[0] == "torch maps" for entry in gpus.log)
    assert gpus.log[-1] == RELEASED


@pytest.mark.parametrize("status", [0, 704])
def test_map_shared_enables_peer_access_from_the_copying_gpu(gpus: Ipc, status: int) -> None:
    """Access may be enabled already; then CUDA's error is cleared, so that torch does not raise it."""
    gpus.reaches = status
    mapped = ipc.map_shared(1, SHARED)
    assert mapped is not None
    assert ("reaches", 1, 0) in gpus.log
    assert ("cleared" in gpus.log) == bool(status)
    mapped.release()


@pytest.mark.parametrize(
    "nonsense",
    [
        ("gpu-0",),
        ("gpu-0", "handle", 1),
        ("gpu-0", b"\x02c" + HANDLE[:9]),
        (*SHARED[:4], 5, 3),
        (*SHARED[:5], "3"),
        (*SHARED[:5], -1),
        (*SHARED[:5], 10_000),
    ],
)
def test_malformed_shared_memory_is_not_mapped(
    gpus: Ipc, nonsense: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strict(index: int, *exported: Any) -> None:
        if len(exported) != 7:
            raise RuntimeError("tuple of 8 items expected")

    monkeypatch.setattr(UntypedStorage, "_new_shared_cuda", staticmethod(strict), raising=False)
    assert ipc.map_shared(0, nonsense) is None
    assert not any(entry[0] == "released" for entry in gpus.log)
