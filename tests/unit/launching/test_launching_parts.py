"""The parts of ``aiocomms run`` beside its decisions: lines, HTTP, options, the environment of a rank, its reports."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import UserList
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio.abc import SocketAttribute
from concurrency import turns

from aiocomms.bootstrap import supervised
from aiocomms.cli import main
from aiocomms.errors import ArgumentError, CommError
from aiocomms.integrations import uvicorn
from aiocomms.launching import Job, forkserver, health, output, supervisor
from aiocomms.launching.forking import ForkServer
from aiocomms.launching.health import answer
from aiocomms.launching.host import RankProcess
from aiocomms.launching.job import At, place, reason_of
from aiocomms.launching.output import LONGEST, LineSplitter, Printer, is_coloured, prefixes
from aiocomms.launching.supervision import Start
from aiocomms.launching.supervisor import Follower, Supervisor, environment, variables

pytestmark = pytest.mark.deterministic


def test_pieces_become_whole_lines_and_the_rest_comes_at_the_end():
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == [b"one"]
    assert splitter.feed(b"o\n\nthr") == [b"two", b""]
    assert splitter.end() == [b"thr"]
    assert splitter.end() == []


def test_line_without_an_end_is_cut_before_it_takes_all_memory():
    assert [len(line) for line in LineSplitter().feed(b"x" * (2 * LONGEST + 1))] == [LONGEST, LONGEST]


def test_colours_are_for_terminals_and_no_color_turns_them_off(monkeypatch):
    assert prefixes(2, coloured=False) == [b"[0] ", b"[1] "]
    assert prefixes(2, coloured=True) == [b"\x1b[36m[0]\x1b[0m ", b"\x1b[33m[1]\x1b[0m "]
    monkeypatch.setattr(os, "isatty", lambda _: True)
    assert is_coloured(1, {"TERM": "xterm"})
    assert not is_coloured(1, {"NO_COLOR": "1"})
    monkeypatch.setattr(os, "isatty", lambda _: False)
    assert not is_coloured(1, {"TERM": "xterm"})


@pytest.mark.parametrize(
    ("request_line", "ready", "status"),
    [
        (b"GET /healthz HTTP/1.1", False, 200),
        (b"GET /readyz HTTP/1.1", True, 200),
        (b"GET /readyz?verbose HTTP/1.1", False, 503),
        (b"GET / HTTP/1.1", True, 404),
        (b"POST /readyz HTTP/1.1", True, 405),
        (b"\x00\xff", True, 405),
        (b"", True, 405),
    ],
)
def test_health_answers_with_the_status_and_a_json_body(request_line, ready, status):
    head, _, body = answer(request_line + b"\r\nHost: x\r\n\r\n", {"ready": ready, "ranks": []}).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == ({"ready": ready, "ranks": []} if status in (200, 503) else json.loads(body))


def test_head_request_is_answered_without_a_body():
    assert answer(b"HEAD /healthz HTTP/1.1\r\n\r\n", {"ready": True}).endswith(b"\r\n\r\n")


def test_no_client_ends_the_supervisor_or_delays_the_others(run, monkeypatch):
    """A connection beyond the allowed number takes the place of the oldest one."""
    monkeypatch.setattr(health, "_PAUSE", 0)
    monkeypatch.setattr(health, "_MOST", 2)
    coming: list[Any] = [OSError(errno.EMFILE, "too many"), ConnectionAbortedError(), 0, 1, 2, 3]
    ended: list[int] = []
    events = [anyio.Event() for _ in range(4)]

    class Listener:
        async def accept(self) -> int:
            await anyio.lowlevel.checkpoint()
            if not coming:
                await anyio.sleep_forever()
            if isinstance(coming[0], OSError):
                raise coming.pop(0)
            return coming.pop(0)

    async def handle(stream: int) -> None:
        try:
            await events[stream].wait()
        finally:
            ended.append(stream)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(health._accept, Listener(), {}, handle)
            await turns(20)
            assert ended == [0, 1]
            events[3].set()
            await turns(20)
            assert ended == [0, 1, 3]
            tasks.cancel_scope.cancel()

    run(main)


def test_ports_that_the_system_has_chosen_are_printed(run, monkeypatch):
    class Found(contextlib.nullcontext[Any]):
        listeners = ()
        extra = staticmethod({SocketAttribute.local_port: 4711}.get)

        def getsockname(self) -> tuple[str, int]:
            return "::1", 4712

    async def listener(**_: object) -> Found:
        return Found()

    async def signals(*, task_status: Any) -> None:
        task_status.started()

    async def ends(code: int = 0) -> int:
        return code

    fake = SimpleNamespace(hear_signals=signals, run=ends, aclose=ends, state=dict, summary=list)
    monkeypatch.setattr(supervisor, "Supervisor", lambda *_: fake)
    monkeypatch.setattr(supervisor, "listen", lambda *_: Found())
    monkeypatch.setattr(health, "anyio", SimpleNamespace(**{**vars(anyio), "create_tcp_listener": listener}))
    said: list[str] = []
    printer = SimpleNamespace(say=said.append, limit=dict)
    for port in (0, 80):
        job = Job(program=["x.py"], health=f"[::1]:{port}", listen=f"[::1]:{port}")
        assert run(supervisor._supervise, job, printer) == 0
    assert said == ["listen is at [::1]:4712", "health is at [::1]:4711"]


def test_blocked_terminal_blocks_neither_a_sentence_nor_the_end(run, monkeypatch):
    blocked = threading.Lock()
    blocked.acquire()
    monkeypatch.setattr(output, "_write", lambda *_: blocked.acquire())
    monkeypatch.setattr(output, "_LAST", 0)

    async def main() -> None:
        printer = Printer(1, None, {})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(printer.print_sentences)
            printer.say("one")
            printer.say("two")
            await turns(20)
            printer.end()
            printer.limit()
        await printer.lines(0, 1, [b"three"], None)

    run(main)
    blocked.release()


def test_output_waits_for_a_free_descriptor_and_is_not_lost_by_a_cancellation(run, monkeypatch, tmp_path):
    refusals, printed = [CommError("no thread can be started")], []

    async def run_in_thread(call: Any) -> None:
        if refusals:
            raise refusals.pop()
        call()

    monkeypatch.setattr(output, "run_in_thread", run_in_thread)
    monkeypatch.setattr(output, "_PAUSE", 0)
    monkeypatch.setattr(output, "_write", lambda descriptor, data: printed.append((descriptor, data)))

    async def main() -> None:
        printer = Printer(1, tmp_path, {})
        with printer.log(0, 0) as log, anyio.CancelScope() as scope:
            scope.cancel()
            await printer.lines(0, 1, [b"one"], log)
            assert printed == [(1, b"[0] one\n"), (log.fileno(), b"one\n")]
        printer.end()
        await printer.print_sentences()

    run(main)


class ForkServerThatHears:
    """A fork server with some messages."""

    ready = killed = False

    def __init__(self, *messages: object) -> None:
        self._messages = [*messages, None]

    async def hear(self) -> object:
        return self._messages.pop(0)

    def close(self) -> None: ...

    async def aclose(self) -> None:
        self.killed = True


def test_fork_server_that_ends_during_its_imports_is_an_error(run):
    async def main() -> None:
        supervisor = Supervisor(Job(program=["x.py"]), None, None, None)
        supervisor._host._server = server = ForkServerThatHears()
        with pytest.raises(CommError, match="has ended before the imports were done"):
            await supervisor._host._hear(server)
        await supervisor.aclose()

    run(main)


def test_messages_about_processes_that_have_been_ended_are_ignored(run):
    async def main() -> None:
        supervisor = Supervisor(Job(program=["x.py"]), None, None, None)
        await supervisor._host._hear(ForkServerThatHears(["started", "0.0", 7], ["ended", "0.0", 0]))
        await supervisor.aclose()

    run(main)


def test_signal_that_the_process_ignores_stays_ignored(run):
    """``nohup`` ignores SIGHUP, so the end of a session ends no job."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def main() -> None:
        supervisor = Supervisor(Job(program=["x.py"]), None, None, None)
        async with anyio.create_task_group() as tasks:
            await tasks.start(supervisor.hear_signals)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
            assert await supervisor._events.receive() == ("stop", "SIGTERM: all ranks are to end")
            tasks.cancel_scope.cancel()
        await supervisor.aclose()

    try:
        run(main)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_stop_kills_the_ranks_of_a_host_whose_first_host_does_not_answer(run):
    asked = threading.Lock()
    asked.acquire()
    sent: list[tuple[object, ...]] = []

    async def main() -> None:
        job = Job(program=["x.py"], nnodes=2, node_rank=1, rendezvous="127.0.0.1:1")
        follower = Follower(job, None, None, None)
        killed = anyio.Event()

        async def note(*what: object) -> None:
            sent.append(what)
            killed.set()

        follower._host = SimpleNamespace(processes={1: None}, signal=note)
        queue = SimpleNamespace(send=lambda *_: asked.acquire())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower._report, queue)
            for _ in range(2):
                follower._send.send_nowait(("stop", "SIGTERM"))
            await killed.wait()
            tasks.cancel_scope.cancel()
        follower._send.close()
        follower._events.close()

    run(main)
    asked.release()
    assert sent == [(1, signal.SIGKILL)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks is 0, wanted an integer >= 1"),
        ({"nnodes": 0}, "nnodes is 0, wanted an integer >= 1"),
        ({"max_restarts": -1}, "max_restarts is -1, wanted an integer >= 0"),
        ({"restart": "always"}, "restart is 'always', wanted one of never, on-failure"),
        ({"grace": float("nan")}, "grace is nan, wanted 0 to 86400 seconds"),
        ({"node_rank": 1}, "node_rank is 1, wanted 0 <= node_rank < nnodes=1"),
        ({"nnodes": 2}, "rendezvous is missing, wanted HOST:PORT of the first host"),
        ({"rendezvous": "a:1"}, "rendezvous is 'a:1', and nnodes is 1: supervisors of several hosts meet there"),
        ({"program": []}, "no program is given, wanted FILE.py or -m MODULE"),
        ({"program": ["-m"]}, "no program is given, wanted FILE.py or -m MODULE"),
        ({"program": ["absent.py"]}, "there is no file 'absent.py'"),
        ({"program": [""]}, "there is no file ''"),
        ({"program": ["-m", "absent.server"]}, "there is no module 'absent.server'"),
        ({"health": "80a"}, "health is '80a', wanted HOST:PORT with a port of 0 to 65535"),
        ({"listen": "host:65536"}, "listen is 'host:65536', wanted HOST:PORT with a port of 0 to 65535"),
        ({"listen": "[::1:80"}, "listen is '[::1:80', wanted HOST:PORT with a port of 0 to 65535"),
        ({"listen": "::1]:80"}, "listen is '::1]:80', wanted HOST:PORT with a port of 0 to 65535"),
        ({"listen": 80}, "the job is wrong: Expected `str | null`, got `int` - at `$.listen`"),
        ({"program": "server.py"}, "the job is wrong: Expected `array`, got `str` - at `$.program`"),
        ({"preload": [Path("x")]}, "the job is wrong: Expected `str`, got `PosixPath` - at `$.preload[0]`"),
        ({"grace": None}, "the job is wrong: Expected `float`, got `null` - at `$.grace`"),
        ({"node_rank": "0"}, "the job is wrong: Expected `int`, got `str` - at `$.node_rank`"),
    ],
)
def test_wrong_option_is_refused_with_one_sentence(options: dict[str, Any], message):
    with pytest.raises(ArgumentError) as caught:
        Job(**{"program": ["-m", "json"], **options}).check({})
    assert str(caught.value) == message


def test_fields_of_a_job_may_have_subclasses_of_their_types(tmp_path):
    Job(program=UserList(["-m", "json"]), grace=np.float64(3), log_dir=tmp_path).check({})


def test_arguments_fill_one_message_to_the_fork_server_or_are_refused(monkeypatch):
    inherited: list[socket.socket] = []

    def start(*_: object, pass_fds: list[int], **__: object) -> None:
        inherited.append(socket.socket(fileno=os.dup(pass_fds[0])))

    monkeypatch.setattr(subprocess, "Popen", start)
    room = forkserver.LARGEST - len(json.dumps({"program": [""], "grace": 1}))
    ForkServer({"program": ["x" * room], "grace": 1}, {}).close()
    with pytest.raises(CommError, match="the program's arguments have 262145 bytes, wanted at most 262144"):
        ForkServer({"program": ["x" * (room + 1)], "grace": 1}, {})
    [theirs] = inherited
    with theirs:
        assert len(theirs.recv(2 * forkserver.LARGEST)) == forkserver.LARGEST


@pytest.mark.parametrize("given", [["absent.py"], ["--", "absent.py"]])
def test_command_ends_with_1_and_says_what_is_wrong(given, capsys):
    assert main(["run", "-n", "2", *given, "-n", "3"]) == 1
    assert capsys.readouterr().err == "aiocomms run: there is no file 'absent.py'\n"


def test_ctrl_c_during_the_imports_ends_the_command_in_silence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiocomms.cli.running", running := ModuleType("running"))
    monkeypatch.setattr(running, "__getattr__", interrupt, raising=False)
    assert main(["run", "x.py"]) == 130
    assert capsys.readouterr() == ("", "")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_address_that_cannot_be_bound_has_a_reason():
    text = "Name or service not known"
    assert reason_of(socket.gaierror(socket.EAI_NONAME, text)) == text
    # socket.create_server adds the address.
    assert reason_of(OSError(socket.EAI_NONAME, f"{text} (while attempting to bind on address ('x', 80))")) == text
    assert reason_of(OSError(errno.EADDRINUSE, "[Errno 98] error while ...")) == os.strerror(errno.EADDRINUSE)
    assert reason_of(OSError("no number")) == "no number"


def test_options_behind_the_program_are_its_own(monkeypatch):
    jobs: list[Job] = []
    monkeypatch.setattr("aiocomms.cli.running.anyio", SimpleNamespace(run=lambda _, job: jobs.append(job) or 0))
    for arguments in (["server.py", "-n", "3", "--grace=1"], ["-m", "server", "-n", "3", "-m", "x"]):
        assert main(["run", "-n", "2", "--preload", "json", "--preload", "math", *arguments]) == 0
    assert [(job.ranks, list(job.preload)) for job in jobs] == 2 * [(2, ["json", "math"])]
    assert [job.program for job in jobs] == [
        ["server.py", "-n", "3", "--grace=1"],
        ["-m", "server", "-n", "3", "-m", "x"],
    ]


def test_places_have_a_host_and_a_port():
    assert place("x", "8080") == At("127.0.0.1", 8080)
    assert place("x", "[::1]:80") == At("::1", 80)
    assert str(place("x", "[::1]:80")) == "[::1]:80"


def test_more_ranks_or_threads_than_cores_is_a_warning_with_the_setting():
    job = Job(program=["x.py"], ranks=4)
    assert job.warnings({}, 4) == []
    assert "at most 2 (-n)" in job.warnings({}, 2)[0]
    assert "set OMP_NUM_THREADS=2" in job.warnings({"OMP_NUM_THREADS": "4"}, 8)[0]


def test_ranks_get_one_thread_and_a_token_of_their_own_unless_given():
    first, second = environment({}), environment({})
    assert first["OMP_NUM_THREADS"] == "1"
    assert first["AIOCOMMS_TOKEN"] != second["AIOCOMMS_TOKEN"]
    assert "AIOCOMMS_TOKEN" not in environment({}, nnodes=2)  # Each host would draw another one.
    assert environment({"AIOCOMMS_TOKEN_FILE": "f", "OMP_NUM_THREADS": "2"}) == {
        "AIOCOMMS_TOKEN_FILE": "f",
        "OMP_NUM_THREADS": "2",
    }


def test_variables_give_a_rank_its_place_and_its_restarts():
    job = Job(program=["x.py"], ranks=2, nnodes=2, rendezvous="h:1")
    found = variables(job, Start(3, 5, 1, 2), At("h", 9))
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    wanted |= {"MASTER_ADDR": "h", "MASTER_PORT": "9", "AIOCOMMS_RESTARTS": "2"}
    assert wanted.items() <= found.items()


class TestReports:
    """Reports of a rank to the launcher, over the descriptor that the environment names."""

    @pytest.fixture(autouse=True)
    def _place(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")

    @pytest.fixture
    def reported(self, monkeypatch):
        mine, its = (end.detach() for end in socket.socketpair())
        os.set_blocking(mine, False)
        os.set_blocking(its, False)
        monkeypatch.setenv("AIOCOMMS_SUPERVISOR", f"{its}:{os.getpid()}")

        def read() -> bytes:
            try:
                return os.read(mine, 4096)
            except BlockingIOError:
                return b""

        read.line = mine
        yield read
        os.close(mine)
        os.close(its)

    def test_communicator_of_all_ranks_is_reported_when_formed_and_when_it_loses_a_rank(self, reported):
        supervised.report_formed(1, 2, "world", 1)
        supervised.report_lost(1, 2, "world", 1, 0)
        assert reported() == b"formed 1 world\nlost 0 1 world\n"

    def test_rank_that_leaves_says_so(self, reported):
        supervised.report_leaves(1, 2)
        assert reported() == b"leaves\n"

    def test_communicator_of_other_ranks_is_not_reported(self, reported):
        supervised.report_formed(0, 1, "part", 1)
        supervised.report_leaves(0, 1)
        assert reported() == b""

    def test_rank_learns_why_the_launcher_ends_it_and_remembers_it(self, reported, monkeypatch):
        monkeypatch.setattr(supervised, "_announced", set())
        assert not supervised.is_announced(supervised.REPLACED)
        os.write(reported.line, b"replaced\n")
        for _ in range(2):
            assert supervised.is_announced(supervised.REPLACED)
            assert not supervised.is_announced(supervised.ENDS)
        os.write(reported.line, b"ends\n")
        assert supervised.is_announced(supervised.ENDS)

    def test_restarted_rank_is_a_newcomer_and_a_program_that_it_starts_is_none(self, reported, monkeypatch):
        assert not supervised.is_newcomer()
        monkeypatch.setenv("AIOCOMMS_RESTARTS", "0")
        assert not supervised.is_newcomer()
        monkeypatch.setenv("AIOCOMMS_RESTARTS", "2")
        assert supervised.is_newcomer()
        monkeypatch.setattr(os, "getpid", lambda: 1)
        assert not supervised.is_newcomer()

    def test_supervisor_reads_what_its_ranks_report(self, monkeypatch, run):
        """The supervisor replaces a rank that leaves, although failed ranks are not, and ignores a malformed report."""

        async def main():
            supervisor = Supervisor(Job(program=["x.py"], ranks=2), None, None, None)
            supervisor.supervision.begin(0.0)
            process = RankProcess(1, 0, None)
            monkeypatch.setenv("AIOCOMMS_SUPERVISOR", f"{process.theirs[2]}:{os.getpid()}")
            supervised.report_formed(1, 2, "world", 1)
            supervised._report(1, 2, "leaves for lunch")
            supervised.report_leaves(1, 2)
            supervised.report_lost(1, 2, "world", 1, 0)
            assert supervisor._host._read_reports(process)
            events = [supervisor._events.receive_nowait() for _ in range(3)]
            assert events == [("formed", 1, 0, "world", 1), ("leaves", 1, 0), ("lost", 0, "world", 1)]
            for event in events:
                supervisor._decide(event, 0.0)
            assert [rank.leaving for rank in supervisor.supervision.ranks] == [False, True]
            for descriptor in (*process.pipes, *process.theirs):
                os.close(descriptor)
            await supervisor.aclose()

        run(main)

    def test_child_of_a_rank_reports_nothing(self, reported, monkeypatch):
        monkeypatch.setattr(os, "getpid", lambda: 1)
        supervised.report_formed(1, 2, "world", 1)
        assert reported() == b""


@pytest.mark.parametrize(("ranks", "way"), [(1, "setsid"), (2, "setsid"), (3, "setpgid")])
def test_rank_has_a_session_of_its_own_where_no_rank_has_to_share_its_core(monkeypatch, ranks, way):
    taken: list[str] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "setsid", lambda: taken.append("setsid"))
    monkeypatch.setattr(os, "setpgid", lambda *_: taken.append("setpgid"))
    forkserver._part(ranks)
    assert taken == [way]


def test_uvicorn_ends_by_a_signal_that_comes_during_the_start():
    started = False

    async def app(scope: object, receive: Any, send: object) -> None:
        nonlocal started
        await receive()
        started = True
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    uvicorn.run(app, uds="unused", log_level="error")
    assert started


def test_uvicorn_refuses_a_descriptor_that_is_no_socket_with_what_to_do(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(ArgumentError, match=r"fd is \d+, wanted .* --listen"):
        uvicorn.run(None, fd=file.fileno())
