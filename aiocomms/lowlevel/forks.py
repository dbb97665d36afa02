"""The handling of forks. A child closes its parent's connections, and never destroys objects that have threads.

A connection ends when all processes have closed their descriptors of the connection. If a child kept its parent's
connections, the other ranks would not notice the parent's death.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

Address = str | bytes | tuple[Any, ...]
"""The address that ``getsockname`` returns for a unix or an internet socket."""


class Unshared:
    """The addresses at which ranks listen for connections of other ranks.

    A forked child closes every connection from or to one of these addresses.

    A child recognizes connections by their addresses, because a library does not report the connections that it opens.
    """

    def __init__(self, *addresses: Address) -> None:
        """Register the addresses.

        The addresses stay registered until a call of :meth:`release`, or until no reference to this object is left.
        """
        self._records: list[bytes] = []
        self._owner: Callable[[], object] = lambda: None
        for address in addresses:
            self.add(address)
        _all.add(self)

    def add(self, address: Address) -> None:
        """Add an address, or bytes that contain the address in the kernel's format."""
        self._records.append(_packed(address))

    def remove(self, address: Address) -> None:
        """Remove an address whose connections are closed."""
        self._records.remove(_packed(address))

    def belongs_to(self, owner: object) -> None:
        """Keep these addresses registered as long as ``owner`` exists.

        The owner is the object that uses the connections.

        A child never destroys the owner, because the destructor would wait for threads that only the parent has.
        """
        self._owner = weakref.ref(owner)
        _of[owner] = self

    def release(self) -> None:
        """Remove all addresses.

        Call this method when the connections of these addresses are closed, because other sockets may then get the
        addresses.
        """
        self._records = []
        self._owner = lambda: None

    def covers(self, address: Address) -> bool:
        """Return whether an address is one of these addresses."""
        packed = _packed(address)
        return len(packed) > 0 and any(packed in record for record in self._records)

    def let_go(self) -> None:
        """Release the addresses in a forked child, and ensure that the child never destroys the owner."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._owner()))
        self.release()


_all: weakref.WeakSet[Unshared] = weakref.WeakSet()
_of: weakref.WeakKeyDictionary[object, Unshared] = weakref.WeakKeyDictionary()


def _packed(address: Address) -> bytes:
    """Return the name of a unix socket, or the first bytes of the kernel's struct for an internet socket's address.

    The struct is sockaddr_in or sockaddr_in6. The bytes do not contain the scope ID of a sockaddr_in6.
    """
    if not isinstance(address, tuple):
        return address.encode() if isinstance(address, str) else address
    host, port, *flow = address
    host = host.partition("%")[0]
    if host.startswith("::ffff:"):  # This is an IPv4 address of an IPv6 socket.
        host, flow = host.removeprefix("::ffff:"), []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    head = struct.pack("=H", family) + struct.pack("!H", port)
    return head + (struct.pack("!I", *flow[:1] or [0]) if ":" in host else b"") + socket.inet_pton(family, host)


def _let_go() -> None:
    """Close the parent's connections in a forked child."""
    ours, before = list(_all), socket.getdefaulttimeout()
    if not ours:
        return
    socket.setdefaulttimeout(None)  # With a timeout, a new socket object would set a flag that the parent shares.
    # Each closed number stays in use, because a library would take a later descriptor of that number for its own.
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if any(some.covers(end) for end in _ends(fd) for some in ours):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    socket.setdefaulttimeout(before)
    for some in ours:
        some.let_go()


def _ends(fd: int) -> list[Address]:
    """Return the addresses of both ends of a unix or internet socket; an empty list for any other descriptor."""
    found: list[Address] = []
    with contextlib.suppress(OSError):  # The descriptor that lists the folder is closed by now.
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as it:
                for ask in (it.getsockname, it.getpeername):
                    with contextlib.suppress(OSError):  # The socket is not connected.
                        if it.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
                            found.append(ask())
    return found


os.register_at_fork(after_in_child=_let_go)
