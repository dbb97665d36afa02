"""Streams in reports: their names, their counts of items, and the time that tasks are blocked in them."""

from __future__ import annotations

import os

import anyio
import msgspec
import prometheus_client
import pytest
import torch
from concurrency import run_on, together, turns
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from aiocomms.cli import main as command
from aiocomms.cli.top import looking
from aiocomms.cli.top.drawing import drawn
from aiocomms.communicator.portal.views import BlockingStream
from aiocomms.diagnosis.live import Sight
from aiocomms.diagnosis.stream_counts import Blocked, StreamStatistics
from aiocomms.integrations import otel, profiler, prometheus
from aiocomms.serving import Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


async def pair(one, two, *given, **options):
    return await together(lambda: one.open_stream(1, *given, **options), lambda: two.open_stream(0, *given, **options))


def names(comm):
    """Return owner, state and idleness of the recorded ops that have an owner."""
    return {(item.of, item.state, item.idle) for item in comm._core.recorder.snapshot("").items() if item.of}


def on_loop(main):
    run_on("asyncio", main)


@pytest.mark.parametrize("name", ["tokens", ""])
def test_messages_of_a_stream_are_recorded_with_its_name(name):
    async def main():
        async with local_world(2) as (one, two):
            first = await pair(one, two, name="another")
            there, here = await pair(one, two, name=name)
            await there.send(torch.ones(3))
            await here.receive()
            await turns()
            called = f"stream {name!r}" if name else "stream 2"
            for comm in (one, two):
                found = {(of, state) for of, state, _ in names(comm) if of != "a stream"}
                each = {(of, state) for of in ("stream 'another'", called) for state in ("done", "pending")}
                assert found == each | {(f"{of}, for room", "pending") for of, _ in each}
                # The greeting of a stream without a name does not say which stream it is of.
                assert any(of == "a stream" for of, *_ in names(comm)) == (not name)
            await together(*(stream.aclose for stream in (*first, there, here)))
            # The names outlive the streams, as long as the recorder has their messages.
            assert {of.removesuffix(", for room") for of, *_ in names(one)} - {"a stream"} == {
                "stream 'another'",
                called,
            }
            assert one.statistics().streams == []

    on_loop(main)


def test_own_receives_of_a_stream_are_not_pending_ops_of_the_program():
    async def main():
        async with local_world(2) as (one, two):
            there, _ = await pair(one, two, name="idle")
            now = one.statistics()
            assert (now.pending, now.pending_bytes, now.oldest, now.standing) == (0, 0, None, 2)
            mine = one.recv(torch.ones(4), 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(there.receive)
                await turns()
                now = one.statistics()
                assert (now.pending, now.standing) == (2, 1)  # a task waits for the item
                tasks.cancel_scope.cancel()
            await two.send(torch.ones(4), 0)
            await mine

    on_loop(main)


def test_greeting_that_nobody_has_taken_is_no_pending_op_of_the_program():
    async def main():
        async with local_world(2) as (one, _), anyio.create_task_group() as tasks:
            tasks.start_soon(one.open_stream, 1, 8, "early")
            await turns()
            items = one._core.recorder.snapshot("").pending
            assert {(item.name, item.of, item.idle) for item in items} == {
                ("send", "stream 'early'", True),  # no task awaits it
                ("recv", "stream 'early'", False),
            }
            assert (one.statistics().pending, one.statistics().standing) == (1, 1)
            tasks.cancel_scope.cancel()

    on_loop(main)


def test_statistics_count_what_an_end_carries_and_holds():
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two, 4, "kv")
            for _ in range(3):
                await there.send(torch.ones(5))
            await here.receive()
            while here.statistics().queued < 2:
                await turns()
            sent, got = there.statistics(), here.statistics()
            assert (sent.name, sent.number, sent.peer, sent.sent, sent.received, sent.queued) == ("kv", 1, 1, 3, 0, 0)
            assert (got.peer, got.sent, got.received, got.queued, got.queued_bytes, got.capacity) == (0, 0, 1, 2, 40, 4)
            assert [each.number for each in two.statistics().streams] == [1]
            assert BlockingStream(one.portal()._door, there).statistics().sent == 3
            assert msgspec.json.decode(msgspec.json.encode(two.statistics()))["streams"][0]["queued"] == 2
            await here.aclose()
            assert here.statistics().queued == 0
            assert here.statistics().seconds == here.statistics().seconds > 0  # The time stands still after the close.
            assert two.statistics().streams == []

    on_loop(main)


def test_bubble_is_the_share_of_time_in_which_a_stage_waits():
    """The first stage takes 1 s of virtual time for an item, the second one 3 s, the third one none."""

    async def main():
        async with local_world(3) as world:
            ends = {}

            async def open_all(comm):
                if comm.rank:
                    ends[comm.rank, "in"] = await comm.open_stream(comm.rank - 1, 1)
                if comm.rank < 2:
                    ends[comm.rank, "out"] = await comm.open_stream(comm.rank + 1, 1)

            async def first():
                for _ in range(5):
                    await anyio.sleep(1)
                    await ends[0, "out"].send(torch.ones(1))
                await ends[0, "out"].send_eof()

            async def second():
                async for item in ends[1, "in"]:
                    await anyio.sleep(3)
                    await ends[1, "out"].send(item)
                await ends[1, "out"].send_eof()

            async def third():
                return [item async for item in ends[2, "in"]]

            await together(*(lambda comm=comm: open_all(comm) for comm in world))
            *_, got = await together(first, second, third)
            assert len(got) == 5
            now = {place: end.statistics() for place, end in ends.items()}
            # The second stage waits 1 s for its first item, and works for 15 s.
            assert now[1, "in"].bubble(now[1, "out"]) == pytest.approx(1 / 16, abs=0.01)
            assert now[1, "in"].receive_blocked == pytest.approx(1, abs=0.1)
            # The third item has room at 4 s instead of 3 s, and each of the last two 3 s after the one before.
            assert now[0, "out"].send_blocked == pytest.approx(5, abs=0.1)
            assert now[2, "in"].receive_blocked == pytest.approx(16, abs=0.1)
            assert now[2, "in"].bubble(now[2, "in"]) == pytest.approx(1, abs=0.01)

    run_on("simulated", main)


def test_bubble_of_streams_that_are_not_open_is_zero():
    shut = StreamStatistics("", 1, 0, 0.0, 0, 0, 0, 0, 8, 0.0, 0.0)
    assert shut.bubble(shut) == 0.0
    busy = msgspec.structs.replace(shut, seconds=4.0, receive_blocked=1.0, send_blocked=2.0)
    assert busy.bubble(busy) == 0.75
    assert busy.bubble(msgspec.structs.replace(busy, send_blocked=8.0)) == 1.0  # Several tasks may wait at once.


def test_blocked_seconds_are_those_in_which_any_task_is_suspended():
    async def main():
        blocked = Blocked()

        async def suspended(begins, lasts):
            await anyio.sleep(begins)
            blocked.begin()
            await anyio.sleep(lasts)
            blocked.end()

        async def look():
            await anyio.sleep(2.5)
            return blocked.seconds(anyio.current_time())

        *_, halfway = await together(lambda: suspended(1, 2), lambda: suspended(2, 2), lambda: suspended(5, 1), look)
        assert halfway == pytest.approx(1.5, abs=0.01)
        assert blocked.seconds(anyio.current_time()) == pytest.approx(4, abs=0.01)

    run_on("simulated", main)


def scrape(registry):
    text = prometheus_client.generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return {(each.name, *sorted(each.labels.items())): each.value for family in families for each in family.samples}


def test_prometheus_sums_streams_of_one_name_and_keeps_their_messages_apart():
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(2) as (one, two):
            prometheus.instrument(two, registry)
            for there, here in [await pair(one, two, name="kv"), await pair(one, two, name="kv")]:
                await there.send(torch.ones(2))
                await here.receive()
            await together(lambda: one.send(torch.ones(2), 1), lambda: two.recv(torch.ones(2), 0))
            await turns()
            seen = scrape(registry)
            labels = {"comm": "world", "rank": "1", "stream": "kv", "peer": "0"}
            assert seen["aiocomms_stream_received_total", *sorted(labels.items())] == 2
            assert seen["aiocomms_stream_queued", *sorted(labels.items())] == 0
            counted = [(dict(key[1:]), value) for key, value in seen.items() if key[0] == "aiocomms_op_seconds_count"]
            counts = {labels["op"]: value for labels, value in counted}
            assert counts["recv"] == 1  # the program's own
            assert counts["stream_recv"] > 2
            assert seen["aiocomms_pending", ("comm", "world"), ("rank", "1")] == 0

    on_loop(main)


def test_prometheus_keeps_messages_of_a_service_apart():
    async def main():
        registry = prometheus_client.CollectorRegistry()

        async def execute(plan):
            return plan

        async def serve(comm):
            async with Service(comm) as service:
                prometheus.instrument(service, registry)
                if comm.rank:
                    return await service.work(execute)
                async with service.drive(execute) as driver:
                    await driver.run("plan")
                    return scrape(registry)

        async with local_world(2) as world:
            seen, _ = await together(*(lambda comm=comm: serve(comm) for comm in world))
        ops = {dict(key[1:])["op"] for key in seen if key[0] == "aiocomms_op_seconds_count"}
        assert ops == {"service_send_object", "service_recv_object"}

    on_loop(main)


def test_profiler_names_messages_of_streams_apart():
    async def main():
        async with local_world(2) as (one, two):
            there, here = await pair(one, two)
            recording = profiler.record_ops(one)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
                await there.send(torch.ones(2))
                await here.receive()
            recording.remove()
            ranges = {event.name for event in found.events() if event.name.startswith("aiocomms:")}
            assert "aiocomms:stream_send" in ranges
            assert not ranges & {"aiocomms:send", "aiocomms:recv"}

    on_loop(main)


def test_no_span_is_made_of_a_receive_that_stands_ready():
    async def main():
        spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(spans))
        async with local_world(2) as (one, two):
            for comm in (one, two):
                otel.trace_ops(comm, provider)
            with provider.get_tracer("server").start_as_current_span("request"):
                there, here = await pair(one, two)
                await there.send(torch.ones(2))
                await here.receive()
                await together(lambda: one.send(torch.ones(2), 1), lambda: two.recv(torch.ones(2), 0))
                await turns()
        found = [span.name for span in spans.get_finished_spans()]
        assert set(found) == {"stream_send", "send", "recv", "request"}
        assert found.count("recv") == 1  # the program's own

    on_loop(main)


def sights(world):
    """Return the sights of all ranks, as `aiocomms top` decodes them."""
    encoded = [msgspec.json.encode(comm._sight()) for comm in world]
    return [looking._checked(msgspec.json.decode(each, type=Sight)) for each in encoded]


@pytest.mark.parametrize(("name", "shown"), [("*", {"fast", "slow"}), ("sl*", {"slow"}), ("stream 'fast'", {"fast"})])
def test_top_shows_streams_by_name(name, shown, monkeypatch):
    async def main():
        async with local_world(2) as world:
            streams = [await pair(*world, 2, each) for each in ("fast", "slow")]
            monkeypatch.setattr(looking, "_listeners", dict)
            monkeypatch.setattr(looking, "_ask", lambda _: [(os.getpid(), sights(world))])
            await streams[1][0].send(torch.ones(1))
            while not streams[1][1].statistics().queued:
                await turns()
            console = Console(width=200)
            with console.capture() as captured:
                console.print(drawn(looking.Top(None, name).look()))
            lines = captured.get().splitlines()
            rows = [line.split() for line in lines if "of 2" in line]
            assert {row[2].strip("'") for row in rows} == shown
            if "slow" in shown:
                assert any("1 of 2" in line and "4 B" in line for line in lines)
            waits = {word for word in ("fast", "slow") if f"recv(src=1) of stream '{word}'" in captured.get()}
            assert waits == shown

    on_loop(main)


def test_trace_is_filtered_by_the_name_of_a_stream(tmp_path, capsys):
    async def main():
        async with local_world(2) as (one, two):
            _, here = await pair(one, two, name="forth")
            mine = two.recv(torch.ones(1), 0, tag=5)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(here.receive, name="stage")
                while one.statistics().streams[0].seconds == 0 or two.statistics().standing == 2:
                    await turns()
                for comm in (one, two):
                    comm.dump(tmp_path)
                tasks.cancel_scope.cancel()
            await mine.cancel()

    on_loop(main)

    def shown(name):
        """Return the exit status, the output, and the names of the drawn ops."""
        output = tmp_path / "trace.json"
        status = command(["trace", str(tmp_path), "--name", name, "--output", str(output)])
        events = msgspec.json.decode(output.read_bytes())["traceEvents"]
        return status, capsys.readouterr().out, [event["name"] for event in events if event["ph"] == "X"]

    status, words, ops = shown("for*")
    assert (status, {"of stream 'forth'" in op for op in ops}) == (1, {True})
    assert "recv(src=0) of stream 'forth'" in words
    assert {op.partition("(")[0] for op in shown("recv")[2]} == {"recv"}
    assert "recv(src=0, tag=5) (pending)" in shown("*")[2]
    assert shown("none such")[0::2] == (0, [])
