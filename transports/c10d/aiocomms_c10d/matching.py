"""Point to point with one peer: matches its messages with this rank's receives.

A small message travels with its header and is kept by the receiver until it is asked for; a large one is announced,
and sent straight into the tensor that a receive has named. Matching is done on whichever thread comes second, so it
does not wait for a busy loop.

A sender that gives up lets its program have the tensor at once, while gloo may still be sending it. Behind the bytes
goes a frame that says whether they stand, and a receive that does not hear so waits for the end of the communicator.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any, Final

from torch import Tensor

from aiocomms import ops
from aiocomms.errors import CommError, MessageTruncatedError, ProtocolError
from aiocomms.lowlevel import misfit
from aiocomms.transport import OP_RESULT, Completion, conclude
from aiocomms_c10d.control import FOREVER, ControlConnection
from aiocomms_c10d.inbox import Inbox
from aiocomms_c10d.wire import CODES, CREDIT, CTS, DATA, DONE, EAGER, INLINE, RTS, VOID, Frame, Header, flat, pack, void

Key = tuple[int, int]
"""Channel and tag."""

_CREDIT: Final = 1024 * 1024
"""Bytes of small messages that a peer keeps for receives that have not come yet; beyond them all are announced."""
_OVERHEAD: Final = 256
"""What keeping a message costs besides its bytes."""

_PENDING = object()
"""Not complete yet."""


class Matcher:
    """The messages from and to one peer. Works are completed on the loop's thread."""

    def __init__(self, connection: ControlConnection, inbox: Inbox) -> None:
        self._connection = connection
        self._inbox = inbox
        self._lock = threading.Lock()
        self._posted: defaultdict[Key, deque[tuple[ops.Recv, Completion]]] = defaultdict(deque)
        self._unexpected: defaultdict[Key, deque[tuple[Header, Tensor | None]]] = defaultdict(deque)
        self._announced: dict[int, tuple[Tensor, Completion]] = {}
        self._sending: dict[int, tuple[Tensor, Completion, Tensor, Any]] = {}
        self._receiving: deque[tuple[int, Any, ops.Recv, Completion, Any]] = deque()
        self._last_ident = 0
        self._credit = _CREDIT  # what the peer will still keep for us
        self._credit_owed = 0  # what we have kept for the peer, and handed over since we last told it
        self._abandoned = False
        self._close_error: CommError | None = None  # why nothing more will come, once the peer has closed
        self._handlers = {
            EAGER: self._match,
            RTS: self._match,
            CTS: self._send_data,
            DATA: self._finish_recv,
            VOID: lambda _: None,  # the peer has lost the communicator, and will say why, or nothing more
            DONE: self._finish_send,
            CREDIT: self._add_credit,
        }

    # ---------------------------------------------------------------------------------------- on the loop's thread

    def send(self, op: ops.Send, work: Completion) -> None:
        """Start a send."""
        payload = flat(op.tensor)
        nbytes = payload.numel()
        header = Header(EAGER, op.channel, CODES[op.tensor.dtype], op.tag, nbytes=nbytes)
        cost = nbytes + _OVERHEAD
        with self._lock:
            close_error = self._close_error
            eager = nbytes <= INLINE and cost <= self._credit
            if close_error is not None:
                pass  # the work fails below: nothing is completed under the lock, for that may post the next op
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
        """Take the oldest matching message, or wait for one."""
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

    def try_cancel(self, work: Completion) -> bool:
        """Forget a receive that nothing has matched; False if something has."""
        op = work.op
        if not isinstance(op, ops.Recv):
            return False
        key = (op.channel, op.tag)
        with self._lock:
            posted = self._posted.get(key, ())
            for i, (_, other) in enumerate(posted):
                if other is work:
                    del posted[i]  # type: ignore[union-attr]
                    if not posted:
                        del self._posted[key]
                    return True
        return False

    # --------------------------------------------------------------------------------------- on the reader's thread

    def handle(self, frame: Frame) -> None:
        """Act on a frame of the peer.

        :raises ProtocolError: it makes no sense.
        """
        self._handlers[frame.header.kind](frame)

    def close(self, error: CommError) -> None:
        """The peer has said goodbye: what waits for it fails, and so will what is posted later.

        What it sent before and nobody asked for can still be received; what it only announced will not come.
        """
        with self._lock:
            self._close_error = error
            orphans = [work for posted in self._posted.values() for _, work in posted]
            orphans += [work for _, work in self._announced.values()]
            self._posted.clear()
            self._announced.clear()
            for key, unexpected in list(self._unexpected.items()):
                self._unexpected[key] = deque(message for message in unexpected if message[1] is not None)
                if not self._unexpected[key]:
                    del self._unexpected[key]
        for work in orphans:
            self._inbox.put(conclude, work, error)

    def has_transfer_under_way(self) -> bool:
        """Whether a large message was under way from the peer or to it."""
        with self._lock:
            return bool(self._receiving or self._sending)

    def _match(self, frame: Frame) -> None:
        header = frame.header
        key = (header.channel, header.tag)
        with self._lock:
            posted = self._posted.get(key)
            if not posted:
                self._unexpected[key].append((header, frame.payload.clone() if header.kind == EAGER else None))
                return
            op, work = posted.popleft()
            if not posted:
                del self._posted[key]
            outcome = self._deliver(header, frame.payload, op, work)
        if outcome is not _PENDING:
            self._inbox.put(conclude, work, outcome)

    def _deliver(self, header: Header, payload: Tensor | None, op: ops.Recv, work: Completion) -> Any:
        """Deliver a message or, if it was only announced, ask for it."""
        buffer = flat(op.tensor)
        outcome = _outcome_of(header, op, self._connection.peer)
        short = outcome is OP_RESULT or isinstance(outcome, MessageTruncatedError)
        n = min(header.nbytes, buffer.numel()) if short else 0
        if header.kind == RTS:
            return self._request_data(header.ident, buffer[:n], op, work, outcome)
        assert payload is not None
        buffer[:n].copy_(payload[:n])
        self._credit_owed += header.nbytes + _OVERHEAD
        if self._credit_owed >= _CREDIT // 4:
            self._connection.send(pack(Header(CREDIT, ident=self._credit_owed)))
            self._credit_owed = 0
        return outcome

    def _request_data(self, ident: int, buffer: Tensor, op: ops.Recv, work: Completion, outcome: Any) -> Any:
        if buffer.numel():
            try:
                received = self._connection.receive_data(buffer)
            except RuntimeError:
                return _PENDING  # the peer is lost, and the reader is about to say so
            self._receiving.append((ident, received, op, work, outcome))
        self._connection.send(pack(Header(CTS, ident=ident, nbytes=buffer.numel())))
        return _PENDING if buffer.numel() else outcome

    def _send_data(self, frame: Frame) -> None:
        header = frame.header
        with self._lock:
            payload, work = self._announced.pop(header.ident, (None, None))
        if payload is None or work is None or header.nbytes > payload.numel():
            raise ProtocolError(
                f"rank {self._connection.peer} asks for what was not announced", peer=self._connection.peer
            )
        if not header.nbytes:
            self._inbox.put(conclude, work)
            return
        behind = pack(Header(DATA, ident=header.ident))
        with self._lock:
            self._sending[header.ident] = (payload, work, behind, None)
        # Either abandon() has seen what goes behind the data, or we see here that it was called.
        if not self._abandoned:
            sent = self._connection.send_data(payload[: header.nbytes], behind)
            with self._lock:
                self._sending[header.ident] = (payload, work, behind, sent)

    def _finish_recv(self, frame: Frame) -> None:
        with self._lock:
            if not self._receiving or self._receiving[0][0] != frame.header.ident:
                raise ProtocolError(
                    f"rank {self._connection.peer} sends what was not asked for", peer=self._connection.peer
                )
            _, received, _, work, outcome = self._receiving[0]
        try:
            received.wait(FOREVER)
        except RuntimeError:
            return  # kept in _receiving, for the tensor; the reader sees that the peer is lost
        with self._lock:
            self._receiving.popleft()
        # First, so that it reaches the peer even if the loop closes as soon as the work is complete.
        self._connection.send(pack(Header(DONE, ident=frame.header.ident)))
        self._inbox.put(conclude, work, outcome)

    def _finish_send(self, frame: Frame) -> None:
        with self._lock:
            _, work, *_ = self._sending.pop(frame.header.ident, (None, None))
        if work is None:
            raise ProtocolError(f"rank {self._connection.peer} confirms what was not sent", peer=self._connection.peer)
        self._inbox.put(conclude, work)

    def _add_credit(self, frame: Frame) -> None:
        with self._lock:
            self._credit = min(_CREDIT, self._credit + frame.header.ident)

    def abandon(self) -> None:
        """From now on the program may write into what is being sent. Any thread, or a signal handler: takes no lock."""
        self._abandoned = True
        for _, _, frame, _ in list(self._sending.values()):
            void(frame)

    def clear(self) -> None:
        """Let go of all tensors; the group is poisoned and its threads have ended."""
        self._receiving.clear()
        self._announced.clear()
        self._sending.clear()
        self._posted.clear()
        self._unexpected.clear()


def _outcome_of(header: Header, op: ops.Recv, peer: int) -> CommError | object:
    """What a receive is completed with when it has taken a message."""
    wanted = op.tensor
    if wanted.untyped_storage().nbytes() < wanted.nbytes:
        return CommError("the tensor's storage was resized while the op had it, and has no room for the message")
    return misfit(peer, header.type, header.nbytes, wanted) or OP_RESULT
