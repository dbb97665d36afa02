"""The line between a rank and ``aiocomms run``: the rank reports which communicators it has formed and what they lose.

It also reports that it leaves, so that another process takes its place. The launcher gives each process that it starts
a socket of its own, and says in the environment which descriptor that is, and of which process. So a program that a
rank starts, or a fork of it, reports nothing. Before the launcher ends a process to replace it by another, it says so
there. This module imports nothing but the standard library, and a process that another launcher has started does no
more than look for one variable.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

LINE: Final = "AIOCOMMS_SUPERVISOR"
"""The variable with the descriptor of the line and the number of the process whose it is: ``"17:4711"``."""
REPLACED: Final = b"replaced\n"
"""The launcher's word that another process takes this one's place."""
RESTARTS: Final = "AIOCOMMS_RESTARTS"
"""The variable that says how many processes have been this rank before, since all ranks were started together."""


def is_newcomer() -> bool:
    """Return whether the launcher has started this rank anew, while the others go on."""
    return os.environ.get(RESTARTS, "0") != "0"


def report_formed(rank: int, size: int, base: str, epoch: int) -> None:
    """Report a communicator of all ranks that this process has formed; one of other ranks is none of the launcher's.

    :param base: the communicator's name in its first epoch.
    """
    _report(rank, size, f"formed {epoch} {base}")


def report_lost(rank: int, size: int, base: str, epoch: int, peer: int) -> None:
    """Report a rank that is lost to a communicator of all ranks."""
    _report(rank, size, f"lost {peer} {epoch} {base}")


def report_leaves(rank: int, size: int) -> None:
    """Report that this process ends soon, by its own will, and that another one is to take its place.

    :param rank: its rank in the communicator that it leaves, which is one of all ranks.
    """
    _report(rank, size, "leaves")


def is_supervised() -> bool:
    """Return whether ``aiocomms run`` has started this process."""
    return LINE in os.environ


def is_replaced() -> bool:
    """Return whether the launcher ends this process so that another takes its place; read once, at the end."""
    line = _line()
    with contextlib.suppress(OSError):  # The launcher has said nothing, or is gone.
        return line is not None and os.read(line, len(REPLACED)) == REPLACED
    return False


def _line() -> int | None:
    descriptor, _, process = os.environ.get(LINE, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None


def _report(rank: int, size: int, text: str) -> None:
    line = _line()
    if line is not None and (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (str(rank), str(size)):
        with contextlib.suppress(OSError):  # The launcher is gone, or does not read: then it needs no report.
            os.write(line, f"{text[:1000]}\n".encode())
