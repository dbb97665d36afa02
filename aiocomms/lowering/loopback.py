"""Messages of a rank to itself: no transport is asked, and so they are the same on all of them."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

from aiocomms import ops
from aiocomms.errors import CommClosedError
from aiocomms.lowlevel import copy_message
from aiocomms.transport import OP_RESULT, Completion, conclude

M = TypeVar("M", ops.Send, ops.Recv)

Queues = dict[tuple[int, int], deque[tuple[M, Completion]]]
"""What waits for its counterpart, by channel and tag."""


class Loopback:
    """The sends and receives of one rank to and from itself.

    Whichever of the two is posted last copies the message within its call. A send of any size waits for its receive.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sends: Queues[ops.Send] = {}
        self._recvs: Queues[ops.Recv] = {}

    def carries(self, op: ops.Op) -> bool:
        """Whether an op is one of them."""
        return self._rank == (op.dst if isinstance(op, ops.Send) else op.src if isinstance(op, ops.Recv) else None)

    def send(self, op: ops.Send, work: Completion) -> None:
        """Start a send."""
        if (match := _oldest(self._recvs, op)) is None:
            _keep(self._sends, op, work)
        else:
            self._meet(op, work, *match)

    def recv(self, op: ops.Recv, work: Completion) -> None:
        """Start a receive."""
        if (match := _oldest(self._sends, op)) is None:
            _keep(self._recvs, op, work)
        else:
            self._meet(*match, op, work)

    def _meet(self, send: ops.Send, sent: Completion, recv: ops.Recv, received: Completion) -> None:
        outcome = copy_message(send.tensor, recv.tensor, self._rank) or OP_RESULT
        conclude(sent)
        conclude(received, outcome)

    def withdraw(self, work: Completion) -> bool:
        """Forget a receive; False if something has matched it."""
        op: Any = work.op
        key, entry = (op.channel, op.tag), (op, work)
        queue = self._recvs.get(key)
        if queue is None or entry not in queue:
            return False
        queue.remove(entry)
        if not queue:
            del self._recvs[key]
        return True

    def close(self) -> None:
        """Fail the sends that nothing has matched: this rank closes."""
        for work in [work for queue in self._sends.values() for _, work in queue]:
            conclude(work, CommClosedError("it was closed on this rank, which had not received the message"))
        self.clear()

    def clear(self) -> None:
        """Forget everything: the works have ended."""
        self._sends.clear()
        self._recvs.clear()


def _keep(queues: Queues[M], op: M, work: Completion) -> None:
    queues.setdefault((op.channel, op.tag), deque()).append((op, work))


def _oldest(queues: Queues[M], counterpart: ops.Send | ops.Recv) -> tuple[M, Completion] | None:
    """Take what matches from the queues; None: nothing does."""
    key = counterpart.channel, counterpart.tag
    if (queue := queues.get(key)) is None:
        return None
    match = queue.popleft()
    if not queue:
        del queues[key]
    return match
