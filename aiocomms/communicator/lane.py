"""Lanes: views of a communicator whose operations match only operations with the same key on the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from math import inf
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, as_int
from aiocomms.communicator.collectives import Collectives
from aiocomms.communicator.objects import Objects
from aiocomms.communicator.p2p import PointToPoint
from aiocomms.core.core import Core
from aiocomms.errors import CommClosedError, CommError, as_reason, wrong_thread
from aiocomms.lowering.runs import RunPart
from aiocomms.lowering.tags import Key, number_of
from aiocomms.ops import Op
from aiocomms.ops.arrays import checked
from aiocomms.progress.inflight import LaneWork
from aiocomms.progress.work import Work

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator

LONGEST = 60
"""The maximum length, in characters, of a key that errors and records show in full."""


class _Current(NamedTuple):
    """An entry for a ``with`` block: the lane that the block makes current, and the entry of the enclosing block."""

    lane: Lane
    before: _Current | None


CURRENT: ContextVar[_Current | None] = ContextVar("aiocomms lanes", default=None)


def current(core: Core) -> Lane | None:
    """Return the current lane of a communicator in this task, or None if the task has no current lane."""
    found = CURRENT.get()
    while found is not None and found.lane._core is not core:
        found = found.before
    return None if found is None else found.lane


class Lane(PointToPoint, Collectives, Objects):
    """A view of a communicator, for example for one request; made by :meth:`Communicator.lane`.

    Operations of a lane match only operations in lanes with the same key on the other ranks. Within a lane all ranks
    must call the same collectives in the same order. The lane's collectives run one after the other. Lanes with
    different keys never wait for each other, even if the ranks call the lanes' operations in different orders. After a
    failure that loses the communicator, such as a missed deadline or a mismatch, all the communicator's lanes are lost.

    ``with comm.lane(key):`` makes the lane current in this task, and in the tasks and threads that are started within
    the block. Within the block, the communicator's collectives and its sends and receives (messages and objects) run in
    the lane. For example, ``comm.all_reduce(x)`` runs in the lane. An exception that leaves the block aborts the lane
    on all ranks, see :meth:`abort`. Without the abort, the other ranks might wait for operations that this rank will
    never call.
    """

    name: str
    rank: int
    size: int
    device: torch.device

    __slots__ = ("_closed", "_known", "_shortcuts")  # Native code reads these slots.

    _core: Core

    def __init__(self, comm: Communicator, key: Key) -> None:
        if type(key) not in (str, bytes, int):
            key = as_int(key)
        if type(key) not in (str, bytes, int):
            raise arguments.wrong_type("key", key, "a str, bytes or an int").about(op="lane", rank=comm.rank)
        self.key = key
        self.name, self.rank, self.size, self.device = comm.name, comm.rank, comm.size, comm.device
        self._comm = comm
        self._core = comm._core
        self._shortcuts = comm._shortcuts
        self._own: float | None = None  # The deadline of this view in seconds; None: the communicator's.
        self._closed = False
        self._known: tuple[int, str] | None = None  # The number and the key in words, once an op has begun.

    def __repr__(self) -> str:
        return f"<Lane {arguments.short(self.key)} of '{self.name}' rank {self.rank} of {self.size}>"

    @property
    def timeout(self) -> float | None:
        """The default deadline in seconds; None means no deadline.

        This default is the communicator's timeout until :meth:`set_timeout` is called.
        """
        seconds = self._seconds
        return None if seconds == inf else seconds

    @property
    def _seconds(self) -> float:
        return self._comm._seconds if self._own is None else self._own

    def set_timeout(self, timeout: arguments.Timeout) -> None:
        """Set the default deadline of operations on this view of the lane.

        :param timeout: seconds; None means no deadline.
        :raises ArgumentError: the timeout is neither None nor a number of seconds above 0.
        """
        self._own = arguments.deadline("timeout", timeout)

    @property
    def closed(self) -> bool:
        """True after this view has been closed on this rank. Other views with the same key may still be open."""
        return self._closed

    def abort(self, reason: str | BaseException) -> None:
        """Abort the lane on every rank: its pending operations fail with :class:`LaneAbortedError`.

        All further operations with the same key also fail, on all views, so use another key. The communicator and its
        other lanes stay usable. A pending operation fails when the transport no longer uses the operation's tensors.
        Any thread may call this method. A second abort of the lane does not change the reason. The call does nothing if
        the communicator is lost or closed.

        :param reason: the reason, which the errors on all ranks contain.
        """
        core, why = self._core, as_reason(reason)
        if get_ident() == core.thread:
            self._give_up(why)
        else:
            core.driver.call_threadsafe(self._give_up, why)

    def _give_up(self, why: str) -> None:
        if not self._core.ledger.refusing:
            self._core.router.lane_aborts.give_up(*self._names(), why)

    async def aclose(self) -> None:
        """Withdraw the lane's unmatched receives, and wait until the lane's other operations have ended.

        The call is optional, because a lane has no resources to release. The call does not notify the other ranks.
        Idempotent.

        :raises RuntimeError: the caller is not on the communicator's thread.
        """
        core, (number, _) = self._core, self._names()
        if get_ident() != core.thread:
            raise wrong_thread(f"aclose of {self!r}")
        self._closed = True
        await core.posted_elsewhere(number)
        works = [work for work in core.in_flight if isinstance(work, LaneWork) and work.number == number]
        for work in works:
            if work.op.withdrawable and core.withdraw(work):
                work.abandon(CommClosedError("the lane was closed on this rank, and the op was withdrawn"))
        for work in works:
            await work.wait()

    def __enter__(self) -> Self:
        self._comm._follow_lanes()
        CURRENT.set(_Current(self, CURRENT.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        found = CURRENT.get()
        if found is None or found.lane is not self:
            raise RuntimeError(f"{self!r} is not the current lane here: end the blocks of lanes in reverse order")
        CURRENT.set(found.before)
        if error is not None:
            self.abort(error)  # The other ranks may wait for ops that this rank will never call.

    def _names(self) -> tuple[int, str]:
        """Return the lane's number, and its key as text."""
        if self._known is not None:
            return self._known
        plain = isinstance(self.key, str) and self.key.isprintable() and len(self.key) <= LONGEST
        return number_of(self.key), str(self.key) if plain else arguments.short(self.key)

    def _begin(self) -> tuple[int, str]:
        """Prepare for the first op: store the lane's number and key, and start to receive notices of aborted lanes."""
        core, names = self._core, self._names()
        if get_ident() == core.thread and not core.ledger.refusing:
            core.router.lane_aborts.listen()
            self._known = names
        return names

    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[Any]:
        """Issue an op as a communicator does, but do not number a collective."""
        comm, core = self._comm, self._core
        number, words = self._known or self._begin()
        try:
            if core.ledger.refusing or self._closed or number in core.given_up or get_ident() != core.thread:
                raise self._refused(op)
            of_tensors = checked(op, core)
            own = comm._seconds if self._own is None else self._own
            seconds = own if hints is None and timeout is COMM_TIMEOUT else self._asked(hints, timeout)
            seq = core.ledger.issued
            work: LaneWork[Any] = comm._start_within(of_tensors, seq, core, hints, number=number, lane=words)
        except CommError as error:
            raise error.about(comm=f"{comm.name}, lane {words}", op=op.name, rank=self.rank) from error.__cause__
        if of_tensors is not op:
            work._value = op.result()  # The op was called with arrays.
        return core.start(work, seconds, words)

    def _posted(self, work: LaneWork[Any], look_after: Callable[[int], object], index: int) -> Work[Any]:
        """Track a posted op, as :meth:`Communicator._posted` does. For a message, call :meth:`_adopted` first."""
        return self._core.follow(work, self._seconds, look_after, index)

    def _adopted(self, work: LaneWork[Any], part: RunPart) -> None:
        """Register a message with the core's router, because native code has posted the message without the router."""
        self._core.router.adopt(work, part)

    def _asked(self, hints: Mapping[str, Any] | None, timeout: OpTimeout) -> float:
        """Check the hints and the timeout of a call, and return the deadline in seconds."""
        if hints is not None:
            arguments.mapping("hints", hints)
        return self._seconds if timeout is COMM_TIMEOUT else arguments.deadline("timeout", timeout)

    def _refused(self, op: Op) -> Exception:
        """Return the error for an op that the lane refuses to start, or refuses to start on this thread."""
        core = self._core
        if core.ledger.refusing or get_ident() != core.thread:
            return core.life.refusal() or core.refused(op)
        given_up = core.given_up.get(self._names()[0])
        return CommClosedError("the lane was closed on this rank") if given_up is None else given_up.about()
