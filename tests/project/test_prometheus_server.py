"""A real Prometheus scrapes a real process, and is asked what the dashboard asks; skipped where there is none.

A worker's own port is asked without one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE

PROMETHEUS = shutil.which("prometheus")
DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "dashboard.json"

pytestmark = pytest.mark.real
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="no Prometheus on this machine: apt-get install prometheus, say"
)

PROGRAM = """
import asyncio, sys
import prometheus_client, torch
from aiocomms.errors import CommError
from aiocomms.integrations.prometheus import instrument
from aiocomms.serving import Service
from aiocomms.testing import local_world

async def divide(plan):
    return 1 // plan

async def reduce(comms, times):
    for _ in range(times):
        works = [comm.all_reduce(torch.ones(256)) for comm in comms]
        for work in works:
            await work

async def main():
    registry = prometheus_client.CollectorRegistry()
    server, _ = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    async with (
        local_world(2, "ucx", name="shown") as comms, local_world(2, name="lost") as (left, right),
        local_world(1, name="served") as (comm,), Service(comm) as service, service.drive(divide) as driver,
    ):
        for each in (*comms, left, service):
            instrument(each, registry)
        await driver.run(1)
        try:
            await driver.run(0)
        except ZeroDivisionError:
            pass
        await reduce(comms, 5)
        late = comms[0].recv(torch.ones(2), 1)
        failing = left.recv(torch.ones(2), 1)
        print(server.server_port, flush=True)
        while (line := await asyncio.to_thread(sys.stdin.readline)) != "end\\n":
            if line == "more\\n":
                await reduce(comms, 7)
            else:
                right.abort("enough")
                try:
                    await failing
                except CommError:
                    pass
            print("done", flush=True)
        await late.cancel()
    server.shutdown()

asyncio.run(main())
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def ask(program: subprocess.Popen[str], tmp_path: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Yield a query to a Prometheus that scrapes the program."""
    port = int(program.stdout.readline())
    job = {"job_name": "aiocomms", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    config = {"global": {"scrape_interval": "100ms", "scrape_timeout": "100ms"}, "scrape_configs": [job]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML, too
    command = [
        PROMETHEUS, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = ""
            while "Server is ready to receive web requests" not in said:
                line = server.stderr.readline()
                assert line, f"it has ended: {said}"
                said += line
            [address] = re.findall(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', said)
            url = f"http://{address}/api/v1/query?"

            def query(text: str) -> list[dict[str, Any]]:
                with urllib.request.urlopen(url + urllib.parse.urlencode({"query": text})) as answer:
                    said = json.load(answer)
                assert said["status"] == "success", said
                return said["data"]["result"]

            yield query
        finally:
            server.kill()


def until(condition: Callable[[], Any]) -> Any:
    """Wait until it is true, and return what it is."""
    ends = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < ends
        time.sleep(0.05)
    return found


def tell(program: subprocess.Popen[str], what: str) -> None:
    program.stdin.write(f"{what}\n")
    program.stdin.flush()
    assert program.stdout.readline() == "done\n"


def counted(ask: Callable[[str], list[dict[str, Any]]], rank: int) -> float | None:
    query = f'aiocomms_op_seconds_count{{comm="shown", op="all_reduce", rank="{rank}", transport="ucx", size="<16KiB"}}'
    return next((float(row["value"][1]) for row in ask(query)), None)


OF_A_WORKER = """
import asyncio, socket, urllib.request
from aiocomms.testing import local_world

def ask(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return answer.read().decode()

async def execute(plan):
    return plan

async def drive(comm, port):
    async with Service(comm) as service, service.drive(execute) as driver:
        await driver.run("good")
        print(await asyncio.to_thread(ask, port))

async def main():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with local_world(2) as comms:
        await asyncio.gather(drive(comms[0], port), work(comms[1], execute, port - 1))

asyncio.run(main())
"""


@pytest.mark.search
@pytest.mark.real
def test_worker_shows_its_metrics_at_a_port_of_its_own() -> None:
    """The function ``work`` is the one of the documentation."""
    page = (DOCS / "metrics.md").read_text()
    [block] = re.findall(r"```python\n([^`]*?start_http_server[^`]*?)```", page)
    program = f"from aiocomms.integrations import prometheus\n{block}{OF_A_WORKER}"
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert 'aiocomms_plans_total{comm="world",outcome="done",rank="1",reason=""} 1.0' in said
    assert 'aiocomms_plan_seconds_count{comm="world",rank="0"}' not in said


@needs_prometheus
@pytest.mark.search
@pytest.mark.real
def test_prometheus_server_has_the_metrics_of_the_process(program, ask) -> None:
    for rank in range(2):
        assert until(lambda rank=rank: counted(ask, rank)) == 5
    tell(program, "more")
    for rank in range(2):
        until(lambda rank=rank: counted(ask, rank) == 12)
    [row] = ask('sum by (transport) (aiocomms_bytes_total{comm="shown"})')
    assert (row["metric"], float(row["value"][1])) == ({"transport": "ucx"}, 2 * 12 * 1024)
    [row] = until(lambda: ask('aiocomms_pending{comm="lost", rank="0"} == 1'))
    tell(program, "abort")
    [row] = until(lambda: ask('aiocomms_failures_total{comm="lost"}'))
    labels = {"reason": "CommAbortedError", "peer": "1", "rank": "0"}
    assert (row["metric"].items() >= labels.items(), float(row["value"][1])) == (True, 1)


@needs_prometheus
@pytest.mark.search
@pytest.mark.real
def test_every_dashboard_query_has_an_answer(program, ask) -> None:
    tell(program, "more")
    tell(program, "abort")
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 10
    for query in queries:
        text = query.replace("$comm", ".*").replace("$rank", ".*").replace("$__rate_interval", "1m")
        assert "$" not in text
        until(lambda text=text: ask(text))
