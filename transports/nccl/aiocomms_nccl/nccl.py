"""The calls of NCCL through CuPy, and the translation of NCCL's errors.

Tests without a GPU can replace this thin layer.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch

from aiocomms.cuda import Cuda, addresses
from aiocomms.errors import CommError
from aiocomms.lowlevel import load_libraries

T = TypeVar("T")

OLDEST: Final = 21801
"""NCCL 2.18.1, the first version with ``ncclCommSplit``."""
SEVERAL_RANKS_PER_GPU: Final = 23000
"""NCCL 2.30, the first version with ``NCCL_MULTI_RANK_GPU_ENABLE``."""

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
"""The values of ``ncclDataType_t``."""
SUM, PROD, MAX, MIN, AVG = range(5)
"""The values of ``ncclRedOp_t``."""
FUNCTIONS: Final = tuple(
    f"nccl{name}"
    for name in (
        *("GroupStart", "GroupEnd", "AllReduce", "Reduce", "Broadcast"),
        *("AllGather", "ReduceScatter", "Send", "Recv"),
    )
)
"""The functions that a native launcher calls."""

_STATUS: Final = {
    1: ("ncclUnhandledCudaError", "a CUDA call within NCCL failed; NCCL_DEBUG=INFO says which"),
    2: ("ncclSystemError", "a system call within NCCL failed: shared memory, a socket, a limit; NCCL_DEBUG=WARN says"),
    3: ("ncclInternalError", "NCCL has a bug, or its memory was overwritten"),
    4: ("ncclInvalidArgument", "NCCL did not accept an argument, or the communicator is closed"),
    5: ("ncclInvalidUsage", "NCCL was used in a wrong way; NCCL_DEBUG=WARN says how"),
    6: ("ncclRemoteError", "another rank has ended, or the network between the ranks failed"),
    7: ("ncclInProgress", "the communicator is still being formed: it was made non-blocking, and this was too early"),
    8: ("ncclTimeout", "NCCL waited longer for another rank than its time limit"),
}


class NcclStatusError(Exception):
    """The error for a status that an NCCL function has returned."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL has returned {status}")
        self.status = status


class CudaBrokenError(CommError):
    """The error after a failure of CUDA, when this process can no longer use the device."""


class NcclComm(Protocol):
    """The interface of one rank's ``ncclComm_t``. The methods have the same names as in CuPy's class.

    Pointers, element counts and streams are integers. The communication methods enqueue work and do not wait. After
    :meth:`abort`, no method may be called.
    """

    @property
    def comm(self) -> int:
        """The ``ncclComm_t``."""

    def allReduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None: ...
    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> None: ...
    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None: ...
    def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None: ...
    def reduceScatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None: ...
    def send(self, send: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def recv(self, recv: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def commSplit(self, color: int, key: int) -> NcclComm | None: ...
    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...
    def destroy(self) -> None: ...


class Nccl(Protocol):
    """The interface through which this transport calls NCCL."""

    errors: tuple[type[Exception], ...]
    """The exceptions that calls of NCCL raise. :func:`explain` translates these exceptions."""

    def version(self) -> int:
        """Return the version as one number, such as 23203."""

    def unique_id(self) -> bytes:
        """Make a unique id of 128 bytes, which all ranks of one communicator must share."""

    def communicator(self, size: int, unique_id: bytes, rank: int) -> NcclComm:
        """Form a communicator on this thread's device. Block until all ranks have joined."""

    def group_start(self) -> None:
        """Start a group, to which this thread's next calls belong."""

    def group_end(self) -> None:
        """Enqueue the group."""

    def functions(self) -> Mapping[str, int] | None:
        """Return the addresses of the functions that a native launcher calls, or None if they were not found."""


class CupyNccl:
    """The implementation of :class:`Nccl` with CuPy."""

    def __init__(self) -> None:
        from cupy.cuda import nccl

        self._nccl: Any = nccl
        # CuPy has no texts for the statuses 7 and 8, so these raise a KeyError.
        self.errors: tuple[type[Exception], ...] = (nccl.NcclError, KeyError)
        self.group_start = nccl.groupStart
        self.group_end = nccl.groupEnd

    def version(self) -> int:
        """See :meth:`Nccl.version`."""
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """See :meth:`Nccl.unique_id`."""
        return bytes(self._nccl.get_unique_id())

    def communicator(self, size: int, unique_id: bytes, rank: int) -> NcclComm:
        """See :meth:`Nccl.communicator`."""
        comm: NcclComm = self._nccl.NcclCommunicator(size, unique_id, rank)
        return comm

    def functions(self) -> Mapping[str, int] | None:
        """See :meth:`Nccl.functions`. The library is the one that CuPy has loaded."""
        return self._functions

    @functools.cached_property
    def _functions(self) -> Mapping[str, int] | None:
        try:
            library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # CuPy has found the library under another name
            return None
        version = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(version))
        return addresses(library, FUNCTIONS) if version.value == self.version() else None


def no_cupy() -> str | None:
    """Return the reason why this transport cannot use CuPy, or None if CuPy works.

    The reason can follow the words "... is not available: ".
    """
    if (found := importlib.util.find_spec("cupy")) is None:
        return "CuPy is not installed: pip install 'aiocomms[nccl]' for CUDA 13, 'aiocomms[nccl-cu12]' for CUDA 12"
    load_libraries(path for folder in found.submodule_search_locations or () for path in _parts_of(Path(folder)))
    try:
        from cupy.cuda import driver, nccl
    except Exception as error:  # CuPy's message is a page of advice, which ends with the reason
        return f"CuPy cannot be loaded ({_reason(error)}): reinstall cupy-cuda13x (or -cuda12x), one of them alone"
    if torch.version.cuda is not None:
        ours, theirs = int(torch.version.cuda.partition(".")[0]), int(driver.get_build_version()) // 1000
        if ours != theirs:
            return f"CuPy is built for CUDA {theirs}, and torch for CUDA {ours}: pip install cupy-cuda{ours}x"
    if not nccl.available:
        return "CuPy finds no NCCL: pip install nvidia-nccl-cu13 for CUDA 13, nvidia-nccl-cu12 for CUDA 12"
    if not hasattr(nccl.NcclCommunicator, "commSplit"):
        return "CuPy is too old, wanted 14 or newer: pip install -U cupy-cuda13x (or -cuda12x)"
    version = int(nccl.get_version())
    if version < OLDEST:
        wanted = f"{readable(OLDEST)} or newer"
        return f"NCCL is {readable(version)}, wanted {wanted}: pip install -U nvidia-nccl-cu13 (or -cu12)"
    return None


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip(" =")]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _parts_of(cupy: Path) -> Iterator[Path]:
    """Yield the paths of CuPy's native modules, except modules that load libraries of CUDA.

    CuPy itself must find those libraries.
    """
    yield from cupy.rglob("*.so")
    yield from (cupy.parent / "cupy_backends" / "cuda").glob("api/*.so")


def readable(version: int) -> str:
    """Return a version as text, such as ``2.32.3``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def status_of(error: Exception) -> int:
    """Return the ``ncclResult_t`` of an exception that a call raised."""
    return int(error.args[0]) if isinstance(error, KeyError) else int(getattr(error, "status", 0))


def guarded(cuda: Cuda, library: Nccl, what: str, call: Callable[[], T]) -> T:
    """Run a blocking call in the current thread. Do not call this function in the loop's thread.

    :raises CommError: NCCL has failed.
    """
    cuda.activate()
    try:
        with cuda.harmless():
            return call()
    except library.errors as error:
        raise explain(what, error) from error


def end_all(cuda: Cuda, calls: Sequence[Callable[[], object]]) -> list[threading.Thread]:
    """Abort or destroy communicators. Return the threads, one for each call.

    Each call has its own thread, because the call may wait for kernels, for other ranks or for CUDA graphs.
    """

    def end(call: Callable[[], object]) -> None:
        cuda.activate()
        with cuda.harmless():
            call()

    threads = [
        threading.Thread(target=end, args=(call,), name="aiocomms ends a NCCL communicator", daemon=True)
        for call in calls
    ]
    for thread in threads:
        thread.start()
    return threads


def explain(what: str, error: Exception) -> CommError:
    """Translate an exception that a call raised.

    :param what: the name of the call, such as ``"all_reduce"``.
    :param error: an instance of one of :attr:`Nccl.errors`, or a :class:`NcclStatusError`.
    """
    status = status_of(error)
    name, text = _STATUS.get(status, (f"status {status}", str(error)))
    failure = CommError(f"NCCL could not do {what}: {text} ({name})")
    failure.__cause__ = error
    return failure
