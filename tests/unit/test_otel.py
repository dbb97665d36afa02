"""The exporter for OpenTelemetry: real ops, and what the SDK's own exporters to memory hold afterwards."""

from __future__ import annotations

import anyio
import pytest
import torch
from concurrency import ranks, run_on, together
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import StatusCode

from aiocomms.errors import ArgumentTypeError, CommAbortedError, CommError
from aiocomms.integrations.otel import measure_ops, trace_ops
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

TRANSPORTS = ["local", "ucx"]


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


def provider_of(exporter, sampler=ALWAYS_ON):
    provider = TracerProvider(sampler=ParentBased(sampler), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_op_span_is_a_child_of_its_tasks_span(exporter, transport):
    """Two tasks work at the same time, and each op's span is of the task that called it."""

    async def main():
        provider = provider_of(exporter)
        tracer = provider.get_tracer("the program")
        async with local_world(2, transport, name="traced") as comms:
            handles = [trace_ops(comm, provider) for comm in comms]
            began = [anyio.Event(), anyio.Event()]

            async def request(comm, name, own, other):
                with tracer.start_as_current_span(name):
                    began[own].set()
                    await began[other].wait()
                    lane = comm.lane(name)
                    await lane.all_reduce(torch.ones(2))
                    await anyio.lowlevel.checkpoint()
                    await lane.barrier()

            async def rank(comm):
                if comm.rank == 0:
                    await together(lambda: request(comm, "one", 0, 1), lambda: request(comm, "two", 1, 0))
                else:  # of no request
                    for name in ("one", "two"):
                        await comm.lane(name).all_reduce(torch.ones(2))
                        await comm.lane(name).barrier()

            await ranks(comms, rank)
            for handle in handles:
                handle.remove()
        spans = exporter.get_finished_spans()
        requests = {span.name: span for span in spans if span.name in ("one", "two")}
        ops = [span for span in spans if span.name not in requests]
        assert sorted(span.name for span in ops) == ["all_reduce", "all_reduce", "barrier", "barrier"]
        for name, parent in requests.items():
            mine = [span for span in ops if span.parent.span_id == parent.context.span_id]
            assert [span.name for span in mine] == ["all_reduce", "barrier"], name
            assert all(parent.start_time <= s.start_time <= s.end_time <= parent.end_time for s in mine)
        first = next(span for span in ops if span.name == "all_reduce")
        assert first.attributes["aiocomms.comm"] == "traced"
        assert first.attributes["aiocomms.rank"] == 0
        assert first.attributes["aiocomms.bytes"] == 8
        assert first.attributes["aiocomms.transport"] == transport

    run_on("asyncio", main)


def test_op_span_lasts_until_the_op_ends(exporter):
    async def main():
        provider = provider_of(exporter)
        async with local_world(2) as [one, two]:
            trace_ops(one, provider)
            with provider.get_tracer("the program").start_as_current_span("request"):
                work = one.recv(torch.ones(2), 1)
            assert [span.name for span in exporter.get_finished_spans()] == ["request"]
            await two.send(torch.ones(2), 0)
            await work
            assert [span.name for span in exporter.get_finished_spans()] == ["request", "recv"]

    run_on("asyncio", main)


class Names(Sampler):
    """Samples the spans of some names."""

    def should_sample(self, parent_context, trace_id, name, *args, **kwargs):
        return SamplingResult(Decision.RECORD_AND_SAMPLE if name in ("request", "barrier") else Decision.DROP)

    def get_description(self):
        return "by name"


def test_sampler_decides_for_each_op_span(exporter):
    async def main():
        provider = TracerProvider(sampler=Names(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        async with local_world(1) as [comm]:
            trace_ops(comm, provider)
            with provider.get_tracer("the program").start_as_current_span("request"):
                await comm.barrier()
                await comm.all_reduce(torch.ones(2))
            assert [span.name for span in exporter.get_finished_spans()] == ["barrier", "request"]

    run_on("asyncio", main)


def test_op_without_a_sampled_parent_has_no_span(exporter):
    async def main():
        provider = provider_of(exporter, ALWAYS_OFF)
        async with local_world(1) as [comm]:
            tracing = trace_ops(comm, provider)
            sampled = provider_of(exporter)
            with provider.get_tracer("the program").start_as_current_span("request"):
                await comm.barrier()
            await comm.barrier()
            tracing.remove()
            trace_ops(comm, sampled)
            await comm.barrier()
            assert exporter.get_finished_spans() == ()

    run_on("asyncio", main)


def test_op_span_records_failure_and_refusal(exporter):
    async def main():
        provider = provider_of(exporter)
        async with local_world(2) as [one, two]:
            trace_ops(one, provider)

            def refuse(op, seq):
                raise CommError("not now")

            with provider.get_tracer("the program").start_as_current_span("request"):
                hook = one.register_pre_hook(refuse)
                with pytest.raises(CommError, match="not now"):
                    one.barrier()
                hook.remove()
                work = one.barrier()
                two.abort("enough")
                with pytest.raises(CommAbortedError):
                    await work
            refused, failed, _ = exporter.get_finished_spans()
            for span, said in ((refused, "not now"), (failed, "enough")):
                assert span.status.status_code is StatusCode.ERROR
                assert said in span.status.description
                assert [event.name for event in span.events] == ["exception"]

    run_on("asyncio", main)


def read(reader):
    """The points of all metrics by their names: their values, by the attributes that are not every point's."""
    found = {}
    data = reader.get_metrics_data()
    for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else ():
        for point in metric.data.data_points:
            key = tuple(sorted((k, v) for k, v in point.attributes.items() if k != "aiocomms.comm"))
            found.setdefault(metric.name, {})[key] = point.value
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_metrics_count_ops_by_kind_transport_and_size(transport):
    async def main():
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader], shutdown_on_exit=False)
        async with local_world(2, transport) as comms:
            handles = [measure_ops(comm, provider) for comm in comms]
            await ranks(comms, lambda comm: comm.all_reduce(torch.ones(2)))
            work = comms[0].recv(torch.ones(4), 1)
            seen = read(reader)
            kind = (("aiocomms.op", "all_reduce"), ("aiocomms.rank", 0), ("aiocomms.size", "<1KiB"))
            kind = (*kind, ("aiocomms.transport", transport))
            assert seen["aiocomms.ops"][kind] == 1
            assert seen["aiocomms.op.size"][kind] == 8
            assert seen["aiocomms.op.time"][kind] > 0
            own, other = (("aiocomms.rank", 0),), (("aiocomms.rank", 1),)
            assert seen["aiocomms.pending"] == {own: 1, other: 0}
            assert seen["aiocomms.pending.size"] == {own: 16, other: 0}
            comms[1].abort("enough")
            with pytest.raises(CommAbortedError):
                await work
            failed = (("aiocomms.peer", 1), ("aiocomms.rank", 0), ("error.type", "CommAbortedError"))
            assert read(reader)["aiocomms.failures"] == {failed: 1}
            assert read(reader)["aiocomms.loop.lateness"][own] >= 0
            for handle in handles:
                handle.remove()
            assert read(reader) == {}
        provider.shutdown()

    run_on("asyncio", main)


@pytest.mark.fault(127)
def test_metrics_keep_their_attributes_after_a_recovery():
    async def main():
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader], shutdown_on_exit=False)
        failed = (("aiocomms.peer", 1), ("aiocomms.rank", 0), ("error.type", "CommAbortedError"))
        async with local_world(2) as comms:
            for generation in (1, 2):
                measure_ops(comms[0], provider)
                await ranks(comms, lambda comm: comm.barrier())
                seen = read(reader)
                assert seen["aiocomms.generation"] == {(("aiocomms.rank", 0),): generation}
                assert list(seen["aiocomms.ops"].values()) == [generation]
                assert seen.get("aiocomms.failures", {}) == ({failed: 1} if generation > 1 else {})
                work = comms[0].recv(torch.ones(1), 1)
                comms[1].abort("enough")
                with pytest.raises(CommAbortedError):
                    await work
                comms[:] = await ranks(comms, lambda comm: comm.reconfigure(ranks=[0, 1]))
            names = {
                point.attributes["aiocomms.comm"]
                for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
                for point in metric.data.data_points
            }
            assert names == {"world"}
            await ranks(comms, lambda comm: comm.aclose())
        provider.shutdown()

    run_on("asyncio", main)


@pytest.mark.parametrize("function", [trace_ops, measure_ops])
def test_tracing_refuses_an_object_that_is_no_communicator(function):
    with pytest.raises(ArgumentTypeError, match="comm is None, wanted a Communicator"):
        function(None)
