"""The agreement of the ranks: the ranks compare their calls of each collective before gloo gets the data.

In gloo a mismatch would abort the process, hang or give wrong results. So every rank announces its call to every other
rank. The data of a small collective travels inside the announcement.

After the announcements, a large collective runs on gloo's group, where *all ranks start the same ops in the same
order*. A rank starts an op when it has the announcements of all ranks and has started all its earlier large calls. So
each rank starts large ops in the order of its calls. Whether a call is large depends only on the agreed call, so all
ranks decide this in the same way. Announcements do not use the group, and wait for no op. So every rank has started the
first unfinished op, or can start this op. Ops cannot deadlock, and gloo cannot match an op with a different op.

When a rank loses the communicator, the program of this rank may reuse its tensors at once. At this time, gloo may still
be sending the tensors. So a large call completes only when gloo is done with the call on every rank. A rank that has
lost the communicator does not report that gloo is done.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError, ProtocolError
from aiocomms.lowlevel import Inbox, buffers, clock, disagreement
from aiocomms.transport import Completion, conclude
from aiocomms_c10d.collectives import PLANS, C10dCall
from aiocomms_c10d.control import ControlConnection
from aiocomms_c10d.group import C10dGroup
from aiocomms_c10d.wire import CALL, INLINE, LANDED, TEXT, C10dFrame, C10dHeader, pack

_EMPTY = buffers.empty(0, dtype=torch.uint8, device="cpu")
_SMALL = object()
_SPREAD: Final = 4 * INLINE
"""The largest total number of bytes that a rank sends to all peers for a small op.

This limit applies only to ops for which the group would move fewer bytes than the announcements.
"""
_AHEAD: Final = 2**20
"""The largest number of collectives by which one rank may be ahead of another rank."""
_BLAME_PEER: Final = 1.0
"""The seconds between a failure of gloo and the report of this failure.

If the connection to a lost peer reports the cause in this time, the failure of gloo is not reported.
"""


class _Announcement(NamedTuple):
    """One rank's announcement of one collective."""

    text: bytes
    sizes: tuple[int, ...]
    payload: Tensor


class _AnnouncedCall:
    """A collective that this rank has called."""

    __slots__ = ("agreed", "announcements", "number", "plan", "text", "work")

    def __init__(self, number: int, plan: C10dCall, work: Completion, text: bytes) -> None:
        self.number = number
        self.plan = plan
        self.work = work
        self.text = text
        self.announcements: dict[int, _Announcement] = {plan.rank: _Announcement(text, plan.sizes, _EMPTY)}
        self.agreed: bool = False


class Agreement:
    """One rank's part of the agreement on collectives.

    The rank announces each collective, compares the announcements of all ranks, and performs the collective if they
    agree.
    """

    def __init__(
        self,
        group: C10dGroup,
        connections: Mapping[int, ControlConnection],
        inbox: Inbox,
        fail: Callable[[CommError], None],
        lost: clock.ThreadEvent,
    ) -> None:
        """Create an agreement without calls.

        :param fail: a function that reports the loss of the communicator. Any thread may call this function.
        :param lost: the event that is set when the loss is reported, before any work fails.
        """
        self._group = group
        self._connections = connections
        self._inbox = inbox
        self._fail = fail
        self._lost = lost
        self._lock = threading.Lock()
        self._count = 0
        self._calls: dict[int, _AnnouncedCall] = {}  # The calls on which the ranks have not agreed yet.
        self._early: dict[int, dict[int, _Announcement]] = {}  # announcements of other ranks' later calls
        self._large: deque[_AnnouncedCall] = deque()  # calls that are or may be large, in order
        self._running: set[_AnnouncedCall] = set()  # The calls whose tensors gloo uses.
        self._landing: dict[int, _AnnouncedCall] = {}  # The calls that gloo has completed on this rank.
        # The ranks on which gloo is done, by the number of the call.
        self._landed: defaultdict[int, set[int]] = defaultdict(set)
        self._jobs: SimpleQueue[_AnnouncedCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._mismatch_error: MismatchError | None = None
        self.disputed = -1
        """The number of the first collective on which the ranks disagree; -1 if there is none."""

    # ---------------------------------------------------------------------------------------- on the loop's thread

    def post(self, op: ops.Op, work: Completion) -> None:
        """Call a collective."""
        plan = PLANS[op.kind](op, self._group.rank, self._group.size)
        call = _AnnouncedCall(self._count, plan, work, _describe(op))
        self._count += 1
        self._announce(call)
        with self._lock:
            early = self._early.pop(call.number, {})
            self._calls[call.number] = call
            if plan.sizes or not self._is_small(plan, plan.nbytes):
                self._large.append(call)
            call.announcements.update(early)
            outcome = self._evaluate(call, early)
        if outcome is _SMALL:
            self._finish(call)
        elif outcome is not None:
            conclude(work, outcome)

    def _announce(self, call: _AnnouncedCall) -> None:
        """Announce this rank's call to every rank. The announcement contains the data of a small call."""
        plan = call.plan
        small = self._is_small(plan, plan.nbytes)
        frame: Tensor | None = None
        before: tuple[int, int] | None = None
        for peer, connection in self._connections.items():
            part = plan.part(peer) if small else None
            place = (0, 0) if part is None else (part.data_ptr(), part.numel())
            if frame is None or place != before:
                frame = pack(C10dHeader(CALL, ident=call.number, nbytes=place[1]), call.text, plan.sizes, part)
                before = place
            connection.send(frame)

    def _finish(self, call: _AnnouncedCall) -> None:
        """Perform a small op with the data from the announcements."""
        if not call.work.done():
            announcements = call.announcements
            call.plan.finish([announcements[rank].payload for rank in range(self._group.size)])
            conclude(call.work)

    # -------------------------------------------------------------------------------------- on the readers' threads

    def handle_call(self, peer: int, frame: C10dFrame) -> None:
        """Store a peer's announcement of a collective."""
        number = frame.header.ident
        if not 0 <= number < self._count + _AHEAD:
            raise ProtocolError(f"rank {peer} calls collective {number}, and this rank is at {self._count}", peer=peer)
        announcement = _Announcement(frame.text, frame.sizes, frame.payload.clone())
        with self._lock:
            call = self._calls.get(number)
            if call is None:
                if number >= self._count - 1:
                    self._early.setdefault(number, {})[peer] = announcement
                return
            call.announcements[peer] = announcement
            outcome = self._evaluate(call, (peer,))
        if outcome is _SMALL:
            self._inbox.put(self._finish, call)
        elif outcome is not None:
            self._inbox.put(conclude, call.work, outcome)

    def handle_landed(self, rank: int, number: int) -> None:
        """Record that a rank is done with a large collective. Gloo no longer reads the tensors of that rank."""
        if not 0 <= number < self._count:
            raise ProtocolError(f"rank {rank} ends collective {number}, and this rank is at {self._count}", peer=rank)
        with self._lock:
            self._landed[number].add(rank)
            if len(self._landed[number]) < self._group.size:
                return
            del self._landed[number]
            call = self._landing.pop(number)
        self._inbox.put(conclude, call.work)

    def dispute(self, number: int, error: MismatchError) -> None:
        """Fail a collective because another rank has found a mismatch."""
        with self._lock:
            if self._mismatch_error is not None:
                return
            self.disputed, self._mismatch_error = number, error
            call = self._calls.pop(number, None)
        if call is not None:
            self._inbox.put(conclude, call.work, error)

    def waits_for(self, peer: int) -> bool:
        """Return whether a call waits for the announcement of a peer."""
        with self._lock:
            return any(peer not in call.announcements for call in self._calls.values())

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """Return the ranks that have not called a pending op."""
        with self._lock:
            call = next((call for call in self._calls.values() if call.work is work), None)
            return [] if call is None else [rank for rank in range(self._group.size) if rank not in call.announcements]

    # ------------------------------------------------------------------------------------------- under the lock

    def _evaluate(self, call: _AnnouncedCall, peers: Iterable[int]) -> object | None:
        """Compare a call with new announcements, and start large calls on which all ranks agree.

        :returns: an error, if there is one; :data:`_SMALL`, if the call is small and can be finished now; None
            otherwise.
        """
        if self._mismatch_error is not None:  # the first mismatch loses the communicator, which ends other calls
            if call.number != self.disputed:
                return None
            del self._calls[call.number]
            return self._mismatch_error
        for peer in peers:
            their_text, my_text = call.announcements[peer].text.decode(errors="replace"), call.text.decode()
            if their_text != my_text:
                return self._disagree(call, disagreement(peer, their_text, call.plan.rank, my_text))
        if len(call.announcements) < self._group.size:
            return None
        announcements = [call.announcements[rank] for rank in range(self._group.size)]
        nbytes = call.plan.nbytes
        if call.plan.sizes:
            wrong = _mismatch([announcement.sizes for announcement in announcements], len(call.plan.sizes))
            if wrong is not None:
                return self._disagree(call, MismatchError(wrong))
            nbytes = max(max(announcement.sizes[: len(announcements)]) for announcement in announcements)
        del self._calls[call.number]
        small = self._is_small(call.plan, nbytes)
        call.agreed = True
        if small and call in self._large:
            self._large.remove(call)
        self._start_agreed()
        return _SMALL if small else None

    def _disagree(self, call: _AnnouncedCall, error: MismatchError) -> MismatchError:
        del self._calls[call.number]
        self.disputed, self._mismatch_error = call.number, error
        return error

    def _is_small(self, plan: C10dCall, nbytes: int) -> bool:
        others = self._group.size - 1
        return others == 0 or nbytes <= (min(INLINE, _SPREAD // others) if plan.spread else INLINE)

    def _start_agreed(self) -> None:
        """Pass the agreed large calls to the thread that starts them, in the order of the calls.

        Stop at the first large call on which the ranks have not agreed yet.
        """
        while self._large and self._large[0].agreed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="aiocomms c10d collectives", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._fail(CommError(f"no thread can be started: {error}"))
                    return
                self._thread = thread
            call = self._large.popleft()
            self._running.add(call)
            self._jobs.put(call)

    # ------------------------------------------------------------------------------------ on a thread of its own

    def _run(self) -> None:
        while (call := self._jobs.get()) is not None:
            self._start(call)
            del call  # The thread must not keep the tensors of this call while it waits for the next call.

    def _start(self, call: _AnnouncedCall) -> None:
        try:
            works = call.plan.start(self._group)
        except Exception as error:
            self._report_gloo_failure(error)
        else:
            self._follow(call, works)

    def _follow(self, call: _AnnouncedCall, works: Sequence[Any]) -> None:
        ended = itertools.count(1)

        def land(future: Any) -> None:
            try:
                future.value()
                if next(ended) == len(works):
                    self._end(call)
            except Exception as error:  # torch ignores an exception of a callback
                self._report_gloo_failure(error)

        for work in works:
            work.get_future().add_done_callback(land)

    def _end(self, call: _AnnouncedCall) -> None:
        """Tell the other ranks that gloo is done with a call. The call completes when gloo is done on all ranks."""
        self._running.discard(call)
        if self._lost.is_set():
            return
        frame = pack(C10dHeader(LANDED, ident=call.number))
        for connection in self._connections.values():
            connection.send(frame)
        call.plan.end()
        self._landing[call.number] = call
        self.handle_landed(self._group.rank, call.number)

    def _report_gloo_failure(self, error: Exception) -> None:
        """Report that gloo failed in an op.

        Report nothing if the connection to a lost peer reports the cause within :data:`_BLAME_PEER` seconds.
        """
        if not self._lost.wait(_BLAME_PEER):
            failure = CommError(f"gloo failed: {str(error).splitlines()[0]}")
            failure.__cause__ = error
            self._fail(failure)

    def join(self, timeout: float | None) -> None:
        """End the thread that starts large calls, and release all tensors.

        Before this call, the caller must break the group's connections by :func:`poison`.

        :param timeout: seconds to wait for the thread; None means no limit.
        """
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout)
        self._group.release()
        self._calls.clear()
        self._early.clear()
        self._large.clear()
        self._landing.clear()


def _describe(op: ops.Op) -> bytes:
    name, *rest = op.signature()
    text = f"{name}({', '.join(map(str, rest))})".replace("torch.", "").encode()
    if len(text) <= TEXT:
        return text
    digest = hashlib.sha256(text).hexdigest()
    return text[: TEXT - len(digest) - 4] + b"... " + digest.encode()


def _mismatch(sizes: Sequence[tuple[int, ...]], count: int) -> str | None:
    """Describe the first mismatch between the numbers of bytes that ranks send and expect; return None if all match."""
    size = len(sizes)
    for rank in range(size):
        if len(sizes[rank]) != count:
            return f"rank {rank} sends {len(sizes[rank])} sizes, wanted {count}"
    for src in range(size):
        for dst in range(size):
            given, wanted = sizes[src][dst], sizes[dst][size + src]
            if given != wanted:
                return f"rank {src} sends {given} bytes to rank {dst}, which wants {wanted}"
    return None
