"""The interface of launchers, and the reference launcher in Python, which uses CuPy and torch.

A launcher calls NCCL for the ops of one transport, and notifies the loop when the ops are done. There are two
launchers. :class:`PythonLauncher` calls NCCL on the loop's thread. :class:`aiocomms_nccl.native.NativeLauncher` calls
NCCL in a native thread. Both have the same interface.
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

The function holds references to all objects of the op, so that these objects stay alive until the call.
"""


class LauncherOwner(Protocol):
    """The interface through which a launcher uses its transport."""

    cuda: Cuda
    library: Nccl
    aborted: bool

    def call_nccl(self, what: str, call: Callable[[], object]) -> bool:
        """Call NCCL. Return True on success. On failure, mark the communicator as lost and return False."""

    def lose(self, error: CommError) -> None:
        """Mark the communicator as lost."""

    def lose_cuda(self, error: RuntimeError) -> None:
        """Mark the communicator as lost, because CUDA has failed."""


class Launcher(Protocol):
    """The interface of launchers. Methods are called on the loop's thread, unless their docstrings say otherwise."""

    @property
    def parked(self) -> bool:
        """True while the launcher's threads wait until ops end, so that the loop need not call :meth:`poll`."""

    spin: int
    """The number of unsuccessful polls by the loop, after which the launcher's threads wait until ops end.

    0 means that the loop need not poll.
    """

    def __len__(self) -> int:
        """Return the number of running ops."""

    def adopt(self, cs: CommStream) -> None:
        """Register a communicator before its first op."""

    def mark(self) -> Any:
        """Return the current position in the caller's stream, for one call of :meth:`launch`."""

    def launch(self, cs: CommStream, what: str, plan: CallPlan, after: Any, then: Then) -> Any:
        """Enqueue the NCCL calls of a plan behind all earlier plans of this communicator.

        A failure of NCCL or CUDA marks the communicator as lost, either in this call or in a later :meth:`poll`.

        :param what: the name of the op, for error messages.
        :param after: the position in the caller's stream, from :meth:`mark`. The plan starts after this position.
        :param then: the function that the loop's thread calls when the op is done.
        :returns: an object that represents the end of the op, for :meth:`wait_stream`; None if the communicator is
            lost.
        """

    def wait_stream(self, end: Any, stream: Any) -> None:
        """Make a CUDA stream wait for the end of an op.

        This method blocks the calling thread until the launcher has called NCCL for the op.
        """

    def settle(self) -> None:
        """Block until the launcher has called NCCL for all launched plans.

        Afterwards the caller may call NCCL itself.
        """

    def poll(self) -> bool:
        """Call the function ``then`` of each op that is done. Return whether an op or a failure was handled."""

    def cut(self, cs: CommStream | None = None) -> None:
        """Prevent further NCCL calls for a communicator, or for all communicators if ``cs`` is None.

        Any thread may call this method.
        """

    def leave(self, cs: CommStream, patience: float) -> bool:
        """Wait until all NCCL calls for a communicator have returned and no more calls are queued.

        This method blocks, so call it in a thread.

        :returns: False if the wait takes longer than ``patience`` seconds.
        """

    def quiet(self, cs: CommStream) -> Callable[[], None]:
        """Return a function that waits for all ops that were launched on a communicator before this call.

        The returned function blocks, so call it in a thread.
        """

    def drain(self) -> None:
        """Wait until all ops have ended, and drop them.

        The transport calls this method in a thread during its close.
        """

    def close(self) -> None:
        """Release the launcher's threads and file descriptors.

        The transport calls this method in a thread during its close.
        """


def end_comm(launcher: Launcher, cs: CommStream, abort: bool, patience: float) -> None:
    """Wait until the launcher no longer uses a communicator, and then abort or destroy it. This function blocks.

    If the wait exceeds ``patience``, the launcher is blocked in an NCCL call that waits for the GPU. Only an abort of
    the communicator ends such a call. So this function aborts the communicator in this case, even if ``abort`` is
    False.

    :param patience: the maximum time to wait for the launcher, in seconds.
    """
    left = launcher.leave(cs, patience)
    launcher.cut(cs)
    if abort or not left:
        cs.comm.abort()
    else:
        cs.comm.destroy()


class PythonLauncher:
    """The launcher that calls NCCL on the loop's thread, within :meth:`launch`. See :class:`Launcher`."""

    def __init__(self, owner: LauncherOwner, wake: Callable[[], None], spin: int) -> None:
        """Create a launcher without ops.

        :param wake: a function that makes the loop call :meth:`poll`. Any thread may call this function.
        :param spin: the number of unsuccessful polls after which threads wait for the CUDA events of the ops.
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
        """Enqueue a plan. The communicator's stream must already wait for the caller's stream."""
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
    """Call ``then``.

    A caller makes a ``functools.partial`` of this function, so that the object ``kept`` stays alive until the call.
    """
    then()
