"""Spans and metrics of ops for OpenTelemetry; needs ``pip install "aiocomms[otel]"``. See ``docs/metrics.md``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Span, Status, StatusCode, TracerProvider

from aiocomms import __version__
from aiocomms.diagnosis.statistics import Statistics
from aiocomms.metrics import Instrumentable, Measured, Row, Shown, Traceable, instrumentable
from aiocomms.ops import Op, size_of
from aiocomms.progress.work import Work

_SCOPE = "aiocomms"


class Tracing:
    """Makes a span of each op that is called within a span; :meth:`remove` ends that."""

    def __init__(self, comm: Traceable, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer(_SCOPE, __version__, provider)
        self._transports = comm.transports
        self._place = _place(comm)
        self._spans: dict[int, Span] = {}  # those of ops under way, by their numbers
        self._hooks = [comm.register_post_hook(self._ended), comm.register_pre_hook(self._called)]

    def remove(self) -> None:
        """Make no more spans; those of ops under way end here, without an end of their op. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        while self._spans:
            self._spans.popitem()[1].end()

    def _called(self, op: Op, seq: int) -> None:
        if not trace.get_current_span().get_span_context().trace_flags.sampled:  # of no request, or of one that is not
            return
        span = self._tracer.start_span(op.name)  # a child of the current one, if the provider's sampler says so
        if span.is_recording():
            transport = self._transports.get(op.family, "messages")
            span.set_attributes({**self._place, "aiocomms.seq": seq, "aiocomms.transport": transport})
            span.set_attribute("aiocomms.bytes", size_of(op))
            self._spans[seq] = span

    def _ended(self, work: Work[Any]) -> None:
        span = self._spans.pop(work.seq, None)
        if span is None:
            return
        if work.error is not None:
            span.record_exception(work.error)
            span.set_status(Status(StatusCode.ERROR, work.error.message))
        span.end()


def trace_ops(comm: Traceable, tracer_provider: TracerProvider | None = None) -> Tracing:
    """Make a span of each op from now on that is called within a span: a child of it, from the call to the op's end.

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
        counter("aiocomms.failures", [self._of_state(_failures)], "{op}", "Ops that have failed")
        gauge("aiocomms.pending", [self._of_state(lambda now: [(now.pending, {})])], "{op}", "Ops under way")
        gauge("aiocomms.pending.size", [self._of_state(lambda now: [(now.pending_bytes, {})])], "By", "Their tensors")
        gauge("aiocomms.pending.age", [self._of_state(lambda now: [(now.oldest or 0.0, {})])], "s", "Of the oldest")
        gauge("aiocomms.heartbeat.age", [self._of_state(_silence)], "s", "Time without a sign of life of a rank")
        gauge("aiocomms.shared_memory", [self._of_state(_memory)], "By", "Shared with other processes of the host")
        gauge("aiocomms.loop.lateness", [self._late], "s", "How long the event loop took to come round to a call")

    def _of_ops(self, read: Callable[[Row], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for each, _comm in self.shown.all():
                for row in each.tally.rows():
                    kind = {"aiocomms.op": row.op, "aiocomms.transport": row.transport, "aiocomms.size": row.size}
                    yield Observation(read(row), {**_place(each), **kind})

        return observe

    def _of_state(
        self, read: Callable[[Statistics], Iterable[tuple[float, dict[str, Any]]]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for each, comm in self.shown.all():
                for value, labels in read(comm.statistics()):
                    yield Observation(value, {**_place(each), **labels})

        return observe

    def _late(self, _: CallbackOptions) -> Iterable[Observation]:
        for each, _comm in self.shown.all():
            if (late := each.lateness.look()) is not None:
                yield Observation(late, _place(each))


def _place(comm: Instrumentable | Measured) -> dict[str, Any]:
    return {"aiocomms.comm": comm.name, "aiocomms.rank": comm.rank}


def _failures(now: Statistics) -> Iterable[tuple[float, dict[str, Any]]]:
    for failed in now.failed:
        named = {} if failed.peer is None else {"aiocomms.peer": failed.peer}
        yield failed.count, {"error.type": failed.error, **named}


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
