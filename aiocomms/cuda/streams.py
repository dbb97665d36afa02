"""CUDA streams and events on the event loop: queues of awaited events.

This module depends on CUDA, but on no transport. A transport for GPU memory orders its ops with events. After an event
is recorded, the event loop queries the event in its next cycles. When the event has fired, this module calls the
transport on the event loop's thread. If the event has not fired after these cycles, a thread sleeps until the event
fires. The thread sleeps without the GIL.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

import torch

from aiocomms import ops
from aiocomms.cuda.device import Cuda, Event, Stream, TorchCuda
from aiocomms.errors import CapturedWorkError, CommError
from aiocomms.lowlevel.waker import Waker
from aiocomms.progress.driver import LoopDriver, Promise
from aiocomms.transport import Capabilities, Transport

SPIN: Final = 30
"""The number of event-loop cycles in which events are queried before a thread sleeps on them.

The cycles take about 100 µs.
"""


class Completions:
    """The queues of awaited events: one per stream, in the order in which the events were recorded.

    The ``progress`` of one transport serves the queues, on one event loop. Nothing runs while no event is awaited. No
    event is queried while the current stream is being captured.
    """

    def __init__(
        self, cuda: Cuda, wake: Callable[[], None], spin: int = SPIN, transport: Transport | None = None
    ) -> None:
        """Create empty queues, on the event loop's thread.

        :param wake: a function, called on any thread, that makes the event loop call :meth:`poll`.
        :param spin: the number of polls without a fired event after which threads sleep on the remaining events. With
            0, threads sleep after each poll. So an event loop that polls only after a wake-up misses no event.
        :param transport: the transport whose ``progress`` calls :meth:`poll`. The event loop calls ``progress`` after
            each op that a communicator posts. With this argument, the event loop also calls ``progress`` after each
            call of :meth:`add`, even if no op was posted.
        """
        self.parked: bool = False
        """True while threads sleep on the remaining events."""
        self._cuda = cuda
        self._wake = wake
        self._spin = spin
        self._queues: dict[int, deque[tuple[Event, Callable[[], object]]]] = {}
        self._pool: list[Event] = []
        self._sleepers: dict[int, _Sleeper] = {}
        self._in_vain = 0
        self._poll_soon = None if transport is None else functools.partial(LoopDriver.current().poll_soon, transport)

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def mark(self, stream: Stream) -> Event:
        """Record an event on a stream. Pass the event to :meth:`release` once it has fired, or drop the event."""
        event = self._pool.pop() if self._pool else self._cuda.event()
        event.record(stream)
        return event

    def release(self, event: Event) -> None:
        """Store an event that has fired, so that :meth:`mark` can use it again."""
        self._pool.append(event)

    def add(self, stream: Stream, then: Callable[[], object]) -> Event:
        """Call ``then`` on the event loop's thread when a stream has done all work that was enqueued so far.

        ``then`` and all objects to which it refers, such as the op and its tensors, stay alive until the call.

        :returns: the event, so that other streams can wait for it. Do not keep the event after it has fired.
        """
        event = self.mark(stream)
        key = stream.cuda_stream
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append((event, then))
        self._in_vain = 0
        self.parked = False
        if self._poll_soon is not None:
            self._poll_soon()
        return event

    def poll(self) -> bool:
        """Call the functions whose events have fired.

        No function is called while the current stream is being captured. During a capture, the transport's ``progress``
        should return True, so that the event loop calls ``progress`` again.

        :returns: whether a function was called.
        """
        if not self._queues or self._cuda.capturing():
            return False
        fired = self._collect()
        self._in_vain = 0 if fired else self._in_vain + 1
        for then in fired:
            then()
        if self._in_vain >= self._spin:
            self._park()
        return bool(fired)

    def _collect(self) -> list[Callable[[], object]]:
        """Return the functions whose events have fired. In each queue, stop at the first event that has not fired."""
        fired = []
        with self._cuda.harmless():
            for key, queue in list(self._queues.items()):
                sleeper = self._sleepers.get(key)
                while queue and queue[0][0].query():
                    event, then = queue.popleft()
                    fired.append(then)
                    if sleeper is None or sleeper.target is not event:  # A thread may still sleep on this event.
                        self._pool.append(event)
                if not queue:
                    del self._queues[key]
        return fired

    def _park(self) -> None:
        self.parked = bool(self._queues)
        for key, queue in self._queues.items():
            if key not in self._sleepers:
                self._sleepers[key] = _Sleeper(self._cuda, self._wake)
            self._sleepers[key].watch(queue[0][0])

    def wait(self) -> None:
        """Block until all events have fired, then empty the queues.

        Call this when the queues are no longer used, and not on the event loop's thread.
        """
        for queue in self._queues.values():
            for event, _ in queue:
                with contextlib.suppress(RuntimeError):  # A broken device does no more work.
                    event.synchronize()
        self._queues.clear()

    def close(self) -> None:
        """Tell all threads to end. A thread that sleeps on an event ends when the event has fired."""
        for sleeper in self._sleepers.values():
            sleeper.close()


class _Sleeper:
    """A thread that sleeps on the events of one stream, one at a time."""

    def __init__(self, cuda: Cuda, wake: Callable[[], None]) -> None:
        self.target: Event | None = None
        """The event on which the thread sleeps or is about to sleep."""
        self._cuda = cuda
        self._wake = wake
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="aiocomms sleeps on events", daemon=True).start()

    def watch(self, event: Event) -> None:
        """Wake the event loop when the event has fired. If the thread already sleeps on another event, do nothing."""
        with self._changed:
            if self.target is None:
                self.target = event
                self._changed.notify()

    def close(self) -> None:
        """Tell the thread to end. A thread that sleeps on an event ends when the event has fired."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        self._cuda.activate()
        with self._cuda.harmless():
            while (event := self._next()) is not None:
                with contextlib.suppress(RuntimeError):  # The next poll gets the same error, and reports it.
                    event.synchronize()
                with self._changed:
                    self.target = None
                self._wake()

    def _next(self) -> Event | None:
        with self._changed:
            while self.target is None and not self._closed:
                self._changed.wait()
            return None if self._closed else self.target


class recorded:  # noqa: N801 - the name reads well in ``await recorded(stream)``
    """Await all work that was enqueued on a CUDA stream so far. After ``graph.replay()``, the call awaits the replay.

    The call records an event. ``await`` returns when the event has fired, and uses no CPU while it waits. Cancellation
    of the ``await`` does not affect the stream.

    :param stream: a ``torch.cuda.Stream``; None for the current stream.
    :param cuda: the device; None for torch's current device.
    :raises CapturedWorkError: the stream is being captured; a captured event does not fire in a replay.
    """

    def __init__(self, stream: Stream | None = None, *, cuda: Cuda | None = None) -> None:
        self._cuda = cuda or TorchCuda(torch.device("cuda", torch.cuda.current_device()))
        if self._cuda.capturing(stream):
            raise CapturedWorkError("the stream is being captured: await recorded() after graph.replay()")
        self._stream = stream or self._cuda.current_stream()
        self._event = self._cuda.event()
        self._event.record(self._stream)

    def done(self) -> bool:
        """Return whether the stream has done the awaited work."""
        with self._cuda.harmless():
            return self._event.query()

    def __await__(self) -> Generator[Any, Any, None]:
        if self._cuda.capturing() or not self.done():  # a query by the capturing thread breaks its capture
            yield from _Watch(self._cuda, self._event).__await__()


class _Watch:
    """A wait for one event. The event loop's driver polls this object as it polls a transport."""

    capabilities = Capabilities(ops=frozenset[type[ops.Op]](), spin=SPIN)

    def __init__(self, cuda: Cuda, event: Event) -> None:
        self._cuda = cuda
        self._event = event
        self._waker = Waker()
        self._sleeper: _Sleeper | None = None
        self._driver = LoopDriver.current()
        self._promise = Promise(self._driver)
        self._error: CommError | None = None
        self._left = SPIN
        self.fileno = self._waker.fileno

    def __await__(self) -> Generator[Any, Any, None]:
        self._driver.attach(self)
        self._driver.poll_soon(self)
        try:
            yield from self._promise.__await__()
        finally:
            self._driver.detach(self)
            if self._sleeper is not None:
                self._sleeper.close()
            self._waker.close()
        if self._error is not None:
            raise self._error

    def progress(self) -> bool:
        self._waker.clear()
        if self._cuda.capturing():
            return True  # True makes the event loop call this again.
        with self._cuda.harmless():
            fired = self._event.query()
        if fired:
            self._promise.set()
            return True
        self._left -= 1
        if self._left <= 0:
            self._sleeper = self._sleeper or _Sleeper(self._cuda, self._waker.wake)
            self._sleeper.watch(self._event)
        return False

    def on_failure(self, error: CommError) -> None:
        self._error = error
        self._promise.set()
