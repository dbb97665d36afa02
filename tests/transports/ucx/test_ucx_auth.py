"""The handshake by which ranks of the ucx transport let each other in, and no other process."""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from concurrency import in_threads
from processes import HANGS, all_let_go, held

from aiocomms.errors import AuthError, CommTimeoutError
from aiocomms.lowlevel import Gate, mac
from aiocomms.lowlevel import gate as gate_module
from aiocomms.lowlevel.gate import MOST_HALF_OPEN, Entrance, HalfOpen
from aiocomms.lowlevel.handshake import Dialogue, connector_dialogue

pytestmark = pytest.mark.real

KEY = b"what this family knows"


def hello(rank: int, key: bytes = KEY) -> bytes:
    """The first message of a rank to rank 0."""
    nonce = b"n" * 16
    return struct.pack("!6sI16s32s", b"aioG\2\0", rank, nonce, mac(key, "hello", rank, 0, nonce))


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: scanner\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(range(200)),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "a beginning": b"aioG\2\0",
    "half a hello": b"aioG\2\0\0\0\0\1" + b"n" * 8,
    "a wrong rank": hello(2**32 - 1) + bytes(32),
    "a rank below": hello(0) + bytes(32),
    "no proof": hello(1) + bytes(32),
    "no key": struct.pack("!6sI16s", b"aioG\2\0", 1, b"n" * 16) + bytes(64),
    "a pickle": b"\x80\x04\x95" + bytes(60),
}


@pytest.fixture(params=[pytest.param("unix", marks=pytest.mark.deterministic), "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) if request.param == "tcp" else on_this_host() as made:
        yield made


def on_this_host() -> socket.socket:
    """Listen at a Unix socket."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0aiocomms-test-{secrets.token_hex(8)}")
    made.listen(1024)
    return made


@pytest.fixture
def silence_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a peer that says nothing all the time there is."""
    monkeypatch.setattr(gate_module, "PATIENCE", math.inf)


def connect(listener: socket.socket) -> socket.socket:
    made = socket.socket(listener.family)
    made.settimeout(HANGS)
    try:
        made.connect(listener.getsockname())
    except OSError:
        made.close()
        raise
    return made


def join(listener: socket.socket, rank: int = 1, key: bytes = KEY, size: int = 2) -> socket.socket:
    """Join as a rank above 0 does, which lets no other rank in itself."""
    it = Gate(rank, key, {0: lambda: connect(listener)}, size)
    it._missing = {0}  # the ranks above it do not come
    return it.run([], HANGS)[0]


def talk(*ends: socket.socket) -> None:
    """Check that two ends are those of one connection."""
    ends[0].sendall(b"hello")
    assert ends[1].recv(5, socket.MSG_WAITALL) == b"hello"
    for end in ends:
        end.close()


def open_up(listener: socket.socket, size: int = 2, seconds: float = HANGS) -> tuple[Gate, dict[int, socket.socket]]:
    it = Gate(0, KEY, {}, size)
    return it, it.run([listener], seconds)


def test_handshake_admits_all_ranks(listener: socket.socket) -> None:
    size = 6
    (_, inside), *outside = in_threads(
        lambda: open_up(listener, size), *(lambda rank=rank: join(listener, rank, size=size) for rank in range(1, size))
    )
    assert sorted(inside) == list(range(1, size))
    for rank, end in enumerate(outside, 1):
        assert end.getblocking()
        talk(end, inside[rank])


@pytest.mark.deterministic
def test_handshakes_of_all_ranks_with_all_succeed_concurrently() -> None:
    """Every rank connects and lets in at once."""
    size = 5
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(on_this_host()) for _ in range(size)]

        def one(rank: int) -> dict[int, socket.socket]:
            ways = {peer: (lambda peer=peer: connect(listeners[peer])) for peer in range(rank)}
            return Gate(rank, KEY, ways, size).run([listeners[rank]], HANGS)

        all_sockets = in_threads(*(lambda rank=rank: one(rank) for rank in range(size)))
        for a in range(size):
            for b in range(a):
                talk(all_sockets[a][b], all_sockets[b][a])


@pytest.mark.fault(22, transport="ucx")
@pytest.mark.parametrize("what", GARBAGE)
def test_connection_with_garbage_is_dropped(listener: socket.socket, what: str) -> None:
    def stranger() -> bytes:
        with connect(listener) as it:
            it.sendall(GARBAGE[what])
            if what not in ("a beginning", "half a hello"):
                with contextlib.suppress(ConnectionResetError):
                    while it.recv(1000):  # at most a challenge
                        pass
            return b"dropped"

    def rank() -> socket.socket:
        stranger()
        return join(listener)

    (it, inside), end = in_threads(lambda: open_up(listener), rank)
    assert it.dropped == 1
    talk(end, inside[1])


@pytest.mark.real
@pytest.mark.fault(64, transport="ucx")
def test_silent_connection_is_dropped_in_time(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "PATIENCE", 0.3)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(listener)) for _ in range(20)]
        slow = stack.enter_context(connect(listener))

        def rank() -> socket.socket:
            with contextlib.suppress(OSError):
                for byte in GARBAGE["no proof"]:  # a byte at a time does not win more time
                    slow.sendall(bytes([byte]))
                    time.sleep(0.05)
            for it in (*silent, slow):
                with contextlib.suppress(ConnectionResetError):
                    assert it.recv(100, socket.MSG_WAITALL) == b""
            monkeypatch.setattr(gate_module, "PATIENCE", HANGS)
            return join(listener)  # the gate waits for this rank: it has not dropped the others because it is done

        (it, inside), end = in_threads(lambda: open_up(listener), rank)
    assert it.dropped == 21
    talk(end, inside[1])


@pytest.mark.usefixtures("silence_without_end")
def test_silent_connections_do_not_delay_a_rank(listener: socket.socket) -> None:
    """A rank that comes behind them is in, or it hangs."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(listener))
        (_, inside), end = in_threads(lambda: open_up(listener), lambda: join(listener))
        talk(end, inside[1])


@pytest.mark.search
@pytest.mark.fault(64, transport="ucx")
def test_ten_thousand_foreign_connections_do_not_keep_out_a_rank(listener: socket.socket) -> None:
    """No more are kept than there is room for, and the rank that comes amid them gets in."""
    done = threading.Event()
    most = [0]

    def strangers() -> None:
        pieces = list(GARBAGE.values())
        held: list[socket.socket] = []
        number = 0
        while number < 10_000:
            with contextlib.suppress(OSError):  # a unix socket's queue is full
                held.append(connect(listener))
                number += 1
                if number % 3:
                    held[-1].sendall(pieces[number % len(pieces)])
            if len(held) > 300:
                held.pop(random.Random(number).randrange(len(held))).close()
        for it in held:
            it.close()
        done.set()

    def rank() -> list[socket.socket]:
        ends = [join(listener, 1, size=3)]
        assert done.wait(HANGS)
        return [*ends, join(listener, 2, size=3)]

    class Watched(Entrance):
        def add(self, *args: Any, **more: Any) -> HalfOpen:
            half = super().add(*args, **more)
            most[0] = max(most[0], len(self))
            return half

    watched = Gate(0, KEY, {}, 3)
    watched.entrance = Watched(watched._selector, 3 + MOST_HALF_OPEN)
    inside, ends, _ = in_threads(lambda: watched.run([listener], HANGS), rank, strangers)
    assert most[0] <= 3 + MOST_HALF_OPEN
    assert watched.dropped > 9000
    for number, end in enumerate(ends, 1):
        talk(end, inside[number])


@pytest.mark.fault(64, transport="ucx")
def test_wrong_key_raises_auth_error(listener: socket.socket) -> None:
    def rank() -> socket.socket:
        with pytest.raises(AuthError, match="in the place of rank 0 does not prove to be that rank") as caught:
            join(listener, key=b"another")
        assert caught.value.peer == 0
        return join(listener)

    (it, inside), end = in_threads(lambda: open_up(listener), rank)
    assert it.dropped == 1
    talk(end, inside[1])


class Tap:
    """Stands between a rank and its peer, and writes down what they say."""

    def __init__(self, listener: socket.socket) -> None:
        self.said = {"in": b"", "out": b""}
        self._far = connect(listener)
        self.near, self._mine = socket.socketpair()

    def close(self) -> None:
        for end in (self._far, self._mine, self.near):
            end.close()

    def run(self, until: Callable[[], bool]) -> None:
        for end in (self._far, self._mine):
            end.setblocking(False)
        while not until():
            for name, src, dst in (("in", self._mine, self._far), ("out", self._far, self._mine)):
                with contextlib.suppress(BlockingIOError):
                    data = src.recv(1000)
                    self.said[name] += data
                    dst.sendall(data)


@pytest.mark.fault(64, transport="ucx")
def test_replayed_handshake_is_refused(listener: socket.socket) -> None:
    """A rank's old words are said again as they were, to the same rank, and to the other side."""
    tap = Tap(listener)

    def tapped() -> socket.socket:
        it = Gate(1, KEY, {0: lambda: tap.near}, 2)
        return it.run([], HANGS)[0]

    (_, inside), end, _ = in_threads(
        lambda: open_up(listener), tapped, lambda: tap.run(lambda: len(tap.said["out"]) == 55)
    )
    end.close()
    inside[1].close()
    tap.close()

    def replay() -> socket.socket:
        with connect(listener) as it:
            it.sendall(tap.said["in"])
            assert len(it.recv(54, socket.MSG_WAITALL)) == 54
            with contextlib.suppress(ConnectionResetError):
                assert it.recv(1) == b""
        return join(listener)

    (it, inside), end = in_threads(lambda: open_up(listener), replay)
    assert it.dropped == 1
    talk(end, inside[1])
    # An impostor who listens in a rank's place cannot say again what that rank has said either.
    near, mine = socket.socketpair()
    mine.sendall(tap.said["out"])
    with pytest.raises(AuthError):
        Gate(1, KEY, {0: lambda: near}, 2).run([], HANGS)
    mine.close()


def test_reflected_handshake_is_refused(listener: socket.socket) -> None:
    """Reflection: what a rank says as the one who is called is not taken from one who calls."""

    def mirror() -> socket.socket:
        with connect(listener) as it:
            it.sendall(hello(1))
            challenge = it.recv(54, socket.MSG_WAITALL)
            it.sendall(challenge[22:])
            with contextlib.suppress(ConnectionResetError):
                assert it.recv(1) == b""
        return join(listener)

    (it, inside), end = in_threads(lambda: open_up(listener), mirror)
    assert it.dropped == 1
    talk(end, inside[1])


def drowned(it: Gate, listener: socket.socket, stack: contextlib.ExitStack) -> None:
    """Open silent connections until the gate has dropped more of them than it has room for."""
    while it.dropped <= 2 * MOST_HALF_OPEN:
        with contextlib.suppress(OSError):  # a unix socket's queue is full
            stack.enter_context(connect(listener))


def finish(dialogue: Dialogue, end: socket.socket, wanted: int) -> None:
    """Say what is left to say, until it is accepted."""
    with contextlib.suppress(StopIteration):
        while message := end.recv(wanted, socket.MSG_WAITALL):
            wanted = dialogue.send(message)
        raise AssertionError("it was dropped")


@pytest.mark.usefixtures("silence_without_end")
@pytest.mark.fault(103, transport="ucx")
def test_flood_does_not_evict_a_rank_that_has_spoken(listener: socket.socket) -> None:
    """Its second message may take as long as it likes to come."""
    it = Gate(0, KEY, {}, 2)

    def rank() -> socket.socket:
        with contextlib.ExitStack() as stack:
            end = connect(listener)
            dialogue = connector_dialogue(end, KEY, 1, 0)
            wanted = next(dialogue)
            drowned(it, listener, stack)
            finish(dialogue, end, wanted)
            return end

    inside, end = in_threads(lambda: it.run([listener], HANGS), rank)
    talk(end, inside[1])


@pytest.mark.search
@pytest.mark.usefixtures("silence_without_end")
@pytest.mark.fault(103, transport="ucx")
def test_flood_from_another_address_does_not_evict_a_silent_rank() -> None:
    it = Gate(0, KEY, {}, 2)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:

        def rank() -> socket.socket:
            with contextlib.ExitStack() as stack:
                end = socket.create_connection(listener.getsockname(), HANGS, ("127.0.0.2", 0))
                drowned(it, listener, stack)
                dialogue = connector_dialogue(end, KEY, 1, 0)
                finish(dialogue, end, next(dialogue))
                return end

        inside, end = in_threads(lambda: it.run([listener], HANGS), rank)
        talk(end, inside[1])


@pytest.mark.real
@pytest.mark.fault(33, 103, transport="ucx")
def test_timeout_error_names_missing_ranks_and_counts_dropped_connections(listener: socket.socket) -> None:
    with connect(listener) as stranger:
        stranger.sendall(GARBAGE["zeros"])
        with pytest.raises(CommTimeoutError, match=r"\[1\]; 1 connections were dropped"):
            open_up(listener, seconds=1)
    before = held()
    with pytest.raises(CommTimeoutError, match=r"these ranks did not connect within 0.3 s: \[1, 2\]"):
        open_up(listener, size=3, seconds=0.3)
    all_let_go(before)


@pytest.mark.fault(69, transport="ucx")
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_connection_of_another_user_is_refused() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0aiocomms-test-{secrets.token_hex(8)}")
        listener.listen()
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as it:
                    it.connect(listener.getsockname())
                    it.settimeout(HANGS)
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        it.sendall(hello(1))
                        os.write(there, it.recv(100))
            finally:
                os._exit(0)
        os.close(there)

        def rank() -> socket.socket:
            os.waitpid(child, 0)
            return join(listener)

        (it, inside), end = in_threads(lambda: open_up(listener), rank)
        assert it.dropped == 1
        assert os.read(here, 100) == b"", "it was answered"
        os.close(here)
        talk(end, inside[1])
