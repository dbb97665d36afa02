"""The *line*: the socket on which a rank reports formed communicators and lost ranks to ``aiocomms run``.

The rank also reports that it leaves. Then another process replaces the process of this rank. The launcher gives a
socket to each process that it starts. An environment variable contains the socket's descriptor and the pid of the
process. A child or a fork of a rank has another pid, so it reports nothing. Before the launcher replaces a process or
ends all ranks, it announces the replacement or the end on the line. This module imports only the standard library. In a
process of another launcher, this module only reads one environment variable.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

LINE: Final = "AIOCOMMS_SUPERVISOR"
"""The environment variable with the descriptor of the line's socket and the pid of the process, such as ``"17:4711"``.
"""
REPLACED, ENDS = "replaced", "ends"
"""The launcher's two announcements: another process replaces this process, or all ranks end."""
RESTARTS: Final = "AIOCOMMS_RESTARTS"
"""The environment variable with this rank's number of restarts since the common start of all ranks."""

_announced: set[str] = set()


def is_newcomer() -> bool:
    """Return whether the launcher has restarted this rank while the other ranks continue.

    A program that this rank starts inherits the environment variable, but is no newcomer.
    """
    return os.environ.get(RESTARTS, "0") != "0" and _line() is not None


def report_formed(rank: int, size: int, base: str, epoch: int) -> None:
    """Report that this process has formed a communicator of all ranks.

    The launcher does not need a report of smaller communicators.

    :param base: the communicator's name before its first reconfiguration.
    """
    _report(rank, size, f"formed {epoch} {base}")


def report_lost(rank: int, size: int, base: str, epoch: int, peer: int) -> None:
    """Report that a communicator of all ranks has lost a rank."""
    _report(rank, size, f"lost {peer} {epoch} {base}")


def report_leaves(rank: int, size: int) -> None:
    """Report that this process ends soon on purpose, and that another process must take its place.

    :param rank: the process's rank in the communicator that the process leaves, which includes all ranks.
    """
    _report(rank, size, "leaves")


def is_supervised() -> bool:
    """Return whether ``aiocomms run`` has started this process."""
    return LINE in os.environ


def is_announced(what: str) -> bool:
    """Return whether the launcher has announced :data:`REPLACED` or :data:`ENDS` to this process."""
    line = _line()
    if line is None:
        return False
    with contextlib.suppress(OSError):  # The launcher has announced nothing new, or is gone.
        _announced.update(os.read(line, 4096).decode().split())
    return what in _announced


def _line() -> int | None:
    descriptor, _, process = os.environ.get(LINE, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None


def _report(rank: int, size: int, text: str) -> None:
    line = _line()
    if line is not None and (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (str(rank), str(size)):
        with contextlib.suppress(OSError):  # A launcher that is gone or does not read needs no report.
            os.write(line, f"{text[:1000]}\n".encode())
