"""Support for tests of programs that use aiocomms: worlds of several ranks in one process, without sockets or GPUs."""

from __future__ import annotations

from aiocomms.testing.together import run_ranks
from aiocomms.testing.world import local_world

__all__ = ["local_world", "run_ranks"]
