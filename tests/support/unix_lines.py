"""The wires of endpoints over Unix sockets, for tests of one process that are no tests of TCP: they use no network."""

from __future__ import annotations

import itertools
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from aiocomms.lowlevel import wires

_ports = itertools.count(1)


class UnixSocket(socket.socket):
    """A Unix socket that takes the addresses of one of TCP on the loopback interface."""

    port = 0

    def __init__(self, *_: Any, fileno: int | None = None) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fileno)

    @property
    def _path(self) -> str:
        return f"\0aiocomms-tests-{os.getpid()}-{self.port}"

    def listen_anywhere(self) -> UnixSocket:
        """Listen on a port of its own."""
        self.port = next(_ports)
        self.bind(self._path)
        self.listen()
        self.setblocking(False)
        return self

    def connect(self, address: Any) -> None:
        """See :meth:`socket.socket.connect`."""
        self.port = address[1]
        super().connect(self._path)

    def accept(self) -> tuple[socket.socket, Any]:
        """See :meth:`socket.socket.accept`."""
        made = UnixSocket(fileno=self._accept()[0])  # type: ignore[attr-defined]
        return made, made.getpeername()

    def getsockname(self) -> Any:
        """See :meth:`socket.socket.getsockname`."""
        return ("127.0.0.1", self.port)

    getpeername = getsockname


def use_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the endpoints of this process meet over them."""
    monkeypatch.setattr(wires, "socket", SimpleNamespace(**{**vars(socket), "socket": UnixSocket}))
    monkeypatch.setattr(wires, "owner", lambda connection: None)
    monkeypatch.setattr(wires, "_listen", lambda host, here: UnixSocket().listen_anywhere())
