"""A service under uvicorn and torchrun that gets SIGINT or SIGTERM still answers its pending request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import HANGS, free_port

httpx = pytest.importorskip("httpx")
for package in ("starlette", "uvicorn"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.real, pytest.mark.timeout(HANGS, method="signal"), pytest.mark.search]

SERVER = """
import asyncio, contextlib, os, signal, sys
import anyio, torch, uvicorn
from pathlib import Path
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
import aiocomms
from aiocomms import serving

def say(what):  # in one call, so that the lines of two ranks do not mix
    os.write(1, (what + "\\n").encode())

async def exists(path):
    while not path.exists():
        await asyncio.sleep(0.005)

def model(comm):
    async def execute(plan):
        if plan == "held":
            say(f"rank {comm.rank} is in it")
            await exists(Path("go on"))
        return (await comm.all_reduce(torch.ones(1))).item()
    return execute

@contextlib.asynccontextmanager
async def driving():
    async with serving.Service(await aiocomms.new_comm("c10d")) as service:
        async with service.drive(model(service.comm)) as driver:
            yield driver
        say("rank 0 has drained")

@contextlib.asynccontextmanager
async def lifespan(app):
    async with driving() as app.state.driver:
        yield

async def answer(request):
    return JSONResponse(await request.app.state.driver.run(request.path_params["plan"]))

async def work():
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as told:  # they do nothing else
        async with serving.Service(await aiocomms.new_comm("c10d")) as service:
            say("rank 1 works")
            reporting = asyncio.create_task(report(told))
            await service.work(model(service.comm))
            reporting.cancel()
    say("rank 1 has left")

async def report(told):
    await anext(told)
    say("rank 1 was told")

if os.environ["RANK"] == "0":
    app = Starlette(routes=[Route("/{plan}", answer)], lifespan=lifespan)
    uvicorn.run(app, port=int(sys.argv[1]), timeout_graceful_shutdown=None, log_level="info")
else:
    asyncio.run(work())
"""


class Output:
    """The lines that a process prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._process = process

    def wait_for(self, *wanted: str) -> None:
        """Read until all of these texts have been printed, in any order."""
        assert self._process.stdout is not None
        while not all(any(text in line for line in self.lines) for text in wanted):
            line = self._process.stdout.readline()
            assert line, f"it has ended without {wanted}: {''.join(self.lines)}"
            self.lines.append(line)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Output, str, Path]]:
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launcher, "server.py", str(port)],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output = Output(process)
    try:
        output.wait_for("rank 1 works", "Application startup complete", "Uvicorn running")
        yield process, output, f"http://127.0.0.1:{port}", tmp_path
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_pending_requests_are_answered_before_any_rank_exits_on_a_signal(server, number) -> None:
    process, output, url, folder = server
    with httpx.Client(base_url=url, timeout=None) as client:
        assert client.get("/one").json() == 2.0
        answers: list[float] = []
        thread = threading.Thread(target=lambda: answers.append(client.get("/held").json()))
        thread.start()
        output.wait_for("rank 0 is in it", "rank 1 is in it")
        process.send_signal(number)  # torchrun forwards the signal to all ranks
        output.wait_for("rank 1 was told", "Shutting down")
        (folder / "go on").touch()
        thread.join()
    assert answers == [2.0]
    output.wait_for("rank 0 has drained", "rank 1 has left")
    assert not any("Error" in line and "SignalException" not in line for line in output.lines), output.lines
    process.wait()
