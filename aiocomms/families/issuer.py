"""The base class of the method families: the method ``_issue``, through which each family starts its ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from aiocomms.ops import Op, checks
from aiocomms.ops.checks import Timeout
from aiocomms.progress.work import Work


class Issuer(ABC):
    """The part of a communicator that the method families use."""

    name: str
    rank: int
    size: int
    device: torch.device
    _core: checks.Group
    """What checks of arguments know of the communicator."""

    @abstractmethod
    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: Timeout = None) -> Work[Any]:
        """Check an op, post it, and return its work."""
