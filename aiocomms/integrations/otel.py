"""Spans of ops, and of a service's plans, for OpenTelemetry.

This module needs ``pip install "aiocomms[otel]"``. See ``docs/metrics.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Status, StatusCode, TracerProvider

from aiocomms import __version__
from aiocomms.diagnosis.recorder import window_of
from aiocomms.errors import ArgumentTypeError
from aiocomms.integrations.metrics import Instrumentable, instrumentable, part_of
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import size_of
from aiocomms.progress.work import Work
from aiocomms.serving import PlanStart, Service

_SCOPE = "aiocomms"


class _Spans:
    """The hook of one communicator. The hook makes a span for each op that is called within a sampled span."""

    def __init__(self, comm: Instrumentable, provider: TracerProvider) -> None:
        self.provider = provider
        self.users: set[Tracing] = set()
        """The handles on this hook for which :meth:`Tracing.remove` was not called yet."""
        self._tracer = trace.get_tracer(_SCOPE, __version__, provider)
        self._transports = comm.transports
        self._place = _labels(comm.name, comm.rank)
        self.remove: Callable[[], None] = comm.register_post_hook(self._ended).remove

    def _ended(self, work: Work[Any]) -> None:
        # Post-hooks run in the context of the call, so the current span is the caller's. Without a sampled span the op
        # belongs to no request, or to an unsampled one.
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            return
        if work.called is None:  # The op was called before this hook was registered.
            return
        op = work.op
        part = part_of(op, getattr(work, "lane", ""))
        if part and "recv" in op.name:  # A standing receive belongs to no request.
            return
        # The clocks are read in this order so that the span does not begin before the call.
        took, now = clock.now() - work.called, int(clock.wall() * 1e9)
        transport = self._transports.get(op.family, "messages")
        facts = {
            **self._place,
            "aiocomms.seq": work.seq,
            "aiocomms.transport": transport,
            "aiocomms.bytes": size_of(op),
        }
        if window := window_of(op):
            facts["aiocomms.window"] = window
        span = self._tracer.start_span(part + op.name, attributes=facts, start_time=now - int(took * 1e9))
        if work.error is not None:
            span.record_exception(work.error, timestamp=now)
            span.set_status(Status(StatusCode.ERROR, work.error.message))
        span.end(now)


_lock = threading.Lock()
_known: WeakKeyDictionary[Instrumentable, list[_Spans]] = WeakKeyDictionary()
"""The hooks of each communicator. A communicator has only one hook for each provider, so that no op gets two spans."""


class Tracing(Handle):
    """A handle on the spans of a communicator's ops. :meth:`remove` of the last handle ends the tracing."""

    def __init__(self, comm: Instrumentable, provider: TracerProvider | None) -> None:
        comm = getattr(comm, "_comm", comm)  # A portal has the hooks of its communicator.
        provider = trace.get_tracer_provider() if provider is None else provider
        with _lock:
            self._all = _known.setdefault(comm, [])
            found = next((each for each in self._all if each.provider is provider), None)
            if found is None:
                found = _Spans(comm, provider)
                self._all.append(found)
            found.users.add(self)
        self._spans = found

    def remove(self) -> None:
        """Stop the tracing, unless another handle on it is left. Idempotent."""
        with _lock:
            self._spans.users.discard(self)
            if not self._spans.users and self._spans in self._all:
                self._all.remove(self._spans)
                self._spans.remove()


def trace_ops(comm: Instrumentable, tracer_provider: TracerProvider | None = None) -> Tracing:
    """Make a span for each op that is called from now on and within a sampled span.

    The op's span is a child of the sampled span, and lasts from the call to the op's end. A post-hook of the
    communicator creates the op's span when the op has ended.

    The provider's sampler decides whether the op's span is recorded. The default sampler of OpenTelemetry's SDK makes
    the same decision as for the parent span. An op that is called outside a sampled span gets no span.

    :param comm: a :class:`~aiocomms.Communicator`, :class:`~aiocomms.Portal` or blocking communicator.
    :param tracer_provider: the provider of the tracer; None: the global provider.
    :returns: a handle with ``.remove()``.
    :raises ArgumentTypeError: ``comm`` has another type.
    """
    instrumentable(comm)
    return Tracing(comm, tracer_provider)


def _labels(name: str, rank: int) -> dict[str, Any]:
    return {"aiocomms.comm": name, "aiocomms.rank": rank}


class PlanTracing(Handle):
    """A handle on the spans of a service's plans and of their ops. :meth:`remove` ends the tracing."""

    def __init__(self, service: Service, provider: TracerProvider | None) -> None:
        self._tracer, self._provider = trace.get_tracer(_SCOPE, __version__, provider), provider
        self._ops: Tracing | None = None
        self._hooks = [
            service.register_carrier_hook(_fill),
            service.register_plan_hook(self._within),
            service.register_comm_hook(self._follow),
        ]

    def _follow(self, comm: Instrumentable) -> None:
        if self._ops is not None:
            self._ops.remove()
        self._ops = Tracing(comm, self._provider)

    def _within(self, start: PlanStart) -> AbstractContextManager[object]:
        # On rank 0 the plan's task has the context of the call. Elsewhere the carrier has it.
        caller = context.get_current() if start.comm.rank == 0 else propagate.extract(start.carrier, context.Context())
        if not trace.get_current_span(caller).get_span_context().trace_flags.sampled:
            return nullcontext()
        facts = {
            **_labels(start.comm.name, start.comm.rank),
            "aiocomms.plan.number": start.number,
            "aiocomms.plan.waited": start.waited,
        }
        return self._tracer.start_as_current_span("aiocomms.plan", caller, attributes=facts)

    def remove(self) -> None:
        """Stop the tracing of plans and ops. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        if self._ops is not None:
            self._ops.remove()


def _fill(carrier: dict[str, str]) -> None:
    """Add the context of a plan's caller to the carrier, if the caller runs within a sampled span."""
    if trace.get_current_span().get_span_context().trace_flags.sampled:
        propagate.inject(carrier)


def trace_plans(service: Service, tracer_provider: TracerProvider | None = None) -> PlanTracing:
    """Make a span on this rank for each plan that is called within a sampled span, and for the plan's ops.

    Call this function on every rank.

    OpenTelemetry's global propagator writes the context of the plan's caller into the plan's carrier, and rank 0 sends
    the carrier with the plan to all ranks. So the plan's span on each rank is a child of the caller's span. The spans
    of the plan's ops on this rank are children of the plan's span, which lasts as long as ``execute`` runs. As with
    :func:`trace_ops`, a plan that is called outside a sampled span gets no span.

    :param service: the service. The function traces the ops of the service's current and later communicators, as
        :func:`trace_ops` does.
    :param tracer_provider: the provider of the tracer; None: the global provider.
    :returns: a handle with ``.remove()``.
    :raises ArgumentTypeError: ``service`` is not a service.
    """
    if not isinstance(service, Service):
        raise ArgumentTypeError(f"service is {service!r}, wanted a Service")
    return PlanTracing(service, tracer_provider)
