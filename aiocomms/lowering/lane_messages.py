"""The implementation of lanes by messages.

Collectives match by the key of their lane, and by the order of calls within the lane.

If the transport does not implement lanes itself, the collectives of a lane are executed as messages, whose tags
(:mod:`aiocomms.lowering.tags`) are derived from the lane's key. So collectives of different lanes may be called in
different orders on different ranks. Like any other message, a message of a collective may arrive before its receive is
posted. The collectives of one lane run one after the other, so the order of calls is enough to match them. A lane needs
no counter that all ranks share. A lane without pending ops needs no memory.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError
from aiocomms.lowering.runs import Poster, Run, Steps
from aiocomms.lowlevel.threads import copied
from aiocomms.progress.inflight import LaneWork


class _LaneRun(Run):
    """The run of a lane's collective. The run starts when the lane's earlier collectives have ended."""

    __slots__ = ("_turn",)

    work: LaneWork[Any]

    def __init__(self, comm: Poster, steps: Steps, work: LaneWork[Any], turn: _Turn) -> None:
        super().__init__(comm, steps, work)
        self._turn = turn

    def advance(self) -> None:
        super().advance()
        self._turn.look()

    def begin(self) -> None:
        """Start the run once the previous run of the lane has ended.

        The call with which the program started the collective has already returned, and cannot raise an error. So an
        error ends the communicator.
        """
        self._posted = True
        self.advance()

    def part_failed(self, error: CommError) -> None:
        super().part_failed(error)
        self._turn.look()

    def _give_up(self, error: CommError) -> None:
        named = self.work.located(error) if isinstance(error, MismatchError) else error
        super()._give_up(named.about(comm=self.work._comm_name()))


class _Turn(deque[_LaneRun]):
    """The queue of one lane's collectives. The first collective is running, and the others wait for it to end."""

    def __init__(self, turns: dict[int, _Turn], number: int) -> None:
        super().__init__()
        self._turns = turns
        self._number = number
        self._looking = False

    def call(self, run: _LaneRun) -> None:
        """Start a collective now, or when the collectives before it have ended."""
        self.append(run)
        if len(self) == 1:
            try:
                run.advance()
            except BaseException:  # The exception is the caller's, and nothing was sent.
                self.clear()
                del self._turns[self._number]
                raise

    def look(self) -> None:
        """Start the next collective if the running collective has ended.

        The function does not recurse, because thousands of collectives may end at once.
        """
        if self._looking:
            return
        self._looking = True
        try:
            while self and self[0].work.done():
                self.popleft()
                if self:
                    self[0].begin()
        finally:
            self._looking = False
        if not self:
            self._turns.pop(self._number, None)


class Turns(dict[int, _Turn]):
    """The queues of one communicator's lanes that have pending collectives, by lane number."""

    def __init__(self, comm: Poster) -> None:
        super().__init__()
        self._comm = comm

    def call(self, steps: Steps, work: LaneWork[Any]) -> None:
        """Start a collective of a lane when the lane's earlier collectives have ended."""
        number = work.number
        turn = self.get(number)
        if turn is None:
            turn = self[number] = _Turn(self, number)
        turn.call(_LaneRun(self._comm, steps, work, turn))

    def waiting_for(self, work: LaneWork[Any]) -> list[int] | None:
        """Return the ranks whose messages a collective waits for.

        If the collective has not started, return the ranks whose messages the lane's current collective waits for.
        Thread-safe.

        :returns: the ranks, or None if the collective does not consist of messages.
        """
        for turn in copied(self.values()):
            runs = copied(turn)
            if any(run.work is work for run in runs):
                return runs[0].waits_for()
        return None

    def stop(self, number: int, error: CommError) -> list[ops.Send]:
        """End the collectives of one lane; see :meth:`Run.stop`.

        :returns: the sends that may still be unmatched.
        """
        runs = list(self.pop(number, ()))
        left = [send for run in runs for send in run.unfinished_sends()]
        for run in reversed(runs):  # In this order no run begins when the one before it ends.
            run.stop(error)
        return left
