"""Marks in the stream of a calling thread, behind which the loop's thread begins the op.

An op comes after all that its caller's stream had when it was called, and after nothing that came later. So the call
records an event, and the loop begins the op with another stream as the current one, the shadow of the caller's: that
waits for the event. A shadow has nothing else to do, but what ops that are made of messages enqueue there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

from aiocomms.cuda.device import Cuda, Event, Stream
from aiocomms.transport import Transport


class CallerMark:
    """The place in a thread's stream from which one op was called."""

    __slots__ = ("_cuda", "_event", "_stream")

    def __init__(self, cuda: Cuda, stream: Stream, event: Event | None = None) -> None:
        """Note the place.

        :param stream: the shadow; or the thread's own stream, of which nothing more than that is known.
        :param event: of the thread's stream, for which the shadow is to wait.
        """
        self._cuda, self._stream, self._event = cuda, stream, event

    def begin(self) -> AbstractContextManager[object]:
        """Make the stream current, on the thread that begins the op; once."""
        if self._event is not None:
            self._stream.wait_event(self._event)
        return self._cuda.on(self._stream)

    def hold_up(self) -> None:
        """Have the current stream of the thread that begins something wait for the place itself."""
        if self._event is not None:
            self._cuda.current_stream().wait_event(self._event)

    def join(self) -> None:
        """Have this thread's current stream wait for what the op has enqueued on the shadow; it has ended."""
        if self._event is None or self._cuda.capturing():
            return
        end = self._cuda.event()
        end.record(self._stream)
        self._cuda.current_stream().wait_event(end)


class CallerMarks:
    """The marks of one communicator's calls, from any thread."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda: Cuda = cuda
        self._shadows: dict[int, Stream] = {}  # by the streams' handles; a program has few
        self._lock = threading.Lock()

    @classmethod
    def of(cls, transports: Sequence[Transport]) -> Self | None:
        """Return those of a communicator; None: none of its transports has a layer of CUDA."""
        cuda = next((each.cuda for each in transports if each.cuda is not None), None)
        return None if cuda is None else cls(cuda)

    def mark(self) -> CallerMark:
        """Record where the current stream of this thread is now. One that is being captured is its own shadow."""
        stream = self.cuda.current_stream()
        if self.cuda.capturing(stream):
            return CallerMark(self.cuda, stream)
        event = self.cuda.event()
        event.record(stream)
        return CallerMark(self.cuda, self._shadow(stream.cuda_stream), event)

    def stream(self) -> CallerMark:
        """Note no more than the current stream of this thread: in its memory pool the loop allocates what is returned.

        The op may come after what the thread enqueues later, too.
        """
        return CallerMark(self.cuda, self.cuda.current_stream())

    def _shadow(self, handle: int) -> Stream:
        with self._lock:
            shadow = self._shadows.get(handle)
            if shadow is None:
                shadow = self._shadows[handle] = self.cuda.stream(0)
            return shadow
