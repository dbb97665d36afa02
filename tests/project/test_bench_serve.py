"""`make bench-serve`: the arithmetic of its client and report, a streaming server, and a short run of all of it."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from generator import random_model
from processes import SUITE_HANGS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from supervised import EXAMPLES

from benchmarks.serve import report
from benchmarks.serve.client import Record, arrivals, ask, connect, load, quantile, saturate, summary
from benchmarks.serve.kills import deaths, verdicts
from benchmarks.serve.phases import around, parse_wrk
from benchmarks.serve.servers import Look, late, parse
from benchmarks.serve.targets import Stream

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]


def record(due: float, ended: float, status: int = 200, right: bool | None = True, *tokens: float) -> Record:
    """One that was sent when it was due."""
    return Record(due, due, ended, status, right, list(tokens))


def test_arrivals_are_a_reproducible_poisson_process() -> None:
    moments = list(arrivals(50.0, 200.0, seed=3))
    assert moments == sorted(moments) == list(arrivals(50.0, 200.0, seed=3))
    assert moments[-1] < 200
    assert len(moments) == pytest.approx(10_000, abs=400)  # 4 standard deviations
    gaps = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([7.0], 0.99) == 7
    assert quantile([], 0.5) is None


def test_summary_counts_each_request_once_and_times_the_good_ones() -> None:
    records = [
        record(10.0, 10.1), record(10.2, 10.5), record(10.4, 13.0), record(11.0, 11.1, 503, None),
        record(11.2, 11.3, 0, None), record(11.4, 11.5, 200, False), record(11.6, 11.7, 500, None),
    ]  # fmt: skip
    found = summary(records, 2.0)
    counts = ("sent", "good", "refused", "broken", "wrong", "other")
    assert [found[kind] for kind in counts] == [7, 3, 1, 1, 1, 1]
    assert found["per_s"] == 1.0  # the third came after the end
    assert found["p50"] == pytest.approx(300)
    assert found["p99"] == pytest.approx(2600)
    assert found["tokens_per_s"] is found["ttft_p50"] is found["gap_p99"] is None


def test_summary_of_streams_times_their_tokens() -> None:
    streams = [record(0.0, 0.5, 200, True, 0.2, 0.3, 0.5), record(1.0, 2.6, 200, True, 1.4, 1.5, 2.6)]
    found = summary(streams, 2.0)
    assert found["tokens_per_s"] == 2.5  # the last one came after the end
    assert found["ttft_p50"] == pytest.approx(200)
    assert found["ttft_p99"] == pytest.approx(400)
    assert found["gap_p50"] == pytest.approx(100)
    assert found["gap_p99"] == pytest.approx(1100)


def test_summary_of_no_requests_has_no_quantiles() -> None:
    assert summary([], 1.0)["p99"] is None


def test_recovery_ends_with_the_first_answer_to_a_later_request() -> None:
    records = [
        record(0.0, 0.9), record(0.5, 1.25, 503, None), record(0.9, 1.6), record(1.1, 1.3, 0, None),
        record(1.2, 2.5), record(1.4, 2.25),
    ]  # fmt: skip
    assert around(records, 1.0) == {"again": 1.25, "failed": 2, "failed_after": pytest.approx(0.25)}
    assert around(records[:2], 1.0)["again"] is None


def test_each_kill_is_judged_by_requests_before_the_next() -> None:
    records = [record(1.1, 1.3, 503, None), record(1.2, 2.0), record(3.5, 5.5, 503, None), record(4.0, 9.0)]
    found = deaths(records, [1.0, 3.0, 10.0])
    assert (found["kills"], found["never_again"]) == (3, 1)
    assert (found["again_p50"], found["again_p99"]) == (1.0, 6.0)
    assert found["refused_after"] == pytest.approx(2.0)
    row = {"wrong": 0, "broken": 0, "other": 0, "memory": [9, 10, 10, 10], **found}
    assert [verdict.reached for verdict in verdicts(row)] == [False, False, False, True]
    row |= {"never_again": 0, "again_p99": 3.0, "refused_after": 1.0}
    assert [verdict.reached for verdict in verdicts(row)] == [True] * 4
    assert not verdicts(row | {"wrong": 1})[0].reached
    assert not verdicts(row | {"memory": [9, 10, 10, 11]})[3].reached


def look(**processes: tuple[int, ...]) -> Look:
    """A look at histograms whose buckets have counted so many."""
    bounds = ("0.001", "0.002", "0.004", "+Inf")
    buckets = (
        f'late_bucket{{le="{bound}",process="{process}"}} {count}'
        for process, counts in processes.items()
        for bound, count in zip(bounds, counts, strict=True)
    )
    return Look(0.0, parse("\n".join(["# TYPE late histogram", *buckets, ""])))


def test_lateness_is_that_of_the_worst_process_between_two_looks() -> None:
    quiet, busy = (0, 0, 0, 0), (5, 5, 5, 5)
    before, after = look(a=quiet, b=busy), look(a=(100, 100, 100, 100), b=(55, 95, 105, 105))
    assert late(before, after, "late", 0.5) == pytest.approx(1.0)
    assert late(before, after, "late", 0.7) == pytest.approx(1.5)
    assert late(before, after, "late", 0.95) == pytest.approx(3.0)
    assert late(before, before, "late") is None
    assert late(before, after, "other") is None


WRK = """Running 4s test @ http://127.0.0.1:8000
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   125.67ms   49.99ms 345.09ms   71.54%
    Req/Sec   127.21     45.14   232.00     65.79%
  Latency Distribution
     50%  850.00us
     75%  152.65ms
     90%  193.42ms
     99%    1.26s
  492 requests in 4.00s, 4.14MB read
  Socket errors: connect 1, read 2, write 0, timeout 4
  Non-2xx or 3xx responses: 12
Requests/sec:    122.93
Transfer/sec:      1.03MB
"""


def test_parse_wrk_reads_its_report_and_refuses_other_text() -> None:
    assert parse_wrk(WRK) == {"per_s": 122.93, "p50": 0.85, "p99": 1260.0, "errors": 19}
    with pytest.raises(ValueError, match="no report"):
        parse_wrk("unable to connect")


class Tokens:
    """A server that streams tokens when it is told to, and knows when a client has left."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.given, self.left = asyncio.Event(), asyncio.Event()

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        if asked["prompt"] == "no":
            return JSONResponse({"error": "It is full."}, 503)
        return StreamingResponse(self._tokens(asked), media_type="text/event-stream")

    async def _tokens(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        try:
            for number in range(asked["max_tokens"]):
                await self.go.acquire()
                yield f"data: {json.dumps({'text': str(number)})}\n\n"
                self.given.set()
            if asked["prompt"] != "breaks":
                yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[Tokens, str]]:
    """Run such a server here."""
    tokens = Tokens()
    app = Starlette(routes=[Route("/generate", tokens.generate, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield tokens, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.mark.search
@pytest.mark.real
def test_load_reads_each_stream_to_its_end() -> None:
    async def main() -> None:
        async with streaming() as (tokens, url):
            for _ in range(100):
                tokens.go.release()
            records = await load(url, Stream(["a", "b"], 3), rate=100.0, seconds=0.1, seed=4)
            assert records
            assert len(records) == len(list(arrivals(100.0, 0.1, 4)))
            for each in records:
                assert (each.status, each.right, len(each.tokens)) == (200, True, 3)
                assert each.due <= each.sent <= each.tokens[0] <= each.tokens[1] <= each.tokens[2] <= each.ended

    asyncio.run(main())


@pytest.mark.search
@pytest.mark.real
def test_each_token_of_a_stream_has_its_arrival_time() -> None:
    async def main() -> None:
        async with streaming() as (tokens, url), connect(url) as http:
            asking = asyncio.create_task(ask(http, Stream(["a"], 2), 0, time.perf_counter()))
            tokens.go.release()
            await tokens.given.wait()
            before = time.perf_counter()
            tokens.go.release()
            found = await asking
            assert found.tokens[1] > before

    asyncio.run(main())


@pytest.mark.search
@pytest.mark.real
def test_client_with_leave_after_leaves_amid_its_stream() -> None:
    async def main() -> None:
        async with streaming() as (tokens, url), connect(url) as http:
            tokens.go.release()
            tokens.go.release()
            found = await ask(http, Stream(["a"], 4, leave_after=2), 0, time.perf_counter())
            assert (found.status, len(found.tokens), found.right) == (200, 2, None)
            await tokens.left.wait()

    asyncio.run(main())


@pytest.mark.search
@pytest.mark.real
def test_refusals_and_broken_streams_count_as_no_answers() -> None:
    async def main() -> None:
        async with streaming() as (tokens, url), connect(url) as http:
            tokens.go.release()
            assert (await ask(http, Stream(["no"], 1), 0, time.perf_counter())).status == 503
            assert (await ask(http, Stream(["breaks"], 1), 0, time.perf_counter())).status == 0
        assert {each.status for each in await saturate(url, Stream(["a"], 1), 2, 0.5)} == {0}  # no server listens

    asyncio.run(main())


def test_verdict_fails_unless_throughput_or_latency_is_better() -> None:
    def row(load: str, by: str, per_s: float, p99: float) -> dict[str, Any]:
        return {"load": load, "by": by, "per_s": per_s, "p99": p99, "late_p99": 1.0, "wrong": 0, "other": 0}

    def layout(per_s: float, p99: float, after: int = 3) -> dict[str, Any]:
        rows = [row(load, by, *figures) for load in ("no pause", "60 %")
                for by, figures in (("aiocomms", (per_s, p99)), ("gloo twin", (100.0, 50.0)))]  # fmt: skip
        return {"pp": 2, "rows": rows, "leaving": {"aiocomms": {"after": after}}, "killed": {"aiocomms": {"wrong": 0}}}

    def reached(*figures: Any) -> list[bool]:
        return [verdict.reached for verdict in report.verdicts(layout(*figures))]

    assert reached(130.0, 50.0) == reached(100.0, 30.0) == [True] * 4
    assert reached(120.0, 40.0) == [False, True, True, True]
    assert reached(130.0, 50.0, 4) == [True, False, True, True]


def test_stream_verdict_fails_unless_token_rate_or_gap_is_better() -> None:
    def row(load: str, by: str, tokens: float, gap: float) -> dict[str, Any]:
        shared = {"late_p99": 1.0, "wrong": 0, "other": 0}
        return {"load": load, "by": by, "tokens_per_s": tokens, "gap_p99": gap, **shared}

    def reached(tokens: float, gap: float, after: float = 0.5) -> list[bool]:
        rows = [row(load, by, *figures) for load in ("no pause", "60 %")
                for by, figures in (("aiocomms", (tokens, gap)), ("gloo twin", (100.0, 10.0)))]  # fmt: skip
        layout = {"rows": rows, "leaving": {"aiocomms": {"after": after}}, "killed": {"aiocomms": {"wrong": 0}}}
        return [verdict.reached for verdict in report.stream_verdicts(layout)]

    assert reached(150.0, 10.0) == reached(100.0, 6.0) == [True] * 4
    assert reached(149.0, 6.1) == [False, True, True, True]
    assert reached(150.0, 10.0, 1.5) == [True, False, True, True]


@pytest.mark.search
@pytest.mark.real
def test_answer_that_differs_from_the_unsplit_model_is_wrong() -> None:
    async def main() -> None:
        async with streaming() as (tokens, url), connect(url) as http:
            for wanted in ("01", "02"):
                for _ in wanted:
                    tokens.go.release()
                found = await ask(http, Stream(["a"], 2, [wanted]), 0, time.perf_counter())
                assert found.right == (wanted == "01")

    asyncio.run(main())


@pytest.mark.search
@pytest.mark.real
@pytest.mark.timeout(SUITE_HANGS)
def test_serve_benchmark_measures_both_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are the unsplit model's, and after a kill tokens come again."""
    model = tmp_path / "model.safetensors"
    monkeypatch.syspath_prepend(str(EXAMPLES))
    random_model(importlib.import_module("text_generator.model")).save(model)
    command = [sys.executable, "-m", "benchmarks.serve", "--seconds=1", "--layouts", "--streams", "2x1"]
    run = subprocess.run(
        [*command, f"--model={model}", f"--out={tmp_path}"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    [layout] = json.loads((tmp_path / "serve.json").read_text())["streams"]
    for row in layout["rows"]:
        assert row["good"] == row["sent"], row
        assert row["load"] != "no pause" or row["tokens_per_s"] > 0
    for by in report.ORDER:
        assert layout["leaving"][by]["wrong"] == layout["killed"][by]["wrong"] == 0
        assert layout["killed"][by]["again"] > 0
    assert layout["killed"]["aiocomms"]["broken"] == 0
    assert "a token again after" in run.stdout


@pytest.mark.search
@pytest.mark.real
@pytest.mark.timeout(SUITE_HANGS)
def test_serve_benchmark_measures_both_servers(tmp_path: Path) -> None:
    """All answers are right, and what a kill breaks is served again by ours."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.serve",
        "--seconds=1",
        "--layouts",
        "2x1",
        "--streams",
        f"--out={tmp_path}",
    ]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    [layout] = json.loads((tmp_path / "serve.json").read_text())["layouts"]
    for row in layout["rows"]:
        assert row["good"] == row["sent"], row
        if row["load"] == "no pause":
            assert row["sent"]
            assert row["cpu_per_1000"] > 0  # a single request may cost less than the kernel counts, a hundredth of 1 s
        assert not row["sent"] or row["late_p99"] > 0
    for by in report.ORDER:
        assert all(value > 0 for part, value in layout["split"][by].items() if part != "HTTP")
        assert layout["killed"][by]["wrong"] == 0
    assert layout["killed"]["aiocomms"]["broken"] == 0
    for name in ("serve.md", "serve.png", "serve-load.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert "one client, ms" in run.stdout
