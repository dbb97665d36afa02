"""The contract of a transport that itself executes the collectives of lanes.

A lane is one of the independent, ordered sequences of operations of a communicator.
"""

from __future__ import annotations

from abc import abstractmethod

from aiocomms import ops
from aiocomms.errors import CommError
from aiocomms.transport.contract import Completion, Transport


class LaneTransport(Transport):
    """A transport that matches collectives within each lane. ``Capabilities.lanes`` lists these collectives.

    On any other transport, the core executes the collectives of lanes as messages.
    """

    @abstractmethod
    def post_in_lane(self, op: ops.Op, lane: int, work: Completion) -> float | None:
        """Start a collective that matches only collectives of the same lane on the other ranks.

        The core calls this method for the op types in ``Capabilities.lanes``. The contract of :meth:`post` also applies
        to this method. Within a lane all ranks call the same collectives in the same order, and these collectives run
        one after the other. Different ranks may call the ops of two lanes in different orders. Different ranks may also
        call the ops of a lane and the ops of :meth:`post` in different orders. Ten thousand lanes may have pending ops
        at the same time. A lane without pending ops must use no memory.

        If ranks call different collectives in a lane, they get a :class:`MismatchError`, as in :meth:`post`. The core
        also calls :meth:`waiting_for` for the works of lanes.

        :param lane: the lane's number, which has 62 bits and is equal on all ranks.
        """

    @abstractmethod
    def give_up_lane(self, lane: int, error: CommError) -> None:
        """End this rank's pending works of a lane that this rank aborts. The core posts no more ops in the lane.

        Each work must end with ``error`` as soon as no rank accesses the work's tensors. After this end the program
        may write new data into these tensors, and no rank may complete an op with this new data. An op that all ranks
        have called may complete before the lane's other works end. The core notifies the other ranks, which also abort
        the lane. Other lanes are not affected.

        If ``Capabilities.lanes`` is not empty, the core calls this method once for each aborted lane. An exception
        means that the transport is broken.
        """

    @abstractmethod
    def forget_lane(self, lane: int, rank: int) -> None:
        """Delete all data of a lane that has arrived from another rank.

        The other rank has aborted the lane, and sends no more data in the lane. The core calls this method after
        :meth:`give_up_lane`, once for each living rank. During this call, the effects of all actions of the other rank
        in the lane are visible on this rank. An exception means that the transport is broken.
        """
