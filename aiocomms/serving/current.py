"""The class ``CurrentComm``, which the layers of a model store in place of a communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.communicator.collectives import Collectives
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.lane import Lane
from aiocomms.communicator.objects import Objects
from aiocomms.communicator.p2p import PointToPoint
from aiocomms.communicator.portal.portal import Portal
from aiocomms.lowering.tags import Key
from aiocomms.ops import Op
from aiocomms.progress.work import Work


class CurrentComm(PointToPoint, Collectives, Objects):
    """The current communicator of a service.

    The layers of a model can store this object, because the object stays valid when a recovery forms a new
    communicator. The attribute ``current`` is the communicator itself. That communicator also has the methods that this
    class lacks. A window or a stream belongs to one communicator. Open windows and streams on ``current``, and open
    them again after each recovery.
    """

    current: Communicator
    name: str
    rank: int
    size: int
    device: torch.device

    def __init__(self, comm: Communicator) -> None:
        self.turn_to(comm)

    def turn_to(self, comm: Communicator) -> None:
        """Replace the current communicator with ``comm``. Only the service calls this method."""
        self.current, self._core = comm, comm._core
        self.name, self.rank, self.size, self.device = comm.name, comm.rank, comm.size, comm.device

    def lane(self, key: Key) -> Lane:
        """See :meth:`Communicator.lane`."""
        return self.current.lane(key)

    def portal(self) -> Portal:
        """Return the current communicator's portal, through which other threads call operations.

        Call this method again for each plan, because a recovery replaces the communicator and its portal.
        """
        return self.current.portal()

    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[Any]:
        return self.current._issue(op, hints, timeout)
