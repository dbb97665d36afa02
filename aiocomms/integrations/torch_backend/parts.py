"""The parts of a work of a process group. The last part may be a step, which runs when the other parts have ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiocomms.communicator.portal.works import BlockingWork
from aiocomms.errors import CommError, UnsupportedOperation
from aiocomms.integrations.torch_backend.completer import Completer
from aiocomms.lowlevel import clock


class WorkPart(Protocol):
    """A part of a work: a :class:`~aiocomms.communicator.portal.works.BlockingWork` or a :class:`WorkStep`."""

    def done(self) -> bool:
        """Return whether the part has ended."""

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the part has ended. If the part has failed, raise its error.

        :raises TimeoutError: the part has not ended within ``timeout`` seconds.
        """

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Call ``call()`` when the part has ended.

        If exactly one thread waits for an unmatched receive, Ctrl-C withdraws the receive. If other threads also wait,
        Ctrl-C does not withdraw the receive. A callback has the effect of another waiting thread.
        """

    def add_step(self, call: Callable[[], object]) -> None:
        """Call ``call()`` when the part has ended.

        The step does not prevent the withdrawal of a receive by Ctrl-C; see :meth:`add_done_callback`.
        """


def when_done(parts: Sequence[WorkPart], call: Callable[[], object], *, waits: bool = True) -> None:
    """Call a function when all parts have ended.

    If all parts have already ended, call the function at once on this thread. Otherwise the thread on which the last
    part ends calls the function.

    :param waits: True if the function has the effect of a waiting thread; see :meth:`WorkPart.add_done_callback`.
    """
    left = [part for part in parts if not part.done()]
    if not left:
        call()
        return
    count, lock = len(left), threading.Lock()

    def one_less() -> None:
        nonlocal count
        with lock:
            count -= 1
            last = not count
        if last:
            call()

    for part in left:
        (part.add_done_callback if waits else part.add_step)(one_less)


def wait_for(parts: Sequence[WorkPart], patience: float | None) -> None:
    """Block until all parts have ended, for at most ``patience`` seconds. Raise the error of the first failed part."""
    ends = None if patience is None else clock.now() + patience
    for part in parts:
        part.wait(None if ends is None else max(0.0, ends - clock.now()))


def order_stream(parts: Sequence[WorkPart]) -> None:
    """Make this thread's current stream wait for all parts. If a stream cannot wait for a part, block this thread."""
    for part in parts:
        if isinstance(part, BlockingWork):
            with contextlib.suppress(UnsupportedOperation):
                part.wait_stream()
                continue
        part.wait(None)


class WorkStep:
    """The last part of a work: a step that runs once, on any thread, after the other parts have ended.

    :meth:`wait` first waits for the other parts. So Ctrl-C can interrupt this wait, and can withdraw a receive that is
    one of the other parts.
    """

    def __init__(self, parts: Sequence[WorkPart], call: Callable[[], object]) -> None:
        """Store the other parts and the step's function.

        :param call: the function to call when the parts have ended, even if parts have failed. If the function raises
            an exception, the step fails.
        """
        self._parts, self._call = parts, call
        self._over, self._lock = clock.event(), threading.Lock()
        self._error: BaseException | None = None
        self._calls: list[Callable[[], object]] = []

    def after(self, completer: Completer, *, here: bool) -> WorkStep:
        """Run the step on a thread of the completer when the other parts have ended.

        If ``here`` is true and the other parts have already ended, run the step at once on this thread.
        """
        if here and all(part.done() for part in self._parts):
            self._run()
        else:
            when_done(self._parts, lambda: completer.submit(self._run), waits=False)
        return self

    def done(self) -> bool:
        """See :class:`WorkPart`."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """See :class:`WorkPart`."""
        ends = None if timeout is None else clock.now() + timeout
        for part in self._parts:
            with contextlib.suppress(CommError):  # The step runs all the same.
                part.wait(None if ends is None else max(0.0, ends - clock.now()))
        if not self._over.wait(None if ends is None else max(0.0, ends - clock.now())):
            raise TimeoutError(f"the step after the operation was not done within {timeout} s; it goes on")
        if self._error is not None:
            raise self._error

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """See :class:`WorkPart`."""
        self.add_step(call)
        for part in self._parts:
            part.add_done_callback(_nothing)

    def add_step(self, call: Callable[[], object]) -> None:
        """See :class:`WorkPart`."""
        with self._lock:
            if not self._over.is_set():
                self._calls.append(call)
                return
        call()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._over.set()
        for call in self._calls:
            call()


def _nothing() -> None:
    """Do nothing. This callback is registered as a substitute for a waiting thread; see :class:`WorkPart`."""
