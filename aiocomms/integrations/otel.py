"""Spans and metrics of ops for OpenTelemetry; needs ``pip install "aiocomms[otel]"``. See ``docs/metrics.md``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Status, StatusCode, TracerProvider

from aiocomms import __version__
from aiocomms.diagnosis.statistics import Statistics
from aiocomms.integrations.metrics import Instrumentable, Measured, MetricRow, Shown, instrumentable
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import size_of
from aiocomms.progress.work import Work

_SCOPE = "aiocomms"


class Tracing(Handle):
    """The spans of ops that are called within a span, each made when the op has ended; ``remove()`` ends that."""

    def __init__(self, comm: Instrumentable, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer(_SCOPE, __version__, provider)
        self._transports = comm.transports
        self._place = _labels(comm.name, comm.rank)
        self.remove: Callable[[], None] = comm.register_post_hook(self._ended).remove

    def _ended(self, work: Work[Any]) -> None:
        # The current span is the caller's: post-hooks are called in the context of the call. Without a sampled span the
        # op belongs to no request, or to one that is not sampled.
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            return
        if work.called is None:  # The op was called before this hook was registered.
            return
        # The order keeps the span from beginning before its call.
        took, now = clock.now() - work.called, int(clock.wall() * 1e9)
        op = work.op
        transport = self._transports.get(op.family, "messages")
        facts = {
            **self._place,
            "aiocomms.seq": work.seq,
            "aiocomms.transport": transport,
            "aiocomms.bytes": size_of(op),
        }
        span = self._tracer.start_span(op.name, attributes=facts, start_time=now - int(took * 1e9))
        if work.error is not None:
            span.record_exception(work.error, timestamp=now)
            span.set_status(Status(StatusCode.ERROR, work.error.message))
        span.end(now)


def trace_ops(comm: Instrumentable, tracer_provider: TracerProvider | None = None) -> Tracing:
    """Make a span of each op from now on that is called within a span: a child of it, from the call to the op's end.

    It is made when the op has ended, and is told then when that began.

    Whether it is recorded is for the sampler of the provider to decide; that of OpenTelemetry's SDK follows the parent
    by default. Ops that are called within no span, or within one that is not sampled, have none.

    :param comm: a :class:`~aiocomms.Communicator`, :class:`~aiocomms.Portal` or blocking communicator.
    :param tracer_provider: None: the global one.
    :returns: a handle with ``.remove()``.
    :raises ArgumentTypeError: ``comm`` is none of these.
    """
    instrumentable(comm)
    return Tracing(comm, tracer_provider)


class _Instruments:
    """The metrics of all communicators that are measured by one provider."""

    def __init__(self, provider: MeterProvider) -> None:
        self.shown = Shown()
        meter = provider.get_meter(_SCOPE, __version__)
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        counter("aiocomms.ops", [self._of_ops(lambda row: sum(row.counts))], "{op}", "Ops that have ended")
        counter("aiocomms.op.time", [self._of_ops(lambda row: row.seconds)], "s", "Time from their calls to their ends")
        counter("aiocomms.op.size", [self._of_ops(lambda row: row.bytes)], "By", "Bytes of their tensors")
        counter("aiocomms.failures", [self._failures], "{op}", "Ops that have failed")
        gauge("aiocomms.generation", [self._of_state(_generation)], "1", "1, and one more with each reconfiguration")
        gauge("aiocomms.pending", [self._of_state(lambda now: [(now.pending, {})])], "{op}", "Ops under way")
        gauge("aiocomms.pending.size", [self._of_state(lambda now: [(now.pending_bytes, {})])], "By", "Their tensors")
        gauge("aiocomms.pending.age", [self._of_state(lambda now: [(now.oldest or 0.0, {})])], "s", "Of the oldest")
        gauge("aiocomms.heartbeat.age", [self._of_state(_silence)], "s", "Time without a sign of life of a rank")
        gauge("aiocomms.shared_memory", [self._of_state(_memory)], "By", "Shared with other processes of the host")
        gauge("aiocomms.loop.lateness", [self._late], "s", "How long the event loop took to come round to a call")

    def _of_ops(self, read: Callable[[MetricRow], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for place, totals in self.shown.totals().items():
                for row in totals.rows():
                    kind = {"aiocomms.op": row.op, "aiocomms.transport": row.transport, "aiocomms.size": row.size}
                    yield Observation(read(row), {**_labels(*place), **kind})

        return observe

    def _failures(self, _: CallbackOptions) -> Iterable[Observation]:
        for place, totals in self.shown.totals().items():
            for failed in totals.failures():
                named = {} if failed.peer is None else {"aiocomms.peer": failed.peer}
                yield Observation(failed.count, {**_labels(*place), "error.type": failed.error, **named})

    def _of_state(
        self, read: Callable[[Statistics], Iterable[tuple[float, dict[str, Any]]]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for each, now in self.shown.open():
                for value, labels in read(now):
                    yield Observation(value, {**_labels(each.name, each.rank), **labels})

        return observe

    def _late(self, _: CallbackOptions) -> Iterable[Observation]:
        for each, _now in self.shown.open():
            if (late := each.lateness.look()) is not None:
                yield Observation(late, _labels(each.name, each.rank))


def _labels(name: str, rank: int) -> dict[str, Any]:
    return {"aiocomms.comm": name, "aiocomms.rank": rank}


def _generation(now: Statistics) -> Iterable[tuple[float, dict[str, Any]]]:
    return [(now.generation, {})]


def _silence(now: Statistics) -> Iterable[tuple[float, dict[str, Any]]]:
    return [(seconds, {"aiocomms.peer": rank}) for rank, seconds in now.silence.items()]


def _memory(now: Statistics) -> Iterable[tuple[float, dict[str, Any]]]:
    return [] if now.shared_memory is None else [(now.shared_memory, {})]


_instruments: WeakKeyDictionary[MeterProvider, _Instruments] = WeakKeyDictionary()
_creating = threading.Lock()


def measure_ops(comm: Instrumentable, meter_provider: MeterProvider | None = None) -> Measured:
    """Show what a communicator does, from now on until it is closed; call it on the thread of its event loop.

    Called elsewhere, as for a portal or a blocking communicator, it shows all but the lateness of the loop. All is
    read when the provider's reader collects; nothing of OpenTelemetry runs when an op does.

    :param comm: a :class:`~aiocomms.Communicator`, :class:`~aiocomms.Portal` or blocking communicator.
    :param meter_provider: None: the global one.
    :returns: a handle with ``.remove()``.
    :raises ArgumentTypeError: ``comm`` is none of these.
    """
    instrumentable(comm)
    provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
    with _creating:
        instruments = _instruments.get(provider)
        if instruments is None:
            instruments = _instruments[provider] = _Instruments(provider)
    return instruments.shown.add(comm)
