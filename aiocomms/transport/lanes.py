"""The contract of a transport that carries the collectives of lanes itself."""

from __future__ import annotations

from abc import abstractmethod

from aiocomms import ops
from aiocomms.errors import CommError
from aiocomms.transport.contract import Completion, Transport


class LaneTransport(Transport):
    """A transport that matches collectives by lanes; ``Capabilities.lanes`` lists these collectives.

    On any other transport the core lowers the collectives of lanes to messages.
    """

    @abstractmethod
    def post_in_lane(self, op: ops.Op, lane: int, work: Completion) -> float | None:
        """Start a collective that matches only collectives of the same lane on the other ranks.

        The core calls this for the ops in ``Capabilities.lanes``, with the contract of :meth:`post`. Within a lane all
        ranks call the same collectives in the same order, and these collectives run one after the other. Ops of two
        different lanes have no common order, nor have ops of a lane and ops of :meth:`post`. Ten thousand lanes may
        have pending ops at once. A lane without pending ops must use no memory.

        As in :meth:`post`, ranks whose collectives in a lane differ get a :class:`MismatchError`. The core calls
        :meth:`waiting_for` for these works, too.

        :param lane: the lane's number, 62 bits, the same on all ranks.
        """

    @abstractmethod
    def give_up_lane(self, lane: int, error: CommError) -> None:
        """End this rank's pending works of a lane that this rank aborts. The core posts nothing more in the lane.

        Each work fails with ``error`` as soon as no rank accesses the work's tensors any more. Afterwards the program
        may write new data into these tensors, and no rank may complete an op with this new data. Ops that all ranks
        have called may first run to their end. The core notifies the other ranks, which abort the lane, too. Other
        lanes are not affected.

        The core calls this for a transport with ``Capabilities.lanes``, once per lane. An exception means that the
        transport is broken.
        """

    @abstractmethod
    def forget_lane(self, lane: int, rank: int) -> None:
        """Drop all data of a lane that has arrived from a rank.

        That rank has aborted the lane, and sends no more data in the lane. The core calls this after
        :meth:`give_up_lane`, once for each living rank. All actions of the rank in the lane before its abort are
        visible here, as if a message from that rank had just arrived. An exception means that the transport is broken.
        """
