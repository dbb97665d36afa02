"""aiocomms for synchronous programs: communicators whose methods block, over an asyncio loop in a thread of its own.

>>> with aiocomms.blocking.new_comm("auto") as comm:
...     t = comm.all_reduce(t).wait()

What returns a :class:`~aiocomms.Work` elsewhere returns a :class:`BlockingWork` here; what is awaited there blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, Self

from aiocomms import communicator, opening
from aiocomms.errors import CommError
from aiocomms.lowlevel.ending import at_end
from aiocomms.portal import pending
from aiocomms.portal.operations import BlockingLane
from aiocomms.portal.portal import Portal
from aiocomms.portal.views import BlockingBatch, BlockingStream, BlockingWindow
from aiocomms.portal.works import BlockingWork

__all__ = [
    "BlockingBatch",
    "BlockingLane",
    "BlockingStream",
    "BlockingWindow",
    "BlockingWork",
    "Communicator",
    "from_process_group",
    "new_comm",
]

_P = ParamSpec("_P")


class _LoopThread:
    """A thread that runs an event loop for as long as communicators use it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._users = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="aiocomms blocking", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise CommError(f"no thread can be started: {error}") from error

    def form(self, forming: Awaitable[communicator.Communicator]) -> communicator.Communicator:
        """Await what forms a communicator, and return that."""

        async def main() -> communicator.Communicator:
            return await forming

        comm = asyncio.run_coroutine_threadsafe(main(), self._loop).result()
        at_end(functools.partial(_end, weakref.ref(self)))  # before the transport's own end, which is known by now
        return comm

    def enter(self) -> None:
        """One more communicator uses it."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One communicator less; with the last one it ends."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self.stop()

    def stop(self) -> None:
        """End the loop with all that is still open, and wait for that; twice is once."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:  # in a forked child it is not
            with contextlib.suppress(RuntimeError):  # it has ended just now
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


class Communicator(Portal):
    """One rank's handle on a fixed, ordered group of ranks, for a synchronous program; made by :func:`new_comm`.

    Any thread may use it. Its hooks are called on the thread of its event loop.
    """

    def __init__(self, comm: communicator.Communicator, thread: _LoopThread) -> None:
        super().__init__(comm)
        comm._guard.opened("use `with`, or call its close()")
        self._thread: _LoopThread | None = thread
        thread.enter()

    def __repr__(self) -> str:
        return repr(self._comm)

    def close(self) -> None:
        """Close: let ops that are under way end, withdraw receives that nothing matched, release everything.

        It waits up to :data:`aiocomms.core.CLOSE_GRACE` seconds for the former. Idempotent.

        :raises RuntimeError: this is the loop's own thread, as that of a hook.
        :raises CommError: a transport broke while it closed; everything else is released.
        """
        if not self._door.closed:
            self._door.elsewhere("close")
        try:
            super().close()
        finally:
            self._leave()

    def reconfigure(
        self, ranks: Sequence[int] | None = None, *, size: int | None = None, timeout: float | timedelta = 10.0
    ) -> Self:
        """Form the communicator that takes the place of this one, which is closed when it stands.

        See :meth:`aiocomms.Communicator.reconfigure`.
        """
        new = super().reconfigure(ranks, size=size, timeout=timeout)
        self._leave()
        return new

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)  # the peers may be waiting for ops that this rank will never call
        self.close()

    def _of(self, comm: Any) -> Self:
        assert self._thread is not None  # for it has just run this
        return type(self)(comm, self._thread)

    def _leave(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.leave()


def _blocking(form: Callable[_P, Awaitable[communicator.Communicator]], described: str) -> Callable[_P, Communicator]:
    """The function that starts a thread for a loop, and has it form a communicator."""

    @functools.wraps(form)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Communicator:
        forming = form(*args, **kwargs)  # here, for what is wrong with the arguments is said by this thread
        thread = _LoopThread()
        try:
            return Communicator(thread.form(forming), thread)
        except BaseException:
            thread.stop()
            raise

    call.__doc__ = f"{described}\n\nArguments and errors are those of :func:`aiocomms.{form.__name__}`."
    return call


new_comm = _blocking(
    opening.new_comm,
    "Form a communicator with the other ranks, in a thread of its own; collective. ``with`` closes it.",
)
from_process_group = _blocking(
    opening.from_process_group, "Form a communicator over a ``torch.distributed`` process group; collective."
)


def _end(thread: weakref.ref[_LoopThread]) -> None:
    """The interpreter ends, and the program has left a communicator open."""
    left = thread()
    if left is not None:
        pending.stand_still()
        left.stop()
