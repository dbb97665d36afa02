"""The contract of a transport that carries the collectives of lanes itself."""

from __future__ import annotations

from abc import abstractmethod

from aiocomms import ops
from aiocomms.errors import CommError
from aiocomms.transport.contract import Completion, Transport


class LaneTransport(Transport):
    """A transport that matches collectives by lanes, and says in ``Capabilities.lanes`` which ones.

    On any other transport the collectives of lanes go by messages.
    """

    @abstractmethod
    def post_in_lane(self, op: ops.Op, lane: int, work: Completion) -> float | None:
        """Start a collective that matches those of the same lane on the other ranks, and nothing else.

        Called for the ops in ``Capabilities.lanes``, with the contract of :meth:`post`. Within a lane all ranks
        call the same collectives in the same order, and these run one after the other. Nothing is ordered between
        lanes, nor between a lane and what :meth:`post` is given. Ten thousand lanes may have something under way at
        once. A lane at rest keeps nothing.

        Ranks that call different things in a lane are found out as those of :meth:`post` are, with a
        :class:`MismatchError`; :meth:`waiting_for` is asked for these works, too.

        :param lane: 62 bits, the same on all ranks.
        """

    @abstractmethod
    def give_up_lane(self, lane: int, error: CommError) -> None:
        """End what is pending in a lane on this rank, which gives it up. Nothing of it is posted any more.

        Each work fails with ``error``, now or later: once no rank reads or writes its tensors any more, nor can
        complete with what the program writes into them then. What all ranks have called may run to its end first. The
        other ranks are told, and give the lane up, too. Other lanes notice nothing.

        Called for a transport with ``Capabilities.lanes``, once per lane. Raising: the transport is broken.
        """

    @abstractmethod
    def forget_lane(self, lane: int, rank: int) -> None:
        """Forget what has come of a lane from another rank, which has given it up: nothing more of it comes from there.

        Called after :meth:`give_up_lane`, once for each rank that lives. What that rank has done of the lane before it
        gave it up is known here, as if it had been sent as a message. Raising: the transport is broken.
        """
