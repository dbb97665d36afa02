"""The setting of close-on-exec on descriptors that a library opens without it, as Python never does (PEP 446)."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_KINDS: Final = ("socket:", "pipe:", "anon_inode:")


@contextlib.contextmanager
def closed_on_exec() -> Iterator[None]:
    """Set close-on-exec on the sockets, pipes and epolls that are opened within the context, at its end.

    The kernel does not tell which thread has opened a descriptor. So a descriptor that another thread opens meanwhile,
    to be inherited by number, is taken for the library's. Python gives descriptors to its children in the child, later.
    """
    before = _inheritable()
    try:
        yield
    finally:
        for fd in _inheritable() - before:
            with contextlib.suppress(OSError):  # The descriptor was closed meanwhile.
                fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def _inheritable() -> set[int]:
    found = set()
    own = Path("/proc/self/fd")
    for entry in own.iterdir() if own.exists() else ():  # Linux has this folder.
        with contextlib.suppress(OSError):  # The descriptor that lists the folder is gone.
            fd = int(entry.name)
            if not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC and str(entry.readlink()).startswith(_KINDS):
                found.add(fd)
    return found
