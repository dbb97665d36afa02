"""The interface of launchers, and the reference launcher, which calls NCCL on the loop's thread with CuPy and torch.

A launcher has NCCL called for the ops of one transport, and tells the loop when the ops are done. There are two:
:class:`PythonLauncher` here, and :class:`aiocomms_nccl.native.NativeLauncher`, whose native thread calls NCCL. The
transport does not know which one it has.
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
"""The function that the loop's thread calls when an op is done. It refers to all that the op uses, until the call."""


class LauncherOwner(Protocol):
    """The interface through which a launcher uses its transport."""

    cuda: Cuda
    library: Nccl
    aborted: bool

    def call_nccl(self, what: str, call: Callable[[], object]) -> bool:
        """Call NCCL. Returns False if the call failed and the communicator is lost."""

    def lose(self, error: CommError) -> None:
        """Lose the communicator."""

    def lose_cuda(self, error: RuntimeError) -> None:
        """Lose the communicator, because CUDA has failed."""


class Launcher(Protocol):
    """The interface of launchers. Its methods are called on the loop's thread unless they say otherwise."""

    @property
    def parked(self) -> bool:
        """True while the ops under way take so long that threads sleep on them."""

    spin: int
    """The turns of the loop for which :meth:`poll` is worth calling; 0 if it needs no polls to wake the loop."""

    def __len__(self) -> int:
        """Return the number of ops under way."""

    def adopt(self, cs: CommStream) -> None:
        """Register a communicator, before its first op."""

    def mark(self) -> Any:
        """Return a point at the present end of the caller's stream, for one :meth:`launch`."""

    def launch(self, cs: CommStream, what: str, plan: CallPlan, after: Any, then: Then) -> Any:
        """Have a plan carried out, behind all plans that were launched on this communicator before.

        A failure of NCCL or CUDA loses the communicator, now or when :meth:`poll` hears of it.

        :param what: the name of the op, for errors.
        :param after: the point for which the communicator's stream waits.
        :returns: the op's end, for :meth:`wait_stream`; None if the communicator is lost.
        """

    def wait_stream(self, end: Any, stream: Any) -> None:
        """Make a stream wait for an op's end. Blocks until NCCL was called for the op."""

    def settle(self) -> None:
        """Block until NCCL was called for all launched plans, because the caller makes the next calls itself."""

    def poll(self) -> bool:
        """Call the functions of the ops that are done. Returns whether there was anything to do."""

    def cut(self, cs: CommStream | None = None) -> None:
        """Have NCCL called no more, for one communicator or for all. Any thread may call this."""

    def leave(self, cs: CommStream, patience: float) -> bool:
        """Wait until a communicator has no call to make and none under way. Runs in a thread.

        :returns: False if that takes longer than ``patience`` seconds.
        """

    def quiet(self, cs: CommStream) -> Callable[[], None]:
        """Return a function that waits for all ops launched on a communicator so far. It is called in a thread."""

    def drain(self) -> None:
        """Wait until all ops have ended, and drop them. Runs in a thread, at the end."""

    def close(self) -> None:
        """Release threads and descriptors. Runs in a thread, at the end."""


def end_comm(launcher: Launcher, cs: CommStream, abort: bool, patience: float) -> None:
    """Abort or destroy a communicator, once its launcher has left it. Blocks.

    A launcher that does not leave in time is held in a call of NCCL by the GPU, which only an abort stops. The
    communicator is then aborted in any case.

    :param patience: the seconds for which the launcher may stay.
    """
    left = launcher.leave(cs, patience)
    launcher.cut(cs)
    if abort or not left:
        cs.comm.abort()
    else:
        cs.comm.destroy()


class PythonLauncher:
    """The launcher that calls NCCL at once, on the loop's thread. See :class:`Launcher`."""

    def __init__(self, owner: LauncherOwner, wake: Callable[[], None], spin: int) -> None:
        """Start with no ops.

        :param wake: makes the loop call :meth:`poll`; it is called on any thread.
        :param spin: the number of polls without result after which threads sleep on events.
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
        """Carry out a plan, whose stream waits for the caller's stream already."""
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
        """See :meth:`Launcher.cut`. It does nothing: the transport holds its lock while it calls NCCL."""

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
    """Call ``then``. A partial of this function keeps ``kept`` until that call."""
    then()
