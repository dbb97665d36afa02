"""Weights that move into a running server: tensors sharded one way over some ranks, and another way over others."""

from __future__ import annotations

from aiocomms.resharding.chunks import Chunk
from aiocomms.resharding.source import Source
from aiocomms.resharding.target import Target
from aiocomms.resharding.versions import Weights

__all__ = ["Chunk", "Source", "Target", "Weights"]
