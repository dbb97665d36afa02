"""Metrics of communicators and services for Prometheus; needs ``pip install "aiocomms[prometheus]"``.

See ``docs/metrics.md``. A post-hook, which runs at the end of each op, increases a few counts and does nothing else.
Communicators and services keep all other counts themselves, and the exporter reads these counts at each scrape.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import Final, TypeVar, overload
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from aiocomms.blocking.peer import BlockingPeer
from aiocomms.diagnosis.durations import BOUNDS
from aiocomms.diagnosis.statistics import Statistics
from aiocomms.endpoints.peer import Peer
from aiocomms.integrations.metrics import Instrumentable, Measured, MeasuredService, Shown, Totals, instrumentable
from aiocomms.lowlevel.handles import Handle
from aiocomms.serving import Service, ServiceStatistics

_OWN: Final = ["comm", "rank"]
_LARGEST: Final = (
    "_generation",
    "_age_seconds",
    "_lateness_seconds",
    "_oldest_pending_seconds",
    "_oldest_plan_seconds",
)
"""Suffixes of metric names.

If several samples have the same labels, a metric with such a suffix exports their largest value. Every other metric
exports their sum.
"""
_LE: Final = [*(repr(bound) for bound in BOUNDS), "+Inf"]


class Exporter(Handle, Collector):
    """The metrics of all measured communicators and services of one registry."""

    def __init__(self) -> None:
        self.shown: Shown = Shown()

    def describe(self) -> list[Metric]:
        """Return an empty list, so that the registry does not call :meth:`collect` to get the names of the metrics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all communicators and services. Thread-safe."""
        families, streams, plans = _Families(), _StreamFamilies(), _PlanFamilies()
        for (name, rank), totals in self.shown.totals().items():
            families.add_totals([name, str(rank)], totals)
        for each, now in self.shown.open():
            families.add_state(each, now)
            streams.add(each, now)
        for service in self.shown.services():
            plans.add(service)
        for metrics in (families, streams, plans):
            yield from map(_merged, vars(metrics).values())


class _Families:
    """The metrics of communicators in one scrape."""

    def __init__(self) -> None:
        self.seconds = HistogramMetricFamily(
            "aiocomms_op_seconds", "Time from the call of an op to its end; of those that have ended without an error.",
            labels=[*_OWN, "op", "transport", "size"],
        )  # fmt: skip
        self.bytes = CounterMetricFamily(
            "aiocomms_bytes", "Bytes of the tensors that these ops were about, on this rank.",
            labels=[*_OWN, "op", "transport"],
        )  # fmt: skip
        self.failures = CounterMetricFamily(
            "aiocomms_failures", "Ops that have failed, by the error and the rank that it names.",
            labels=[*_OWN, "reason", "peer"],
        )  # fmt: skip
        self.heartbeat = GaugeMetricFamily(
            "aiocomms_heartbeat_age_seconds", "Seconds without a sign of life of another rank, while ops are pending.",
            labels=[*_OWN, "peer"],
        )  # fmt: skip
        self.generation = _gauge("generation", "1, and one more with each reconfiguration.")
        self.pending = _gauge("pending", "Ops that are under way.")
        self.pending_bytes = _gauge("pending_bytes", "Bytes of the tensors of ops that are under way.")
        self.pending_lanes = _gauge("pending_lanes", "Lanes in which ops are under way.")
        self.oldest = _gauge(
            "oldest_pending_seconds", "For how long the oldest pending op has been under way; 0: none."
        )
        self.lateness = _gauge("loop_lateness_seconds", "How long the event loop took to come round to a call.")
        self.window_bytes = _gauge("window_bytes", "Bytes of this rank's parts of open windows.")
        self.window_peer_bytes = _gauge("window_peer_bytes", "Bytes of the other ranks' parts of open windows.")
        self.memory = _gauge("shared_memory_bytes", "Memory that is shared with other processes of the host.")

    def add_totals(self, labels: list[str], totals: Totals) -> None:
        """Add the durations, bytes and failures of a communicator's ops to the metrics."""
        moved: dict[tuple[str, str], int] = {}
        for row in totals.rows():
            self.seconds.add_metric([*labels, row.op, row.transport, row.size], _buckets(row.counts), row.seconds)
            moved[row.op, row.transport] = moved.get((row.op, row.transport), 0) + row.bytes
        for key, count in moved.items():
            self.bytes.add_metric([*labels, *key], count)
        for failed in totals.failures():
            peer = "" if failed.peer is None else str(failed.peer)
            self.failures.add_metric([*labels, failed.error, peer], failed.count)

    def add_state(self, each: Measured, now: Statistics) -> None:
        """Add the current state of a communicator to the metrics."""
        labels = [each.name, str(each.rank)]
        self.generation.add_metric(labels, now.generation)
        for rank, seconds in now.silence.items():
            self.heartbeat.add_metric([*labels, str(rank)], seconds)
        self.pending.add_metric(labels, now.pending)
        self.pending_bytes.add_metric(labels, now.pending_bytes)
        self.pending_lanes.add_metric(labels, now.pending_lanes)
        self.oldest.add_metric(labels, now.oldest or 0.0)
        self.window_bytes.add_metric(labels, sum(one.bytes for one in now.windows))
        self.window_peer_bytes.add_metric(labels, sum(one.peer_bytes for one in now.windows))
        if (late := each.lateness.look()) is not None:
            self.lateness.add_metric(labels, late)
        if now.shared_memory is not None:
            self.memory.add_metric(labels, now.shared_memory)


class _StreamFamilies:
    """The metrics of communicators' streams in one scrape."""

    def __init__(self) -> None:
        self.sent = _of_streams(CounterMetricFamily, "sent", "Items sent on open streams.")
        self.received = _of_streams(CounterMetricFamily, "received", "Items that the program has taken.")
        self.queued = _of_streams(GaugeMetricFamily, "queued", "Items that wait for the program.")
        self.queued_bytes = _of_streams(GaugeMetricFamily, "queued_bytes", "Bytes of these items.")
        self.send_blocked = _of_streams(
            CounterMetricFamily, "send_blocked_seconds", "Seconds in which a task was suspended in send."
        )
        self.receive_blocked = _of_streams(
            CounterMetricFamily, "receive_blocked_seconds", "Seconds in which a task was suspended in receive."
        )

    def add(self, each: Measured, now: Statistics) -> None:
        """Add the counts of a communicator's streams to the metrics."""
        for stream in now.streams:
            labels = [each.name, str(each.rank), stream.name, str(stream.peer)]
            self.sent.add_metric(labels, stream.sent)
            self.received.add_metric(labels, stream.received)
            self.queued.add_metric(labels, stream.queued)
            self.queued_bytes.add_metric(labels, stream.queued_bytes)
            self.send_blocked.add_metric(labels, stream.send_blocked)
            self.receive_blocked.add_metric(labels, stream.receive_blocked)


class _PlanFamilies:
    """The metrics of services in one scrape."""

    def __init__(self) -> None:
        self.seconds = _histogram(
            "plan_seconds", "Time from the call of a plan to its end; of those that have ended without an error."
        )
        self.wait = _histogram("plan_wait_seconds", "Time from the call of a plan until it was carried out.")
        self.plans = CounterMetricFamily(
            "aiocomms_plans", "Plans by how they have ended, and the error with which they have failed.",
            labels=[*_OWN, "outcome", "reason"],
        )  # fmt: skip
        self.recoveries = CounterMetricFamily(
            "aiocomms_recoveries", "Communicators that have taken the place of a lost one of the service.", labels=_OWN
        )
        self.running = _gauge("plans_running", "Plans that are under way.")
        self.waiting = _gauge("plans_waiting", "Plans that wait for their turn.")
        self.oldest = _gauge(
            "oldest_plan_seconds", "For how long the oldest plan has been under way; 0: there is none."
        )

    def add(self, now: ServiceStatistics) -> None:
        """Add the durations, outcomes and current state of a service's plans to the metrics."""
        labels = [now.name, str(now.rank)]
        for family, durations in ((self.seconds, now.took), (self.wait, now.waited)):
            family.add_metric(labels, _buckets(durations.counts), durations.seconds)
        for outcome in ("done", "cancelled", "refused"):
            self.plans.add_metric([*labels, outcome, ""], getattr(now, outcome))
        for failed in now.failed:
            self.plans.add_metric([*labels, "failed", failed.error], failed.count)
        self.recoveries.add_metric(labels, now.recoveries)
        self.running.add_metric(labels, now.running)
        self.waiting.add_metric(labels, now.waiting)
        self.oldest.add_metric(labels, now.oldest or 0.0)


_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)


def _of_streams(family: type[_Family], name: str, what: str) -> _Family:
    return family(f"aiocomms_stream_{name}", what, labels=[*_OWN, "stream", "peer"])


def _gauge(name: str, what: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"aiocomms_{name}", what, labels=_OWN)


def _histogram(name: str, what: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"aiocomms_{name}", what, labels=_OWN)


def _merged(family: Metric) -> Metric:
    """Merge samples with the same name and labels, because Prometheus rejects a scrape with duplicates."""
    found: dict[tuple[str, ...], Sample] = {}
    for each in family.samples:
        key = each.name, *each.labels.values()
        if (known := found.get(key)) is not None:
            value = max(known.value, each.value) if family.name.endswith(_LARGEST) else known.value + each.value
            each = each._replace(value=value)
        found[key] = each
    family.samples = list(found.values())
    return family


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    return list(zip(_LE, map(float, accumulate(counts)), strict=True))


_exporters: WeakKeyDictionary[CollectorRegistry, Exporter] = WeakKeyDictionary()
_registering = threading.Lock()


@overload
def instrument(comm: Service, registry: CollectorRegistry = REGISTRY) -> MeasuredService: ...
@overload
def instrument(comm: Instrumentable | Peer | BlockingPeer, registry: CollectorRegistry = REGISTRY) -> Measured: ...
def instrument(
    comm: Instrumentable | Peer | BlockingPeer | Service, registry: CollectorRegistry = REGISTRY
) -> Measured | MeasuredService:
    """Export the metrics of a communicator, from this call until the communicator is closed.

    Call this function on the thread of the communicator's event loop. On any other thread the metrics lack the lateness
    of the event loop. Programs that pass a portal or a blocking communicator usually call this function on another
    thread.

    For a service, the metrics cover all plans since the service's start, and the service's current communicator, until
    the service ends. A connection between endpoints appears as a communicator of two ranks, whose name contains the
    names of both endpoints.

    :param comm: a :class:`~aiocomms.Communicator`, :class:`~aiocomms.Portal`, blocking communicator,
        :class:`~aiocomms.Peer`, blocking peer or :class:`~aiocomms.serving.Service`.
    :param registry: the Prometheus registry that exports the metrics. Any number of communicators may share a registry.
    :returns: a handle with ``.remove()``.
    :raises ArgumentTypeError: ``comm`` has another type.
    """
    if isinstance(comm, (Peer, BlockingPeer)):
        comm = comm._comm
    if not isinstance(comm, Service):
        instrumentable(comm, ", or a Peer or Service")
    with _registering:
        exporter = _exporters.get(registry)
        if exporter is None:
            exporter = Exporter()
            registry.register(exporter)
            _exporters[registry] = exporter
    return exporter.shown.add_service(comm) if isinstance(comm, Service) else exporter.shown.add(comm)
