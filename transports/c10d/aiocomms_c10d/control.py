"""One peer: the frames that go to it and come from it."""

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
from aiocomms_c10d import wire
from aiocomms_c10d.wire import ACK, Frame, Header

FOREVER: Final = timedelta(days=100)
"""gloo closes every connection of a rank when one wait expires, so none may; what blocks is freed by ``poison``."""

_FRAMES, _DATA = 0, 1
"""gloo tags."""
_RING: Final = 4
"""Receives posted ahead: gloo sends nothing before its peer has posted the receive for it."""
_UNACKED: Final = 16
"""Frames that the peer keeps in memory until it hears that they have come."""


class ControlConnection:
    """Sends to and receives from one peer. Frames arrive in the order in which they were sent.

    gloo tells the end of a receive only to a thread that waits for it, so one thread waits for the next frame. Nobody
    waits for the end of a send: gloo loses one that it takes up when the peer turns out to be gone, and never ends the
    wait for it. What is sent is kept until the peer confirms it, or the link is joined.
    """

    def __init__(
        self,
        group: Any,
        peer: int,
        size: int,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[CommError | None], None],
    ) -> None:
        """Take up a connection.

        :param on_frame: called on the reader's thread with each frame.
        :param on_lost: called there once, when there will be no more: with what the peer did wrong, or None if it is
            gone.
        """
        self.peer = peer
        self.flushed = threading.Event()
        """The peer has got everything that was sent to it, or will never."""
        self._group = group
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._capacity = wire.capacity(size)
        self._slots: deque[tuple[Any, bytearray, Tensor]] = deque()
        self._unacked = 0
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._sending = threading.Lock()  # keeps _sent in the order in which gloo sends
        self._thread = threading.Thread(target=self._read, name=f"aiocomms c10d reads from {peer}", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def send(self, frame: Tensor) -> None:
        """Send a frame. Any thread; never blocks; fails in silence, for the reader notices too."""
        with self._sending:
            work = self._send(frame, _FRAMES)
            if work is not None:
                self._sent.append((work, frame))

    def send_data(self, tensor: Tensor, frame: Tensor) -> Any:
        """Send a large message's bytes, for which :meth:`receive_data` waits, and then a frame that says so.

        :returns: what to keep, with the tensor, until the peer confirms it.
        """
        work = self._send(tensor, _DATA)
        self.send(frame)
        return work

    def receive_data(self, tensor: Tensor) -> Any:
        """Start to receive a large message's bytes; those of several come in the order of these calls.

        :returns: what to ``wait`` for.
        :raises RuntimeError: the peer is lost.
        """
        return self._group.recv([tensor], self.peer, _DATA)

    def send_last(self, frame: Tensor) -> Any:
        """Send a frame before the link is poisoned.

        :returns: what to ``wait`` for, or None if the peer is lost.
        """
        return self._send(frame, _FRAMES)

    def join(self) -> None:
        """Wait for the thread to end; the group is poisoned. Then nothing holds the group any more."""
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
            error = CommError(f"the transport broke: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        self.flushed.set()
        self._on_lost(error)

    def _wait_for_frame(self) -> bool:
        """Wait for the next frame; False: there will be none."""
        try:
            return bool(self._slots) and self._slots[0][0].wait(FOREVER)
        except RuntimeError:
            return False

    def _post(self, buffer: bytearray, tensor: Tensor) -> None:
        # A lost peer is noticed by the wait for the receives that were posted before.
        with contextlib.suppress(RuntimeError):
            self._slots.append((self._group.recv([tensor], self.peer, _FRAMES), buffer, tensor))

    def _handle(self, frame: Frame) -> None:
        if frame.header.kind == ACK:
            with self._sending:
                for _ in range(min(frame.header.ident, len(self._sent))):
                    self._sent.popleft()
        else:
            self._on_frame(frame)
        self._unacked += 1
        if self._unacked == _UNACKED:
            self._unacked = 0
            self.send(wire.pack(Header(ACK, ident=_UNACKED)))
