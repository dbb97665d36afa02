"""The operations of a communicator or a lane in blocking form, for all threads except the thread of the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self, cast

import torch

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.communicator.collectives import Collectives
from aiocomms.communicator.issuer import Issuer
from aiocomms.communicator.objects import Objects
from aiocomms.communicator.p2p import PointToPoint
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.views import BlockingBatch, started
from aiocomms.communicator.portal.works import BlockingWork, close
from aiocomms.core.core import Core
from aiocomms.errors import CommError
from aiocomms.lowering.tags import Key
from aiocomms.ops import Op
from aiocomms.ops.arrays import checked


class Operations(Issuer):
    """The operations that communicators and lanes share. Each method returns a work for which a thread can wait."""

    _core: Core
    _door: Door
    _target: Any
    """The communicator or lane on which the operations run."""
    _where: str
    """The name of the communicator or lane in errors."""

    send: Final = started(PointToPoint.send)
    recv: Final = started(PointToPoint.recv)
    recv_any: Final = started(PointToPoint.recv_any)
    recv_message: Final = started(PointToPoint.recv_message)
    probe: Final = started(PointToPoint.probe)

    broadcast: Final = started(Collectives.broadcast)
    all_reduce: Final = started(Collectives.all_reduce)
    reduce: Final = started(Collectives.reduce)
    scan: Final = started(Collectives.scan)
    exscan: Final = started(Collectives.exscan)
    all_gather: Final = started(Collectives.all_gather)
    all_gather_v: Final = started(Collectives.all_gather_v)
    all_gather_single: Final = started(Collectives.all_gather_single)
    reduce_scatter: Final = started(Collectives.reduce_scatter)
    reduce_scatter_v: Final = started(Collectives.reduce_scatter_v)
    reduce_scatter_single: Final = started(Collectives.reduce_scatter_single)
    all_to_all: Final = started(Collectives.all_to_all)
    all_to_all_single: Final = started(Collectives.all_to_all_single)
    all_to_all_v_single: Final = started(Collectives.all_to_all_v_single)
    scatter: Final = started(Collectives.scatter)
    gather: Final = started(Collectives.gather)
    gather_single: Final = started(Collectives.gather_single)
    barrier: Final = started(Collectives.barrier)

    send_object: Final = started(Objects.send_object)
    recv_object: Final = started(Objects.recv_object)
    broadcast_object: Final = started(Objects.broadcast_object)
    all_gather_object: Final = started(Objects.all_gather_object)
    gather_object: Final = started(Objects.gather_object)
    scatter_object: Final = started(Objects.scatter_object)
    _parcel = Objects._parcel

    def batch(self) -> BlockingBatch:
        """Make a batch of messages, or of collectives, that start together; see :meth:`Communicator.batch`."""
        return BlockingBatch(cast("Any", self))

    def _issue(  # type: ignore[override]
        self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> BlockingWork[Any]:
        """Check an op, post the op on this thread or on the loop's thread, and return the op's work."""
        if self._core.refusing:
            raise self._core.refused(op)
        self._door.elsewhere(op.name)
        try:
            of_tensors = checked(op, self._core)
            if hints is not None:
                arguments.mapping("hints", hints)
            work: BlockingWork[Any] = BlockingWork(self._target, self._where, self._door, of_tensors, hints, timeout)
        except CommError as error:
            raise self._core.worded(error.about(comm=self._where, op=op.name, rank=self.rank)) from None
        if of_tensors is not op and op.result() is not None:
            work._given = op
        if hints is not None or timeout is not COMM_TIMEOUT or not work._posted():
            self._door.put(work._begin)
        return work


class BlockingLane(Operations):
    """A :class:`~aiocomms.Lane` in blocking form.

    Any thread except the thread of the event loop may use the lane; see :meth:`Portal.lane`. ``with comm.lane(key):``
    makes the lane current on this thread. Within the block, this thread's calls on the communicator or its portal run
    in the lane.
    """

    rank: int
    size: int
    name: str
    device: torch.device

    def __init__(self, door: Door, lane: Any) -> None:
        self.rank, self.size, self.name, self.device = lane.rank, lane.size, lane.name, lane.device
        self.key: Key = lane.key
        self._core, self._door, self._target = lane._core, door, lane
        self._where = f"{lane.name}, lane {lane._names()[1]}"

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._target)[1:]}"

    @property
    def timeout(self) -> float | None:
        """The default deadline of operations, in seconds; see :attr:`Lane.timeout`."""
        seconds: float | None = self._target.timeout
        return seconds

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default deadline of operations on this view of the lane; see :meth:`Lane.set_timeout`."""
        self._target.set_timeout(timeout)

    @property
    def closed(self) -> bool:
        """True once this view of the lane was closed on this rank."""
        closed: bool = self._target.closed
        return closed

    def abort(self, reason: str | BaseException) -> None:
        """Abort the lane on every rank; see :meth:`Lane.abort`. Any thread may call this method."""
        self._target.abort(reason)

    def close(self) -> None:
        """Withdraw unmatched receives of the lane, and wait until its other operations have ended.

        The call is optional. Idempotent. See :meth:`Lane.aclose`.

        :raises RuntimeError: the caller is on the loop's own thread.
        """
        close(self._door, "close", self._target.aclose)

    def __enter__(self) -> Self:
        self._target.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._target.__exit__(kind, error, trace)
