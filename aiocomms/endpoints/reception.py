"""The reception of other endpoints: it listens on the loop's thread, and lets in those that prove to be of the job."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
from collections.abc import Callable
from contextvars import Context
from typing import Final

import anyio

from aiocomms.endpoints.meeting import CALLER, ENDPOINT
from aiocomms.errors import ArgumentError, CommError
from aiocomms.lowlevel import Unshared, check_exposed
from aiocomms.lowlevel.auth import job_token
from aiocomms.lowlevel.gate import MOST_HALF_OPEN, Entrance, Proved
from aiocomms.lowlevel.handshake import Dialogue, acceptor_dialogue
from aiocomms.lowlevel.storeserver import owner
from aiocomms.progress.driver import LoopDriver
from aiocomms.transport import Capabilities

_BACKLOG: Final = 1024
_PAUSE: Final = 0.05
"""Seconds before another look for connections, where there is no descriptor to accept them."""


class Reception:
    """The service of one listener. All connections are watched as one descriptor, and without any nothing wakes up."""

    host: str
    port: int

    capabilities: Capabilities = Capabilities(ops=frozenset())

    def __init__(self, host: str, here: Here, driver: LoopDriver) -> None:
        """Listen.

        :param here: where that is, by :func:`find`.
        :raises ArgumentError: the host is not an address of this one; or others could reach it, and the job has no
            token.
        """
        self._listener = _listen(host, here)
        self.host, self.port = str(self._listener.getsockname()[0]), int(self._listener.getsockname()[1])
        self._unshared = Unshared(self._listener.getsockname())
        self._guarded = job_token() is None
        self._driver = driver
        self._key = b""
        self._let_in: Callable[[socket.socket], object] = socket.socket.close
        self._selector = selectors.EpollSelector()
        self._entrance = Entrance(self._selector, MOST_HALF_OPEN)

    def open(self, key: bytes, let_in: Callable[[socket.socket], object]) -> None:
        """Let others in from now on.

        :param key: what only who belongs to the job can know, if it has a token.
        :param let_in: called with each connection that is proved.
        """
        self._key, self._let_in = key, let_in
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._driver.attach(self)

    def close(self) -> None:
        """Listen no more."""
        self._driver.detach(self)
        self._entrance.close()
        self._selector.close()
        self._listener.close()
        self._unshared.release()

    # --------------------------------------------------------------------------------------- what the driver calls

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
        """See :class:`aiocomms.progress.driver.Served`. The driver has reported it; no endpoint is let in any more."""

    def _accept(self) -> bool:
        """Accept connections. False: there is no descriptor for them."""
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
        except OSError:  # The other end has gone again.
            stranger = True
        if stranger:
            connection.close()
        else:
            self._let_in(connection)

    async def _listen_again(self) -> None:
        await anyio.sleep(_PAUSE)
        with contextlib.suppress(ValueError, KeyError, OSError):  # The listener was closed meanwhile.
            self._selector.register(self._listener, selectors.EVENT_READ)


Here = tuple[int, tuple[str, int]]
"""A family of addresses, and an address of this host, whose port is 0."""


def find(host: str) -> Here:
    """Return where an endpoint listens. Blocks: a name has to be looked up.

    :raises ArgumentError: the host is no address.
    """
    job_token()  # from now on it is known
    try:
        family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ArgumentError(f"host is {host!r}, wanted an address of this host: {error}") from None
    return family, (str(where[0]), 0)


def _listen(host: str, here: Here) -> socket.socket:
    """Listen on a free port."""
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
