"""The launcher in native code (``aiocomms_launcher``), in which one native thread for each device calls NCCL."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import aiocomms
from aiocomms.cuda import Cuda, Event
from aiocomms.lowlevel import load_libraries
from aiocomms_nccl.calls import CallPlan
from aiocomms_nccl.collectives import CommStream
from aiocomms_nccl.control import Control
from aiocomms_nccl.launcher import Launcher, LauncherOwner, PythonLauncher, Then
from aiocomms_nccl.nccl import Nccl, NcclStatusError, explain

if TYPE_CHECKING:
    import aiocomms_launcher as native

DONE, NCCL_FAILED, CUDA_FAILED, DROPPED, ASLEEP = range(5)
"""The outcomes of an op, and the notice ``ASLEEP``. The native module uses the same numbers.

``DROPPED`` means that NCCL was not called for the op. ``ASLEEP`` means that the native threads sleep until running ops
end.
"""
_MODULE: Final = "aiocomms_launcher"
SPIN_US: Final = 50
"""The time for which native threads poll for a new op or for the end of an op before they sleep, in microseconds."""
_DIRECT_SPIN: Final = 0
"""The number of polls for the end of an op with torch kernels, before a thread sleeps until the op ends.

With the native launcher, the loop polls only after a thread has woken the loop. So the number is 0.
"""
_PATIENCE: Final = 1.0
"""The maximum time to wait for the end of native threads, in seconds.

The wait has this limit, because a thread may be blocked in CUDA or NCCL.
"""


class _Shared:
    """The native launchers that transports of this process use, one for each device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[object, tuple[native.Launcher, int]] = {}

    def acquire(self, functions: Mapping[str, int], device: int) -> tuple[object, native.Launcher]:
        """Return the launcher of a device, and the key that :meth:`release` needs."""
        from aiocomms_launcher import make

        key = device, tuple(sorted(functions.items()))
        with self._lock:
            launcher, count = self._users.get(key) or (make(dict(functions), device, SPIN_US), 0)
            self._users[key] = launcher, count + 1
        return key, launcher

    def release(self, key: object) -> None:
        """Release a launcher. If no other transport uses the launcher, end the launcher's threads."""
        with self._lock:
            launcher, count = self._users.pop(key)
            if count > 1:
                self._users[key] = launcher, count - 1
                return
        launcher.end(_PATIENCE)

    def forget(self) -> None:
        """Drop all launchers in a forked child process, because the child does not have the launchers' threads."""
        self._lock = threading.Lock()
        self._users.clear()


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.forget)


def load_launcher(cuda: Cuda, library: Nccl) -> None:
    """Load the native module and the functions that the module calls, so that :func:`make_launcher` does not block.

    This function blocks.
    """
    found = importlib.util.find_spec(_MODULE)
    if found is not None and found.origin is not None and _MODULE not in sys.modules:
        load_libraries([found.origin])
    with contextlib.suppress(ImportError):
        importlib.import_module(_MODULE)
    if _is_there():
        cuda.functions()
        library.functions()


def _is_there() -> bool:
    """Return whether the native module of this version is loaded. ``AIOCOMMS_PURE=1`` disables the module."""
    if os.environ.get("AIOCOMMS_PURE", "0") not in ("", "0"):
        return False
    module = sys.modules.get(_MODULE)
    return module is not None and bool(module.version() == aiocomms.__version__)


def make_launcher(owner: LauncherOwner, control: Control, spin: int) -> Launcher:
    """Return the launcher of a transport: the native launcher if its module is available, else the Python launcher.

    :param spin: the number of unsuccessful polls after which threads sleep until running ops end.
    """
    if _is_there():
        runtime, nccl = owner.cuda.functions(), owner.library.functions()
        if runtime is not None and nccl is not None:
            return NativeLauncher(owner, control, {**runtime, **nccl})
    return PythonLauncher(owner, control.wake, spin)


_UnderWay = tuple[str, Then, CommStream]
"""A running op: the op's name, the function to call at the op's end, and the communicator.

The function holds references to all objects of the op, so that these objects stay alive.
"""


class NativeLauncher:
    """The launcher that passes ops to the native thread of the device. See :class:`Launcher`.

    Ops with torch kernels are an exception: the loop's thread enqueues them. Before each such op, the loop's thread
    waits until the native thread has called NCCL for all earlier ops.
    """

    def __init__(self, owner: LauncherOwner, control: Control, functions: Mapping[str, int]) -> None:
        """Create a launcher without ops.

        :param functions: the addresses of the CUDA runtime functions and NCCL functions that the native thread calls.
        """
        self.spin = 0
        """See :attr:`Launcher.spin`."""
        self._owner = owner
        self._cuda = owner.cuda
        self._wake = control.wake
        self._direct = PythonLauncher(owner, control.wake, _DIRECT_SPIN)
        self._key, self._native = _shared.acquire(functions, owner.cuda.index)
        self._port = self._native.open()
        self._ops: dict[int, _UnderWay] = {}
        self._lost: list[_UnderWay] = []  # failed ops, whose memory may still be in use
        self._asleep = False  # whether native threads sleep
        control.watch(self._port.fd)

    @property
    def parked(self) -> bool:
        """See :attr:`Launcher.parked`."""
        return self._asleep or self._direct.parked

    def __len__(self) -> int:
        return len(self._ops) + len(self._direct)

    def adopt(self, cs: CommStream) -> None:
        """See :meth:`Launcher.adopt`."""
        cs.line = self._native.add(self._port, cs.handle, cs.comm.comm)

    def mark(self) -> Any:
        """See :meth:`Launcher.mark`."""
        return self._native.mark(self._cuda.current_handle())

    def launch(self, cs: CommStream, what: str, plan: CallPlan, after: Any, then: Then) -> int | Event | None:
        """See :meth:`Launcher.launch`."""
        if plan.before or plan.after:
            self._native.settle_all(self._port)
            self._native.join(cs.handle, after)
            self._wake()  # the loop polls the op once, and then a thread waits for its event
            return self._direct.carry_out(cs, what, plan, then)
        number = self._native.launch(cs.line, after, plan.calls)
        self._ops[number] = (what, then, cs)
        self._asleep = False
        return number

    def wait_stream(self, end: int | Event, stream: Any) -> None:
        """See :meth:`Launcher.wait_stream`."""
        if isinstance(end, int):
            handle = self._cuda.current_handle() if stream is None else stream.cuda_stream
            self._native.wait_stream(self._port, end, handle)
        else:
            self._direct.wait_stream(end, stream)

    def settle(self) -> None:
        """See :meth:`Launcher.settle`."""
        self._native.settle_all(self._port)

    def poll(self) -> bool:
        """See :meth:`Launcher.poll`."""
        did = False
        for number, kind, code in self._native.take(self._port):
            if kind == ASLEEP:
                self._asleep = True
            else:
                did = True
                self._end(self._ops.pop(number), kind, code)
        # A poll of events may raise an error, so the port is emptied first.
        return (len(self._direct) > 0 and self._direct.poll()) or did

    def _end(self, op: _UnderWay, kind: int, code: int) -> None:
        what, then, _ = op
        if kind == DONE or (kind == DROPPED and not self._lost):  # ``then`` fails a dropped op of a cut communicator
            then()
        elif kind == NCCL_FAILED:
            self._lost.append(op)
            self._owner.lose(explain(what, NcclStatusError(code)))
        elif kind == CUDA_FAILED:
            self._lost.append(op)
            self._owner.lose_cuda(RuntimeError(self._native.cuda_error(code)))

    def cut(self, cs: CommStream | None = None) -> None:
        """See :meth:`Launcher.cut`."""
        if cs is None:
            self._native.cut_all(self._port)
        else:
            self._native.cut(cs.line)

    def leave(self, cs: CommStream, patience: float) -> bool:
        """See :meth:`Launcher.leave`."""
        return self._native.settle(cs.line, patience)

    def quiet(self, cs: CommStream) -> Callable[[], None]:
        """See :meth:`Launcher.quiet`."""
        direct = self._direct.quiet(cs)

        def wait() -> None:
            self._native.drain(cs.line)
            direct()

        return wait

    def drain(self) -> None:
        """See :meth:`Launcher.drain`."""
        self._native.drain_all(self._port)
        self._direct.drain()
        self._ops.clear()
        self._lost.clear()

    def close(self) -> None:
        """See :meth:`Launcher.close`."""
        self._direct.close()
        self._native.close(self._port)
        _shared.release(self._key)
