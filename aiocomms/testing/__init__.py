"""For tests of programs that use aiocomms: worlds of several ranks in one process, without sockets and without GPUs."""

from __future__ import annotations

from aiocomms.testing.world import local_world

__all__ = ["local_world"]
