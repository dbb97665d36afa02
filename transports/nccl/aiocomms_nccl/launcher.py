"""The interface of launchers, and the reference launcher, which calls NCCL on the loop's thread with CuPy and torch.

A launcher calls NCCL for the ops of one transport, and tells the loop when the ops are done. There are two launchers.
:class:`PythonLauncher` calls NCCL on the loop's thread. :class:`aiocomms_nccl.native.NativeLauncher` calls NCCL in a
native thread. Both have the same interface.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from aiocomms.cuda import Completions, Cuda, Event
from aiocomms.errors import CommError
from aiocomms_nccl.calls import CallPlan
from aiocomms_nccl.collectives import CommStream
from aiocomms_nccl.nccl import Nccl

Then = Callable[[], object]
"""The function that the loop's thread calls when an op is done.

The function keeps all objects of the op alive until then.
"""


class LauncherOwner(Protocol):
    """The interface through which a launcher uses its transport."""

    cuda: Cuda
    library: Nccl
    aborted: bool

    def call_nccl(self, what: str, call: Callable[[], object]) -> bool:
        """Call NCCL. Return False if the call failed and the communicator is lost."""

    def lose(self, error: CommError) -> None:
        """Lose the communicator."""

    def lose_cuda(self, error: RuntimeError) -> None:
        """Lose the communicator, because CUDA has failed."""


class Launcher(Protocol):
    """The interface of launchers. Methods are called on the loop's thread, unless their docstrings say otherwise."""

    @property
    def parked(self) -> bool:
        """True while threads sleep until the running ops end."""

    spin: int
    """The turns of the loop that should call :meth:`poll` before threads sleep; 0 if no polls are needed."""

    def __len__(self) -> int:
        """Return the number of running ops."""

    def adopt(self, cs: CommStream) -> None:
        """Register a communicator before its first op."""

    def mark(self) -> Any:
        """Return the current position in the caller's stream, for one call of :meth:`launch`."""

    def launch(self, cs: CommStream, what: str, plan: CallPlan, after: Any, then: Then) -> Any:
        """Enqueue a plan after all plans that were launched on this communicator before.

        A failure of NCCL or CUDA loses the communicator, at once or when :meth:`poll` notices the failure.

        :param what: the name of the op, for errors.
        :param after: the position for which the communicator's stream waits.
        :param then: called when the op is done.
        :returns: the op's end, for :meth:`wait_stream`; None if the communicator is lost.
        """

    def wait_stream(self, end: Any, stream: Any) -> None:
        """Make a stream wait for an op's end. Block until NCCL has been called for the op."""

    def settle(self) -> None:
        """Block until NCCL has been called for all launched plans. After that, the caller may call NCCL."""

    def poll(self) -> bool:
        """Call the functions of the ops that are done. Return whether any op or failure was handled."""

    def cut(self, cs: CommStream | None = None) -> None:
        """Make no more NCCL calls for one communicator or for all communicators. Any thread may call this method."""

    def leave(self, cs: CommStream, patience: float) -> bool:
        """Wait until a communicator has neither waiting nor running calls. This method runs in a thread.

        :returns: False if the wait takes longer than ``patience`` seconds.
        """

    def quiet(self, cs: CommStream) -> Callable[[], None]:
        """Return a blocking function that waits for all ops launched on a communicator until now.

        Call this function in a thread.
        """

    def drain(self) -> None:
        """Wait until all ops have ended, and forget the ops. This method runs in a thread at the transport's end."""

    def close(self) -> None:
        """Release threads and descriptors. This method runs in a thread at the transport's end."""


def end_comm(launcher: Launcher, cs: CommStream, abort: bool, patience: float) -> None:
    """Abort or destroy a communicator after its launcher has stopped using it. This function blocks.

    If the launcher does not stop in time, the GPU blocks the launcher in an NCCL call. Only an abort ends that call, so
    this function then always aborts the communicator.

    :param patience: the most seconds to wait for the launcher.
    """
    left = launcher.leave(cs, patience)
    launcher.cut(cs)
    if abort or not left:
        cs.comm.abort()
    else:
        cs.comm.destroy()


class PythonLauncher:
    """The launcher that calls NCCL at once on the loop's thread. See :class:`Launcher`."""

    def __init__(self, owner: LauncherOwner, wake: Callable[[], None], spin: int) -> None:
        """Start with no ops.

        :param wake: a function that makes the loop call :meth:`poll`. Any thread may call this function.
        :param spin: the number of polls without a result after which threads sleep on events.
        """
        self.spin = spin
        """See :attr:`Launcher.spin`."""
        self._owner = owner
        self._cuda = owner.cuda
        self._completions = Completions(owner.cuda, wake, spin)

    @property
    def parked(self) -> bool:
        """See :attr:`Launcher.parked`."""
        return self._completions.parked

    def __len__(self) -> int:
        return len(self._completions)

    def adopt(self, cs: CommStream) -> None:
        """See :meth:`Launcher.adopt`."""

    def mark(self) -> Event:
        """See :meth:`Launcher.mark`."""
        return self._completions.mark(self._cuda.current_stream())

    def launch(self, cs: CommStream, what: str, plan: CallPlan, after: Event, then: Then) -> Event | None:
        """See :meth:`Launcher.launch`."""
        cs.stream.wait_event(after)
        return self.carry_out(cs, what, plan, functools.partial(self._finish, after, then))

    def carry_out(self, cs: CommStream, what: str, plan: CallPlan, then: Then) -> Event | None:
        """Enqueue a plan on a stream that already waits for the caller's stream."""
        if not self._owner.call_nccl(what, functools.partial(cs.carry_out, plan)):
            return None
        return self._completions.add(cs.stream, functools.partial(_done, then, plan.kept) if plan.kept else then)

    def _finish(self, after: Event, then: Then) -> None:
        self._completions.release(after)
        then()

    def wait_stream(self, end: Event, stream: Any) -> None:
        """See :meth:`Launcher.wait_stream`."""
        (stream or self._cuda.current_stream()).wait_event(end)

    def settle(self) -> None:
        """See :meth:`Launcher.settle`."""

    def poll(self) -> bool:
        """See :meth:`Launcher.poll`."""
        return self._completions.poll()

    def cut(self, cs: CommStream | None = None) -> None:
        """See :meth:`Launcher.cut`.

        This method does nothing, because the transport holds its lock during NCCL calls.
        """

    def leave(self, cs: CommStream, patience: float) -> bool:
        """See :meth:`Launcher.leave`."""
        return True

    def quiet(self, cs: CommStream) -> Callable[[], None]:
        """See :meth:`Launcher.quiet`."""
        event = self._cuda.event()
        event.record(cs.stream)
        return event.synchronize

    def drain(self) -> None:
        """See :meth:`Launcher.drain`."""
        self._completions.wait()

    def close(self) -> None:
        """See :meth:`Launcher.close`."""
        self._completions.close()


def _done(then: Then, kept: object) -> None:
    """Call ``then``. A ``functools.partial`` of this function keeps ``kept`` alive until the call."""
    then()
