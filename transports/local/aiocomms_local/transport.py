"""The plug-in :class:`LocalTransport`.

Each instance is one rank of a communicator, and shares a :class:`SharedMatcher` with the other ranks.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from aiocomms import ops
from aiocomms.errors import ArgumentError, CommAbortedError, CommError
from aiocomms.lowlevel import Inbox
from aiocomms.transport import Capabilities, Completion, Rendezvous, Transport, conclude
from aiocomms_local.matching import Done, SharedMatcher
from aiocomms_local.semantics import perform

_forming: dict[bytes, SharedMatcher] = {}
"""The matchers of the communicators that are being opened.

The keys are tokens. Every rank uses the matcher whose key is rank 0's token.
"""
_forming_lock = threading.Lock()

_PERFORMED: frozenset[type[ops.Op]] = ops.COLLECTIVES | ops.SCANS
_COLLECTIVE: frozenset[type[ops.Op]] = _PERFORMED | {ops.WindowOpen, ops.WindowClose}


class LocalTransport(Transport):
    """The transport between ranks that are tasks of one process, in one event loop or in the loops of several threads.

    ``post`` does all the work. If a send and a receive match, the later of the two calls moves the message. In a
    collective, the call of the last rank moves the data. The call that moves the data also completes the works of all
    ranks that take part. A send waits for its receive, whatever the size of the message. So a program that relies on
    buffered sends hangs with this transport.
    """

    capabilities = Capabilities(
        ops=(ops.P2P - {ops.Batch}) | ops.ARRIVALS | _COLLECTIVE | ops.RMA,
        devices=frozenset({"cpu", "cuda"}),
        in_process=True,
    )

    def __init__(self, matcher: SharedMatcher, rank: int) -> None:
        self._matcher = matcher
        self._rank = rank
        self._thread = threading.get_ident()
        self._calls = 0
        self._inbox = Inbox()  # The inbox takes works that a rank in another thread has completed.
        self._solo = matcher.size == 1
        self._handlers: dict[type[ops.Op], Callable[[Any, Completion], Done]] = {
            ops.Send: lambda op, work: matcher.send(rank, op, work),
            ops.Recv: lambda op, work: matcher.recv(rank, op, work),
            ops.Take: lambda op, work: matcher.take(rank, op, work),
            ops.Probe: lambda op, work: matcher.probe(rank, op, work),
            **dict.fromkeys(_COLLECTIVE, self._join),
            **dict.fromkeys(ops.RMA - _COLLECTIVE, lambda op, work: op.window.handle.act(op, rank, work)),
        }

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        """See :meth:`Transport.probe`. This transport can always run."""
        return None

    @classmethod
    def preference(cls, device: torch.device, size: int, family: ops.Family) -> int:
        """See :meth:`Transport.preference`. This transport is the obvious choice for a communicator of one rank."""
        return 100 if size == 1 else 0

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`."""
        ours = b"%d " % os.getpid()
        token = ours + secrets.token_hex(16).encode()
        matcher = SharedMatcher(rendezvous.size)
        with _forming_lock:
            _forming[token] = matcher
        try:
            tokens = await rendezvous.exchange("local", token)
            if not all(value.startswith(ours) for value in tokens):
                processes = [int(value.split()[0]) for value in tokens]
                raise ArgumentError(
                    f"transport 'local' joins ranks of one process, and these are in the processes {processes}"
                )
            if (found := _forming.get(tokens[0])) is None:
                raise CommAbortedError("rank 0 has given up while the ranks met", peer=0)
            matcher = found
            self = cls(matcher, rendezvous.rank)
            with matcher.lock:
                matcher.ranks[rendezvous.rank] = self
            try:
                # After this exchange every rank has found rank 0's matcher, so the token is no longer needed.
                await rendezvous.exchange("local-found", b"")
            except BaseException:
                self._inbox.close()
                raise
        finally:
            with _forming_lock:
                del _forming[token]
        return self

    def post(self, op: ops.Op, work: Completion) -> None:
        """See :meth:`Transport.post`."""
        if self._solo and type(op) in _PERFORMED:
            perform((op,))
            work.complete()
            return
        matcher = self._matcher
        with matcher.lock:
            if matcher.failure is not None:
                done: Done = [(self._rank, work, matcher.failure)]
            else:
                done = self._handlers[type(op)](op, work)
            failure = matcher.failure
        self._deliver(done)
        if failure is not None:
            self._spread(failure)

    def progress(self) -> bool:
        """See :meth:`Transport.progress`.

        This method completes the works that ranks in other threads have passed on.
        """
        return self._inbox.drain()

    def fileno(self) -> int | None:
        """See :meth:`Transport.fileno`."""
        return self._inbox.fileno()

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        with self._matcher.lock:
            return self._matcher.withdraw(self._rank, work.op, work)

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """See :meth:`Transport.waiting_for`."""
        with self._matcher.lock:
            return self._matcher.waiting_for(work.op, work)

    def say(self, rank: int, note: bytes) -> bool:
        """See :meth:`Transport.say`. The other rank's ``on_note`` runs on this thread."""
        transport = self._matcher.ranks[rank]
        if transport is not None:
            transport.on_note(self._rank, note)
        return True

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`."""
        with self._matcher.lock:
            if self._matcher.failure is not None:
                return
            self._matcher.failure = error
        self._spread(error)

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        matcher = self._matcher
        with matcher.lock:
            done = matcher.leave(self._rank)
            failure = matcher.failure
        self._deliver(done)
        if failure is not None:
            self._spread(failure)
        self._inbox.drain()
        self._inbox.close()

    def _join(self, op: ops.Op, work: Completion) -> Done:
        self._calls += 1
        return self._matcher.join(self._rank, self._calls, op, work)

    def _deliver(self, done: Done) -> None:
        """Mark works of this rank and of other ranks as complete, each work on the thread of its own rank."""
        for rank, work, value in done:
            owner = self._matcher.ranks[rank]
            if owner is None:
                conclude(work, value)
            else:
                owner.settle(work, value)

    def settle(self, work: Completion, value: Any) -> None:
        """Complete a work of this rank, on this rank's thread."""
        if self._thread == threading.get_ident():
            conclude(work, value)
        else:
            self._inbox.put(conclude, work, value)

    def _spread(self, failure: CommError) -> None:
        """Notify every open rank that the communicator is lost."""
        for transport in list(self._matcher.ranks):
            if transport is not None and transport is not self:
                transport.on_failure(failure)
        if self._matcher.ranks[self._rank] is self:
            self.on_failure(failure)
