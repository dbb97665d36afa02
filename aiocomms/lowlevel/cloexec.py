"""The flag close-on-exec for the descriptors that C libraries open without this flag.

Python itself sets the flag (PEP 446).
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_KINDS: Final = ("socket:", "pipe:", "anon_inode:")


@contextlib.contextmanager
def closed_on_exec() -> Iterator[None]:
    """Set close-on-exec, at the end of the context, on sockets, pipes and epolls that were opened within the context.

    The kernel does not report which thread has opened a descriptor. So the context also sets the flag on a descriptor
    that another thread opens before the end of the context. If that thread passes only the number of the descriptor to
    a child, the child cannot use the descriptor. Descriptors that Python passes to a child are safe, because Python
    clears the flag later, in the child.
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
    for entry in own.iterdir() if own.exists() else ():  # Only Linux has this folder.
        with contextlib.suppress(OSError):  # The descriptor that lists the folder is closed by now.
            fd = int(entry.name)
            if not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC and str(entry.readlink()).startswith(_KINDS):
                found.add(fd)
    return found
