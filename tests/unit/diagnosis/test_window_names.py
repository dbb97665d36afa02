"""Windows and regions in reports: which one an operation is on, and the bytes that they hold open."""

from __future__ import annotations

import json
from functools import partial

import prometheus_client
import pytest
import torch
from concurrency import run_on, together, turns
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from aiocomms import open_endpoint
from aiocomms.cli import main as command
from aiocomms.diagnosis.statistics import WindowStatistics
from aiocomms.errors import CommTimeoutError
from aiocomms.integrations import otel, profiler, prometheus
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


async def opened(world, *sizes):
    return await together(*(partial(comm.new_window, torch.zeros(n)) for comm, n in zip(world, sizes, strict=True)))


def on_loop(main):
    run_on("asyncio", main)


def recorded(comm, name):
    """Return the text and the state of each recorded op of a name."""
    return [(str(item), item.state) for item in comm._core.recorder.snapshot("").items() if item.name == name]


def test_ops_say_which_window_they_are_on(tmp_path, capsys):
    async def main():
        async with local_world(2) as world:
            first, second = [await opened(world, 4, 2) for _ in range(2)]
            waits = [window.wait_signal(1) for window in (first[0], second[0])]
            words = [f"wait_signal(src=1) of window {number}" for number in (1, 2)]
            assert recorded(world[0], "wait_signal") == [(each, "pending") for each in words]
            await first[1].signal(0)
            await waits[0]
            assert recorded(world[0], "wait_signal") == [(words[0], "done"), (words[1], "pending")]
            for comm in world:
                comm.dump(tmp_path)
            assert command(["trace", str(tmp_path), "--name", "window 2"]) == 1
            said = capsys.readouterr().out
            assert words[1] in said
            assert "window 1" not in said
            await second[1].signal(0)
            await waits[1]
            await together(*(window.aclose for window in (*first, *second)))

    on_loop(main)


def test_late_wait_names_its_window():
    async def main():
        async with local_world(2) as world:
            windows = await opened(world, 1, 1)
            with pytest.raises(CommTimeoutError, match=r"nothing matched wait_signal\(src=1\) of window 1 before"):
                await windows[0].wait_signal(1, timeout=0.01)
            await together(*(window.aclose for window in windows))

    on_loop(main)


def test_statistics_and_prometheus_have_the_bytes_of_open_windows():
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(2) as world:
            prometheus.instrument(world[1], registry)
            first, second = await opened(world, 4, 2), await opened(world, 0, 8)
            assert [window.name for window in second] == ["window 2"] * 2
            one, two = (comm.statistics().windows for comm in world)
            assert one == [WindowStatistics("window 1", 16, 8), WindowStatistics("window 2", 0, 32)]
            assert two == [WindowStatistics("window 1", 8, 16), WindowStatistics("window 2", 32, 0)]
            text = prometheus_client.generate_latest(registry).decode()
            seen = {f.name: f.samples[0].value for f in text_string_to_metric_families(text) if f.samples}
            assert [seen[f"aiocomms_window{name}"] for name in ("_bytes", "_peer_bytes")] == [40, 16]
            await together(*(window.aclose for window in first))
            assert world[0].statistics().windows == one[1:]
            await together(*(window.aclose for window in second))
            assert world[0].statistics().windows == []

    on_loop(main)


def test_profiler_and_spans_name_the_window():
    async def main():
        spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(spans))
        async with local_world(1) as world:
            [window] = await opened(world, 4)
            recording = profiler.record_ops(world[0])
            otel.trace_ops(world[0], provider)
            request = provider.get_tracer("server").start_as_current_span("request")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found, request:
                await window.put(torch.ones(2), 0)
            recording.remove()
            assert "aiocomms:put of window 1" in {event.name for event in found.events()}
            put, _ = spans.get_finished_spans()
            assert (put.name, put.attributes["aiocomms.window"]) == ("put", "window 1")
            await window.aclose()

    on_loop(main)


def test_regions_and_endpoints_are_called_by_their_names(tmp_path):
    async def main():
        async with open_endpoint("local", name="decode") as here, open_endpoint("local", name="prefill") as there:
            peer = await here.connect(there.address)
            back = await there.accept()
            assert (peer.name.partition("@")[0], back.name.partition("@")[0]) == ("prefill", "decode")
            assert peer._comm.name == back._comm.name == f"endpoints {back.name}-{peer.name}"
            with pytest.raises(CommTimeoutError, match=r"decode, peer prefill@.*nothing matched recv"):
                await peer.recv(torch.zeros(1), 7, timeout=0.01)
            there.register(torch.zeros(3))
            region = there.register(torch.zeros(2))
            async with await peer.attach(region.descriptor):
                assert peer.statistics().windows == [WindowStatistics("region 2", 0, 8)]
                while not back.statistics().windows:
                    await turns()
                assert back.statistics().windows == [WindowStatistics("region 2", 8, 0)]
                await peer.put(torch.ones(2), region.descriptor)
                work = back.wait_signal()
                assert recorded(back._comm, "wait_signal") == [(f"wait_signal(src={peer._comm.rank})", "pending")]
                await peer.signal()
                await work
            registry = prometheus_client.CollectorRegistry()
            prometheus.instrument(peer, registry)
            shown = f'aiocomms_pending{{comm="endpoints {back.name}-{peer.name}",rank="{peer._comm.rank}"}} 0.0'
            assert shown in prometheus_client.generate_latest(registry).decode()
            path = peer._comm.dump(tmp_path)
            items = [json.loads(line) for line in path.read_text().splitlines()[1:]]
            assert {item["of"] for item in items if item["name"] == "close_window"} == {"region 2"}

    run_on("simulated", main)
