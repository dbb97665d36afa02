"""The class ``CurrentComm``, which the layers of a model hold in place of a communicator."""

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
from aiocomms.lowering.lane_messages import Key
from aiocomms.ops import Op
from aiocomms.progress.work import Work


class CurrentComm(PointToPoint, Collectives, Objects):
    """The communicator that a service has at the moment, for layers to hold: it stays valid when a new one is formed.

    The communicator itself is ``current``, and has what this lacks. Windows and streams belong to one communicator:
    open them on ``current``, and anew when that is another.
    """

    current: Communicator
    name: str
    rank: int
    size: int
    device: torch.device

    def __init__(self, comm: Communicator) -> None:
        self.turn_to(comm)

    def turn_to(self, comm: Communicator) -> None:
        """Stand for another communicator from now on; for the service."""
        self.current, self._core = comm, comm._core
        self.name, self.rank, self.size, self.device = comm.name, comm.rank, comm.size, comm.device

    def lane(self, key: Key) -> Lane:
        """See :meth:`Communicator.lane`."""
        return self.current.lane(key)

    def portal(self) -> Portal:
        """Return the operations for other threads; ask for it at each call, for it belongs to one communicator."""
        return self.current.portal()

    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[Any]:
        return self.current._issue(op, hints, timeout)
