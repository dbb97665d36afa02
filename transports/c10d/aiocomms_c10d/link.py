"""One peer: the frames that go to it and come from it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

from aiocomms.errors import CommError
from aiocomms_c10d import wire
from aiocomms_c10d.wire import Frame

FOREVER: Final = timedelta(days=100)
"""gloo closes every connection of a rank when one wait expires, so none may; what blocks is freed by ``poison``."""

_FRAMES, _DATA = 0, 1
"""gloo tags."""
_RING: Final = 4
"""Receives posted ahead: gloo sends nothing before its peer has posted the receive for it."""
_BATCH: Final = 16
"""Frames whose sends are looked after together."""


class Link:
    """Sends to and receives from one peer.

    Frames arrive in the order in which they were sent. gloo tells the end of a send or a receive only to a thread that
    waits for it, so there is one that waits for the next frame, and one that waits for sends, in their order.
    """

    def __init__(
        self, group: Any, peer: int, size: int, heard: Callable[[Frame], None], lost: Callable[[CommError | None], None]
    ) -> None:
        """Take up a connection.

        :param heard: called on the reader's thread with each frame.
        :param lost: called there once, when there will be no more: with what the peer did wrong, or None if it is gone.
        """
        self.peer = peer
        self.parted = threading.Event()
        """The peer has got everything that was sent to it, or will never."""
        self._group = group
        self._heard = heard
        self._lost = lost
        self._slots: deque[tuple[Any, bytearray, Tensor]] = deque()
        self._capacity = wire.capacity(size)
        self._sent: deque[tuple[Any, Tensor, Callable[[], None] | None]] = deque()
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, name=f"aiocomms c10d reads from {peer}", daemon=True),
            threading.Thread(target=self._reap, name=f"aiocomms c10d sends to {peer}", daemon=True),
        ]

    def start(self) -> None:
        """Begin to listen."""
        for thread in self._threads:
            thread.start()

    def send(self, frame: Tensor) -> None:
        """Send a frame. Any thread; never blocks; fails in silence, for the reader notices too."""
        self._start_send(frame, _FRAMES, None)

    def send_data(self, tensor: Tensor, frame: Tensor, done: Callable[[], None]) -> None:
        """Send a large message's bytes, for which :meth:`receive_data` waits, and then a frame that says so.

        :param done: called on another thread when the bytes have left; never if the peer is lost.
        """
        self._start_send(tensor, _DATA, done)
        self.send(frame)

    def receive_data(self, tensor: Tensor) -> Any:
        """Start to receive a large message's bytes; those of several come in the order of these calls.

        :returns: what to ``wait`` for.
        :raises RuntimeError: the peer is lost.
        """
        return self._group.recv([tensor], self.peer, _DATA)

    def last_words(self, frame: Tensor) -> Any:
        """Send a frame before the link is poisoned.

        :returns: what to ``wait`` for, or None if the peer is lost.
        """
        group = self._group
        try:
            return None if group is None else group.send([frame], self.peer, _FRAMES)
        except RuntimeError:
            return None

    def join(self) -> None:
        """Wait for the threads to end; the group is poisoned. Then nothing holds the group any more."""
        self._wakes.put(False)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._slots.clear()
        self._group = None

    def _start_send(self, tensor: Tensor, tag: int, done: Callable[[], None] | None) -> None:
        group = self._group
        if group is None:
            return
        try:
            work = group.send([tensor], self.peer, tag)
        except RuntimeError:
            return
        self._sent.append((work, tensor, done))
        if done is not None or len(self._sent) >= _BATCH:
            self._wakes.put(True)

    def _reap(self) -> None:
        """Keep what is being sent until gloo has let go of it."""
        again = True
        while again:
            again = self._wakes.get()
            while self._sent:
                work, _tensor, done = self._sent.popleft()
                try:
                    work.wait(FOREVER)
                except RuntimeError:
                    continue
                if done is not None:
                    done()

    def _read(self) -> None:
        error: CommError | None = None
        try:
            for _ in range(_RING):
                buffer = bytearray(self._capacity)
                self._post(buffer, torch.frombuffer(buffer, dtype=torch.uint8))
            while self._arrived():
                _, buffer, tensor = self._slots.popleft()
                self._heard(wire.unpack(buffer, tensor))
                self._post(buffer, tensor)
        except CommError as wrong:
            error = wrong
        except Exception as wrong:
            error = CommError(f"the transport broke: {type(wrong).__name__}: {wrong}")
            error.__cause__ = wrong
        self.parted.set()
        self._lost(error)

    def _arrived(self) -> bool:
        """Wait for the next frame; False: there will be none."""
        try:
            return bool(self._slots) and self._slots[0][0].wait(FOREVER)
        except RuntimeError:
            return False

    def _post(self, buffer: bytearray, tensor: Tensor) -> None:
        # A lost peer is noticed by the wait for the receives that were posted before.
        with contextlib.suppress(RuntimeError):
            self._slots.append((self._group.recv([tensor], self.peer, _FRAMES), buffer, tensor))
