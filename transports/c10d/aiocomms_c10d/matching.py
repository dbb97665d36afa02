"""The matching of one peer's messages with this rank's receives.

A small message is sent with its header (eager), and the receiver keeps the message until a receive takes it. A large
message is first announced (rendezvous), and later sent into the tensor of the matching receive. If the message comes
after the receive, the reader's thread makes the match. Otherwise the event loop's thread makes the match. So a message
that comes after its receive is matched even while the event loop is busy.

When a sender abandons the communicator, the sender's program may reuse the tensor at once. At this time, gloo may still
be sending the tensor. So after the bytes, the sender sends a frame, which confirms that the bytes are valid. Until this
frame arrives, the receive stays pending. If the frame never arrives, the receive ends with the communicator.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any, Final

from torch import Tensor

from aiocomms import ops
from aiocomms.errors import CommError, MessageTruncatedError, ProtocolError
from aiocomms.lowlevel import Inbox, has_room, misfit
from aiocomms.ops.writing import write
from aiocomms.transport import OP_RESULT, Completion, conclude
from aiocomms_c10d.control import FOREVER, ControlConnection
from aiocomms_c10d.wire import (
    CODES,
    CREDIT,
    CTS,
    DATA,
    DONE,
    EAGER,
    INLINE,
    RTS,
    VOID,
    C10dFrame,
    C10dHeader,
    flat,
    pack,
    void,
)

Key = tuple[int, int]
"""The channel and the tag of a message."""

_CREDIT: Final = 1024 * 1024
"""The largest number of bytes of unmatched small messages that a receiver keeps for one sender.

Beyond this limit, the sender announces all messages.
"""
_OVERHEAD: Final = 256
"""The number of bytes of memory that a stored message needs in addition to its payload."""

_PENDING = object()
"""The value that marks the outcome of an op as not known yet."""


class PeerMatcher:
    """The matcher of messages from and to one peer. Works are completed on the event loop's thread."""

    def __init__(self, connection: ControlConnection, inbox: Inbox) -> None:
        self._connection = connection
        self._inbox = inbox
        self._lock = threading.Lock()
        self._posted: defaultdict[Key, deque[tuple[ops.Recv, Completion]]] = defaultdict(deque)
        self._unexpected: defaultdict[Key, deque[tuple[C10dHeader, Tensor | None]]] = defaultdict(deque)
        self._probes: defaultdict[Key, list[tuple[ops.Probe, Completion]]] = defaultdict(list)
        self._announced: dict[int, tuple[Tensor, Completion]] = {}
        self._sending: dict[int, tuple[Tensor, Completion, Tensor, Any]] = {}
        self._receiving: deque[tuple[int, Any, ops.Recv, Completion, Any]] = deque()
        self._last_ident = 0
        self._credit = _CREDIT  # the bytes that the peer still has room for
        self._credit_owed = 0  # the peer's bytes that were delivered since the last CREDIT frame
        self._abandoned = False
        self._close_error: CommError | None = None  # the error of all ops after the peer has closed
        self._handlers = {
            EAGER: self._match,
            RTS: self._match,
            CTS: self._send_data,
            DATA: self._finish_recv,
            VOID: lambda _: None,  # the peer has lost the communicator, and may send the reason
            DONE: self._finish_send,
            CREDIT: self._add_credit,
        }

    # ---------------------------------------------------------------------------------------- on the loop's thread

    def send(self, op: ops.Send, work: Completion) -> None:
        """Start a send."""
        payload = flat(op.tensor)
        nbytes = payload.numel()
        header = C10dHeader(EAGER, op.channel, CODES[op.tensor.dtype], op.tag, nbytes=nbytes)
        cost = nbytes + _OVERHEAD
        with self._lock:
            close_error = self._close_error
            eager = nbytes <= INLINE and cost <= self._credit
            if close_error is not None:
                pass  # the work fails below, without the lock, because its end may post the next op
            elif eager:
                self._credit -= cost
                self._connection.send(pack(header, payload=payload))
            else:
                self._last_ident += 1
                self._announced[self._last_ident] = (payload, work)
                self._connection.send(pack(header._replace(kind=RTS, ident=self._last_ident)))
        if close_error is not None:
            work.fail(close_error)
        elif eager:
            work.complete()

    def recv(self, op: ops.Recv, work: Completion) -> None:
        """Take the oldest matching message, or store the receive until a matching message arrives."""
        key = (op.channel, op.tag)
        with self._lock:
            unexpected = self._unexpected.get(key)
            outcome: Any = self._close_error
            if unexpected:
                header, payload = unexpected.popleft()
                if not unexpected:
                    del self._unexpected[key]
                outcome = self._deliver(header, payload, op, work)
            elif outcome is None:
                self._posted[key].append((op, work))
                outcome = _PENDING
        if outcome is not _PENDING:
            conclude(work, outcome)

    def take(self, op: ops.Take, work: Completion) -> None:
        """Take the oldest matching message if there is one.

        Until the peer closes, only the thread that calls this method removes messages.
        """
        if (op.channel, op.tag) in self._unexpected:
            self.recv(op, work)
        else:
            work.complete(False)

    def probe(self, op: ops.Probe, work: Completion) -> None:
        """Complete a probe with the oldest message that a receive would take.

        If there is no message, store the probe.
        """
        key = (op.channel, op.tag)
        with self._lock:
            unexpected = self._unexpected.get(key)
            outcome: Any = self._close_error
            if unexpected:
                outcome = _seen(op, unexpected[0][0])
            elif outcome is None:
                self._probes[key].append((op, work))
                return
        conclude(work, outcome)

    def try_cancel(self, work: Completion) -> bool:
        """Withdraw a receive or a probe. Return False if a message has already matched the receive or probe."""
        op = work.op
        if not isinstance(op, (ops.Recv, ops.Probe)):
            return False
        key = (op.channel, op.tag)
        waiting: dict[Key, Any] = self._probes if isinstance(op, ops.Probe) else self._posted
        with self._lock:
            posted = waiting.get(key, ())
            for i, (_, other) in enumerate(posted):
                if other is work:
                    del posted[i]
                    if not posted:
                        del waiting[key]
                    return True
        return False

    # --------------------------------------------------------------------------------------- on the reader's thread

    def handle(self, frame: C10dFrame) -> None:
        """Process a frame that the peer has sent.

        :raises ProtocolError: the frame is invalid.
        """
        self._handlers[frame.header.kind](frame)

    def close(self, error: CommError) -> None:
        """Fail all ops that wait for the peer, and all later ops, because the peer has closed.

        Receives can still take the peer's earlier eager messages. Messages that were only announced do not arrive.
        """
        with self._lock:
            self._close_error = error
            orphans = [work for posted in self._posted.values() for _, work in posted]
            orphans += [work for probes in self._probes.values() for _, work in probes]
            orphans += [work for _, work in self._announced.values()]
            self._posted.clear()
            self._probes.clear()
            self._announced.clear()
            for key, unexpected in list(self._unexpected.items()):
                self._unexpected[key] = deque(message for message in unexpected if message[1] is not None)
                if not self._unexpected[key]:
                    del self._unexpected[key]
        for work in orphans:
            self._inbox.put(conclude, work, error)

    def has_transfer_under_way(self) -> bool:
        """Return whether a large message is being sent to the peer or received from it."""
        with self._lock:
            return bool(self._receiving or self._sending)

    def _match(self, frame: C10dFrame) -> None:
        header = frame.header
        key = (header.channel, header.tag)
        with self._lock:
            posted = self._posted.get(key)
            if not posted:
                self._unexpected[key].append((header, frame.payload.clone() if header.kind == EAGER else None))
                for probe, work in self._probes.pop(key, ()):
                    self._inbox.put(conclude, work, _seen(probe, header))
                return
            op, work = posted.popleft()
            if not posted:
                del self._posted[key]
            outcome = self._deliver(header, frame.payload, op, work)
        if outcome is not _PENDING:
            self._inbox.put(conclude, work, outcome)

    def _deliver(self, header: C10dHeader, payload: Tensor | None, op: ops.Recv, work: Completion) -> Any:
        """Deliver an eager message, or request the data of an announced message."""
        buffer = flat(op.tensor)
        outcome = _outcome_of(header, op, self._connection.peer)
        short = outcome is OP_RESULT or isinstance(outcome, MessageTruncatedError)
        n = min(header.nbytes, buffer.numel()) if short else 0
        if header.kind == RTS:
            return self._request_data(header.ident, buffer[:n], op, work, outcome)
        assert payload is not None
        write(buffer[:n], payload[:n])
        self._credit_owed += header.nbytes + _OVERHEAD
        if self._credit_owed >= _CREDIT // 4:
            self._connection.send(pack(C10dHeader(CREDIT, ident=self._credit_owed)))
            self._credit_owed = 0
        return outcome

    def _request_data(self, ident: int, buffer: Tensor, op: ops.Recv, work: Completion, outcome: Any) -> Any:
        if buffer.numel():
            try:
                received = self._connection.receive_data(buffer)
            except RuntimeError:
                return _PENDING  # the peer is lost, and the reader is about to report it
            self._receiving.append((ident, received, op, work, outcome))
        self._connection.send(pack(C10dHeader(CTS, ident=ident, nbytes=buffer.numel())))
        return _PENDING if buffer.numel() else outcome

    def _send_data(self, frame: C10dFrame) -> None:
        header = frame.header
        with self._lock:
            payload, work = self._announced.pop(header.ident, (None, None))
        if payload is None or work is None or header.nbytes > payload.numel():
            raise ProtocolError(
                f"rank {self._connection.peer} takes a message that was not announced", peer=self._connection.peer
            )
        if not header.nbytes:
            self._inbox.put(conclude, work)
            return
        behind = pack(C10dHeader(DATA, ident=header.ident))
        with self._lock:
            self._sending[header.ident] = (payload, work, behind, None)
        # Either abandon() sees the frame that follows the data, or this line sees the call of abandon().
        if not self._abandoned:
            sent = self._connection.send_data(payload[: header.nbytes], behind)
            with self._lock:
                self._sending[header.ident] = (payload, work, behind, sent)

    def _finish_recv(self, frame: C10dFrame) -> None:
        with self._lock:
            if not self._receiving or self._receiving[0][0] != frame.header.ident:
                raise ProtocolError(
                    f"rank {self._connection.peer} sends a message that was not taken", peer=self._connection.peer
                )
            _, received, _, work, outcome = self._receiving[0]
        try:
            received.wait(FOREVER)
        except RuntimeError:
            return  # The receive stays in _receiving, which keeps the tensor. The reader reports the lost peer.
        with self._lock:
            self._receiving.popleft()
        # DONE is sent first, so that it reaches the peer even if the loop closes as soon as the work is complete.
        self._connection.send(pack(C10dHeader(DONE, ident=frame.header.ident)))
        self._inbox.put(conclude, work, outcome)

    def _finish_send(self, frame: C10dFrame) -> None:
        with self._lock:
            _, work, *_ = self._sending.pop(frame.header.ident, (None, None))
        if work is None:
            peer = self._connection.peer
            raise ProtocolError(f"rank {peer} confirms a message that was not sent", peer=peer)
        self._inbox.put(conclude, work)

    def _add_credit(self, frame: C10dFrame) -> None:
        with self._lock:
            self._credit = min(_CREDIT, self._credit + frame.header.ident)

    def abandon(self) -> None:
        """Invalidate all messages that are being sent, because the program may write into their tensors from now on.

        Any thread or a signal handler may call this method, so the method takes no lock.
        """
        self._abandoned = True
        for _, _, frame, _ in list(self._sending.values()):
            void(frame)

    def clear(self) -> None:
        """Release all tensors, after the group's connections are broken and its threads have ended."""
        self._receiving.clear()
        self._announced.clear()
        self._sending.clear()
        self._posted.clear()
        self._probes.clear()
        self._unexpected.clear()


def _seen(probe: ops.Probe, header: C10dHeader) -> ops.Message:
    """Return the result of a probe that has found a message."""
    return probe.message(header.nbytes, header.type)


def _outcome_of(header: C10dHeader, op: ops.Recv, peer: int) -> CommError | object:
    """Return the outcome of a receive that has taken a message."""
    wanted = op.tensor
    if not has_room(wanted):
        return CommError("the storage of a tensor was resized while the op had it")
    return misfit(peer, header.type, header.nbytes, wanted) or OP_RESULT
