"""The example of a third-party transport: its size, its entry point, its error without UCXX, and its conformance.

The suite also runs over a stand-in for UCXX, made of asyncio's streams. So aiocomms' side of the contract is tested
where UCXX is not installed.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from processes import SUITE_HANGS
from strangers import QUICK, expect_death_to_be_noticed, run

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "transport_ucxx"
MODULE = EXAMPLE / "aiocomms_ucxx.py"
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
SUITE = ["-m", "pytest", "--pyargs", "aiocomms.testing.conformance", "--transport=ucxx", "--ranks=2", "--loops=asyncio"]

STAND_IN = '''
"""What the example uses of UCXX, over TCP streams."""
import asyncio, socket, struct
from collections import defaultdict, deque

HEAD = struct.Struct("<QQ")  # tag, size
arrived, wanted, keep = defaultdict(deque), defaultdict(deque), []

def init(options, enable_python_future):
    listening = socket.create_server(("127.0.0.1", 0))
    keep.append(listening)
    keep.append(asyncio.get_running_loop().create_task(asyncio.start_server(serve, sock=listening)))

def get_worker_address():
    return bytearray(struct.pack("<H", keep[0].getsockname()[1]))

def get_ucx_address_from_buffer(address):
    return struct.unpack("<H", address)[0]

async def create_endpoint_from_worker_address(port):
    return Endpoint(*await asyncio.open_connection("127.0.0.1", port))

async def serve(reader, writer):
    try:
        while True:
            tag, size = HEAD.unpack(await reader.readexactly(HEAD.size))
            data = await reader.readexactly(size)
            while wanted[tag] and wanted[tag][0].done():
                wanted[tag].popleft()
            if wanted[tag]:
                wanted[tag].popleft().set_result(data)
            else:
                arrived[tag].append(data)
    except (asyncio.IncompleteReadError, OSError):
        writer.close()

class Endpoint:
    def __init__(self, reader, writer):
        self.alive, self.recvs, self.writer = True, set(), writer
        self.watching = asyncio.ensure_future(self.watch(reader))

    async def watch(self, reader):
        try:
            await reader.read(1)  # nobody writes: it ends when the peer's process does
        except OSError:
            pass
        self.end()

    def end(self):
        self.alive = False
        self.writer.close()
        for future in self.recvs:
            if not future.done():
                future.set_exception(ConnectionResetError("the peer is gone"))

    def abort(self):
        self.watching.cancel()
        self.end()

    async def send(self, buffer, tag, force_tag):
        assert self.alive and force_tag and tag < 2**64
        self.writer.write(HEAD.pack(tag, len(buffer)) + bytes(buffer))
        await self.writer.drain()

    async def recv(self, buffer, tag, force_tag):
        assert self.alive and force_tag
        if arrived[tag]:
            data = arrived[tag].popleft()
        else:
            future = asyncio.get_running_loop().create_future()
            wanted[tag].append(future)
            self.recvs.add(future)
            try:
                data = await future
            finally:
                self.recvs.discard(future)
        memoryview(buffer)[:] = data  # raises if the sizes differ, as UCXX does
'''


def need_ucxx() -> None:
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed: pip install ucxx-cu13")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Install the example by hand, as ``pip install`` would, and return the folder."""
    (tmp_path / MODULE.name).symlink_to(MODULE)
    info = tmp_path / "aiocomms_ucxx-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n")
    entries = PROJECT["entry-points"]["aiocomms.transports"].items()
    (info / "entry_points.txt").write_text(
        "\n".join(["[aiocomms.transports]", *(f"{name} = {value}" for name, value in entries)])
    )
    return tmp_path


def test_ucxx_example_has_fewer_than_200_lines() -> None:
    assert [path.name for path in EXAMPLE.rglob("*.py")] == [MODULE.name]
    assert len(MODULE.read_text().splitlines()) < 200


def test_ucxx_example_is_its_own_distribution() -> None:
    assert PROJECT["entry-points"] == {"aiocomms.transports": {"ucxx": "aiocomms_ucxx:UcxxTransport"}}
    assert "aiocomms" in PROJECT["dependencies"]
    assert not re.findall(r"^from aiocomms\S*\._|^import aiocomms_(?!ucxx)", MODULE.read_text(), re.MULTILINE)


@pytest.mark.search
@pytest.mark.real
def test_missing_ucxx_says_what_to_install(folder: Path) -> None:
    hidden = "import sys; sys.modules['ucxx'] = sys.modules['ucp'] = None; "
    program = "import torch; from aiocomms.bootstrap.registry import available; print(available(torch.device('cpu')))"
    (folder / "hide.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name in ('ucxx', 'ucp') else find(name, *rest)\n"
    )
    done = run(folder, "-c", f"{hidden}import hide; {program}")
    assert "'ucxx': 'UCXX is missing: pip install ucxx-cu13" in done.stdout, done.stdout + done.stderr
    assert "'local': None" in done.stdout


@pytest.mark.search
@pytest.mark.real
def test_death_is_noticed_over_a_stand_in(folder: Path) -> None:
    (folder / "ucxx.py").write_text(STAND_IN)
    expect_death_to_be_noticed(folder, "ucxx", "recv", "recv")  # its sends do not wait for their receives


def test_death_is_noticed_over_ucxx(folder: Path) -> None:
    need_ucxx()
    expect_death_to_be_noticed(folder, "ucxx", "recv", "recv", "send")


@pytest.mark.search
@pytest.mark.real
@pytest.mark.timeout(2 * SUITE_HANGS)
def test_ucxx_example_passes_the_conformance_suite_over_a_stand_in(folder: Path) -> None:
    (folder / "ucxx.py").write_text(STAND_IN)
    done = run(folder, *SUITE, *QUICK)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


@pytest.mark.search
@pytest.mark.real
@pytest.mark.timeout(2 * SUITE_HANGS)
def test_ucxx_example_passes_the_conformance_suite_over_ucxx(folder: Path) -> None:
    need_ucxx()
    done = run(folder, *SUITE, *QUICK)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
