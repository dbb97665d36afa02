"""The hook that handles an exception which ends a rank before the rendezvous.

The hook reports the exception to the other ranks, which wait for this rank. If a launcher has started this process as a
rank, ``import aiocomms`` imports this module. This module imports only the standard library, so that ``import
aiocomms`` does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final

MARKS: Final = {
    "torchrun": "RANK",
    "Open MPI": "OMPI_COMM_WORLD_RANK",
    "MPICH": "PMI_RANK",
    "Slurm": "SLURM_PROCID",
}
"""A mapping from each launcher to the environment variable in which it stores a process's rank."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Start:
    """The state of this process: whether the process has met the other ranks."""

    has_met = False


def has_met() -> bool:
    """Return whether this process has met the other ranks.

    After the meeting, communicators report failures to the other ranks.
    """
    return _Start.has_met


def meets() -> None:
    """Record that this process has met the other ranks."""
    _Start.has_met = True


def watch() -> None:
    """Install the hook that reports to the other ranks an exception which ends this process."""
    sys.excepthook = _telling(sys.excepthook, os.getpid())


def _telling(before: Hook, process: int) -> Hook:
    """Return an exception hook that first calls ``before``.

    Then the hook reports the exception to the other ranks, unless this process is a forked child.
    """

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Exception) and os.getpid() == process and not has_met():
            with contextlib.suppress(Exception):  # The user has already seen the error that ends the process.
                importlib.import_module("aiocomms.bootstrap.casualties").tell(error)

    return told
