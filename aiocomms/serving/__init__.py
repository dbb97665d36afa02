"""A driver and its workers: rank 0 gives out plans, and every rank carries them out."""

from __future__ import annotations

from aiocomms.serving.current import CurrentComm
from aiocomms.serving.driver import Driver
from aiocomms.serving.service import Service

__all__ = ["CurrentComm", "Driver", "Service"]
