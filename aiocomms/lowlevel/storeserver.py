"""The server of a job's store, which accepts connections only from ranks, and only while they form a communicator.

torch's ``TCPStore`` answers every connection, never closes a connection or deletes a value by itself, and listens until
the store ends. This server gives access to a ``HashStore`` of torch only to connections that have authenticated
(:mod:`aiocomms.lowlevel.gate`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final
from weakref import WeakSet

import msgspec
from torch.distributed import HashStore

from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import MAX_RECORD
from aiocomms.lowlevel.forks import Unshared
from aiocomms.lowlevel.gate import MOST_HALF_OPEN, Entrance, Proved
from aiocomms.lowlevel.handshake import Dialogue, RefusedError, acceptor_dialogue
from aiocomms.lowlevel.sockets import tune
from aiocomms.lowlevel.waker import Waker

SERVER: Final = "the store"
"""The name of the server in the handshake, in place of a rank."""
LENGTH: Final = struct.Struct("!I")
"""The format of the length, which precedes each request and each answer."""
OUTAGE: Final = 120
"""The time in seconds after which a connection ends if the host of the rank no longer answers.

The end of this connection does not mean that the rank is dead.
"""
LONGEST: Final = 16 * MAX_RECORD
"""The largest size in bytes of a request.

A record always fits in a request. The limit also bounds the memory that unread requests can use.
"""

_RANKS: Final = range(2**20)
_PIECE: Final = 2**16
_PAUSE: Final = 0.01
"""The time in seconds until the server accepts connections again, if there was no free descriptor for a connection."""
_NLMSGHDR: Final = struct.Struct("=IHHII")
_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NETLINK_SOCK_DIAG = 20, 1, 4
_UID_AT: Final = 16 + 4 + 48 + 12  # The parts are nlmsghdr, then of inet_diag_msg states, idiag_sockid, timer, queues.

_log = logging.getLogger("aiocomms")
_servers: WeakSet[StoreServer] = WeakSet()


def perform(kept: HashStore, what: str, args: Sequence[Any]) -> Any:
    """Execute a rank's request to the store. This function never waits.

    :raises ValueError: the store does not know the request.
    """
    match what:
        case "get":
            try:
                return kept.get(*args) if kept.check(list(args)) else None
            except RuntimeError:  # Another rank has deleted the key meanwhile.
                return None
        case "multi_get":
            (keys,) = args
            if len(set(keys)) != len(keys):
                # With a repeated key, an answer could be larger than all values in the store.
                raise ValueError("a key is asked for twice")
            return [perform(kept, "get", [key]) for key in keys]
        case "check":
            return kept.check(*args)
        case "set" | "append" | "add" | "compare_set" | "delete_key" | "num_keys":
            return getattr(kept, what)(*args)
    raise ValueError(f"{what!r} is no request")


class _Line:
    """The connection to a rank.

    The object also holds the received part of the rank's next request, and the answers that were not sent yet.
    """

    __slots__ = ("answers", "connection", "request")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.request = bytearray()
        self.answers = bytearray()


class StoreServer:
    """The server of a store for the ranks of a job. The server runs on a separate thread.

    The port is open while ranks form a communicator over the store. The thread ends only when this process no longer
    uses the store and no rank is connected, because other ranks may need the store longer than this process.
    """

    address: tuple[str, int]
    family: socket.AddressFamily

    def __init__(self, listener: socket.socket, key: bytes, *, guarded: bool) -> None:
        """Begin to serve the store. The caller counts as the first user of the server.

        :param listener: the listening socket, which the server owns and closes from now on.
        :param key: the key that only the ranks of the job know, if the job has a token.
        :param guarded: True if the job has no token. Then the server accepts only processes of this system user, if the
            kernel reports the user of a process.
        :raises CommError: no descriptor or no thread is left for the server.
        """
        self.kept: HashStore = HashStore()
        # A get waits for this time if its key is deleted between check and get.
        self.kept.set_timeout(timedelta(milliseconds=1))
        self._key, self._guarded = key, guarded
        self.address, self.family = listener.getsockname(), listener.family
        self._users, self._forming = 1, 0
        self._listener: socket.socket | None = None
        self._lines: dict[socket.socket, _Line] = {}
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._lock = threading.RLock()  # A garbage collection may release a store while its thread holds this lock.
        Unshared(self.address).belongs_to(self)
        self._ended = False
        with contextlib.ExitStack() as stack:
            stack.callback(listener.close)
            try:
                self._selector = stack.enter_context(selectors.DefaultSelector())
                self._waker = Waker()
                stack.callback(self._waker.close)
                self._entrance = Entrance(self._selector, MOST_HALF_OPEN)
                self._selector.register(self._waker, selectors.EVENT_READ)
                self._open(listener)
                self._thread = threading.Thread(target=self._serve, name="aiocomms store", daemon=True)
                self._thread.start()
            except (OSError, RuntimeError) as error:
                raise CommError(f"the store cannot be served: {error}") from error
            stack.pop_all()
        _servers.add(self)

    def take(self) -> bool:
        """Add a user of the server.

        A user is an object of this process that needs the server. Return False if the server has already ended.
        """
        return self._call(self._take)

    def let_go(self) -> None:
        """Remove a user of the server.

        When no user is left, the server closes the port. If no rank is connected either, the thread ends.
        """
        self._call(self._let_go)
        while not (self._users or self._lines) and self._thread.is_alive():
            if threading.current_thread() is self._thread:
                return
            self._thread.join(_PAUSE)  # The server leaves no thread behind, unless another user is added meanwhile.

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Let ranks connect within the context.

        When the last of these contexts ends, the server closes the port, but keeps the connections.
        """
        self._call(self._begin_to_listen)
        try:
            yield
        finally:
            self._call(self._end_to_listen)

    @property
    def is_there(self) -> bool:
        """True while the server runs in this process."""
        return not self._ended

    def disown(self) -> None:
        """Mark the server as ended in a forked child, because the child has no copy of the server's thread."""
        self._ended, self._lock = True, threading.RLock()

    def _call(self, call: Callable[[], None]) -> bool:
        """Make a call on the server's thread. Return False if the server's thread has ended."""
        if threading.current_thread() is self._thread:
            call()
            return not self._ended
        done: Future[None] = Future()
        with self._lock:
            if self._ended:
                return False
            self._calls.append((call, done))
        self._waker.wake()
        done.result()
        return True

    # ------------------------------------------------------------------------------------------- the server's thread

    def _take(self) -> None:
        self._users += 1

    def _let_go(self) -> None:
        self._users -= 1
        if not self._users:
            self._shut()
            for line in list(self._lines.values()):  # A connection that has ended must not keep the server.
                self._read(line)

    def _begin_to_listen(self) -> None:
        self._forming += 1
        if self._listener is None:
            try:
                self._open(socket.create_server(self.address, family=self.family, backlog=socket.SOMAXCONN))
            except OSError as error:  # Another process has taken the port. Connected ranks still meet.
                _log.warning("the store accepts no new connections at %s: %s", self.address, error)

    def _end_to_listen(self) -> None:
        self._forming -= 1
        if not self._forming:
            self._shut()

    def _open(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener

    def _shut(self) -> None:
        self._entrance.drop_all()
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _serve(self) -> None:
        try:
            while not self._over():
                self._turn()
        except Exception as error:  # This is a defect. The ranks must not wait for answers.
            _log.error("the store of this job is broken", exc_info=error)
        finally:
            with self._lock:
                self._ended = True
            self._shut()
            for line in list(self._lines.values()):
                self._drop(line)
            self._waker.close()
            self._selector.close()
            while self._calls:
                self._calls.popleft()[1].set_result(None)

    def _over(self) -> bool:
        with self._lock:
            self._ended = not (self._users or self._lines or self._calls)
            return self._ended

    def _turn(self) -> None:
        ends = self._entrance.next_end()
        for key, events in self._selector.select(None if ends == math.inf else max(0.0, ends - clock.now())):
            what = key.data
            if isinstance(what, _Line):
                if events & selectors.EVENT_WRITE:
                    self._write(what)
                if events & selectors.EVENT_READ:
                    self._read(what)
            elif what is not None:
                self._let_in(self._entrance.read(what))
            elif key.fileobj is self._waker:
                self._do_calls()
            elif key.fileobj is self._listener:
                self._accept()
        self._entrance.expired()

    def _do_calls(self) -> None:
        self._waker.clear()
        while self._calls:
            call, done = self._calls.popleft()
            try:
                call()
            except BaseException as error:  # The error is the caller's to handle.
                done.set_exception(error)
            else:
                done.set_result(None)

    def _accept(self) -> None:
        assert self._listener is not None
        before = len(self._entrance), self._entrance.dropped
        for proved in self._entrance.accept(self._listener, self._dialogue):
            self._let_in(proved)
        if before == (
            len(self._entrance),
            self._entrance.dropped,
        ):  # There may be no descriptor, and a waiting connection keeps the listener readable.
            clock.sleep(_PAUSE)

    def _dialogue(self, connection: socket.socket) -> Dialogue:
        return acceptor_dialogue(connection, self._key, SERVER, _RANKS)

    def _let_in(self, proved: Proved | None) -> None:
        if proved is None:
            return
        connection = proved[1]
        try:
            if self._guarded and owner(connection) not in (None, os.geteuid()):
                raise RefusedError
            tune(connection, OUTAGE)
        except (OSError, RefusedError):  # An OSError means that the rank is gone again.
            self._entrance.dropped += 1
            connection.close()
            return
        line = self._lines[connection] = _Line(connection)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _read(self, line: _Line) -> None:
        if line.connection not in self._lines:
            return
        try:
            data = line.connection.recv(_PIECE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        line.request += data
        try:
            if not data:
                raise ValueError("the rank is gone")
            self._answer(line)
        except Exception:  # The rank is gone or sends nonsense; torch's store raises errors of many classes.
            self._drop(line)

    def _answer(self, line: _Line) -> None:
        """Answer all requests that have arrived completely."""
        while len(line.request) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(line.request)
            if length > LONGEST:
                raise ValueError(f"a request has {length} bytes, wanted at most {LONGEST}")
            if len(line.request) < LENGTH.size + length:
                break
            what, *args = msgspec.msgpack.decode(line.request[LENGTH.size : LENGTH.size + length], type=list)
            del line.request[: LENGTH.size + length]
            answer = msgspec.msgpack.encode(perform(self.kept, what, args))
            line.answers += LENGTH.pack(len(answer)) + answer
        self._write(line)

    def _write(self, line: _Line) -> None:
        try:
            del line.answers[: line.connection.send(line.answers)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(line)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.answers else 0)
        self._selector.modify(line.connection, wanted, line)

    def _drop(self, line: _Line) -> None:
        if self._lines.pop(line.connection, None) is not None:
            self._selector.unregister(line.connection)
            line.connection.close()


def owner(connection: socket.socket) -> int | None:
    """Return the user ID of the process at the other end of a local connection.

    Return None if the kernel does not report the user ID.
    """
    mine, theirs = connection.getsockname(), connection.getpeername()
    ends = [socket.inet_pton(connection.family, end[0].partition("%")[0]).ljust(16, b"\0") for end in (theirs, mine)]
    ask = struct.pack("=BBBxI", connection.family, socket.IPPROTO_TCP, 0, 2**32 - 1)
    ask += struct.pack("!HH", theirs[1], mine[1]) + ends[0] + ends[1] + struct.pack("=I8s", 0, b"\xff" * 8)
    ask = _NLMSGHDR.pack(_NLMSGHDR.size + len(ask), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + ask
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel,
    ):
        kernel.settimeout(1.0)
        kernel.send(ask)
        said = kernel.recv(4096)
        if _NLMSGHDR.unpack_from(said)[1] == _SOCK_DIAG_BY_FAMILY:
            return int(struct.unpack_from("=I", said, _UID_AT)[0])
    return None


def _disown_in_child() -> None:
    for server in list(_servers):
        server.disown()


os.register_at_fork(after_in_child=_disown_in_child)
