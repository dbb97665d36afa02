"""The package that the code blocks of the page "Write a transport" make is installed and tested.

The package must equal ``examples/transport_tcp``, so that page and example stay the same.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from processes import HANGS, SUITE_HANGS
from strangers import QUICK, expect_death_to_be_noticed, run

from aiocomms import ops
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError, ProtocolError

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "transport_tcp"
PAGE = (ROOT / "docs" / "transports.md").read_text()
MODULE = "aiocomms_tcp.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the package as a reader of the page does, and return its folder."""
    folder = tmp_path_factory.mktemp("page")
    (toml,) = blocks("toml")
    (folder / "pyproject.toml").write_text(toml)
    (folder / MODULE).write_text("\n\n".join(blocks("py")))
    return folder


@pytest.fixture(scope="module")
def installed(package: Path) -> Path:
    """Install the package by ``pip install .``, as the page says but without an index, and return the folder."""
    target = package.parent / f"{package.name}-installed"
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), "."]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_code_of_the_page_equals_the_example_package(package: Path) -> None:
    assert (package / "pyproject.toml").read_text() == (EXAMPLE / "pyproject.toml").read_text()
    assert lines((package / MODULE).read_text()) == lines((EXAMPLE / MODULE).read_text())
    assert [path.name for path in EXAMPLE.rglob("*.py")] == [MODULE]
    assert "$ pip install ." in PAGE


def test_tcp_example_has_fewer_than_250_lines(package: Path) -> None:
    assert len((EXAMPLE / MODULE).read_text().splitlines()) < 250


@pytest.mark.search
@pytest.mark.real
@pytest.mark.timeout(2 * SUITE_HANGS)
@pytest.mark.parametrize(
    ("where", "options"), [("", "--loops=asyncio"), ("@processes", "--loops=trio -k 'closing or timeouts'")]
)
def test_tcp_example_passes_the_conformance_suite(installed: Path, where: str, options: str) -> None:
    """The whole suite passes in one process, and the checks of closing and timeouts also on processes and Trio."""
    command = next(c for c in re.findall(r"^\$ (.*--transport=tcp)$", PAGE, re.MULTILINE))
    _, *arguments = shlex.split(command + where)
    done = run(installed, *arguments, "--ranks=2", *shlex.split(options), *QUICK)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


@pytest.mark.real
def test_death_is_noticed_although_a_forked_child_lives(installed: Path) -> None:
    """The child has a copy of each descriptor; a connection ends when the last copy is closed."""
    expect_death_to_be_noticed(
        installed, "tcp", "recv", "recv", "send", die="os.read(0, 1) if os.fork() == 0 else os._exit(0)"
    )


# ------------------------------------------------------------------------------------------------- one end, by hand


@pytest.fixture
def module(installed: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("aiocomms_tcp_of_the_page", installed / MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class End:
    """A transport of rank 1, the failures that it reports to its communicator, and rank 0's socket."""

    def __init__(self, module: ModuleType) -> None:
        self.socket, its = socket.socketpair()
        self.socket.settimeout(10)
        self.transport = module.TcpTransport(1, {0: its})
        self.failures: list[CommError] = []
        self.transport.on_failure = self.failures.append

    def post(self, op: Any) -> SimpleNamespace:
        ended: list[Any] = []
        work = SimpleNamespace(
            op=op, ended=ended, done=lambda: bool(ended), fail=ended.append, complete=lambda *_: ended.append(None)
        )
        self.transport.post(op, work)
        return work

    def close(self) -> None:
        for peer in list(self.transport.peers.values()):
            self.transport.disconnect(peer)
        self.transport.epoll.close()
        self.socket.close()


@pytest.fixture
def end(module: ModuleType) -> Iterator[End]:
    end = End(module)
    yield end
    end.close()


NOTHING = (0, 0, 0, 0, 0)
SENSELESS = {
    "an unknown kind": (77, *NOTHING),
    "an unknown dtype": (0, 0, 99, 0, 0, 4),
    "a negative size": (0, 0, 0, 0, 0, -4),
    "takes what was not announced": (1, 0, 0, 0, 12345, 4),
    "data that was not taken": (2, 0, 0, 0, 0, 4),
    "a reason without end": (4, 0, 0, 0, 0, 2**40),
}


@pytest.mark.parametrize("said", SENSELESS)
def test_malformed_header_raises_protocol_error_and_disconnects(end: End, module: ModuleType, said: str) -> None:
    end.socket.sendall(module.HEADER.pack(*SENSELESS[said]))
    end.transport.progress()
    (failure,) = end.failures
    assert isinstance(failure, ProtocolError)
    assert failure.peer == 0
    assert end.socket.recv(1) == b""  # the transport has closed the connection


def test_malformed_abort_reason_raises_protocol_error(end: End, module: ModuleType) -> None:
    end.socket.sendall(module.HEADER.pack(4, 0, 0, 0, 0, 3) + b"\xc1\xc1\xc1")
    end.transport.progress()
    assert isinstance(end.failures[0], ProtocolError)


def test_end_without_a_farewell_is_a_death_after_all_received_data(end: End, module: ModuleType) -> None:
    op = ops.Recv(torch.empty(2), 0)
    work = end.post(op)
    data = torch.tensor([1.0, 2.0])
    header = module.HEADER
    end.socket.sendall(header.pack(0, op.channel, module.NUMBERED.index(torch.float32), 0, 9, 8))
    end.transport.progress()
    assert header.unpack(end.socket.recv(header.size)) == (1, 0, 0, 0, 9, 8)
    end.socket.sendall(header.pack(2, 0, 0, 0, 0, 8) + data.numpy().tobytes())
    end.socket.close()
    end.transport.progress()
    assert work.ended == [None]
    assert op.tensor.equal(data)
    (failure,) = end.failures
    assert isinstance(failure, PeerDiedError)
    assert str(failure) == "rank 0 has died or was cut off: its connection broke unexpectedly"


@pytest.mark.parametrize("thread", ["the loop's", "another one"])
def test_abort_amid_a_large_message_sends_its_reason_and_no_later_data(
    end: End, module: ModuleType, thread: str
) -> None:
    """The peer gets whole pieces, then the reason, and none of the data that the program writes after the abort."""
    tensor = torch.full((4 * 2**20,), 7, dtype=torch.uint8)
    end.post(ops.Send(tensor, 0))
    header = module.HEADER
    announced = header.unpack(end.socket.recv(header.size))
    end.socket.sendall(header.pack(1, 0, 0, 0, announced[4], tensor.nbytes))
    end.transport.progress()  # until the connection is full
    error = CommAbortedError("for a reason", peer=1)
    if thread == "another one":
        aborting = threading.Thread(target=end.transport.abort, args=(error,))
        aborting.start()
        aborting.join()
    else:
        end.transport.abort(error)
    tensor.fill_(9)
    heard = bytearray()
    while True:
        end.transport.progress()
        part = end.socket.recv(2**20)
        if not part:
            break
        heard += part
    while heard:
        kind, *_, nbytes = header.unpack(heard[: header.size])
        body, heard = heard[header.size : header.size + nbytes], heard[header.size + nbytes :]
        if kind == 4:
            break
        assert kind == 2
        assert body == b"\7" * len(body)
    assert b"for a reason" in body
    assert not heard


def test_withdrawn_recv_takes_no_message(end: End, module: ModuleType) -> None:
    first, second = ops.Recv(torch.empty(2), 0), ops.Recv(torch.empty(2), 0)
    works = [end.post(first), end.post(second)]
    assert end.transport.try_cancel(works[0])
    assert not end.transport.try_cancel(works[0])
    end.socket.sendall(module.HEADER.pack(0, first.channel, module.NUMBERED.index(torch.float32), 0, 9, 8))
    end.transport.progress()
    assert not end.transport.try_cancel(works[1])  # the receive has matched a message
    assert not any(work.ended for work in works)
