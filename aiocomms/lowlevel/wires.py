"""The connections between endpoints, over sockets. In a simulation, other classes replace the classes of this module.

The reception (the listener) runs on the event loop's thread. The reception accepts only processes that prove that they
belong to the job.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Final

import anyio

from aiocomms.errors import ArgumentError, CommError, CommTimeoutError, PeerDiedError, ProtocolError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import MAX_RECORD, check_exposed, job_token
from aiocomms.lowlevel.forks import Unshared
from aiocomms.lowlevel.gate import MOST_HALF_OPEN, Entrance, Proved
from aiocomms.lowlevel.handshake import Dialogue, acceptor_dialogue
from aiocomms.lowlevel.jobstore import prove
from aiocomms.lowlevel.lines import CALLER, ENDPOINT, LineCall, Reception, ReceptionDriver, Wires
from aiocomms.lowlevel.sockets import read_exactly, tune
from aiocomms.lowlevel.storeserver import LENGTH, owner
from aiocomms.transport import Capabilities

_BACKLOG: Final = 1024
_PAUSE: Final = 0.05
"""The time in seconds until the reception accepts connections again, if no descriptor was left for a connection."""
_MOST: Final = 2 * MAX_RECORD

Here = tuple[int, tuple[str, int]]
"""An address family, and an address of this host with port 0."""


class ClosableSocket:
    """A socket that any thread may close. The descriptor is closed when no thread waits for it any more.

    The kernel gives the number of a closed descriptor to the next socket. If this class closed the descriptor earlier,
    a waiting thread would wait for the wrong socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._users, self._closed = 0, False

    @contextlib.contextmanager
    def used(self) -> Iterator[socket.socket]:
        """Yield the socket, for which the calling thread may wait within the context.

        :raises OSError: the socket was closed.
        """
        with self._lock:
            self.check()
            self._users += 1
        try:
            yield self._connection
        finally:
            with self._lock:
                self._users -= 1
                self._release()

    def check(self) -> None:
        """Check that the socket is open.

        :raises OSError: the socket was closed.
        """
        if self._closed:
            raise OSError(errno.EBADF, "this endpoint has closed it")

    def close(self) -> None:
        """Wake a thread that waits for the socket, and close the socket. Idempotent."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._release()

    def _release(self) -> None:
        if self._closed and not self._users:
            self._connection.close()


class SocketLine:
    """See :class:`EndpointLine`."""

    def __init__(self, connection: ClosableSocket, seconds: float = 0) -> None:
        """Use an authenticated connection as a line.

        :param seconds: the time in seconds for all calls of the line, in total.
        :raises OSError: the other endpoint is gone.
        """
        self._connection = connection
        with connection.used() as used:
            self.host: str = str(tune(used).getpeername()[0])
        self.ends: float = clock.now() + seconds

    def tell(self, what: bytes) -> None:
        """See :meth:`EndpointLine.tell`."""
        with self._named() as connection:
            connection.sendall(LENGTH.pack(len(what)) + what)

    def hear(self) -> bytes:
        """See :meth:`EndpointLine.hear`."""
        with self._named() as connection:
            (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size))
            if length > _MOST:
                raise ProtocolError(f"the other endpoint sends {length} bytes, wanted at most {_MOST}")
            return read_exactly(connection, length)

    def extend(self, seconds: float) -> None:
        """See :meth:`EndpointLine.extend`."""
        self.ends = clock.now() + seconds

    def close(self) -> None:
        """See :meth:`EndpointLine.close`."""
        self._connection.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[socket.socket]:
        try:
            with self._connection.used() as connection:
                connection.settimeout(_left(self.ends))
                yield connection
        except TimeoutError:
            raise CommTimeoutError("the other endpoint did not answer in time") from None
        except OSError as error:
            raise PeerDiedError(f"the connection with the other endpoint broke: {error}") from error


class SocketCall:
    """See :class:`LineCall`."""

    def __init__(self, host: str, port: int, key: bytes, seconds: float, name: str) -> None:
        """See :meth:`Wires.call`."""
        self._there, self._key, self._seconds = (host, port), key, seconds
        self._where = f"the endpoint {name} at {host}:{port}"
        try:
            self._connection = ClosableSocket(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        except OSError as error:
            raise CommError(f"no connection can be made: {error}") from error

    def run(self) -> SocketLine:
        """See :meth:`LineCall.run`."""
        ends = clock.now() + self._seconds
        try:
            with self._connection.used() as connection:
                connection.settimeout(self._seconds)
                connection.connect(self._there)
                self._connection.check()  # A socket that was not connected could not be shut down.
                prove(connection, self._key, CALLER, _left(ends), ENDPOINT)
                return SocketLine(self._connection, _left(ends))
        except TimeoutError:
            raise CommTimeoutError(f"{self._where} did not answer within {self._seconds:g} s") from None
        except OSError as error:
            raise PeerDiedError(f"{self._where} cannot be reached: {error}") from error

    def hang_up(self) -> None:
        """See :meth:`LineCall.hang_up`."""
        self._connection.close()


class SocketReception:
    """The listener of one endpoint.

    The event loop watches one epoll descriptor for all connections of the listener, and does not poll.
    """

    host: str
    port: int

    capabilities: Capabilities = Capabilities(ops=frozenset())

    def __init__(self, host: str, here: Here, driver: ReceptionDriver) -> None:
        """Listen on a free port.

        :param here: the address that :meth:`SocketWires.find` has found.
        :raises ArgumentError: the address is a wildcard, or is not an address of this host; or other hosts could reach
            the address, and the job has no token.
        :raises CommError: listening fails.
        """
        self._listener = _listen(host, here)
        self.host, self.port = str(self._listener.getsockname()[0]), int(self._listener.getsockname()[1])
        self._unshared = Unshared(self._listener.getsockname())
        self._guarded = job_token() is None
        self._driver = driver
        self._key = b""
        self._let_in: Callable[[SocketLine], object] = SocketLine.close
        self._selector = selectors.EpollSelector()
        self._entrance = Entrance(self._selector, MOST_HALF_OPEN)

    def open(self, key: bytes, let_in: Callable[[SocketLine], object]) -> None:
        """See :meth:`Reception.open`."""
        self._key, self._let_in = key, let_in
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._driver.attach(self)

    def close(self) -> None:
        """See :meth:`Reception.close`."""
        self._driver.detach(self)
        self._entrance.close()
        self._selector.close()
        self._listener.close()
        self._unshared.release()

    # ----------------------------------------------------------------------------------------------- the driver's calls

    def fileno(self) -> int:
        """See :class:`aiocomms.progress.driver.Served`."""
        return self._selector.fileno()

    def progress(self) -> bool:
        """See :class:`aiocomms.progress.driver.Served`."""
        for key, _ in self._selector.select(0):
            if key.data is not None:
                self._enter(self._entrance.read(key.data))
            elif not self._accept():
                self._selector.unregister(self._listener)  # The listener would stay readable.
                self._driver.spawn(self._listen_again, Context())
        self._entrance.expired()
        return False

    def on_failure(self, error: CommError) -> None:
        """See :class:`aiocomms.progress.driver.Served`.

        The driver has reported the error. From then on, no call is accepted.
        """

    def _accept(self) -> bool:
        """Accept connections. Return False if no descriptor is left for a connection."""
        before = len(self._entrance), self._entrance.dropped
        try:
            proved = self._entrance.accept(self._listener, self._dialogue)
        except OSError:  # The selector has no room for a descriptor.
            return False
        for one in proved:
            self._enter(one)
        return bool(proved) or before != (len(self._entrance), self._entrance.dropped)

    def _dialogue(self, connection: socket.socket) -> Dialogue:
        return acceptor_dialogue(connection, self._key, ENDPOINT, (CALLER,))

    def _enter(self, proved: Proved | None) -> None:
        if proved is None:
            return
        connection = proved[1]
        try:
            stranger = self._guarded and owner(connection) not in (None, os.geteuid())
            connection.setblocking(True)
            line = SocketLine(ClosableSocket(connection))
        except OSError:  # The other end is gone again.
            stranger = True
        if stranger:
            connection.close()
        else:
            self._let_in(line)

    async def _listen_again(self) -> None:
        await anyio.sleep(_PAUSE)
        with contextlib.suppress(ValueError, KeyError, OSError):  # The listener was closed meanwhile.
            self._selector.register(self._listener, selectors.EVENT_READ)


class SocketWires:
    """See :class:`Wires`."""

    def find(self, host: str) -> Callable[[ReceptionDriver], Reception]:
        """See :meth:`Wires.find`."""
        job_token()  # This reads the token now, in a thread that may block.
        try:
            family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ArgumentError(f"host is {host!r}, wanted an address of this host: {error}") from None
        return functools.partial(SocketReception, host, (family, (str(where[0]), 0)))

    def call(self, host: str, port: int, key: bytes, seconds: float, name: str) -> LineCall:
        """See :meth:`Wires.call`."""
        return SocketCall(host, port, key, seconds, name)


_SOCKETS: Final = SocketWires()


def wires() -> Wires:
    """Return the factory of connections for endpoints.

    A simulation has its own factory. Outside a simulation, the factory makes connections over sockets.
    """
    return _SOCKETS if clock.simulation is None else clock.simulation.wires()


def _listen(host: str, here: Here) -> socket.socket:
    """Return a listener on a free port."""
    family, where = here
    try:
        listener = socket.create_server(where, family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ArgumentError(f"host is {host!r}, wanted an address of this host: {error}") from None
        raise CommError(f"nothing can listen at {host!r}: {error}") from error
    address = str(listener.getsockname()[0])
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
        if ip.is_unspecified:
            raise ArgumentError(f"host is {host!r}, which is every interface, wanted one address")
        if not ip.is_loopback:
            check_exposed(f"the endpoint at {address} can be reached from other hosts")
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _left(ends: float) -> float:
    return max(0.001, ends - clock.now())
