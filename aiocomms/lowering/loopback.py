"""Messages of a rank to itself. The messages use no transport, so they behave the same with every transport."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

from aiocomms import ops
from aiocomms.errors import CommClosedError
from aiocomms.lowlevel import copy_message
from aiocomms.transport import OP_RESULT, Completion, conclude

M = TypeVar("M", ops.Send, ops.Recv, ops.Probe)

Queues = dict[tuple[int, int], deque[tuple[M, Completion]]]
"""The unmatched ops of one kind. The key is the pair of channel and tag."""


class Loopback:
    """The sends, receives and probes of one rank to and from itself.

    When the second op of a matching pair is posted, this op copies the message. A send of any size waits for
    the matching receive.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sends: Queues[ops.Send] = {}
        self._recvs: Queues[ops.Recv] = {}
        self._probes: Queues[ops.Probe] = {}

    def carries(self, op: ops.Op) -> bool:
        """Return whether an op is a message of this rank to itself."""
        if isinstance(op, ops.Send):
            return self._rank == op.dst
        return isinstance(op, (ops.Recv, ops.Probe)) and self._rank == op.src

    def send(self, op: ops.Send, work: Completion) -> None:
        """Start a send."""
        if (match := _oldest(self._recvs, op)) is None:
            _keep(self._sends, op, work)
            while (probe := _oldest(self._probes, op)) is not None:
                conclude(probe[1], probe[0].message(op.tensor.nbytes, op.tensor.dtype))
        else:
            self._meet(op, work, *match)

    def recv(self, op: ops.Recv, work: Completion) -> None:
        """Start a receive."""
        if (match := _oldest(self._sends, op)) is None:
            _keep(self._recvs, op, work)
        else:
            self._meet(*match, op, work)

    def take(self, op: ops.Take, work: Completion) -> None:
        """Start a receive that does not wait for a message."""
        if (op.channel, op.tag) in self._sends:
            self.recv(op, work)
        else:
            work.complete(False)

    def probe(self, op: ops.Probe, work: Completion) -> None:
        """Start a probe."""
        if (waiting := self._sends.get((op.channel, op.tag))) is None:
            _keep(self._probes, op, work)
        else:
            tensor = waiting[0][0].tensor
            work.complete(op.message(tensor.nbytes, tensor.dtype))

    def _meet(self, send: ops.Send, sent: Completion, recv: ops.Recv, received: Completion) -> None:
        outcome = copy_message(send.tensor, recv.tensor, self._rank) or OP_RESULT
        conclude(sent)
        conclude(received, outcome)

    def withdraw(self, work: Completion) -> bool:
        """Withdraw a receive or a probe; return False if a send has already matched the op."""
        op: Any = work.op
        queues: Queues[Any] = self._probes if isinstance(op, ops.Probe) else self._recvs
        key, entry = (op.channel, op.tag), (op, work)
        queue = queues.get(key)
        if queue is None or entry not in queue:
            return False
        queue.remove(entry)
        if not queue:
            del queues[key]
        return True

    def close(self) -> None:
        """End the unmatched sends with an error, because this rank closes the communicator."""
        for work in [work for queue in self._sends.values() for _, work in queue]:
            conclude(work, CommClosedError("this rank has closed the communicator, and had not received the message"))
        self.clear()

    def clear(self) -> None:
        """Remove all ops from the queues, because the communicator has ended these ops."""
        self._sends.clear()
        self._recvs.clear()
        self._probes.clear()


def _keep(queues: Queues[M], op: M, work: Completion) -> None:
    queues.setdefault((op.channel, op.tag), deque()).append((op, work))


def _oldest(queues: Queues[M], counterpart: ops.Send | ops.Recv) -> tuple[M, Completion] | None:
    """Remove the oldest matching op from the queues, and return this op; None if no op matches."""
    key = counterpart.channel, counterpart.tag
    if (queue := queues.get(key)) is None:
        return None
    match = queue.popleft()
    if not queue:
        del queues[key]
    return match
