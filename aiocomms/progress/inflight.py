"""The works (handles) of one communicator's pending ops, the code that ends each op, and the queues of deadlines."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from weakref import WeakSet

import msgspec
from torch import Tensor, UntypedStorage

from aiocomms import ops
from aiocomms.errors import (
    CapturedWorkError,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    LaneAbortedError,
    MismatchError,
    PeerDiedError,
    WorkCancelledError,
    as_reason,
)
from aiocomms.lowlevel import clock, memory
from aiocomms.lowlevel.threads import copied, run_in_thread
from aiocomms.progress import deadlines
from aiocomms.progress.driver import LoopDriver, Promise, Waiters
from aiocomms.progress.handed import Steps
from aiocomms.progress.heartbeat import Heartbeat
from aiocomms.progress.loops import Waiter
from aiocomms.progress.work import ABANDONED, DONE, FIELDS_BELOW, PENDING, Owner, T_co, UnseenError, Work
from aiocomms.transport import OP_RESULT

if TYPE_CHECKING:
    from aiocomms.core.core import Core

_LOCATED: Final = ("in lane ", "in collective ")
"""The first words of error messages that already name the op on which the ranks disagree."""
_POISONS: Final = (CommTimeoutError, MismatchError, PeerDiedError)
"""The classes of errors that end the communicator when an op fails with one of these errors."""
AGAIN: Final = 5.0
"""The time in seconds after which the watchdog checks a work again, if the work is still pending after its deadline.

A work stays pending after its deadline only if an exception of a signal handler has interrupted its end.
"""
_RESIZED = (
    "the storage of a tensor was resized while the op had it: its result is lost, or went to memory that was freed"
)


class StartedWork(Work[T_co]):
    """A work with the methods that the core and the transports use. Every :class:`Work` is a ``StartedWork``.

    A signal handler may raise an exception between any two steps. Therefore each method stores the outcome before the
    state, and a work stays in flight until all its waiters are awake. If an exception interrupts a method, the watchdog
    finds the work at its deadline and calls :meth:`finish`.
    """

    __slots__ = FIELDS_BELOW

    fault: CommError | None
    """The error with which the transport ended the op.

    The value is None if the op has not failed, or if the work was abandoned or withdrawn.
    """
    queue: Any
    """The queue that holds the work while it is pending; see :class:`InFlight`."""
    memory: UntypedStorage | list[tuple[UntypedStorage, int]] | None
    """The storage of a pending op's tensor, or several storages and their addresses.

    The reference keeps the storage alive, even if the program replaces the tensor's storage while the op is pending.
    """
    context: Context | None
    """The context of the call of a pending op.

    Post-hooks are called in this context. The value is None if no post-hook was registered at the call.
    """
    _place: int

    def waiters(self) -> list[Waiter]:
        """Return the suspended tasks that await the work."""
        return [] if self._waiters is None else list(self._waiters.waiting)

    def add_first_waiter(self, waiter: Waiter) -> None:
        """Add the first waiter. The waiter wakes when the work ends.

        Any thread may call this method, even while another thread ends the work.
        """
        self._waiters = Waiters(self, self._nobody_waits, [waiter])

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        if self._state:
            return self._refuse_second()
        if self.queue is not None and self._resized():
            return self.fail(CommError(_RESIZED))
        if value is not OP_RESULT:  # An op on arrays has its value already.
            self._value = value
        self._state = DONE
        if self._waiters is not None or self._callbacks is not None:
            self._notify()
        if self.queue is not None:
            self._owner.settled(self)
        return None

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`."""
        if self._state:
            return self._refuse_second()
        if self._owner.lost:
            return None
        if isinstance(error, MismatchError):
            error = self.located(error)
        self.fault = error.about(seq=self.seq)
        asked = self._waiters is not None or self._callbacks is not None
        self._end(error, DONE)
        if self.queue is not None:
            self._owner.settled(self, self._error)
        if not asked and self._error is not None and self.fails_alone():
            self._unseen = UnseenError(self._owner.driver, self._error)
        return None

    def fails_alone(self) -> bool:
        """Return True if the work has failed, and the communicator stays usable."""
        fault = self.fault
        return not (fault is None or isinstance(fault, CapturedWorkError) or self.fails_all())

    def fails_all(self) -> bool:
        """Return True if the work has failed, and the failure ends the communicator on all ranks."""
        fault = self.fault
        return isinstance(fault, _POISONS) or (isinstance(fault, CommAbortedError) and self.op.family == "collectives")

    def located(self, error: MismatchError) -> MismatchError:
        """Add the number of the collective to the error. The collective has the same number on all ranks.

        A transport may use another number for the collective.
        """
        number = None if error.message.startswith(_LOCATED) else self._owner.collective(self.seq)
        return error if not number else MismatchError(f"in collective {number} {error.message}", peer=error.peer)

    def abandon(self, error: CommError) -> None:
        """End a pending work before its transport reports the end.

        If the transport reports the end later, the report is ignored.
        """
        if not self._state:
            self._end(error, ABANDONED)
        self.finish()

    def refuse(self, error: BaseException) -> None:
        """End a work whose op could not be posted. The post-hooks then get the error of the work.

        If the transport reports the end later, the report is ignored.
        """
        failure = error if isinstance(error, CommError) else CommError(as_reason(error))
        self._error, self._state = failure, ABANDONED

    def finish(self) -> None:
        """Wake the remaining waiters of a work that is done, and remove the work from the works in flight."""
        self._notify()
        if self.queue is not None:
            self._owner.settled(self, self._error)

    def _end(self, error: CommError, state: int) -> None:
        owner = self._owner
        self._error = owner.worded(error.about(comm=owner.name, op=self.op.name, seq=self.seq, rank=owner.rank))
        self._state = state
        if not isinstance(error, CapturedWorkError):  # A refused capture does not count as a failure.
            key = type(error).__name__, error.peer
            owner.failures[key] = owner.failures.get(key, 0) + 1
        self._notify()

    def _notify(self) -> None:
        """Wake all waiters.

        If an exception of a signal handler interrupts a call of this method, the next call wakes the remaining waiters.
        """
        if self._waiters is not None:
            self._waiters.wake()
            self._waiters = None
        while self._callbacks:
            self._owner.driver.call_soon(self._callbacks[0], self)
            del self._callbacks[0]

    def hold(self) -> None:
        """Keep the memory of a pending op alive, even if the program replaces a tensor's storage."""
        op = self.op
        tensor = getattr(op, "tensor", None)
        if tensor is not None:  # Nearly every op has one tensor.
            self.memory = storage = tensor.untyped_storage()
            self._place = storage.data_ptr()
        else:
            storages = [tensor.untyped_storage() for _, tensor in op.reads() + op.writes()]
            self.memory = [(storage, storage.data_ptr()) for storage in storages]

    def _resized(self) -> bool:
        memory = self.memory
        if isinstance(memory, list):
            return any(storage.data_ptr() != place for storage, place in memory)
        return memory is not None and memory.data_ptr() != self._place

    def _withdraw(self) -> bool:
        if self._state or not self.op.withdrawable or not self._owner.withdraw(self):
            return False
        self._end(WorkCancelledError("it was withdrawn before it happened, and its buffer is untouched"), DONE)
        if self.queue is not None:
            self._owner.settled(self, self._error)
        return True

    def _refuse_second(self) -> None:
        if self._state == DONE:
            raise RuntimeError(f"the transport completed {self!r} twice")


class LaneWork(StartedWork[T_co]):
    """A work of an op in a lane."""

    __slots__ = FIELDS_BELOW

    lane: str
    """The lane's key, as readable text."""
    number: int
    """The lane's number."""

    def _comm_name(self) -> str:
        """See :meth:`Work._comm_name`."""
        return f"{self._owner.name}, lane {self.lane}"

    def _end(self, error: CommError, state: int) -> None:
        super()._end(error.about(comm=self._comm_name()), state)

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`."""
        # The program has aborted the lane on purpose, so an unseen error causes no report.
        if isinstance(error, LaneAbortedError):
            self.abandon(error)
        else:
            super().fail(error)

    def located(self, error: MismatchError) -> MismatchError:
        """Add the lane's name to the error. Collectives of a lane have no numbers."""
        if error.message.startswith(_LOCATED):
            return error
        return MismatchError(f"in lane {self.lane}, {error.message}", peer=error.peer)


class PlainWork(StartedWork[T_co], msgspec.Struct, eq=False, weakref=True):
    """A work that Python code creates. This class declares the fields of the work."""

    op: ops.Op
    seq: int
    _owner: Owner
    hints: Mapping[str, Any] | None = None
    called: float | None = None
    _state: int = PENDING
    _value: Any = OP_RESULT
    _error: CommError | None = None
    _waiters: Waiters | None = None
    _callbacks: list[Callable[[Any], object]] | None = None
    _unseen: UnseenError | None = None
    _steps: Steps | None = None
    fault: CommError | None = None
    queue: Any = None
    memory: UntypedStorage | list[tuple[UntypedStorage, int]] | None = None
    context: Context | None = None
    _place: int = 0


class PlainLaneWork(LaneWork[T_co], PlainWork[T_co]):
    """A work of a lane that Python code creates. This class declares the additional fields of a work in a lane."""

    lane: str = ""
    number: int = 0


class Queue(dict[StartedWork[Any], float]):
    """The pending works that have the same timeout, and the time at which each work was added."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds: float = seconds
        """The time in seconds from the addition of a work to its deadline; infinity if the works have no deadline."""


class Flying(NamedTuple):
    """A snapshot of a pending work."""

    work: StartedWork[Any]
    posted: float
    """The time at which the work was added as pending, in seconds of the monotonic clock."""
    waiters: list[Waiter]
    """The suspended tasks that await the work.

    If the work is a step of a larger operation, the value contains the tasks that await the larger operation.
    """
    of: str = ""
    """The part of this library that has called the op, such as an item stream; empty if the program has called it."""

    @property
    def idle(self) -> bool:
        """True if a part of this library has called the op, and no task waits for the op."""
        return not self.waiters and (bool(self.of) or getattr(self.work.op, "channel", ops.USER) != ops.USER)


class Stands(Protocol):
    """A part of this library, such as a stream of items, whose receives wait for messages that may never come."""

    def standing(self) -> Iterator[tuple[StartedWork[Any], list[Waiter], str]]:
        """Yield, for each of the receives that stay pending, the receive, its waiters, and the name of its owner.

        Any thread or signal handler may call this method.
        """


class InFlight:
    """The pending works of one communicator.

    This object keeps a reference to each work and its tensors until the work is done.

    Threads other than the event loop's thread also read the dictionaries of works. ``list(dict)`` copies the keys in
    one call that runs no Python code, so no other thread or finalizer can change the dictionary during the copy.
    ``list(dict.items())`` is not safe. It allocates a tuple for each item, so a garbage collection can run a finalizer
    during the copy.

    A program uses only a few different timeouts. Each timeout has its own queue, and the works of a queue are in the
    order of their deadlines. So an op costs one insertion and one deletion, independently of the number of pending ops.
    """

    def __init__(self, owner: Core, heartbeat: Heartbeat) -> None:
        self._owner = owner
        self.heartbeat: Heartbeat = heartbeat
        self.driver: LoopDriver = owner.driver
        self._queues: dict[float, Queue] = {}
        self._changing = threading.RLock()  # The lock for changes of the set of queues. Adding a work takes no lock.
        self._drained: Promise | None = None
        self._sends_may_stay = False
        self.stands: WeakSet[Stands] = WeakSet()
        self._watchdog = deadlines.current()
        self._watchdog.register(self)
        memory.register(self)

    def __bool__(self) -> bool:
        return any(list(self._queues.values()))

    def __iter__(self) -> Iterator[StartedWork[Any]]:
        return iter([flying.work for flying in self.look()])

    def look(self) -> list[Flying]:
        """Return all works. Works with the same timeout are in the order of their calls.

        Any thread or signal handler may call this method.
        """
        standing = {work: found for each in copied(self.stands) for work, *found in each.standing()}
        flying = []
        for queue in list(self._queues.values()):
            for work in list(queue):
                posted = queue.get(work, clock.now())  # The work may have become done meanwhile.
                flying.append(Flying(work, posted, *standing.get(work, (work.waiters(),))))
        return flying

    def add(self, work: StartedWork[Any], seconds: float) -> None:
        """Add a pending work, and watch its deadline. The deadline is ``seconds`` from now; infinity means no deadline.

        Any thread may call this method.
        """
        if not work.op.moves:
            work.hold()
        now = clock.now()
        queue = self._queues.get(seconds)
        while queue is None or not self._joins(queue, work, now):
            queue = self._queue_of(seconds)
        work.queue = queue
        period = self.heartbeat.period
        look = now + seconds if seconds < period else now + period
        if look < self._watchdog.wakes_at:
            try:
                self._watchdog.wake_by(look)
            except RuntimeError as error:  # Without a watchdog the work might never end.
                self._owner.lose(CommError(f"its deadlines are not watched: {error}"))

    def _joins(self, queue: Queue, work: StartedWork[Any], now: float) -> bool:
        """Add a work to a queue, unless another thread has just dropped the queue."""
        # This adds the work and then checks the queue. A thread that drops the queue does so first and then checks for
        # works. So one of the two threads notices the other.
        queue[work] = now
        if self._queues.get(queue.seconds) is queue:
            return True
        queue.pop(work, None)
        return False

    def _queue_of(self, seconds: float) -> Queue:
        """Return the queue of a timeout. If the queue does not exist, create it, and drop the queues that are empty."""
        with self._changing:
            if (found := self._queues.get(seconds)) is not None:
                return found
            for queue in list(self._queues.values()):
                if not queue:
                    del self._queues[queue.seconds]
                    if queue:  # Another thread has added a work meanwhile, perhaps before it could see the drop.
                        self._queues[queue.seconds] = queue
            made = self._queues[seconds] = Queue(seconds)
            return made

    def remove(self, work: StartedWork[Any]) -> float:
        """Remove a work that has just ended.

        :returns: the time at which the work was added.
        """
        queue: Queue = work.queue
        added = queue.pop(work)
        work.queue = None
        if self._drained is not None and self._is_drained():
            self._drained.set()
        return added

    def held(self) -> list[Tensor]:
        """Return the tensors of all works. Any thread may call this method."""
        ops = [flying.work.op for flying in self.look()]
        return [tensor for op in ops for _, tensor in op.reads() + op.writes()]

    async def drained(self, but_sends: bool = False) -> None:
        """Wait until no op is pending.

        :param but_sends: whether sends may stay pending.
        """
        self._sends_may_stay = but_sends
        if not self._is_drained():
            self._drained = Promise(self._owner.driver)
            await self._drained

    def _is_drained(self) -> bool:
        if not self._sends_may_stay:
            return not self
        return all(work.op.sends for queue in list(self._queues.values()) for work in list(queue))

    def unwatch(self) -> None:
        """Stop watching deadlines. Idempotent."""
        self._watchdog.unregister(self)

    async def unwatched(self) -> None:
        """Wait until the watchdog's earlier threads, which have been told to end, have ended.

        The wait takes time only if such a thread still acts on a deadline that has just passed.
        """
        for thread in self._watchdog.leaving:
            await run_in_thread(thread.join, anyhow=True)

    def due(self) -> float:
        """See :class:`Watched`."""
        earliest = (next(iter(queue.values()), math.inf) + queue.seconds for queue in list(self._queues.values()))
        return min(earliest, default=math.inf)

    def calm(self, now: float) -> bool:
        """See :class:`Watched`."""
        silent = self.heartbeat.silence(now).values()
        return self.due() > now and max(silent, default=0.0) < self.heartbeat.period

    def expire(self, now: float) -> float:
        """See :class:`Watched`.

        This method iterates over copies of the queues, because the loop's thread may change the queues during the
        iteration.
        """
        earliest = float("inf")
        if self:
            self.heartbeat.look(now)
            earliest = now + self.heartbeat.period
        for queue in list(self._queues.values()):
            for work in list(queue) if queue.seconds < float("inf") else ():
                # A work that has become done meanwhile has no entry.
                deadline = queue.get(work, float("inf")) + queue.seconds
                if now < deadline < float("inf"):
                    earliest = min(earliest, deadline)
                    break
                if deadline <= now:
                    self._owner.expire(work)
                    earliest = min(earliest, now + AGAIN)
        return earliest
