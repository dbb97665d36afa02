"""Support for tests of programs that use aiocomms.

A world is a list with the communicators of several ranks. All ranks of a world run in one process, without sockets or
GPUs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from aiocomms.testing.together import run_ranks
from aiocomms.testing.world import local_world

if TYPE_CHECKING:
    from aiocomms.testing.simulation import Faults, History, explore, here, simulate

__all__ = ["Faults", "History", "explore", "here", "local_world", "run_ranks", "simulate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'aiocomms.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("aiocomms.testing.simulation"), name)
    return value


def __dir__() -> list[str]:
    return __all__
