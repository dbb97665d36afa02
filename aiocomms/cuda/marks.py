"""Marks in CUDA streams. An op's work on the GPU begins after the mark in the caller's stream.

An op waits for all work that was in the caller's stream at the call, and for no later work. So the call records an
event. The event loop's thread then begins the op with another current stream, the *shadow* of the caller's stream. The
shadow waits for the event. Only ops that consist of messages enqueue work on a shadow.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

from aiocomms.cuda.device import Cuda, Event, Stream
from aiocomms.transport import Transport


class CallerMark:
    """The position in a thread's CUDA stream at which an op was called."""

    __slots__ = ("_cuda", "_event", "_stream")

    def __init__(self, cuda: Cuda, stream: Stream, event: Event | None = None) -> None:
        """Store the position.

        :param stream: the shadow, or the thread's own stream if ``event`` is None.
        :param event: an event of the thread's stream, for which the shadow waits.
        """
        self._cuda, self._stream, self._event = cuda, stream, event

    def begin(self) -> AbstractContextManager[object]:
        """Make the mark's stream the current stream of the thread that begins the op. Call this once."""
        if self._event is not None:
            self._stream.wait_event(self._event)
        return self._cuda.on(self._stream)

    def hold_up(self) -> None:
        """Make this thread's current stream wait for the marked position."""
        if self._event is not None:
            self._cuda.current_stream().wait_event(self._event)

    def join(self) -> None:
        """Make this thread's current stream wait for the work that an ended op has enqueued on the shadow stream."""
        if self._event is None or self._cuda.capturing():
            return
        end = self._cuda.event()
        end.record(self._stream)
        self._cuda.current_stream().wait_event(end)


class CallerMarks:
    """The marks of all calls on one communicator. Any thread may make such calls."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda: Cuda = cuda
        self._shadows: dict[int, Stream] = {}  # The keys are handles of streams; a program has few streams.
        self._lock = threading.Lock()

    @classmethod
    def of(cls, transports: Sequence[Transport]) -> Self | None:
        """Return the marks of a communicator, or None if none of its transports has an ``aiocomms.cuda.Cuda``."""
        cuda = next((each.cuda for each in transports if each.cuda is not None), None)
        return None if cuda is None else cls(cuda)

    def mark(self) -> CallerMark:
        """Mark the current position in this thread's stream. A stream that is being captured is its own shadow."""
        stream = self.cuda.current_stream()
        if self.cuda.capturing(stream):
            return CallerMark(self.cuda, stream)
        event = self.cuda.event()
        event.record(stream)
        return CallerMark(self.cuda, self._shadow(stream.cuda_stream), event)

    def stream(self) -> CallerMark:
        """Return a mark without an event.

        The event loop then allocates results in the memory pool of this thread's stream.

        The op may also wait for work that the thread enqueues later.
        """
        return CallerMark(self.cuda, self.cuda.current_stream())

    def _shadow(self, handle: int) -> Stream:
        with self._lock:
            shadow = self._shadows.get(handle)
            if shadow is None:
                shadow = self._shadows[handle] = self.cuda.stream(0)
            return shadow
