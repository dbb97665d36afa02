"""The transport of one rank: control connections, messages, collectives, abort and close."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Self

import msgspec
import torch
from torch._C._distributed_c10d import Backend, ProcessGroup

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError, UnsupportedOperation
from aiocomms.lowlevel import Inbox, admitting, at_end, clock, closed_by, gone, run_in_thread, unaffected
from aiocomms.transport import Capabilities, Completion, Rendezvous, Transport
from aiocomms_c10d import bringup, wire
from aiocomms_c10d.agreement import Agreement
from aiocomms_c10d.control import ControlConnection
from aiocomms_c10d.group import C10dGroup
from aiocomms_c10d.matching import PeerMatcher
from aiocomms_c10d.wire import C10dFrame, C10dHeader

_ABORT_PATIENCE: Final = 2.0
"""The largest number of seconds for sending the reason of an abort to all peers.

If a connection breaks before the peer has received the reason, the peer considers this rank dead. Sending takes the
whole time only if a peer does not read.
"""
_GOODBYE: Final = 2.0
"""The time limit, in seconds, for all peers to confirm that they have received all frames.

The peers confirm this even if their event loops do not run.
"""

_RELEASE: Final = 1.0
"""The time limit, in seconds, for gloo to end its threads. gloo usually needs some milliseconds."""
_log = logging.getLogger("aiocomms")


class C10dTransport(Transport):
    """The transport over its own gloo process group; large collectives may use a user's process group instead.

    Frames are used for point-to-point messages and for the agreement on collectives. One thread for each peer receives
    the frames. gloo executes large collectives. Only the completion of a rank's works waits for that rank's event loop.
    """

    capabilities = Capabilities(ops=(ops.P2P - {ops.Batch}) | ops.ARRIVALS | ops.COLLECTIVES | ops.SCANS)

    def __init__(self, rank: int, size: int, gloo: Any, group: Any) -> None:
        """Start the reader threads.

        :param gloo: this communicator's own group, for frames; None if there is only one rank.
        :param group: the group for large collectives: either ``gloo``, or the user's group.
        """
        self._rank = rank
        self._gloo = gloo
        self._adopted = None if group is gloo else group
        self._inbox = Inbox()
        self._lost = clock.event()
        self._abort_error: CommError | None = None  # the error of the first abort
        self._stop_lock = threading.Lock()
        self._stopped = False  # True once the loss of a peer is no longer reported
        self._closed: frozenset[int] = frozenset()  # the peers that have closed
        peers = [] if gloo is None else [peer for peer in range(size) if peer != rank]
        self._connections = {peer: self._connection(peer, size) for peer in peers}
        self._matchers = {peer: PeerMatcher(connection, self._inbox) for peer, connection in self._connections.items()}
        self._agreement = Agreement(
            C10dGroup(group, rank, size), self._connections, self._inbox, self._fail, self._lost
        )
        try:
            for connection in self._connections.values():
                connection.start()
        except RuntimeError as error:
            self._stop()
            for connection in self._connections.values():
                connection.join()
            self._inbox.close()
            raise CommError(f"no thread can be started: {error}") from error
        _open_transports.add(self)

    def _connection(self, peer: int, size: int) -> ControlConnection:
        return ControlConnection(
            self._gloo,
            peer,
            size,
            lambda frame: self._handle_frame(peer, frame),
            lambda error: self._lose_peer(peer, error),
        )

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        """See :meth:`Transport.probe`. If torch has no gloo, this module cannot be imported."""
        return None

    @classmethod
    def preference(cls, device: torch.device, size: int, family: ops.Family) -> int:
        """See :meth:`Transport.preference`. This transport is used if there is no faster transport."""
        return 10 if device.type == "cpu" else 0

    @classmethod
    def adopts(cls, foreign: object) -> bool:
        """See :meth:`Transport.adopts`."""
        return isinstance(foreign, (ProcessGroup, Backend))

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`.

        Hint ``"adopt"``: the user's process group for the collectives. This transport does not destroy the group.
        """
        rank, size = rendezvous.rank, rendezvous.size
        if size == 1:
            return cls(rank, size, None, None)
        group = options.get("adopt")
        # Two communicators over one group would confuse their collectives.
        adopt = cls.adopts(group) and not any(other is group for other in _adopted_groups)
        if adopt:
            _adopted_groups.append(group)
        transport: Self | None = None
        try:
            gloo, adopted = await cls._bring_up(rendezvous, group, adopt)
            transport = cls(rank, size, gloo, group if adopted else gloo)
        finally:
            if adopt and (transport is None or transport._adopted is None):
                _adopted_groups.remove(group)
        return transport

    async def split(self, rendezvous: Rendezvous, ranks: Sequence[int], options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.split`. The new communicator does not use an adopted group, which has other ranks."""
        return await self.open(rendezvous, {**options, "adopt": None})

    @classmethod
    async def _bring_up(cls, rendezvous: Rendezvous, group: Any, adopt: bool) -> tuple[Any, bool]:
        if rendezvous.store is None and cls.adopts(group):
            timeout = rendezvous.timeout
            rendezvous.store = await rendezvous.run(
                "meeting over the adopted group", lambda: bringup.store_over(group, timeout)
            )
        if rendezvous.store is None and rendezvous.size > 1:
            raise UnsupportedOperation("transport 'c10d' meets in a store, and endpoints have none: use another one")
        async with admitting(rendezvous.store):
            return await bringup.open_gloo(rendezvous, adopt)

    # ---------------------------------------------------------------------------------------- on the loop's thread

    def post(self, op: ops.Op, work: Completion) -> None:
        """See :meth:`Transport.post`."""
        op = _aliased(op)
        if isinstance(op, ops.Send):
            self._matchers[op.dst].send(op, work)
        elif isinstance(op, ops.Take):
            self._matchers[op.src].take(op, work)
        elif isinstance(op, ops.Probe):
            self._matchers[op.src].probe(op, work)
        elif isinstance(op, ops.Recv):
            self._matchers[op.src].recv(op, work)
        else:
            self._agreement.post(op, work)
        for peer in self._closed:
            self._fail_if_needed(peer)

    def progress(self) -> bool:
        """See :meth:`Transport.progress`."""
        return self._inbox.drain()

    def fileno(self) -> int | None:
        """See :meth:`Transport.fileno`."""
        return self._inbox.fileno()

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        return isinstance(work.op, (ops.Recv, ops.Probe)) and self._matchers[work.op.src].try_cancel(work)

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """See :meth:`Transport.waiting_for`."""
        op = work.op
        if isinstance(op, ops.Recv):
            return [op.src]
        return [op.dst] if isinstance(op, ops.Send) else self._agreement.waiting_for(work)

    def say(self, rank: int, note: bytes) -> bool:
        """See :meth:`Transport.say`.

        The peer's reader thread receives the note, even while the peer's event loop is busy.
        """
        if not self._lost.is_set() and rank in self._connections:
            self._connections[rank].send(wire.pack(C10dHeader(wire.NOTE), note))
        return not self._lost.is_set()

    # ---------------------------------------------------------------------------------------- on a reader's thread

    def _handle_frame(self, peer: int, frame: C10dFrame) -> None:
        kind = frame.header.kind
        if kind == wire.CALL:
            self._agreement.handle_call(peer, frame)
        elif kind == wire.LANDED:
            self._agreement.handle_landed(peer, frame.header.ident)
        elif kind == wire.ABORT:
            self._handle_abort(frame)
        elif kind == wire.BYE:
            self._closed |= {peer}
            self._connections[peer].send(wire.pack(C10dHeader(wire.BYE_ACK)))
            self._matchers[peer].close(closed_by(peer))
            self._fail_if_needed(peer)
        elif kind == wire.BYE_ACK:
            self._connections[peer].flushed.set()
        elif kind == wire.NOTE:
            self.on_note(peer, frame.text)
        else:
            self._matchers[peer].handle(frame)

    def _handle_abort(self, frame: C10dFrame) -> None:
        error = wire.unpack_error(frame)
        if isinstance(error, MismatchError):
            self._agreement.dispute(frame.header.ident, error)
        self._fail(error)

    def _lose_peer(self, peer: int, error: CommError | None) -> None:
        """Handle the end of the connection to a peer: no more frames arrive from the peer."""
        if self._stopped:
            return
        if error is not None:
            self._fail(error)
        elif peer in self._closed:
            if self._matchers[peer].has_transfer_under_way():
                self._fail(closed_by(peer))
            self._fail_if_needed(peer)
        else:
            self._fail(gone(peer))

    def _fail_if_needed(self, peer: int) -> None:
        """Lose the communicator if a collective needs a peer that has closed.

        A failed message does not lose the communicator.
        """
        if self._agreement.waits_for(peer):
            self._fail(closed_by(peer))

    def _fail(self, error: CommError) -> None:
        """Report the loss of the communicator on the event loop, after earlier completions of works."""
        self._lost.set()
        self._inbox.put(lambda: self.on_failure(error))

    # ----------------------------------------------------------------------------------------- abort and close

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`."""
        self._lost.set()
        for matcher in self._matchers.values():
            matcher.abandon()
        if self._abort_error is None:
            self._abort_error = error
            try:
                threading.Thread(target=self._stop, name="aiocomms c10d aborts", daemon=True).start()
            except RuntimeError:  # no thread can be started
                self._stop()

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        try:
            await run_in_thread(self._close, anyhow=True)
        finally:  # if the close is cancelled, its thread continues and needs no inbox
            self._inbox.drain()
            self._inbox.close()

    def _close(self) -> None:
        if self._abort_error is None:
            self._say_goodbye()
        self._stop()
        for connection in self._connections.values():
            connection.join()
        self._agreement.join(None if self._adopted is None else 0.0)
        for matcher in self._matchers.values():
            matcher.clear()
        _open_transports.discard(self)
        if self._adopted is not None:
            _adopted_groups.remove(self._adopted)
        groups, self._gloo = [self._gloo], None
        _let_go(groups)

    def _say_goodbye(self) -> None:
        """Send BYE to all peers, and wait at most :data:`_GOODBYE` seconds until the peers have received all frames."""
        for connection in self._connections.values():
            connection.send(wire.pack(C10dHeader(wire.BYE)))
        ends = clock.now() + _GOODBYE
        for connection in self._connections.values():
            connection.flushed.wait(max(0.0, ends - clock.now()))

    def _stop(self) -> None:
        """Break all connections. After an abort, first send the reason to the peers. A second call does nothing."""
        with self._stop_lock:
            if self._stopped:
                return
            self._stopped = True
            try:
                if self._abort_error is not None:
                    self._send_abort(self._abort_error)
            finally:
                if self._gloo is not None:
                    bringup.poison(self._gloo)

    def _send_abort(self, error: CommError) -> None:
        frame = wire.pack_error(error, self._rank, self._agreement.disputed)
        ends = clock.now() + _ABORT_PATIENCE
        for work in [connection.send_last(frame) for connection in self._connections.values()]:
            with contextlib.suppress(RuntimeError):
                if work is not None:
                    work.wait(timedelta(seconds=max(0.001, ends - clock.now())))


def _let_go(groups: list[Any]) -> None:
    """Release the last reference to a gloo group, which ends gloo's threads.

    The release may never return. If a peer is gone when gloo begins a send of a collective, gloo loses that send. The
    thread that waits for the send's end notices neither the loss of the peer nor a call of ``poison``.

    :param groups: a list with the group. This function empties the list.
    """
    try:
        thread = threading.Thread(target=groups.clear, name="aiocomms c10d lets go", daemon=True)
        thread.start()
    except RuntimeError:  # no thread can be started
        return groups.clear()
    thread.join(_RELEASE)
    if thread.is_alive():
        _log.warning(
            "gloo waits without end for a send of a collective that lost a rank: its threads, its sockets and "
            "the collective's tensors stay until this process ends"
        )
    return None


@unaffected
def _aliased(op: ops.Op) -> ops.Op:
    """Return the op with aliases of its tensors, because the program may move its own tensors to other memory."""
    aliases: dict[str, Any] = {}
    for name in op.__struct_fields__:
        value = getattr(op, name)
        if isinstance(value, torch.Tensor):
            aliases[name] = value.detach()
        elif isinstance(value, Sequence) and value and isinstance(value[0], torch.Tensor):
            aliases[name] = [tensor.detach() for tensor in value]
    return msgspec.structs.replace(op, **aliases)


_open_transports: weakref.WeakSet[C10dTransport] = weakref.WeakSet()
_adopted_groups: list[Any] = []
"""The users' process groups that communicators use."""


def _stop_all() -> None:
    """Stop all transports at exit, because a reader that wakes up during the interpreter's shutdown may crash."""
    for transport in list(_open_transports):
        transport._stop()
        for connection in transport._connections.values():
            connection.join()


at_end(_stop_all)
os.register_at_fork(after_in_child=_open_transports.clear)  # the connections belong to the parent
