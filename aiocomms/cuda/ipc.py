"""GPU memory that other processes of the host map through CUDA IPC.

torch counts the processes that have mapped an allocation, and keeps the allocation until the count is zero. When CUDA
maps or unmaps memory for torch, torch's call holds the GIL for milliseconds. So this module makes its own mapping,
without the GIL, before torch maps the memory. The module removes its mapping after torch has unmapped the memory. CUDA
counts the mappings of a process, so torch's calls only change the count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from torch import UntypedStorage

from aiocomms.cuda import runtime

Shared = tuple[Any, ...]
"""The record with which one other process maps memory: the identifier of the memory's GPU, and torch's own values."""

_COUNTERS: Final = 10_000
"""The number of counters in each of torch's counter files (``CUDA_IPC_REF_COUNTER_FILE_SIZE``)."""
_UNUSABLE: Final = (RuntimeError, TypeError, ValueError, IndexError)
"""The errors that are raised if CUDA cannot map the memory, or if a record is malformed."""
_PLAIN: Final = b"c"
"""The mark in torch's handles for memory from ``cudaMalloc``."""


class Mapped(Protocol):
    """Memory of another process that is mapped into this process."""

    storage: UntypedStorage

    def release(self) -> None:
        """Unmap the memory. No other reference to the storage may exist. Do not call this on the loop: it blocks."""


class TorchMapped:
    """The implementation of :class:`Mapped` with torch."""

    def __init__(self, storage: UntypedStorage, index: int, base: int | None) -> None:
        """Wrap memory that is already mapped. The method :meth:`release` unmaps the memory.

        :param index: the number of the memory's GPU in this process.
        :param base: the address of the additional mapping, see :func:`runtime.map_handle`; None if there is no
            additional mapping.
        """
        self.storage = storage
        self._index, self._base = index, base

    def release(self) -> None:
        """See :meth:`Mapped.release`."""
        with aside(self._index):
            del self.storage
            if self._base is not None:
                runtime.unmap(self._base)


def share(storage: UntypedStorage) -> Shared | None:
    """Return the record with which one other process maps this memory; None if CUDA cannot share the memory.

    Each process needs its own record, because torch counts the processes.
    """
    index = storage.device.index
    with aside(index):
        try:
            exported = storage._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return None
    return (_identifier(index), *exported[1:])


def map_shared(index: int, shared: Shared) -> TorchMapped | None:
    """Map another process's memory. The call blocks, so do not call this function on the event loop.

    :param index: the number of the device that copies from and to the memory.
    :returns: the memory; None if this process does not see the memory's GPU, or if CUDA refuses the mapping.
    """
    gpu, *exported = shared
    try:
        owner = next((at for at in range(torch.cuda.device_count()) if _identifier(at) == gpu), None)
        mapped = None if owner is None else _map(owner, exported)
    except _UNUSABLE:
        mapped = None
    if mapped is None:
        _release_unmapped(exported)
    elif owner is not None and owner != index:
        with torch.cuda.device(index):
            runtime.reach(owner)
    return mapped


def _release_unmapped(exported: list[Any]) -> None:
    """Lower torch's count of processes by one, as the release of mapped memory does.

    Otherwise the owner would never free the memory.
    """
    with contextlib.suppress(*_UNUSABLE):
        counters, place = exported[3:5]
        if 0 <= place < _COUNTERS:
            UntypedStorage._release_ipc_counter_cuda(counters, place)


def _map(owner: int, exported: list[Any]) -> TorchMapped:
    with aside(owner):
        handle = _plain(exported[0])
        base = None if handle is None else runtime.map_handle(handle)
        try:
            storage = UntypedStorage._new_shared_cuda(owner, *exported)
        except BaseException:
            if base is not None:
                runtime.unmap(base)
            raise
    return TorchMapped(storage, owner, base)


def _plain(handle: bytes) -> bytes | None:
    """Return the CUDA handle inside a torch handle; None for other kinds of handles.

    A torch handle may begin with a version and a kind.
    """
    if len(handle) == runtime.HANDLE_BYTES:
        return handle
    return handle[2:] if handle[1:2] == _PLAIN and len(handle) == runtime.HANDLE_BYTES + 2 else None


@contextlib.contextmanager
def aside(index: int) -> Iterator[None]:
    """Make an idle stream current until the context ends, because torch's IPC calls wait for the current stream."""
    with torch.cuda.device(index), torch.cuda.stream(_nothing(index)):
        yield


@functools.cache
def _nothing(index: int) -> Any:
    return runtime.own_stream(torch.device("cuda", index), 0)


def _identifier(index: int) -> str:
    """Return the unique identifier of a GPU."""
    return str(torch.cuda.get_device_properties(index).uuid)
