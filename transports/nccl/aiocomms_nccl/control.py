"""One connection to each other rank, which carries frames and whose end is the rank's end."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Mapping
from typing import Final

from aiocomms.errors import ProtocolError
from aiocomms.lowlevel import Waker
from aiocomms_nccl.wire import Frame, pack, unpack

_PIECE: Final = 64 * 1024


class Control:
    """All connections, and what wakes the loop when one has something to say, or when :meth:`wake` is called."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        """Begin.

        :param sockets: a connection for each other rank.
        """
        self._sockets = dict(sockets)
        self._waker = Waker()
        self.wake = self._waker.wake
        self._lock = threading.RLock()  # a signal handler may abort what it interrupts
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

    @property
    def peers(self) -> list[int]:
        """The ranks that are still there."""
        return list(self._sockets)

    def send(self, peer: int, frame: Frame) -> None:
        """Send a frame. Any thread; never blocks; fails in silence, for :meth:`poll` notices too."""
        with self._lock:
            if peer in self._sockets:
                self._unsent[peer] += pack(frame)
                self._push(peer)

    def poll(self) -> list[tuple[int, Frame | ProtocolError | None]]:
        """Frames, and the ranks that they are from; None: the rank has said its last; an error: it makes no sense."""
        self._waker.clear()
        frames: list[tuple[int, Frame | ProtocolError | None]] = []
        for fd, events in self._epoll.poll(0):
            peer = self._peers.get(fd)
            if peer is None:
                continue  # the waker
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
            return  # by whom a signal handler has interrupted; it goes on
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
        """Hand over what is unsent, and close all; off the loop.

        :param patience: seconds that it may take for each rank.
        """
        with self._lock:
            for peer in list(self._sockets):
                connection = self._sockets[peer]
                connection.settimeout(patience)
                with contextlib.suppress(OSError):
                    connection.sendall(self._unsent[peer])
                self._disconnect(peer)
            self._epoll.close()
            self._waker.close()
