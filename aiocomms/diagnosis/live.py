"""The live view for ``aiocomms top``: programs of the same user can read the state of this process's communicators.

While a communicator is open, a thread waits in ``accept`` on an abstract Unix socket. A client gets the content of
every flight recorder, even while the event loop is blocked. Before the thread sends data, the kernel must confirm that
the client runs as the user of this process. The thread reads no data from the client. While the socket is open,
``/proc/net/unix`` lists the socket's name.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from aiocomms.diagnosis import dumps
from aiocomms.diagnosis.recorder import Header, Item, Snapshot
from aiocomms.diagnosis.statistics import Statistics
from aiocomms.lowlevel.gate import same_user
from aiocomms.lowlevel.threads import copied

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator

PREFIX: Final = "aiocomms-live"
TOLD: Final = 1024
"""The maximum number of a communicator's pending ops that a client gets.

The client gets the oldest ops. It gets idle ops (receives for messages that may never come) only if all other pending
ops fit.
"""
PATIENCE: Final = 1.0
"""The number of seconds within which a client must read each message."""
_LATER: Final = 1.0
"""The number of seconds until the next call of ``accept``, if ``accept`` fails for lack of a file descriptor."""
_log = logging.getLogger("aiocomms")


class Sight(msgspec.Struct):
    """The state of one communicator on one rank."""

    header: Header
    """The header. Its field ``reason`` gives the reason for the communicator's loss.

    This field is empty if the communicator is not lost.
    """
    meeting: str
    """A key that distinguishes communicators with the same name. All ranks of a communicator have the same key."""
    pending: list[Item]
    """The pending ops that a client gets, from the oldest to the newest; idle ops come last."""
    statistics: Statistics


def sight_of(snapshot: Snapshot, secret: bytes, statistics: Statistics) -> Sight:
    """Return a communicator's state for clients.

    :param secret: a secret that only this communicator's ranks share. The result contains a part of the secret.
    """
    oldest = sorted(snapshot.pending, key=lambda item: (item.idle, item.posted or 0.0))[:TOLD]
    return Sight(snapshot.header, secret[:8].hex(), oldest, statistics)


class Leaving(NamedTuple):
    """The ending thread of a live view, and the socket of this thread."""

    listener: socket.socket
    stopped: _thread.LockType

    def finish(self) -> None:
        """Wait for the end of the thread, and close the socket.

        If the thread is sending data to a client, the wait takes up to :data:`PATIENCE` seconds.
        """
        try:
            self.stopped.acquire(timeout=PATIENCE)
        finally:
            self.listener.close()


class LiveView:
    """The socket of this process, the thread that serves it, and the communicators that clients can see."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def reset(self) -> None:
        """Reset the object to its initial state: no communicators, no socket and no thread."""
        # The lock is reentrant: a finalizer that runs under it may close a communicator.
        self._lock = threading.RLock()
        self._comms: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._listener: socket.socket | None = None
        self._guest: socket.socket | None = None
        self._stopping, self._stopped = threading.Event(), _thread.allocate_lock()

    def _leave_to_parent(self) -> None:
        """Close the socket in a forked child.

        If the child kept the socket open, a client could not notice the parent's death.
        """
        for inherited in (self._listener, self._guest):
            if inherited is not None:
                inherited.close()
        self.reset()

    def register(self, comm: Communicator) -> None:
        """Show a communicator to clients until :meth:`unregister`. A failure is logged, and raises no error."""
        if not dumps.wanted():
            return
        with self._lock:
            self._comms.add(comm)
            if self._listener is None:
                try:
                    self._start()
                except (OSError, RuntimeError) as error:
                    _log.info("this process cannot be looked at by `aiocomms top`: %s", error)

    def unregister(self, comm: Communicator) -> Leaving | None:
        """Stop showing a communicator. If no communicator is left, end the thread. Idempotent.

        :returns: a :class:`Leaving`, whose method ``finish`` the caller must call; None if this call ends no thread.
        """
        with self._lock:
            self._comms.discard(comm)
            listener = None if self._comms else self._listener
            if listener is not None:
                self._listener = None
                self._stopping.set()
                for end in filter(None, (listener, self._guest)):
                    with contextlib.suppress(OSError):  # The client may have disconnected.
                        end.shutdown(socket.SHUT_RDWR)
        return None if listener is None else Leaving(listener, self._stopped)

    def _start(self) -> None:
        """Listen on a new socket, and start the thread that serves the socket.

        :raises OSError: there is no free descriptor.
        :raises RuntimeError: the system cannot start a thread.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.settimeout(None)  # The program may have set another default.
            listener.bind(f"\0{PREFIX}/{os.geteuid()}/{os.getpid()}/{secrets.token_hex(8)}")
            listener.listen()
            self._stopping, self._stopped = threading.Event(), _thread.allocate_lock()
            self._stopped.acquire()
            # The start of a threading.Thread waits until the thread runs, which would block the event loop.
            _thread.start_new_thread(self._serve, (listener, self._stopping, self._stopped))
        except BaseException:
            listener.close()
            raise
        self._listener = listener

    def _serve(self, listener: socket.socket, stopping: threading.Event, stopped: _thread.LockType) -> None:
        try:
            while not stopping.is_set():
                try:
                    guest, _ = listener.accept()
                except OSError:  # The listener was shut down, or there is no free descriptor.
                    stopping.wait(_LATER)
                    continue
                with guest:
                    self._guest = guest
                    self._tell(guest, stopping)
                    self._guest = None
        finally:
            stopped.release()

    def _tell(self, guest: socket.socket, stopping: threading.Event) -> None:
        """Send a client the state of all communicators, as one line of JSON for each communicator."""
        guest.settimeout(PATIENCE)
        encoder = msgspec.json.Encoder()
        try:
            if not same_user(guest):
                return
            for comm in copied(self._comms):
                if stopping.is_set():
                    return
                guest.sendall(encoder.encode(comm._sight()) + b"\n")
            guest.sendall(b"\n")  # An empty line ends the answer.
        except OSError:  # The client has disconnected, or does not read.
            pass
        except Exception as error:  # The thread must serve the next client in spite of any exception.
            dumps.complain(f"aiocomms top: {type(error).__name__}: {error}")


live: LiveView = LiveView()
"""The live view of the process. It has a thread and a socket only while a communicator is open."""


def listeners(table: str, uid: int) -> Mapping[int, list[str]]:
    """Return the addresses of the live views of a user's processes, by process number.

    :param table: the content of ``/proc/net/unix``, which shows the leading zero byte of an abstract address as ``@``.
    """
    found: dict[int, list[str]] = {}
    for row in table.splitlines():
        prefix, _, rest = row.rpartition(" ")[2].partition("/")
        owner, _, place = rest.partition("/")
        pid = place.partition("/")[0]
        if prefix == f"@{PREFIX}" and owner == str(uid) and pid.isascii() and pid.isdigit():
            found.setdefault(int(pid), []).append(f"\0{PREFIX}/{rest}")
    return {pid: sorted(set(addresses)) for pid, addresses in sorted(found.items())}
