"""The matching of sends with receives on the host. After the match, NCCL transfers the data.

NCCL has no tags, and matches sends with receives in the order of the calls. If the sizes differ, the ranks hang. NCCL
cannot withdraw a send or a receive. So a sender announces a message on the control connection. The receiver matches the
message with a receive, and notifies the sender. Then both ranks call NCCL.

Each direction between two ranks is a :class:`Direction` with its own communicator and stream. The two ranks form the
communicator when the first message of the direction is matched. Two directions never share a communicator. Otherwise,
two ranks would deadlock if each of them first received from the other rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Protocol

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError, ProtocolError, UnsupportedOperation
from aiocomms.lowlevel import misfit
from aiocomms.transport import OP_RESULT, Completion, conclude
from aiocomms_nccl import wire
from aiocomms_nccl.collectives import CommStream
from aiocomms_nccl.control import Control
from aiocomms_nccl.direction import Direction, Forming, Posted
from aiocomms_nccl.wire import DTYPE_CODES, DTYPE_LIST

Key = tuple[int, int, int]
"""The source, channel and tag of a message."""


class MatcherOwner(Forming, Protocol):
    """The interface through which the matcher uses its transport."""

    control: Control

    def closed_by(self, peer: int) -> CommError | None:
        """Return the error for ops that need ``peer``, or None if ``peer`` has not closed its transport."""


class Matcher:
    """The matcher of one rank's messages.

    Methods are called on the loop's thread, unless their docstrings say otherwise.
    """

    def __init__(self, owner: MatcherOwner) -> None:
        self._owner = owner
        self._number = 0
        self._posted: defaultdict[Key, deque[Posted]] = defaultdict(deque)
        self._unexpected: defaultdict[Key, deque[wire.Announce]] = defaultdict(deque)
        self._probes: defaultdict[Key, list[tuple[ops.Probe, Completion]]] = defaultdict(list)
        self._announced: dict[tuple[int, int], Posted] = {}
        self._directions: dict[tuple[int, bool], Direction] = {}  # the key is the peer, and whether this rank sends

    def comm_streams(self) -> list[CommStream]:
        """Return the communicators of all formed directions. Any thread may call this method."""
        return [one.comm_stream for one in list(self._directions.values()) if one.comm_stream is not None]

    def check_not_captured(self) -> None:
        """Raise an error if the current stream is being captured.

        Call this method before the start of a message, or of an op that is implemented with messages.

        :raises UnsupportedOperation: the current stream is being captured.
        """
        if self._owner.cuda.capturing():
            raise UnsupportedOperation(
                "a message cannot be captured into a CUDA graph, because its two ranks agree on it on the host; "
                "send it outside of the capture, or capture a collective instead"
            )

    def post(self, op: ops.Send | ops.Recv | ops.Probe, work: Completion) -> None:
        """Start a send, a receive or a probe.

        :raises UnsupportedOperation: the current stream is being captured. A ``Probe`` does not raise this error. A
            ``Take`` raises this error only if a matching message has arrived.
        """
        if isinstance(op, ops.Probe):
            self._probe(op, work)
        elif isinstance(op, ops.Take) and (op.src, op.channel, op.tag) not in self._unexpected:
            work.complete(False)
        else:
            self._post(op, work)

    def _post(self, op: ops.Send | ops.Recv, work: Completion) -> None:
        self.check_not_captured()
        owner = self._owner
        peer = op.dst if isinstance(op, ops.Send) else op.src
        closed = owner.closed_by(peer)
        if closed is not None:
            work.fail(closed)
            return
        posted = Posted(op, work, owner.launcher.mark())
        if isinstance(op, ops.Send):
            self._number += 1
            self._announced[peer, self._number] = posted
            code = DTYPE_CODES[op.tensor.dtype]
            owner.control.send(peer, wire.Announce(self._number, op.channel, op.tag, code, op.tensor.nbytes))
        else:
            self._recv((peer, op.channel, op.tag), posted)

    def _recv(self, key: Key, posted: Posted) -> None:
        unexpected = self._unexpected.get(key)
        if not unexpected:
            self._posted[key].append(posted)
            return
        message = unexpected.popleft()
        if not unexpected:
            del self._unexpected[key]
        self._take(key[0], message, posted)

    def _probe(self, op: ops.Probe, work: Completion) -> None:
        """Complete a probe with the oldest unmatched message of the probe's source, channel and tag.

        If no such message has arrived, store the probe until one arrives.
        """
        key = (op.src, op.channel, op.tag)
        if (closed := self._owner.closed_by(op.src)) is not None:
            work.fail(closed)
        elif unexpected := self._unexpected.get(key):
            work.complete(_seen(op, unexpected[0]))
        else:
            self._probes[key].append((op, work))

    def withdraw(self, work: Completion) -> bool:
        """Withdraw a receive or a probe. Return False if the receive or the probe has already matched a message."""
        op = work.op
        if isinstance(op, ops.Probe):
            return self._withdraw_probe(op, work)
        if not isinstance(op, ops.Recv):
            return False
        key = (op.src, op.channel, op.tag)
        queue = self._posted.get(key, deque())
        for posted in queue:
            if posted.work is work:
                queue.remove(posted)
                if not queue:
                    del self._posted[key]
                return True
        return False

    def _withdraw_probe(self, op: ops.Probe, work: Completion) -> bool:
        key = (op.src, op.channel, op.tag)
        probes = self._probes.get(key, [])
        if (op, work) not in probes:
            return False
        probes.remove((op, work))
        if not probes:
            del self._probes[key]
        return True

    def release(self, error: CommError) -> bool:
        """Unblock the threads that wait for missing ranks to join a communicator. Any thread may call this method.

        :returns: whether at least one thread was waiting.
        """
        released = [direction.release(error) for direction in list(self._directions.values())]
        return any(released)

    def progress_with(self, peer: int) -> wire.Progress:
        """Return this rank's progress in the two directions with a peer."""
        gives, takes = self._directions.get((peer, True)), self._directions.get((peer, False))
        return wire.Progress(
            gives is not None and gives.begun,
            0 if gives is None else gives.carried,
            0 if takes is None else takes.carried,
        )

    def close_peer(self, peer: int, progress: wire.Progress, error: CommError) -> None:
        """Fail all messages that wait for the rank ``peer``, which has closed its transport.

        :param progress: the closed rank's progress in the two directions with this rank.
        """
        if (direction := self._directions.get((peer, False))) is not None:
            direction.close_peer(progress.sent, progress.joined, error)
        if (direction := self._directions.get((peer, True))) is not None:
            direction.close_peer(progress.received, True, error)  # the receiver joins before it asks the sender to join
        orphans = [posted for key in [k for k in self._posted if k[0] == peer] for posted in self._posted.pop(key)]
        orphans += [self._announced.pop(key) for key in [k for k in self._announced if k[0] == peer]]
        works = [posted.work for posted in orphans]
        works += [work for key in [k for k in self._probes if k[0] == peer] for _, work in self._probes.pop(key)]
        for work in works:
            conclude(work, error)

    # -------------------------------------------------------------------------------------------- frames of the others

    def handle_announce(self, peer: int, message: wire.Announce) -> None:
        """Match an announced message with a posted receive. If no receive matches, store the message."""
        if not 0 <= message.dtype < len(DTYPE_LIST):
            raise ProtocolError(f"rank {peer} announces a message of dtype number {message.dtype}", peer=peer)
        key = (peer, message.channel, message.tag)
        queue = self._posted.get(key)
        if not queue:
            self._unexpected[key].append(message)
            for probe, work in self._probes.pop(key, ()):
                conclude(work, _seen(probe, message))
            return
        posted = queue.popleft()
        if not queue:
            del self._posted[key]
        self._take(peer, message, posted)

    def handle_take(self, peer: int, frame: wire.TakeMessage) -> None:
        """Send a message that the receiver has matched."""
        posted = self._announced.pop((peer, frame.number), None)
        if posted is None or not 0 <= frame.nbytes <= posted.op.tensor.nbytes:
            raise ProtocolError(f"rank {peer} takes a message that was not announced", peer=peer)
        self._transfer(peer, posted, frame.nbytes, OP_RESULT)

    def handle_direction(self, peer: int, frame: wire.DirectionRequest) -> None:
        """Form the communicator of the direction to ``peer``, after ``peer`` has matched this rank's first message."""
        self._direction(peer, sends=True).form(lambda: frame.unique_id)

    # ------------------------------------------------------------------------------------------------ transfers

    def _take(self, peer: int, message: wire.Announce, posted: Posted) -> None:
        tensor = posted.op.tensor
        outcome = misfit(peer, DTYPE_LIST[message.dtype], message.nbytes, tensor) or OP_RESULT
        nbytes = 0 if isinstance(outcome, MismatchError) else min(message.nbytes, tensor.nbytes)
        self._owner.control.send(peer, wire.TakeMessage(message.number, nbytes))
        self._transfer(peer, posted, nbytes, outcome)

    def _transfer(self, peer: int, posted: Posted, nbytes: int, outcome: Any) -> None:
        if not nbytes:
            conclude(posted.work, outcome)
            return
        sends = isinstance(posted.op, ops.Send)
        direction = self._direction(peer, sends)
        if not sends and not direction.begun:
            direction.form(lambda: self._request_direction(peer))
        direction.add(posted, nbytes, outcome)

    def _direction(self, peer: int, sends: bool) -> Direction:
        direction = self._directions.get((peer, sends))
        if direction is None:
            direction = self._directions[peer, sends] = Direction(self._owner, sends)
        return direction

    def _request_direction(self, peer: int) -> bytes:
        """Make the id of a new communicator, and ask the sender to join the communicator.

        This method runs in a thread.
        """
        unique_id = self._owner.library.unique_id()
        self._owner.control.send(peer, wire.DirectionRequest(unique_id))
        return unique_id


def _seen(probe: ops.Probe, message: wire.Announce) -> ops.Message:
    """Return the result of a probe that has found a message."""
    return probe.message(message.nbytes, DTYPE_LIST[message.dtype])
