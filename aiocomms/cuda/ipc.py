"""Memory of a GPU that other processes of the host map, by CUDA IPC.

torch counts the processes that have mapped an allocation, and keeps it until there is none. torch's calls hold the
interpreter's lock for as long as CUDA takes, which is milliseconds where memory is mapped or given back. So this module
maps the memory once more without that lock, before torch maps it and until torch has given it back. CUDA counts the
mappings of a process, and torch's own calls only change the count.
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
"""The record with which one other process maps memory: the identifier of its GPU, and torch's own values."""

_PLAIN: Final = b"c"
"""The kind of a handle of memory that ``cudaMalloc`` gave, in torch's own words."""


class Mapped(Protocol):
    """Memory of another process, mapped into this one."""

    storage: UntypedStorage

    def release(self) -> None:
        """Give the memory back. Nothing else may refer to the storage by then. Blocks, off the loop."""


class TorchMapped:
    """See :class:`Mapped`."""

    def __init__(self, storage: UntypedStorage, index: int, base: int | None) -> None:
        """Take over mapped memory.

        :param index: the number of the memory's GPU in this process.
        :param base: the address of the additional mapping, see :func:`runtime.map_handle`; None if there is none.
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
    """Return the record with which one other process maps this memory; None if CUDA does not share it.

    Each process needs a record of its own, because torch counts them.
    """
    index = storage.device.index
    with aside(index):
        try:
            exported = storage._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return None
    return (_identifier(index), *exported[1:])


def map_shared(index: int, shared: Shared) -> TorchMapped | None:
    """Map another process's memory. Blocks, off the loop.

    :param index: the device that is to copy from and to the memory.
    :returns: the memory; None if this process does not see the memory's GPU, or CUDA refuses.
    """
    gpu, *exported = shared
    try:
        owner = next((at for at in range(torch.cuda.device_count()) if _identifier(at) == gpu), None)
        mapped = None if owner is None else _map(owner, exported)
    except (RuntimeError, TypeError, ValueError, IndexError):  # the record may make no sense, too
        return None
    if mapped is not None and owner is not None and owner != index:
        with torch.cuda.device(index):
            runtime.reach(owner)
    return mapped


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
    """Return CUDA's handle within torch's, behind a version and a kind; None if it is of another kind."""
    if len(handle) == runtime.HANDLE_BYTES:
        return handle
    return handle[2:] if handle[1:2] == _PLAIN and len(handle) == runtime.HANDLE_BYTES + 2 else None


@contextlib.contextmanager
def aside(index: int) -> Iterator[None]:
    """Have torch use an idle stream here: it records an event, waits for one, and waits for the stream."""
    with torch.cuda.device(index), torch.cuda.stream(_nothing(index)):
        yield


@functools.cache
def _nothing(index: int) -> Any:
    return runtime.own_stream(torch.device("cuda", index), 0)


def _identifier(index: int) -> str:
    """Return the identifier of a GPU, different from that of every other GPU."""
    return str(torch.cuda.get_device_properties(index).uuid)
