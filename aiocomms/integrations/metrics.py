"""Metrics for exporters: durations of ops by op type, transport and size, and the lateness of the event loop.

This module uses only the public hooks and :meth:`Communicator.statistics`. An exporter for another monitoring system
can use these hooks and this method.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol
from weakref import ref

from aiocomms.diagnosis.durations import BOUNDS, Durations
from aiocomms.diagnosis.statistics import Failures, Statistics
from aiocomms.errors import ArgumentTypeError
from aiocomms.lowlevel import clock
from aiocomms.ops import USER, Op, size_of
from aiocomms.progress.hooks import Hook
from aiocomms.progress.loops import Loop, running_loop
from aiocomms.progress.work import Work
from aiocomms.serving import Service, ServiceStatistics
from aiocomms.serving.plans import SERVICE_LANE

_SIZES: Final = ((0, "0"), (10, "<1KiB"), (14, "<16KiB"), (18, "<256KiB"), (22, "<4MiB"), (26, "<64MiB"))
LARGEST: Final = ">=64MiB"
SIZES: Final = tuple(next((name for most, name in _SIZES if bits <= most), LARGEST) for bits in range(65))
"""The names of the size classes. A name's index is the bit length of a size in bytes, for example 11 for 1024 bytes."""


class Instrumentable(Protocol):
    """An object that can be measured: a communicator, a portal or a blocking communicator."""

    @property
    def name(self) -> str:
        """The communicator's name."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def closed(self) -> bool:
        """True once the communicator is closed on this rank."""

    @property
    def aborted(self) -> bool:
        """True once the communicator is lost."""

    @property
    def transports(self) -> dict[str, str]:
        """The name of the transport for each family of operations."""

    def statistics(self) -> Statistics:
        """See :meth:`Communicator.statistics`."""

    def register_post_hook(self, fn: Any) -> Hook:
        """See :meth:`Communicator.register_post_hook`."""

    def register_abort_hook(self, fn: Any) -> Hook:
        """See :meth:`Communicator.register_abort_hook`."""


class Traceable(Instrumentable, Protocol):
    """An :class:`Instrumentable` that can also run a hook at the call of each op."""

    def register_pre_hook(self, fn: Any) -> Hook:
        """See :meth:`Communicator.register_pre_hook`."""


def instrumentable(comm: Any, also: str = "") -> None:
    """Check the argument of an exporter.

    :param also: a text for the error message: the types that the exporter accepts besides communicators.
    :raises ArgumentTypeError: ``comm`` is not a communicator.
    """
    if not all(hasattr(type(comm), name) for name in ("statistics", "register_post_hook")):
        raise ArgumentTypeError(f"comm is {comm!r}, wanted a Communicator, or a Portal or blocking.Communicator{also}")


def part_of(op: Op, lane: str = "") -> str:
    """Return a prefix that names the op's caller: ``stream_``, ``service_``, or "" for the program itself."""
    if getattr(op, "channel", USER) != USER:
        return "stream_"
    return "service_" if lane == SERVICE_LANE else ""


class OpDurations(Durations):
    """The durations and bytes of the successful ops with the same type, size class and caller."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.bytes: int = 0


class MetricRow(NamedTuple):
    """The metrics of the ops with the same name, transport and size class."""

    op: str
    transport: str
    size: str
    """The size class, one of :data:`SIZES`."""
    counts: list[int]
    seconds: float
    bytes: int


class Tally:
    """The counts of one communicator's ops by name, transport and size class.

    A post-hook counts the ops that end, until :meth:`remove` is called. The hook changes the counts on the event loop's
    thread. Any thread may read the counts.
    """

    def __init__(self, comm: Instrumentable) -> None:
        self._transports = comm.transports
        self._kinds: dict[tuple[type[Op], str, str], OpDurations] = {}
        self.remove: Callable[[], None] = comm.register_post_hook(self._ended).remove

    def _ended(self, work: Work[Any]) -> None:
        called = work.called
        # A work without a time of its call is older than this hook.
        if called is None or work.error is not None:
            return
        seconds, op = clock.now() - called, work.op
        size = size_of(op)
        key = type(op), SIZES[size.bit_length()], part_of(op, getattr(work, "lane", ""))
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = OpDurations()
        kind.counts[bisect_left(BOUNDS, seconds)] += 1
        kind.seconds += seconds
        kind.bytes += size

    def rows(self) -> Iterator[MetricRow]:
        """Yield the current counts. Thread-safe."""
        for (cls, size, part), kind in list(dict(self._kinds).items()):
            # Collectives that no transport carries consist of messages.
            transport = self._transports.get(cls.family, "messages")
            yield MetricRow(part + cls.name, transport, size, kind.counts[:], kind.seconds, kind.bytes)


class Totals:
    """The sums over one rank's ops on a communicator and on the lost communicators that this communicator replaces."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], MetricRow] = {}
        self._failed: dict[tuple[str, int | None], int] = {}

    def add(self, rows: Iterable[MetricRow], failed: Iterable[Failures]) -> None:
        """Add the counts of one communicator."""
        for row in rows:
            known = self._rows.get(row[:3])
            if known is not None:
                counts = [one + other for one, other in zip(known.counts, row.counts, strict=True)]
                row = MetricRow(*row[:3], counts, known.seconds + row.seconds, known.bytes + row.bytes)
            self._rows[row[:3]] = row
        for each in failed:
            key = each.error, each.peer
            self._failed[key] = self._failed.get(key, 0) + each.count

    def failures(self) -> list[Failures]:
        """Return the numbers of failed ops by reason."""
        return [Failures(*key, count) for key, count in self._failed.items()]

    def rows(self) -> list[MetricRow]:
        """Return the sums by name, transport and size class of the ops."""
        return list(self._rows.values())


class Lateness:
    """The delay from the submission of a callback until an event loop runs the callback.

    The method :meth:`look`, which another thread may call, submits the callbacks.
    """

    def __init__(self) -> None:
        """Measure the event loop that runs on this thread. If no loop runs, the lateness stays unknown."""
        self._loop: Loop | None = None
        try:
            self._loop = running_loop()
        except RuntimeError:
            pass
        self._asked: float | None = None
        self._last: float | None = None

    def look(self) -> float | None:
        """Return the delay of the last callback. If that callback is pending, return its delay so far.

        If no callback is pending, also submit the next callback. Thread-safe.

        :returns: the delay in seconds; None if the delay is unknown. The first call always returns None.
        """
        asked, now = self._asked, clock.now()
        if asked is not None:
            return now - asked
        if self._loop is not None:
            self._asked = now
            if not self._loop.call_threadsafe(self._come, now):
                self._loop = self._asked = self._last = None  # The loop has ended.
        return self._last

    def _come(self, asked: float) -> None:
        self._last, self._asked = clock.now() - asked, None


class Measured:
    """The measurement of one communicator; :meth:`remove` ends it."""

    name: str
    rank: int
    tally: Tally
    lateness: Lateness

    def __init__(self, comm: Instrumentable) -> None:
        self.name, self.rank = comm.statistics().name, comm.rank
        self.tally, self.lateness = Tally(comm), Lateness()
        self._comm = ref(comm)  # A strong reference would prevent the warning of a communicator left open.
        self._removed = False
        self.users: set[object] = set()
        """The users of the measurement: services, and None, which stands for the program."""
        self.lost: Statistics | None = None
        """The communicator's statistics at the time of its loss; None if the communicator is not lost.

        The measurement stores the statistics, because the program may close the lost communicator.
        """
        self._hook = comm.register_abort_hook(self._lost)
        if comm.aborted:
            self._lost()

    def _lost(self, *_: object) -> None:
        if (comm := self._comm()) is not None:
            self.lost = comm.statistics()

    def open(self) -> Instrumentable | None:
        """Return the communicator; None if it was closed or garbage-collected, or :meth:`remove` was called."""
        comm = self._comm()
        return None if comm is None or comm.closed or self._removed else comm

    def remove(self) -> None:
        """Stop measuring and showing the communicator, unless a measured service uses it. Idempotent."""
        self.leave(None)

    def leave(self, user: object) -> None:
        """Remove one user of the measurement. The measurement ends when its last user is removed."""
        self.users.discard(user)
        if self.users:
            return
        self._removed, self.lost = True, None
        self.tally.remove()
        self._hook.remove()


class MeasuredService:
    """The measurement of a service and its communicators; :meth:`remove` ends it."""

    def __init__(self, service: Service, add: Callable[[Instrumentable, object], Measured]) -> None:
        self._service = ref(service)
        self._add = add
        self._measured: Measured | None = None
        self._removed = False
        self._hook = service.register_comm_hook(self._follow)

    def _follow(self, comm: Instrumentable) -> None:
        # The exporter keeps the counts of a lost communicator.
        self._measured = self._add(comm, self)

    def open(self) -> Service | None:
        """Return the service; None if it has ended or was garbage-collected, or :meth:`remove` was called."""
        service = self._service()
        return None if service is None or service.closed or self._removed else service

    def remove(self) -> None:
        """Stop measuring and showing the service. Idempotent.

        If the program does not measure the service's communicator, also stop measuring and showing the communicator.
        """
        self._removed = True
        self._hook.remove()
        if self._measured is not None:
            self._measured.leave(self)


Place = tuple[str, int]
"""The name that a communicator had before its first reconfiguration, and the number of this rank."""


class Shown:
    """The communicators that one exporter shows.

    The exporter adds the counts of a lost communicator to the counts of the communicator that replaces it. Otherwise
    the metrics would not show the failure that caused a recovery. When a communicator is closed without a loss, the
    exporter removes the communicator's counts.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # A service adds its communicator while the service itself is added.
        self._measured: list[Measured] = []
        self._services: list[MeasuredService] = []
        self._kept: dict[Place, Totals] = {}

    def add(self, comm: Instrumentable, user: object = None) -> Measured:
        """Measure a communicator, or return the existing measurement of the communicator or its portal.

        :param user: the user of the measurement: a service; None: the program.
        """
        comm = getattr(comm, "_comm", comm)  # A portal has the hooks of its communicator.
        with self._lock:
            known = next((each for each in self._measured if each.open() is comm), None)
            if known is None:
                known = Measured(comm)
                self._measured.append(known)
            known.users.add(user)
        return known

    def add_service(self, service: Service) -> MeasuredService:
        """Measure a service and its current and later communicators, or return the existing measurement."""
        with self._lock:
            known = next((each for each in self._services if each.open() is service), None)
            if known is None:
                known = MeasuredService(service, self.add)
                self._services.append(known)
        return known

    def services(self) -> list[ServiceStatistics]:
        """Return the statistics of the services that have not ended. Thread-safe."""
        with self._lock:
            found = [(each, service) for each in self._services if (service := each.open()) is not None]
            self._services = [each for each, _ in found]
        return [service.statistics() for _, service in found]

    def open(self) -> list[tuple[Measured, Statistics]]:
        """Return the open communicators with their statistics. Thread-safe."""
        with self._lock:
            found = [(each, comm) for each in self._measured if (comm := each.open()) is not None]
            for each in self._measured:
                if all(each is not one for one, _ in found):
                    self._drop(each)
            self._measured = [each for each, _ in found]
        return [(each, comm.statistics()) for each, comm in found]

    def _drop(self, each: Measured) -> None:
        place = each.name, each.rank
        if each.lost is None:
            self._kept.pop(place, None)
        else:
            self._kept.setdefault(place, Totals()).add(each.tally.rows(), each.lost.failed)

    def totals(self) -> dict[Place, Totals]:
        """Return the sums of each communicator, including the counts of the lost communicators that it replaces.

        Thread-safe.
        """
        found = self.open()
        totals: dict[Place, Totals] = {}
        with self._lock:
            for place, kept in self._kept.items():
                totals.setdefault(place, Totals()).add(kept.rows(), kept.failures())
        for each, now in found:
            totals.setdefault((each.name, each.rank), Totals()).add(each.tally.rows(), now.failed)
        return totals
