"""The exporter for OpenTelemetry: real ops, and the spans that the SDK's in-memory exporters hold afterwards."""

from __future__ import annotations

import anyio
import pytest
import torch
from concurrency import ranks, run_on, together
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import StatusCode

from aiocomms.errors import ArgumentTypeError, CommAbortedError, CommError, WorkerError
from aiocomms.integrations.otel import trace_ops, trace_plans
from aiocomms.serving import Service
from aiocomms.serving.plans import Worker
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
    """Two tasks work at the same time; each op's span is a child of the span of the task that called it."""

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
                else:  # Rank 1 has no span of a request.
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


def test_op_has_one_span_for_each_provider_however_often_it_is_traced(exporter):
    async def main():
        provider, other = provider_of(exporter), provider_of(exporter)
        async with local_world(1) as [comm], Service(comm) as service:

            async def spans() -> int:
                exporter.clear()
                with provider.get_tracer("the program").start_as_current_span("request"):
                    await comm.barrier()
                return [span.name for span in exporter.get_finished_spans()].count("barrier")

            tracings = [trace_ops(comm, provider), trace_ops(comm.portal(), provider), trace_plans(service, provider)]
            assert await spans() == 1
            tracings.append(trace_ops(comm, other))
            assert await spans() == 2
            tracings.pop().remove()
            for tracing in tracings:
                assert await spans() == 1
                tracing.remove()
                tracing.remove()
            assert await spans() == 0
            trace_ops(comm, provider)
            assert await spans() == 1

    run_on("asyncio", main)


class Names(Sampler):
    """A sampler that keeps the spans of some names."""

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


def test_tracing_refuses_an_object_that_is_no_communicator():
    with pytest.raises(ArgumentTypeError, match="comm is None, wanted a Communicator"):
        trace_ops(None)
    with pytest.raises(ArgumentTypeError, match="service is None, wanted a Service"):
        trace_plans(None)


# -------------------------------------------------------------------------------------------------------------- plans


class Rank:
    """A rank of a service with a provider of its own, as in a process of its own."""

    def __init__(self, comm, recover=None):
        self.service = Service(comm, recover)
        self.exporter = InMemorySpanExporter()
        self.provider = provider_of(self.exporter)
        self.tracing = trace_plans(self.service, self.provider)

    async def execute(self, plan):
        await self.service.comm.all_reduce(torch.ones(2))
        if plan == self.service.comm.rank:
            raise KeyError(plan)
        await self.service.comm.barrier()

    async def serve(self, body):
        async with self.service as service:
            if service.comm.rank:
                await service.work(self.execute)
            else:
                async with service.drive(self.execute) as driver:
                    await body(driver, self)

    def spans(self):
        """Return the spans that have ended here, in order, without those of the service's own messages."""
        return [span for span in self.exporter.get_finished_spans() if "object" not in span.name]


async def serve(world, body, recover=None):
    """Serve on all ranks of a world with ``body(driver, rank 0)``, and return them."""
    members = [Rank(comm, recover) for comm in world]
    await ranks(members, lambda member: member.serve(body))
    return members


def test_spans_of_all_ranks_are_children_of_the_request():
    async def body(driver, first):
        async def request(name):
            with first.provider.get_tracer("server").start_as_current_span(name):
                await driver.run("plan")

        await together(lambda: request("one"), lambda: request("two"))

    async def main():
        async with local_world(3) as world:
            first, *workers = await serve(world, body)
        requests = [span for span in first.spans() if span.name in ("one", "two")]
        assert len(requests) == 2
        for request in requests:
            numbers = set()
            for member in (first, *workers):
                [plan] = [s for s in member.spans() if s.parent and s.parent.span_id == request.context.span_id]
                assert plan.name == "aiocomms.plan"
                ops = [s for s in member.spans() if s.parent and s.parent.span_id == plan.context.span_id]
                assert [op.name for op in ops] == ["all_reduce", "barrier"]
                assert {span.context.trace_id for span in (plan, *ops)} == {request.context.trace_id}
                assert plan.attributes["aiocomms.rank"] == member.service.comm.rank
                assert plan.attributes["aiocomms.plan.waited"] >= 0
                numbers.add(plan.attributes["aiocomms.plan.number"])
            assert len(numbers) == 1

    run_on("asyncio", main)


def test_plan_of_no_request_has_no_span_and_carries_nothing(monkeypatch):
    told = []
    tell = Worker._tell

    def noted(worker, ranks, *message):
        told.append(len(message))
        tell(worker, ranks, *message)

    monkeypatch.setattr(Worker, "_tell", noted)

    async def body(driver, first):
        await driver.run("plan")
        tracer = provider_of(first.exporter, ALWAYS_OFF).get_tracer("server")
        with tracer.start_as_current_span("not sampled"):
            await driver.run("plan")
        assert 4 not in told[:-1]
        assert told.count(3) == 2
        with first.provider.get_tracer("server").start_as_current_span("sampled"):
            await driver.run("plan")

    async def main():
        async with local_world(1) as world:
            [first] = await serve(world, body)
        assert [span.name for span in first.spans()] == ["all_reduce", "barrier", "aiocomms.plan", "sampled"]
        assert sorted(told) == [0, 3, 3, 4]

    run_on("asyncio", main)


def test_plan_span_records_the_error_of_its_rank():
    async def body(driver, first):
        with first.provider.get_tracer("server").start_as_current_span("request"), pytest.raises(WorkerError):
            await driver.run(1)

    async def main():
        async with local_world(2) as world:
            first, worker = await serve(world, body)
        [failed] = [span for span in worker.spans() if span.name == "aiocomms.plan"]
        assert failed.status.status_code is StatusCode.ERROR
        assert [event.name for event in failed.events] == ["exception"]
        assert "aiocomms.plan" in [span.name for span in first.spans()]

    run_on("asyncio", main)


def test_tracing_of_plans_goes_on_after_a_recovery_and_ends_by_remove():
    async def recover(lost):
        return await lost.reconfigure(ranks=[0, 1])

    async def body(driver, first):
        tracer = first.provider.get_tracer("server")
        first.service.current.abort("enough")
        await driver.ready()
        with tracer.start_as_current_span("after"):
            await driver.run("plan")
        first.tracing.remove()
        first.tracing.remove()
        with tracer.start_as_current_span("removed"):
            await driver.run("plan")

    async def main():
        async with local_world(2) as world:
            first, worker = await serve(world, body, recover)
        assert [s.name for s in first.spans()] == ["all_reduce", "barrier", "aiocomms.plan", "after", "removed"]
        assert [s.name for s in worker.spans()] == ["all_reduce", "barrier", "aiocomms.plan"]
        assert {s.attributes["aiocomms.comm"] for s in worker.spans()} == {"world@2"}

    run_on("asyncio", main)
