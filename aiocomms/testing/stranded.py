"""The watch over the ranks of a test. The watch ends an op early if nothing can happen before the op's deadline.

A callback, a timer, a descriptor or another thread makes an asyncio loop continue. If none of these can act before the
earliest deadline of an op, the watch ends this op. The watch cannot read the state of other loops, such as the loops of
uvloop and trio. On these loops, and in a process with other threads, ops wait until their deadlines.
"""

from __future__ import annotations

import _thread
import math
import sys
import threading
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from aiocomms import ops
from aiocomms.bootstrap import directory
from aiocomms.communicator.communicator import Communicator
from aiocomms.diagnosis import live
from aiocomms.diagnosis.recorder import called
from aiocomms.lowlevel import clock
from aiocomms.progress import deadlines
from aiocomms.progress.inflight import StartedWork

PERIOD: Final = 0.25
"""The time, in seconds, between two checks of the loop.

The watch ends an op if two consecutive checks find that no callback, timer, descriptor or thread can act before the
op's deadline.
"""

_SIMULATED: Final = "aiocomms.testing.simulation.threads"
_QUIET: Final = {deadlines.__name__, live.__name__, _SIMULATED, "execnet.gateway_base", "pytest_timeout"}
"""The modules whose threads do not call a loop.

The threads are those of this package, those of pytest-xdist, and the timers of pytest-timeout.
"""
_looks: WeakSet[Any] = WeakSet()
"""The timers at which the watches check their event loops. These timers do not count as work of a loop."""


class _NextEnd(NamedTuple):
    """The pending op whose deadline comes first."""

    work: StartedWork[Any]
    comm: Communicator
    deadline: float


class StrandedWatch:
    """The watch over the ranks of one test. The watch costs one timer on the loop, and nothing for each op."""

    def __init__(self, world: Sequence[Communicator]) -> None:
        """Start the watch if the state of the running loop can be read.

        The watch requires that no other thread advances the transports.
        """
        self._world = world
        self._found: StartedWork[Any] | None = None
        self._loop = _readable_loop()
        self._timer: Any = None
        if self._loop is not None:
            self._later()

    def close(self) -> None:
        """Stop the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _later(self) -> None:
        self._timer = self._loop.call_later(PERIOD, self._look)
        _looks.add(self._timer)

    def _look(self) -> None:
        self._later()
        first = self._first()
        found = None if first is None or not self._is_last(first) else first
        if found is not None and found.work is self._found:
            found.comm._core.expire(found.work, self._why(found))
        self._found = None if found is None else found.work

    def _first(self) -> _NextEnd | None:
        """Return the pending op of this process with the earliest deadline; None if no pending op has a deadline."""
        waits = [
            _NextEnd(flying.work, comm, flying.posted + queue.seconds)
            for comm in directory.every_open()
            for flying in comm._core.in_flight.look()
            if (queue := flying.work.queue) is not None and queue.seconds < math.inf
        ]
        return min(waits, key=lambda wait: wait.deadline, default=None)

    def _is_last(self, wait: _NextEnd) -> bool:
        """Return whether the watch may end a pending op, because nothing can happen before the op's deadline.

        The watch does not end an op that was called with a ``timeout``. For such an op, return False.
        """
        kinds = {type(transport) for comm in self._world for transport in comm._core.transports}
        others = {transport for comm in directory.every_open() for transport in comm._core.transports}
        return (
            wait.comm in self._world
            and wait.work.queue.seconds == wait.comm._core._rendezvous.timeout
            and {type(transport) for transport in others} <= kinds
            and not _other_threads()
            and _rests(self._loop, {transport.fileno() for transport in others}, wait.deadline - clock.now())
        )

    def _why(self, wait: _NextEnd) -> str:
        """Return the text of the error. The text describes the mistake and its remedy."""
        core, op = wait.comm._core, wait.work.op
        late = core.waiting_for(wait.work)
        absent = [rank for rank in late if not any(not it.idle for it in self._world[rank]._core.in_flight.look())]
        name = op.name if op.family == "collectives" else called(op)
        waits = f"rank {core.rank} of '{core.name}' waits in {name} for {_ranks(absent or late)}"
        if not absent:
            return f"{waits}, and nothing else runs on this loop"
        gather = f"`await asyncio.gather(*[comm.{op.name}(...) for comm in world])` or "
        if op.family != "collectives" or isinstance(op, ops.CollectiveBatch):  # The call of a batch has no such form.
            gather = ""
        return (
            f"call on all ranks before you await: {waits}, which {'has' if len(absent) == 1 else 'have'} called "
            f"nothing, and nothing else runs on this loop; write {gather}`await run_ranks(world, fn)`"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _readable_loop() -> Any:
    """Return the running loop if it is a selector loop of asyncio; otherwise None."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or clock.simulation is not None:
        return None
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, asyncio.SelectorEventLoop) else None


def _other_threads() -> bool:
    """Return whether another thread could call the loop."""
    if threading.current_thread() is not threading.main_thread():
        return True
    targets = {thread.ident: getattr(thread, "function", None) for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    # The count has no threads that C++ has started. A thread that has just started has no frame.
    quiet = all(_is_quiet(frame, targets.get(ident)) for ident, frame in frames.items())
    return not quiet or _thread._count() > len(frames)


def _is_quiet(frame: FrameType | None, target: object) -> bool:
    """Return whether a thread runs code of modules in ``_QUIET``, and no other code.

    Code of the modules ``socket`` and ``threading`` is also allowed.

    :param target: the function that the thread will call, if the thread is a timer.
    """
    modules = {getattr(target, "__module__", None)} - {None}
    while frame is not None:
        modules.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return _QUIET & modules != set() and modules <= _QUIET | {"socket", "threading"}


def _rests(loop: Any, fds: Collection[int | None], seconds: float) -> bool:
    """Return whether a loop has nothing to run within some seconds.

    asyncio has no public function that returns this state, so this function reads private fields of the loop. The
    result is False for a loop without these fields.

    :param fds: the descriptors of transports. Only other threads can make these descriptors readable.
    """
    try:
        ready, timers, signals = loop._ready, loop._scheduled, loop._signal_handlers
        readers, waker = set(loop._selector.get_map()), loop._ssock.fileno()
    except AttributeError:
        return False
    until = loop.time() + seconds
    near = (timer for timer in timers if timer not in _looks and not timer.cancelled() and timer.when() <= until)
    return not ready and not signals and readers <= {waker, *fds} and next(near, None) is None
