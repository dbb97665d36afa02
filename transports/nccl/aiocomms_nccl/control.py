"""The control connections, one to each other rank.

The connections carry frames. A connection ends when the other rank ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import threading
from collections.abc import Mapping
from typing import Final

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import Waker
from aiocomms_nccl.wire import Frame, pack, unpack

_PIECE: Final = 64 * 1024
"""The maximum number of bytes that one call reads from a connection."""
_MONOTONIC: Final = 1  # CLOCK_MONOTONIC


class _Reminder:
    """A timer with a descriptor (``timerfd``), which becomes readable when the timer expires.

    A transport has no other means to run code at a later time.
    """

    def __init__(self) -> None:
        """Create the descriptor. The timer does not run yet.

        :raises OSError: the process has no free descriptor.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._when = (ctypes.c_long * 4)()  # struct itimerspec: the first half, the interval, stays 0
        self.fd: int = libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, seconds: float) -> None:
        """Make the descriptor readable after ``seconds``, which is more than 0."""
        self._when[2], self._when[3] = divmod(round(seconds * 1e9), 10**9)
        self._settime(self.fd, 0, self._when, None)

    def clear(self) -> None:
        """Make the descriptor unreadable until :meth:`set` is called again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class Control:
    """All control connections, and a descriptor that wakes the loop for a frame, a reminder or :meth:`wake`."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        """Take ownership of the connections.

        :param sockets: a connection to each other rank.
        """
        self._sockets = dict(sockets)
        self._waker = Waker()
        self.wake = self._waker.wake
        self._lock = threading.RLock()  # reentrant, because a signal handler may interrupt a send and abort
        self._pushing = False
        self._unsent = {peer: bytearray() for peer in sockets}
        self._received = {peer: bytearray() for peer in sockets}
        self._peers = {connection.fileno(): peer for peer, connection in sockets.items()}
        self._epoll = select.epoll()
        self._epoll.register(self._waker.fileno(), select.EPOLLIN)
        for fd, peer in self._peers.items():
            self._sockets[peer].setblocking(False)
            self._epoll.register(fd, select.EPOLLIN)
        self.fileno = self._epoll.fileno
        self._reminder: _Reminder | None = None
        self.reminds = False
        """True from a call of :meth:`remind` until :meth:`reminded` returns True."""
        self._due = False

    def watch(self, fd: int) -> None:
        """Make the loop wake up whenever the descriptor ``fd`` is readable."""
        self._epoll.register(fd, select.EPOLLIN)

    def remind(self, seconds: float) -> None:
        """Wake the loop once after ``seconds``. Then :meth:`reminded` returns True once.

        If ``seconds`` is 0, the loop wakes in its next iteration. A second call has no effect until :meth:`reminded`
        has returned True. Only the loop's thread calls this method.
        """
        if self.reminds:
            return
        self.reminds = True
        try:
            if seconds > 0 and self._reminder is None:
                self._reminder = _Reminder()
                self._epoll.register(self._reminder.fd, select.EPOLLIN)
        except OSError:
            seconds = 0
        if seconds > 0 and self._reminder is not None:
            self._reminder.set(seconds)
        else:
            self._due = True
            self.wake()

    def reminded(self) -> bool:
        """Return True at the first call after the time that :meth:`remind` has set; otherwise return False."""
        if not self._due:
            return False
        self._due = self.reminds = False
        return True

    @property
    def peers(self) -> list[int]:
        """The ranks whose connections are open."""
        return list(self._sockets)

    def send(self, peer: int, frame: Frame) -> None:
        """Send a frame without blocking. Any thread may call this method. :meth:`poll` reports failures."""
        with self._lock:
            if peer in self._sockets:
                self._unsent[peer] += pack(frame)
                self._push(peer)

    def poll(self) -> list[tuple[int, Frame | ProtocolError | None]]:
        """Return the frames that have arrived, each with its sender's rank.

        An error in place of a frame means that the rank's bytes are invalid. None means that the rank's connection has
        ended.
        """
        self._waker.clear()
        frames: list[tuple[int, Frame | ProtocolError | None]] = []
        for fd, events in self._epoll.poll(0):
            peer = self._peers.get(fd)
            if peer is None:
                if self._reminder is not None and fd == self._reminder.fd:
                    self._reminder.clear()
                    self._due = True
                continue  # the descriptor is the waker's, or one from watch()
            if events & select.EPOLLOUT:
                with self._lock:
                    self._push(peer)
            if events & ~select.EPOLLOUT:
                self._read(peer, frames)
        return frames

    def _read(self, peer: int, frames: list[tuple[int, Frame | ProtocolError | None]]) -> None:
        buffer, ended = self._received[peer], False
        try:
            data = self._sockets[peer].recv(_PIECE)
            buffer += data
            ended = not data
        except BlockingIOError:
            return
        except OSError:
            ended = True
        try:
            frames += [(peer, frame) for frame in unpack(buffer)]
        except ProtocolError as error:
            frames.append((peer, error))
            ended = True
        if ended:
            frames.append((peer, None))
            with self._lock:
                self._disconnect(peer)

    def _push(self, peer: int) -> None:
        if self._pushing:
            return  # a signal handler has interrupted a push, which continues after this call
        connection, unsent = self._sockets[peer], self._unsent[peer]
        self._pushing = True
        try:
            while unsent:
                del unsent[: connection.send(unsent)]
        except BlockingIOError:
            pass
        except OSError:
            unsent.clear()
        finally:
            self._pushing = False
        self._epoll.modify(connection, select.EPOLLIN | (select.EPOLLOUT if unsent else 0))

    def _disconnect(self, peer: int) -> None:
        connection = self._sockets.pop(peer)
        del self._peers[connection.fileno()]
        with contextlib.suppress(OSError):
            self._epoll.unregister(connection)
        connection.close()

    def close(self, patience: float) -> None:
        """Send all unsent frames, and close all connections. This method blocks.

        :param patience: the maximum number of seconds for the sends to each rank.
        """
        with self._lock:
            for peer in list(self._sockets):
                connection = self._sockets[peer]
                connection.settimeout(patience)
                with contextlib.suppress(OSError):
                    connection.sendall(self._unsent[peer])
                self._disconnect(peer)
            self._epoll.close()
            if self._reminder is not None:
                self._reminder.close()
            self._waker.close()
