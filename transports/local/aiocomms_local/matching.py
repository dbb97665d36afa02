"""The matching of sends with receives, and of the ranks' calls of each collective."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Protocol

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError
from aiocomms.lowlevel import closed_by, copy_message, disagreement, has_room
from aiocomms.transport import OP_RESULT, Completion
from aiocomms_local.semantics import perform
from aiocomms_local.window import LocalWindow

Done = list[tuple[int, Completion, Any]]
"""The works that an operation has completed.

Each entry is a rank, the work of that rank, and the result of the work or its :class:`CommError`.
"""

Key = tuple[int, int, int, int]
"""The source, destination, channel and tag of a message. A send and a receive match if all four values are equal."""


class LocalRank(Protocol):
    """The methods of one rank that other ranks call."""

    def settle(self, work: Completion, value: Any) -> None:
        """Complete a work of this rank, on this rank's thread."""

    def on_note(self, rank: int, note: bytes) -> None:
        """Receive a note from another rank."""

    def on_failure(self, error: CommError) -> None:
        """Handle the error that ends the communicator."""


class SharedMatcher:
    """The state that the ranks share.

    The ranks may run in several threads, so every method is called under :attr:`lock`.
    """

    def __init__(self, size: int) -> None:
        # The lock is reentrant because a signal handler may abort. Under the lock, an abort only stores the failure.
        self.lock = threading.RLock()
        self.size = size
        self.ranks: list[LocalRank | None] = [None] * size
        self.failure: CommError | None = None
        self.left: set[int] = set()
        """The ranks that have closed their communicator."""
        self._sends: defaultdict[Key, deque[tuple[ops.Send, Completion]]] = defaultdict(deque)
        self._recvs: defaultdict[Key, deque[tuple[ops.Recv, Completion]]] = defaultdict(deque)
        self._probes: defaultdict[Key, list[tuple[ops.Probe, Completion]]] = defaultdict(list)
        """The probes without a matching send."""
        self._collectives: dict[int, dict[int, tuple[Any, Completion]]] = {}
        """The collectives that some but not all ranks have called.

        The first key is the collective's number, and the second key is the rank.
        """
        self._windows: list[LocalWindow] = []

    # ------------------------------------------------------------------------------------------ point to point

    def send(self, rank: int, op: ops.Send, work: Completion) -> Done:
        """Match a rank's send with the oldest matching receive, or keep the send until such a receive is posted."""
        key = (rank, op.dst, op.channel, op.tag)
        recvs = self._recvs.get(key)
        if not recvs:
            if op.dst in self.left:
                return [(rank, work, closed_by(op.dst))]
            self._sends[key].append((op, work))
            seen = op.tensor.nbytes, op.tensor.dtype
            return [(op.dst, other, probe.message(*seen)) for probe, other in self._probes.pop(key, ())]
        recv, other_work = recvs.popleft()
        if not recvs:
            del self._recvs[key]
        outcome = _transfer(op, recv, rank) if has_room(recv.tensor) else _too_small(op.dst)
        return [(rank, work, OP_RESULT), (op.dst, other_work, outcome)]

    def recv(self, rank: int, op: ops.Recv, work: Completion) -> Done:
        """Match a rank's receive with the oldest matching send, or keep the receive until such a send is posted."""
        key = (op.src, rank, op.channel, op.tag)
        sends = self._sends.get(key)
        if not sends:
            if op.src in self.left:
                return [(rank, work, closed_by(op.src))]
            self._recvs[key].append((op, work))
            return []
        send, other_work = sends.popleft()
        if not sends:
            del self._sends[key]
        outcome = _transfer(send, op, op.src) if has_room(send.tensor) else _too_small(op.src)
        return [(op.src, other_work, OP_RESULT), (rank, work, outcome)]

    def take(self, rank: int, op: ops.Take, work: Completion) -> Done:
        """Match a rank's receive with the oldest matching send, or complete the receive with False if none matches."""
        return self.recv(rank, op, work) if (op.src, rank, op.channel, op.tag) in self._sends else [(rank, work, False)]

    def probe(self, rank: int, op: ops.Probe, work: Completion) -> Done:
        """Complete a probe with the oldest send that a receive would match.

        If there is no such send, keep the probe.
        """
        key = (op.src, rank, op.channel, op.tag)
        if sends := self._sends.get(key):
            tensor = sends[0][0].tensor
            return [(rank, work, op.message(tensor.nbytes, tensor.dtype))]
        if op.src in self.left:
            return [(rank, work, closed_by(op.src))]
        self._probes[key].append((op, work))
        return []

    def withdraw(self, rank: int, op: Any, work: Completion) -> bool:
        """Withdraw a receive, a probe or a wait.

        Return False if a send or a signal has already matched the operation.
        """
        if isinstance(op, ops.WaitSignal):
            window: LocalWindow = op.window.handle
            return window.withdraw(op, rank, work)
        key = (op.src, rank, op.channel, op.tag)
        waiting: dict[Key, Any] = self._probes if isinstance(op, ops.Probe) else self._recvs
        recvs = waiting.get(key)
        entry = (op, work)
        if recvs is None or entry not in recvs:
            return False
        recvs.remove(entry)
        if not recvs:
            del waiting[key]
        return True

    # --------------------------------------------------------------------------------------------- collectives

    def join(self, rank: int, index: int, op: Any, work: Completion) -> Done:
        """Record a rank's call of its ``index``-th collective. The call of the last rank performs the collective."""
        calls = self._collectives.setdefault(index, {})
        for other, (record, _) in calls.items():
            if record.signature() != op.signature():
                calls[rank] = (op, work)
                return self._lose(calls, disagreement(other, _show(record), rank, _show(op)))
            break  # one comparison is enough, because the earlier calls agree with each other
        calls[rank] = (op, work)
        for absent in self.left - calls.keys():
            self.failure = closed_by(absent)
            return [(r, w, self.failure) for r, (_, w) in calls.items()]
        if len(calls) < self.size:
            return []
        del self._collectives[index]
        records = [calls[r][0] for r in range(self.size)]
        value: Any = OP_RESULT
        if isinstance(op, ops.WindowOpen):
            value = LocalWindow([record.tensor.detach() for record in records])
            self._windows.append(value)
        elif isinstance(op, ops.WindowClose):
            self._windows.remove(op.window.handle)
        elif (resized := _resized(records)) is not None:
            return self._lose(calls, resized)
        else:
            try:
                perform(records)
            except MismatchError as error:
                return self._lose(calls, error)
        return [(r, w, value) for r, (_, w) in calls.items()]

    def waiting_for(self, op: Any, work: Completion) -> list[int]:
        """Return the ranks for which a pending op waits."""
        for calls in self._collectives.values():
            if any(w is work for _, w in calls.values()):
                return [r for r in range(self.size) if r not in calls]
        return [peer for peer in (_peer(op),) if peer is not None]

    def _lose(self, calls: dict[int, tuple[Any, Completion]], error: CommError) -> Done:
        """End the communicator with an error, because a collective cannot run, for example because the calls differ."""
        self.failure = error
        return [(r, w, error) for r, (_, w) in calls.items()]

    # ---------------------------------------------------------------------------------------- ranks that close

    def leave(self, rank: int) -> Done:
        """Close the communicator on a rank. Fail the other ranks' works that need this rank.

        If one of these works is a collective, the whole communicator is lost.
        """
        self.left.add(rank)
        self.ranks[rank] = None
        error = self.failure or closed_by(rank)
        done: Done = []
        self._recvs = defaultdict(deque, {key: q for key, q in self._recvs.items() if key[1] != rank})
        self._sends = defaultdict(deque, {key: q for key, q in self._sends.items() if key[0] != rank})
        for recv_key in [key for key in self._recvs if key[0] == rank]:
            done += [(recv_key[1], work, error) for _, work in self._recvs.pop(recv_key)]
        self._probes = defaultdict(list, {key: q for key, q in self._probes.items() if key[1] != rank})
        for probe_key in [key for key in self._probes if key[0] == rank]:
            done += [(probe_key[1], work, error) for _, work in self._probes.pop(probe_key)]
        for send_key in [key for key in self._sends if key[1] == rank]:
            done += [(send_key[0], work, error) for _, work in self._sends.pop(send_key)]
        for window in self._windows:
            for (src, dst), waiting in window.waiting.items():
                if src == rank:
                    done += [(dst, work, error) for work in waiting]
                    waiting.clear()
        for calls in self._collectives.values():
            if rank not in calls:
                self.failure = self.failure or error
                done += [(r, work, error) for r, (_, work) in calls.items()]
        if self.failure is not None:
            self._collectives.clear()  # a lost communicator keeps no tensors
        if len(self.left) == self.size:
            self._windows.clear()
        return done


def _transfer(send: ops.Send, recv: ops.Recv, src: int) -> Any:
    """Copy one message. Return the result or the error of the receive."""
    return copy_message(send.tensor, recv.tensor, src) or OP_RESULT


def _resized(records: Sequence[ops.Op]) -> CommError | None:
    """Return an error if a tensor of a collective has too small a storage; None if all storages are large enough.

    Without this check, torch would crash the process.
    """
    for rank, record in enumerate(records):
        if not all(has_room(tensor) for _, tensor in record.reads() + record.writes()):
            return _too_small(rank)
    return None


def _too_small(rank: int) -> CommError:
    return CommError(f"the storage of a tensor of rank {rank} was resized while the op had it", peer=rank)


def _peer(op: Any) -> int | None:
    for name in ("src", "dst"):
        if hasattr(op, name):
            return int(getattr(op, name))
    return None


def _show(op: ops.Op) -> str:
    name, *rest = op.signature()
    return f"{name}({', '.join(map(str, rest))})"
