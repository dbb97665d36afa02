"""Debug mode (``AIOCOMMS_DEBUG``): checks of the program that are too slow for normal use."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from aiocomms.diagnosis.places import SourceLine, caller
from aiocomms.errors import (
    ArgumentError,
    BufferBusyError,
    CommClosedError,
    CommError,
    ConcurrentCollectivesError,
)
from aiocomms.ops import GetV, Op, PutV, WindowClose, WindowOpen, checks
from aiocomms.ops._base import Buffers
from aiocomms.progress.inflight import InFlight, PlainLaneWork, PlainWork, StartedWork
from aiocomms.progress.work import FIELDS_BELOW, Owner, T_co
from aiocomms.transport import OP_RESULT


def asked_for() -> bool:
    """Return whether new communicators are in debug mode."""
    return os.environ.get("AIOCOMMS_DEBUG", "0") not in ("", "0")


class Forgotten:
    """The warning about a work that has ended, but whose result no code has requested.

    ``__del__`` of this object shows the warning. The object is not the work itself, because the work may be in a
    reference cycle.
    """

    __slots__ = ("__weakref__", "armed", "place", "what")

    def __init__(self, what: str, place: SourceLine) -> None:
        self.what: str = what
        self.place: SourceLine = place
        self.armed: bool = False
        _watched.add(self)

    def report(self, warn: Callable[..., None] = warnings.warn_explicit) -> None:
        """Warn if the work has succeeded, or was pending when the communicator was closed."""
        if self.armed:
            self.armed = False
            warn(
                f"{self.what} was never awaited: await it, or call its forget() if no code needs to know when it is "
                "done", RuntimeWarning, *self.place, registry=_said,
            )  # fmt: skip

    __del__ = report


_watched: Final[WeakSet[Forgotten]] = WeakSet()


def report_forgotten(*, quietly: bool) -> None:
    """Report all finished works whose results no code has requested, even if an exception still refers to them.

    :param quietly: if true, report these works neither now nor later.
    """
    for forgotten in sorted(_watched, key=lambda it: (it.place, it.what)):
        if quietly:
            forgotten.armed = False
        forgotten.report()


if TYPE_CHECKING:
    _Started = StartedWork[Any]
else:
    _Started = object  # A struct can have only one base with fields.

_said: dict[str | tuple[str, type[Warning], int], int] = {}
"""The registry in which :mod:`warnings` records earlier warnings.

By default, ``warnings`` does not show a recorded warning again.
"""


class DebugWork(_Started):
    """The debug data of a work: the place of its call, and whether any code has requested its result."""

    __slots__ = FIELDS_BELOW
    if TYPE_CHECKING:
        place: SourceLine | None = None
        task: tuple[str, object] | None = None
        _forgotten: Forgotten | None = None

    def watch(self, place: SourceLine) -> None:
        """Warn if the work succeeds and is garbage-collected before any code has requested its result."""
        owner = self._owner
        self.place = place
        self._forgotten = Forgotten(f"{self.op.name} on '{self._comm_name()}' (rank {owner.rank})", place)

    def forget(self) -> None:
        """See :meth:`aiocomms.Work.forget`."""
        if self._forgotten is not None:
            self._forgotten.armed = False
            self._forgotten = None

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        super().complete(value)
        self.task = None
        if self._forgotten is not None:
            # UnseenError reports a failed work whose result no code requests.
            self._forgotten.armed = self._error is None

    def _end(self, error: CommError, state: int) -> None:
        super()._end(error, state)
        self.task = None
        # A receive counts as forgotten if no message has matched it until the communicator was closed.
        if self._forgotten is not None:
            self._forgotten.armed = isinstance(error, CommClosedError)


def _asks(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ask(self: DebugWork, *args: Any, **kwargs: Any) -> Any:
        self.forget()
        return method(self, *args, **kwargs)

    return ask


_ASKING: Final = (
    "__await__", "result", "exception", "add_done_callback", "cancel", "wait", "wait_stream", "wait_blocking",
    "_never_awaited",
)  # fmt: skip
for _name in _ASKING:
    setattr(DebugWork, _name, _asks(getattr(StartedWork, _name)))


class WatchedWork(DebugWork, PlainWork[T_co]):
    """A work in debug mode, with the line and the task of its call."""

    place: SourceLine | None = None
    task: tuple[str, object] | None = None
    """The name and the coroutine of the task that called the op.

    The value is None if a callback called the op, or if the op has ended.
    """
    _forgotten: Forgotten | None = None


class WatchedLaneWork(DebugWork, PlainLaneWork[T_co]):
    """A lane's work in debug mode, with the line and the task of its call."""

    place: SourceLine | None = None
    task: tuple[str, object] | None = None
    _forgotten: Forgotten | None = None


CURE: Final = (
    "Give each a lane of its own, with comm.lane(key): ...; or have one task make all calls, in one order on all ranks."
)


def _collective(op: Op) -> bool:
    return op.family == "collectives" or isinstance(op, (WindowOpen, WindowClose))


def _ended(coroutine: object) -> bool:
    return getattr(coroutine, "cr_frame", coroutine) is None


def _used(op: Op, buffers: Buffers) -> Buffers:
    """Return the parts of an op's buffers that the op reads or writes.

    For ``put_v`` and ``get_v``, these parts are the runs of consecutive elements that the op lists.
    """
    if not isinstance(op, (PutV, GetV)):
        return buffers
    flats = [(name, tensor.view(-1)) for name, tensor in buffers]
    return [(name, flat[start : start + op.count]) for name, flat in flats for start in op.starts.tolist()]


class Debugger:
    """The checks that a communicator in debug mode runs at the start of each op."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight

    def start(self, op: Op, seq: int, owner: Owner, hints: Mapping[str, Any] | None) -> WatchedWork[Any]:
        """Check an op, and create its work, before the op starts.

        :raises BufferBusyError: an unfinished op writes a buffer of this op, or this op would write a buffer of an
            unfinished op.
        :raises ConcurrentCollectivesError: the op is a collective, and a collective of another task is pending.
        """
        work: WatchedWork[Any] = WatchedWork(op, seq, owner, hints)
        self._watch(work, None)
        return work

    def start_within(
        self, op: Op, seq: int, owner: Owner, hints: Mapping[str, Any] | None, *, number: int, lane: str
    ) -> WatchedLaneWork[Any]:
        """Check an op of a lane, and create its work.

        A collective of a lane can conflict only with other collectives of the same lane.

        :param number: the number of the lane.
        :param lane: the key of the lane, as text.
        """
        work: WatchedLaneWork[Any] = WatchedLaneWork(op, seq, owner, hints, number=number, lane=lane)
        self._watch(work, number)
        return work

    def _watch(self, work: DebugWork, lane: int | None) -> None:
        self.check_buffers(work.op)
        place, task = caller(), work._owner.driver.task()
        if task is not None and _collective(work.op):
            self._check_tasks(work.op, lane, place, *task)
        work.task = task
        work.watch(place)

    def _check_tasks(self, op: Op, lane: int | None, place: SourceLine, name: str, coroutine: object) -> None:
        """Raise an error if this task calls a collective while a collective of another task is pending.

        If the other task has ended, the order of the two collectives is certain, so there is no error.
        """
        for work in self._in_flight:
            if not isinstance(work, DebugWork) or work.task is None or not _collective(work.op):
                continue
            if getattr(work, "number", None) != lane:
                continue
            other, others = work.task
            if others is not coroutine and not _ended(others):
                raise ConcurrentCollectivesError(
                    "two tasks have collectives under way at once, and the next rank may call them in another order: "
                    f"task {other!r} has called {work.op.name} #{work.seq} at {work.place}, and task {name!r} calls "
                    f"{op.name} at {place}. {CURE}"
                )

    def check_buffers(self, op: Op) -> None:
        """Check that an op's buffers do not conflict with the buffers of an unfinished op.

        :raises BufferBusyError: an unfinished op writes a buffer of ``op``, or ``op`` would write a buffer of an
            unfinished op.
        """
        for work in self._in_flight:
            try:
                reads, writes = _used(op, op.reads()), _used(op, op.writes())
                their_writes = _used(work.op, work.op.writes())
                checks.disjoint(writes, _used(work.op, work.op.reads()) + their_writes)
                checks.disjoint(their_writes, reads)
            except ArgumentError as error:
                raise BufferBusyError(f"a buffer still belongs to {work!r}: {error.message}") from None
