"""The fake GPU and the fake NCCL as C functions, by which native code calls them as it calls the real ones."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from aiocomms.cuda.runtime import FUNCTIONS as RUNTIME

T = TypeVar("T")
Function = Callable[..., "int | None"]

_NOT_READY = 600
_COMPLAINT = 999

_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_INT_P, _PTR_P = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cudaGetDevice": (_INT_P,),
    "cudaSetDevice": (_I,),
    "cudaThreadExchangeStreamCaptureMode": (_INT_P,),
    "cudaGetErrorString": (_I,),
    "cudaGetLastError": (),
    "cudaEventCreateWithFlags": (_PTR_P, ctypes.c_uint),
    "cudaEventDestroy": (_P,),
    "cudaEventRecord": (_P, _P),
    "cudaEventQuery": (_P,),
    "cudaEventSynchronize": (_P,),
    "cudaStreamWaitEvent": (_P, _P, ctypes.c_uint),
    "cudaMemcpyAsync": (_P, _P, _N, _I, _P),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_P, _P, _N, _I, _I, _P, _P),
    "ncclReduce": (_P, _P, _N, _I, _I, _I, _P, _P),
    "ncclBroadcast": (_P, _P, _N, _I, _I, _P, _P),
    "ncclAllGather": (_P, _P, _N, _I, _P, _P),
    "ncclReduceScatter": (_P, _P, _N, _I, _I, _P, _P),
    "ncclSend": (_P, _N, _I, _I, _P, _P),
    "ncclRecv": (_P, _N, _I, _I, _P, _P),
}
_TEXT = ctypes.create_string_buffer(b"the fake GPU's error")
_callbacks: list[Any] = []
"""All that were ever made: a thread of native code may call one when nothing of its test is left."""

complaints: list[BaseException] = []
"""The exceptions raised in calls of native code that are not a status which CUDA or NCCL return."""


def addresses_of(functions: Mapping[str, Function]) -> dict[str, int]:
    """Make C functions of Python's. What they raise with a number becomes the number that they return."""
    return {name: _address(name, function) for name, function in functions.items()}


def _address(name: str, function: Function) -> int:
    def call(*arguments: Any) -> int:
        try:
            return function(*arguments) or 0
        except BaseException as error:
            code = getattr(error, "code", None) or getattr(error, "status", None)
            if isinstance(error, KeyError):  # CuPy raises status 7 and 8 so
                code = error.args[0]
            if code is None:
                complaints.append(error)
            return code or _COMPLAINT

    result = ctypes.c_void_p if name == "cudaGetErrorString" else ctypes.c_int
    made = ctypes.CFUNCTYPE(result, *_SIGNATURES[name])(call)
    _callbacks.append(made)
    address = ctypes.cast(made, ctypes.c_void_p).value
    assert address is not None
    return address


class PerThread(Generic[T]):
    """A value of each thread. Python forgets what is local to a thread of native code, when it returns from Python."""

    def __init__(self, default: Callable[[], T]) -> None:
        self._default = default
        self._values: dict[int, T] = {}

    def get(self) -> T:
        return self._values.setdefault(threading.get_native_id(), self._default())

    def set(self, value: T) -> None:
        self._values[threading.get_native_id()] = value


def runtime_functions(cuda: Any, modes: tuple[str, str]) -> dict[str, int]:
    """The functions of CUDA's runtime, by a ``FakeCuda``.

    :param modes: the names of the capture modes "global" and "thread-local".
    """
    events: dict[int, Any] = {}
    numbers = itertools.count(1)
    gpu = cuda.gpu

    def exchange(mode: Any) -> None:
        before, gpu.mode = modes.index(gpu.mode), modes[mode[0]]
        mode[0] = before

    def create(made: Any, flags: int) -> None:
        assert flags == 3, "a thread could not sleep on it"
        number = next(numbers)
        events[number] = cuda.event()
        made[0] = number

    def current_device(device: Any) -> None:
        device[0] = cuda.index

    functions: dict[str, Function] = {
        "cudaGetDevice": current_device,
        "cudaSetDevice": lambda device: None,
        "cudaThreadExchangeStreamCaptureMode": exchange,
        "cudaGetErrorString": lambda code: ctypes.addressof(_TEXT),
        "cudaGetLastError": lambda: 0,
        "cudaEventCreateWithFlags": create,
        "cudaEventDestroy": lambda event: events.pop(event) and None,
        "cudaEventRecord": lambda event, stream: events[event].record(gpu.streams[stream]),
        "cudaEventQuery": lambda event: 0 if events[event].query() else _NOT_READY,
        "cudaEventSynchronize": lambda event: events[event].synchronize(),
        "cudaStreamWaitEvent": lambda stream, event, flags: gpu.streams[stream].wait_event(events[event]),
        "cudaMemcpyAsync": lambda to, source, n, kind, stream: cuda.copy(gpu.streams[stream], to, source, n),
    }
    assert set(functions) == set(RUNTIME)
    return addresses_of(functions)


def nccl_functions(library: Any) -> dict[str, int]:
    """The functions of NCCL, by a ``FakeNccl``."""
    comms = library.comms

    def on(method: str) -> Function:
        def call(*arguments: Any) -> None:
            *rest, comm, stream = (argument or 0 for argument in arguments)
            getattr(comms[comm - 1], method)(*rest, stream)

        return call

    return addresses_of(
        {
            "ncclGroupStart": library.group_start,
            "ncclGroupEnd": library.group_end,
            "ncclAllReduce": on("allReduce"),
            "ncclReduce": on("reduce"),
            "ncclBroadcast": on("broadcast"),
            "ncclAllGather": on("allGather"),
            "ncclReduceScatter": on("reduceScatter"),
            "ncclSend": on("send"),
            "ncclRecv": on("recv"),
        }
    )
