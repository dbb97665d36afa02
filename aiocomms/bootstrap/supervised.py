"""Reports of a rank to ``aiocomms run``: which communicators it has formed, and which rank they have lost.

The launcher gives each process that it starts a pipe of its own, and says in the environment which descriptor that is,
and of which process. So a program that a rank starts, or a fork of it, reports nothing. This module imports nothing
but the standard library, and a process that another launcher has started does no more than look for one variable.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

PIPE: Final = "AIOCOMMS_SUPERVISOR"
"""The variable with the descriptor of the pipe and the number of the process whose it is: ``"17:4711"``."""
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


def is_supervised() -> bool:
    """Return whether ``aiocomms run`` has started this process."""
    return PIPE in os.environ


def _report(rank: int, size: int, text: str) -> None:
    descriptor, _, process = os.environ.get(PIPE, "").partition(":")
    ours = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if process == str(os.getpid()) and ours == (str(rank), str(size)):
        with contextlib.suppress(OSError):  # The launcher is gone, or does not read: then it needs no report.
            os.write(int(descriptor), f"{text[:1000]}\n".encode())
