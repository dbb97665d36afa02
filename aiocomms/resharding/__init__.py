"""Moves of weights into a running server, between ranks that shard the same tensors in different ways."""

from __future__ import annotations

from aiocomms.resharding.chunks import Chunk
from aiocomms.resharding.source import Source
from aiocomms.resharding.target import Target
from aiocomms.resharding.versions import Weights

__all__ = ["Chunk", "Source", "Target", "Weights"]
