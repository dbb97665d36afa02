"""Catch an exception that ends a rank before the rendezvous, and tell the other ranks, which wait for it.

:mod:`aiocomms` imports this module where a launcher has started a rank, so it imports nothing but the standard library.
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
"""The variable in which each launcher tells a process its rank."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Start:
    """The state of this process's start."""

    has_met = False


def has_met() -> bool:
    """Return whether this process has met the other ranks: from then on communicators tell them what becomes of it."""
    return _Start.has_met


def meets() -> None:
    """Note that it has."""
    _Start.has_met = True


def watch() -> None:
    """Tell the others from now on of an exception that ends this process."""
    sys.excepthook = _telling(sys.excepthook, os.getpid())


def _telling(before: Hook, process: int) -> Hook:
    """Return a hook that calls another one, and tells the others; in a forked child it does the former alone."""

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Exception) and os.getpid() == process and not has_met():
            with contextlib.suppress(Exception):  # The error that has ended the process has been shown.
                importlib.import_module("aiocomms.bootstrap.casualties").tell(error)

    return told
