"""The class ``Core``, which has one communicator's transports and works, and handles failures and the close.

Programs hold an :class:`aiocomms.Communicator`, which starts ops through a :class:`Core`. The module
:mod:`aiocomms.core.lifecycle` decides how the state of a communicator changes. This module runs the actions of each
change.

Any thread may call :meth:`Core.lose` and :meth:`Core.expire`. Any thread may call :meth:`Core.abort`. A signal
handler may also call this method, even if the signal has interrupted a method of this module. All other methods are
called on the loop's thread. If a transport raises an unexpected exception, :mod:`aiocomms.progress.guard` ends only the
communicator of this transport.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import RLock, get_ident
from typing import Any

import anyio
import anyio.lowlevel
import torch

from aiocomms import ops
from aiocomms.bootstrap.notes import Notes, Parting
from aiocomms.bootstrap.registry import close_transports
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.core import lifecycle
from aiocomms.core.inquiry import Inquiry, Wait
from aiocomms.core.lifecycle import Action, Failure, Life, Verdict, failure_of
from aiocomms.core.posting import Posting
from aiocomms.core.postmortem import ASKED, PostMortem
from aiocomms.cuda import CallerMark, CallerMarks
from aiocomms.diagnosis import debug, dumps
from aiocomms.diagnosis.recorder import UNMATCHED, Recorder, called, capacity, peers
from aiocomms.errors import (
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    LaneAbortedError,
    closed_by,
    wrong_thread,
)
from aiocomms.lowering.routing import Router
from aiocomms.lowering.shortcuts import find_check, find_shortcuts
from aiocomms.lowering.windows import TwoSided
from aiocomms.lowlevel import clock
from aiocomms.progress.driver import LoopDriver, Promise
from aiocomms.progress.guard import guarded
from aiocomms.progress.heartbeat import Heartbeat
from aiocomms.progress.hooks import Hooks
from aiocomms.progress.inflight import AGAIN, InFlight, LaneWork, StartedWork
from aiocomms.transport import Transport
from aiocomms.transport.native import Ledger, PlainLedger, Shortcuts

CLOSE_GRACE = 5.0
"""The largest number of seconds for which a close waits for pending ops."""


class Core(Posting):
    """The internals of one communicator. A core is created when the communicator's transports are open."""

    rank: int
    size: int
    name: str
    label: str
    generation: int
    device: torch.device
    driver: LoopDriver
    ledger: Ledger
    refusals: int
    """The number of refused ops."""
    life: Life
    fast_check: Callable[[object, bool], bool] | None
    failures: dict[tuple[str, int | None], int]
    pre_hooks: Hooks
    post_hooks: Hooks
    abort_hooks: Hooks
    shortcuts: Shortcuts | None
    marks: CallerMarks | None
    """The object that marks positions in the callers' CUDA streams, or None if no transport uses CUDA streams."""
    worded: Callable[[CommError], CommError]

    def __init__(
        self, rendezvous: StoreRendezvous, by_family: Mapping[ops.Family, Transport], options: Mapping[str, Any]
    ) -> None:
        """Create the internals, and begin to handle the events of the transports.

        :param by_family: the transport of each family of ops.
        :param options: the user's hints.
        """
        self.rank, self.size, self.device = rendezvous.rank, rendezvous.size, rendezvous.device
        self.name, self.label, self.generation = rendezvous.name, rendezvous.label, rendezvous.epoch
        self.driver = LoopDriver.current()
        self.thread: int = self.driver.thread
        self.by_family: dict[ops.Family, Transport] = dict(by_family)
        if "rma" not in self.by_family and "p2p" in self.by_family:
            self.by_family["rma"] = TwoSided(self)
        self.transports: list[Transport] = list(dict.fromkeys(self.by_family.values()))
        """The transports without duplicates, because one transport may carry several families of ops."""
        self.fast_check, self.marks = find_check(self.transports), CallerMarks.of(self.transports)
        self.life, self.worded = Life(), lambda error: error
        self._lock = RLock()  # The lock guards every step. A signal handler may abort what it interrupts.
        self.notes: Notes = Notes(self.transports, self.size)
        self._rendezvous, self._inquiry = rendezvous, Inquiry(self, self.notes)
        self._postmortem: PostMortem | None = None
        self._ended, self.refusals, self.failures = False, 0, dict[tuple[str, int | None], int]()
        self._closing: Promise | None = None
        self.over: Promise = Promise(self.driver)
        """The promise that is set when a lost communicator's works have ended, or when the communicator is closed."""
        self.pre_hooks, self.post_hooks, self.abort_hooks = Hooks(), Hooks(), Hooks()
        self.router: Router = Router(self, self.by_family)
        self.given_up: dict[int, LaneAbortedError] = self.router.lane_aborts.given_up
        """The errors of the aborted lanes, by the number of the lane."""
        self.in_flight: InFlight = InFlight(self, Heartbeat(self.transports, options, self.lose))
        entries = 2 * capacity()
        self.shortcuts = None if debug.asked_for() else find_shortcuts(self, self.by_family, entries)
        self.ledger = PlainLedger(entries) if self.shortcuts is None else self.shortcuts
        self.recorder: Recorder = Recorder(self, self.in_flight, entries // 2)
        self._spinning = [t for t in self.transports if t.capabilities.spin]
        self._serve()

    def _serve(self) -> None:
        """Listen for failures, and for notes (small messages) of other ranks.

        Also handle the failures and notes that have arrived while this rank was opening the communicator.
        """
        for transport in self.transports:
            transport.on_failure = self.lose  # type: ignore[method-assign]
            transport.on_note = self.notes.hear  # type: ignore[method-assign]
            self.driver.attach(transport)
        for transport in self.transports:
            for rank, note in transport.early_notes.items():
                self.notes.hear(rank, note)
            if transport.early_failure is not None:
                self.lose(transport.early_failure)

    def mark(self, op: ops.Op) -> CallerMark | None:
        """Mark this thread's position in its CUDA stream, for an op that the loop starts later.

        Any thread may call this method.
        """
        if self.marks is None:
            return None
        # An op that names no tensor may return new ones, which belong to the memory pool of the caller's stream.
        known = op.reads() or op.writes() or isinstance(op, ops.Barrier)
        return self.marks.mark() if known else self.marks.stream()

    @property
    def closed(self) -> bool:
        """True once this rank has begun to close the communicator."""
        return self._closing is not None

    @property
    def refusing(self) -> bool:
        """True once the communicator refuses ops."""
        return self.ledger.refusing

    def refusal(self) -> CommError | None:
        """Return the error with which a new op fails; None if a new op may start."""
        return self.life.refusal()

    def demand(self, what: str) -> None:
        """Raise an error if the caller is not on the loop's thread, or if the communicator is lost or closed.

        Calls that are not ops use this check.
        """
        self.demand_thread(what)
        if (error := self.refusal()) is not None:
            raise error.about(comm=self.name, op=what, rank=self.rank)

    def demand_thread(self, what: str) -> None:
        """Raise an error if the calling thread is not the loop's thread."""
        if get_ident() != self.thread:
            raise wrong_thread(f"{what} on '{self.name}'")

    def refused(self, op: ops.Op) -> Exception:
        """Return the error of an op that is refused."""
        error = self.refusal()
        if error is None:
            return wrong_thread(f"{op.name} on '{self.name}'")
        return self.worded(error.about(comm=self.name, op=op.name, rank=self.rank))

    # ----------------------------------------------------------------------------------------------- losing

    @property
    def lost(self) -> bool:
        """True once a failure has ended the communicator."""
        return self.life.failure is not None

    def abort(self, reason: str) -> None:
        """Abort the communicator on every rank. Any thread and any signal handler may call this."""
        error = CommAbortedError(f"aborted by rank {self.rank}: {reason}", peer=self.rank)
        self._lose(Failure(error, clock.now()), here=False)

    def lose(self, error: CommError) -> None:
        """Mark the communicator as lost because of a failure. Any thread may call this."""
        failure = failure_of(error, clock.now(), self.rank)
        self._lose(failure, here=get_ident() == self.thread)

    def _lose(self, failure: Failure, *, here: bool) -> None:
        """Change the state to lost, and run the actions of this change.

        :param here: True if the caller runs on the loop's thread, and not in a signal handler.
        """
        with self._lock:
            self.life, actions = lifecycle.lose(self.life, failure, here=here)
            self.ledger.refusing = True
            flying = self.in_flight.look() if actions else []
        for action in actions:
            match action:
                case Action.END_WORKS:
                    self._end_works()
                case Action.END_WORKS_SOON:
                    self.driver.call_threadsafe(self._end_works)
                case Action.NOTE:
                    record = dumps.Record(self.recorder, flying, str(failure.error))
                case Action.TELL_PEERS:
                    for transport in self.transports:
                        guarded(None, transport.abort, failure.for_peers(self.rank))
                case Action.RECORD:
                    record.write_later()
                case Action.EXPLAIN:
                    self._postmortem = PostMortem(self, self._rendezvous, failure)
                    self._postmortem.hold(record, self._explained)

    def _explained(self, verdict: Verdict, path: Path | None) -> None:
        with self._lock:
            self.life = lifecycle.explain(self.life, verdict, path)
        self.driver.call_threadsafe(self._end_works)

    def _end_works(self) -> None:
        """End every pending work with the error that belongs to the failure."""
        failure = self.life.failure
        if failure is None:  # After a fork the communicator belongs to the parent process.
            return
        self._ended = True
        for work in self.in_flight:
            work.abandon(failure.error_of(work))
        self.router.loopback.clear()
        self.router.arrivals.clear()
        hooks, self.abort_hooks = self.abort_hooks, Hooks()  # The hooks are called once.
        if hooks:
            hooks.call(self.driver, failure.error)
        self.over.set()
        self.in_flight.unwatch()

    def expire(self, work: StartedWork[Any], why: str = "") -> None:
        """End a pending op whose deadline has passed. The watchdog's thread calls this, perhaps while the loop is busy.

        The watchdog repeats the call until the op has ended, because an exception from a signal handler can
        interrupt a call.

        :param why: the text of the reason, if the op must end before its deadline; empty: the deadline has passed.
        """
        failure = self.life.failure
        if failure is not None:
            if clock.now() - failure.since >= AGAIN:
                self.driver.call_threadsafe(self._end_works)
        elif work.done():
            self.driver.call_threadsafe(work.finish)
        elif work.op.withdrawable:
            self._inquire(work, why)
        else:
            self._expire_all(work, why)

    def _inquire(self, work: StartedWork[Any], why: str) -> None:
        """Ask the peer of a late receive, probe or ``wait_signal`` what the peer is doing, then let the op fail."""
        queue, now = work.queue, clock.now()
        posted = None if queue is None else queue.get(work)
        if posted is not None:  # A work without an entry has become done meanwhile.
            what = called(work.op) + (f" in lane {work.lane}" if isinstance(work, LaneWork) else "")
            late = Wait(self._others(work.op)[0], posted, now, what)
            self._inquiry.begin(late, lambda report: self.driver.call_threadsafe(self._expire_alone, work, report, why))

    def _expire_alone(self, work: StartedWork[Any], report: str, why: str) -> None:
        """Let the late receive, probe or ``wait_signal`` fail, but no other op.

        If a message or signal has already matched the op, the communicator is lost.
        """
        if not work.done():
            if self.withdraw(work):
                late = f"{UNMATCHED} {called(work.op)}{'' if why else ' before its deadline'}; it was withdrawn{report}"
                late = f"{why}; {late}" if why else late
                work.abandon(CommTimeoutError(late, late=self._others(work.op)))
            else:
                self._expire_all(work, why)

    def _expire_all(self, work: StartedWork[Any], why: str) -> None:
        op, absent = work.op, self.waiting_for(work)
        what = "" if op.family == "collectives" else f": {called(op)}"
        who = f"; waiting for rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}" if absent else ""
        error = CommTimeoutError(
            why or f"its deadline passed{what}{who}", comm=work._comm_name(), op=op.name, seq=work.seq, rank=self.rank,
            late=absent[:ASKED],
        )  # fmt: skip
        self.lose(error)

    def waiting_for(self, work: StartedWork[Any]) -> Sequence[int]:
        """Return the ranks for which a pending op waits, as far as known. Any thread may call this."""
        absent = self.router.turns.waiting_for(work) if isinstance(work, LaneWork) else None
        if absent is None and (transport := self.by_family.get(work.op.family)) is not None:
            absent = list(guarded((), transport.waiting_for, self.router.awaited(work)))
        return absent or self._others(work.op)

    def _others(self, op: ops.Op) -> list[int]:
        """Return the other ranks that an op names. If the op names no other rank, return this rank."""
        ranks = peers(op)
        return [rank for rank in ranks if rank != self.rank] or ranks

    # ---------------------------------------------------------------------------------------------- closing

    async def posted_elsewhere(self, lane: int | None = None) -> None:
        """Wait until the ops that other threads are posting now are in flight or done.

        :param lane: the number of a lane, if the call must wait only for the ops of this lane; None: wait for all ops.
        """
        shortcuts = self.shortcuts
        with anyio.CancelScope(shield=True):
            while shortcuts is not None and shortcuts.elsewhere(lane):
                await anyio.lowlevel.checkpoint()

    async def aclose(self, released: Callable[[], object]) -> None:
        """Let pending ops end, withdraw unmatched receives, and release all resources. Idempotent.

        :param released: a function that is called once, after the ops have ended and before the transports are closed.
        """
        if self._closing is not None:
            return await self._closing
        self._closing = Promise(self.driver)
        try:
            await self._drain()
        finally:
            released()
            try:
                await self._release()
            finally:
                self._closing.set()

    async def _drain(self) -> None:
        with self._lock:
            self.life, actions = lifecycle.close(self.life)
            self.ledger.refusing = True
        await self.posted_elsewhere()
        if Action.WITHDRAW not in actions:
            return
        assert self.life.closed is not None
        self.router.lane_aborts.close()
        self.withdraw_all("the communicator", lambda op: True)
        self.router.loopback.close()
        with anyio.move_on_after(CLOSE_GRACE):
            await self.in_flight.drained(but_sends=True)
            await self._part()

    async def _part(self) -> None:
        """Let sends end, and tell the other ranks that this rank receives no more messages.

        Without this notice, two ranks would wait for each other if neither receives the last message of the other.
        """
        if self.in_flight:
            self.notes.on_leaving = lambda: self.driver.call_threadsafe(self._end_lost_sends)
            self._say_parting()
            self._end_lost_sends()
            await self.in_flight.drained()

    def _say_parting(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self.notes.say(rank, Parting())

    def _end_lost_sends(self) -> None:
        """End the sends to ranks that receive no more messages."""
        for work in self.in_flight:
            if work.op.sends and (peer := peers(work.op)[0]) in self.notes.leaving:
                work.abandon(closed_by(peer))

    async def _release(self) -> None:
        with self._lock:
            self.life = lifecycle.release(self.life)
        if self._postmortem is not None:
            self._postmortem.close()
        self._end_works()
        if self.lost or self.in_flight:
            self._say_parting()  # A transport that has given up may not tell the peers that this rank closes.
        if self.in_flight:
            error = CommAbortedError(f"closed by rank {self.rank}, which had unfinished ops", peer=self.rank)
            for transport in self.transports:
                guarded(None, transport.abort, error)
            for work in self.in_flight:
                work.abandon(CommClosedError("the communicator was closed on this rank"))
        self.router.turns.clear()  # The works have ended, and their tensors belong to the program.
        self.over.set()
        self.in_flight.unwatch()
        with anyio.move_on_after(CLOSE_GRACE, shield=True):
            for transport in self.transports:
                self.driver.detach(transport)
            try:
                await close_transports(self.transports)
            except CommError as error:
                raise error.about(comm=self.name, op="aclose", rank=self.rank) from error.__cause__
            finally:
                await self.in_flight.unwatched()

    def disown(self) -> None:
        """Mark the communicator as unusable in a forked child.

        The child must neither use nor close the sockets of its parent.
        """
        self.life = lifecycle.disown(os.getppid())
        self.ledger.refusing = True
        self._closing = self.over = Promise(self.driver)
        self.over.set()
