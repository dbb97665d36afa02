"""The parts of a work of the group, and the steps that follow before it is done."""

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
    """A part of a work: a :class:`~aiocomms.communicator.portal.works.BlockingWork`, or an object like one."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it has, and raise why it failed, or :class:`TimeoutError`."""

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called once it has ended, on behalf of a thread that waits."""

    def add_step(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called once it has ended, while no thread waits."""


def when_done(parts: Sequence[WorkPart], call: Callable[[], object], *, waits: bool = True) -> None:
    """Call it when all parts have ended: here and now, or on the thread that ends the last.

    :param waits: whether a thread waits for them by this.
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
    """Block until all have ended, for ``patience`` seconds at most; and raise why the first has failed."""
    ends = None if patience is None else clock.now() + patience
    for part in parts:
        part.wait(None if ends is None else max(0.0, ends - clock.now()))


def order_stream(parts: Sequence[WorkPart]) -> None:
    """Have this thread's current stream wait for all; block until those have ended that no stream can wait for."""
    for part in parts:
        if isinstance(part, BlockingWork):
            with contextlib.suppress(UnsupportedOperation):
                part.wait_stream()
                continue
        part.wait(None)


class WorkStep:
    """The last part of a work: a step that follows the other parts, and is made once, whichever thread waits.

    A thread that waits for it waits for these parts, so that a receive that Ctrl-C ends is withdrawn.

    Who waits for it waits for them, so that a receive that Ctrl-C ends is withdrawn.
    """

    def __init__(self, parts: Sequence[WorkPart], call: Callable[[], object]) -> None:
        """Note what it follows.

        :param call: what it does once they have ended, well or not; what it raises is why it failed.
        """
        self._parts, self._call = parts, call
        self._over, self._lock = clock.event(), threading.Lock()
        self._error: BaseException | None = None
        self._calls: list[Callable[[], object]] = []

    def after(self, completer: Completer, *, here: bool) -> WorkStep:
        """Have it done by the completer once its parts have ended; or, if they have by now, ``here``."""
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
            with contextlib.suppress(CommError):  # The step is still to be made.
                part.wait(None if ends is None else max(0.0, ends - clock.now()))
        if not self._over.wait(None if ends is None else max(0.0, ends - clock.now())):
            raise TimeoutError(f"what follows it was not done within {timeout} s; it goes on")
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
    """Do nothing: this is called for a thread that waits."""
