"""The control connection to one peer. The connection transfers frames and the data of large messages."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms_c10d import wire
from aiocomms_c10d.wire import ACK, C10dFrame, C10dHeader

FOREVER: Final = timedelta(days=100)
"""The timeout of every wait. gloo closes all connections of a rank when one wait expires, so no wait may expire.

The function ``poison`` ends a wait that blocks."""

_FRAMES, _DATA = 0, 1
"""The gloo tags of frames and of large messages' data."""
_RING: Final = 4
"""The number of receives that are posted in advance. gloo sends a frame only after the peer has posted a receive."""
_UNACKED: Final = 16
"""The number of received frames after which this rank sends an acknowledgement.

The peer keeps the frames until the acknowledgement arrives.
"""


class ControlConnection:
    """The connection to one peer, for sends and receives. Frames arrive in the order of the sends.

    gloo reports the end of a receive only to a thread that waits for this receive, so one thread waits for the next
    frame. No thread waits for the end of a send. If the peer is gone when gloo begins a send, gloo loses that send, and
    a wait for that send never ends. So this object keeps a frame until the peer acknowledges the frame, or until
    :meth:`join`.
    """

    def __init__(
        self,
        group: Any,
        peer: int,
        size: int,
        on_frame: Callable[[C10dFrame], None],
        on_lost: Callable[[CommError | None], None],
    ) -> None:
        """Store the group. :meth:`start` starts the reader's thread.

        :param on_frame: a function that is called on the reader's thread with each frame.
        :param on_lost: a function that is called once on the reader's thread, after the last frame. The argument is an
            error, or None if the peer is gone.
        """
        self.peer = peer
        self.flushed = clock.event()
        """The event that is set when the peer has received all frames, or when the connection has ended."""
        self._group = group
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._capacity = wire.capacity(size)
        self._slots: deque[tuple[Any, bytearray, Tensor]] = deque()
        self._unacked = 0
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._sending = threading.Lock()  # The lock keeps _sent in the order of gloo's sends.
        self._thread = threading.Thread(target=self._read, name=f"aiocomms c10d reads from {peer}", daemon=True)

    def start(self) -> None:
        """Start the reader's thread."""
        self._thread.start()

    def send(self, frame: Tensor) -> None:
        """Send a frame without blocking. Any thread may call this method. The reader's thread reports failures."""
        with self._sending:
            work = self._send(frame, _FRAMES)
            if work is not None:
                self._sent.append((work, frame))

    def send_data(self, tensor: Tensor, frame: Tensor) -> Any:
        """Send a large message's bytes and then a frame. The peer receives the bytes by :meth:`receive_data`.

        :returns: an object that the caller must keep alive, together with the tensor, until the peer confirms the
            message.
        """
        work = self._send(tensor, _DATA)
        self.send(frame)
        return work

    def receive_data(self, tensor: Tensor) -> Any:
        """Start to receive a large message's bytes. The calls receive the messages in the order of the peer's sends.

        :returns: the receive, which has a ``wait`` method.
        :raises RuntimeError: the peer is lost.
        """
        return self._group.recv([tensor], self.peer, _DATA)

    def send_last(self, frame: Tensor) -> Any:
        """Send the last frame, before the caller breaks the group's connections.

        :returns: the send, which has a ``wait`` method; None if the peer is lost.
        """
        return self._send(frame, _FRAMES)

    def join(self) -> None:
        """Wait for the reader's thread to end, and release the group.

        Before this call, the caller must break the group's connections by ``poison``.
        """
        if self._thread.ident is not None:
            self._thread.join()
        with self._sending:
            self._group = None
            self._sent.clear()
            self._slots.clear()

    def _send(self, tensor: Tensor, tag: int) -> Any:
        group = self._group
        try:
            return None if group is None else group.send([tensor], self.peer, tag)
        except RuntimeError:
            return None

    def _read(self) -> None:
        error: CommError | None = None
        try:
            for _ in range(_RING):
                buffer = bytearray(self._capacity)
                self._post(buffer, torch.frombuffer(buffer, dtype=torch.uint8))
            while self._wait_for_frame():
                _, buffer, tensor = self._slots.popleft()
                self._handle(wire.unpack(buffer, tensor))
                self._post(buffer, tensor)
        except CommError as failure:
            error = failure
        except Exception as failure:
            error = CommError(f"the transport 'c10d' is broken: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        self.flushed.set()
        self._on_lost(error)

    def _wait_for_frame(self) -> bool:
        """Wait for the next frame. Return False if the connection has ended."""
        try:
            return bool(self._slots) and self._slots[0][0].wait(FOREVER)
        except RuntimeError:
            return False

    def _post(self, buffer: bytearray, tensor: Tensor) -> None:
        # If the peer is lost, the wait for an earlier receive notices it.
        with contextlib.suppress(RuntimeError):
            self._slots.append((self._group.recv([tensor], self.peer, _FRAMES), buffer, tensor))

    def _handle(self, frame: C10dFrame) -> None:
        if frame.header.kind == ACK:
            with self._sending:
                for _ in range(min(frame.header.ident, len(self._sent))):
                    self._sent.popleft()
        else:
            self._on_frame(frame)
        self._unacked += 1
        if self._unacked == _UNACKED:
            self._unacked = 0
            self.send(wire.pack(C10dHeader(ACK, ident=_UNACKED)))
