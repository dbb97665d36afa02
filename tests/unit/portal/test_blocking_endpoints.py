"""Endpoints that any thread may use, in synchronous programs and in hosts with their own threads."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from processes import HANGS
from test_blocking import loops, run
from unix_lines import use_unix_sockets

import aiocomms
from aiocomms import blocking
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommClosedError,
    CommTimeoutError,
    PeerDiedError,
    RegionError,
)

pytestmark = pytest.mark.real

PART = 7


class Pair(NamedTuple):
    """Two endpoints of this process, each with its own loop, and the peer of each at the other."""

    one: blocking.Endpoint
    two: blocking.Endpoint
    one_sees: blocking.BlockingPeer
    two_sees: blocking.BlockingPeer


LOCAL = pytest.param("local", marks=pytest.mark.deterministic)
"""The transport of tests that need no other process: their endpoints meet over Unix sockets."""


@pytest.fixture(params=[LOCAL, "ucx"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "local":
        use_unix_sockets(monkeypatch)
    return name


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    with blocking.open_endpoint(transport) as one, blocking.open_endpoint(transport) as two:
        peer = one.connect(two.address)
        yield Pair(one, two, peer, two.accept())
    assert one.closed
    assert two.closed
    assert loops() == []


@pytest.mark.deterministic
def test_blocking_open_endpoint_has_the_arguments_of_open_endpoint():
    ours, theirs = inspect.signature(blocking.open_endpoint), inspect.signature(aiocomms.open_endpoint)
    assert list(ours.parameters) == list(theirs.parameters)
    with pytest.raises(ArgumentError, match="timeout"):
        blocking.open_endpoint("local", timeout=-1)
    assert loops() == []


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (blocking.Endpoint, aiocomms.Endpoint),
        (blocking.BlockingPeer, aiocomms.Peer),
        (blocking.BlockingRegion, aiocomms.Region),
        (blocking.BlockingRemoteRegion, aiocomms.RemoteRegion),
    ],
)
def test_blocking_classes_have_the_methods_of_the_async_ones(ours: type, theirs: type):
    """The names are the same, but for ``close``, and so are the arguments, but for an additional ``timeout``."""
    names = {name for name in dir(theirs) if not name.startswith("_")} - {"aclose"}
    attributes = {"name", "device", "address", "transports", "tensor", "descriptor", "register_abort_hook"}
    attributes |= {"new_pool", "handed", "hand_over"}  # Leases are for programs with a loop.
    assert (
        not {name for name in names | {"close"} if not hasattr(ours, name)}
        - attributes
        - ({"close"} if ours is blocking.BlockingRegion else set())
    )
    for name in names - attributes:
        method = getattr(theirs, name)
        if inspect.isfunction(method):
            given = list(inspect.signature(getattr(ours, name)).parameters)
            wanted = list(inspect.signature(method).parameters)
            assert given == (wanted if given == wanted else [*wanted, "timeout"]), name


def test_blocking_peers_exchange_messages_and_streams(pair: Pair):
    _, _, one, two = pair
    work = one.send(torch.arange(3), tag=4)
    assert two.recv(torch.zeros(3, dtype=torch.int64), tag=4).wait().tolist() == [0, 1, 2]
    assert work.wait().tolist() == [0, 1, 2]
    sending = two.send_object({"a": 1})
    assert one.recv_object().wait() == {"a": 1}
    assert sending.wait() is None
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(two.open_stream, items=dict)
        with one.open_stream(items=dict) as stream, other.result() as end:
            stream.send({"item": 1})
            assert end.receive() == {"item": 1}
    with pytest.raises(TimeoutError, match="was not done within"):
        one.recv(torch.zeros(1)).wait(timeout=0)


def test_puts_of_a_thread_are_visible_after_its_signal(pair: Pair):
    here, _, one, two = pair
    threads = 4
    pages = torch.zeros(threads, PART)
    with here.register(pages) as region, ThreadPoolExecutor(threads) as pool:

        def write(page: int) -> None:
            remote = two.attach(region.descriptor)
            work = remote.put(torch.full((PART,), page + 1.0), page * PART)
            two.signal()
            assert work.done()
            back = torch.zeros(PART)
            assert remote.get(back, page * PART).wait() is back
            assert back.tolist() == [page + 1.0] * PART

        for thread in [pool.submit(write, page) for page in range(threads)]:
            thread.result()
        for _ in range(threads):
            one.wait_signal().wait()
        assert pages[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
        two.put(torch.zeros(PART), region.descriptor)
        two.attach(region.descriptor).flush().wait()
        assert two.get(torch.ones(PART), region.descriptor).tolist() == [0.0] * PART
    assert region.revoked
    assert region.tensor is pages


def test_put_during_a_put_does_not_hang(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """A finalizer or a signal handler may put at any moment."""
    with pair.one.register(torch.zeros(2)) as region:
        remote = pair.two_sees.attach(region.descriptor)
        put, works = remote._window.put, []

        def interrupted(*args: object, **kwargs: object) -> object:
            monkeypatch.undo()
            works.append(remote.put(torch.ones(1), 1))
            return put(*args, **kwargs)

        monkeypatch.setattr(remote._window, "put", interrupted)
        thread = threading.Thread(target=lambda: works.append(remote.put(torch.ones(1), 0)), daemon=True)
        thread.start()
        thread.join(HANGS)
        assert [work.wait().item() for work in works] == [1.0, 1.0]
        pair.two_sees.signal()
        pair.one_sees.wait_signal().wait()
        assert region.tensor.tolist() == [1.0, 1.0]


def test_error_of_a_blocking_peer_names_no_ranks(pair: Pair):
    peer = pair.two_sees
    with pair.one.register(torch.zeros(2)) as region:
        remote = peer.attach(region.descriptor)
        for call in (lambda: peer.send(5), lambda: remote.put(torch.zeros(1), 9)):
            with pytest.raises(ArgumentError, match="on 'endpoint, peer ") as caught:
                call()
            assert "rank" not in str(caught.value)
    peer.close()
    with pytest.raises(CommClosedError, match=r"on 'endpoint, peer .*: the connection was closed on this endpoint"):
        peer.lost()


def test_concurrent_connects_return_the_same_peer(pair: Pair):
    one, two, peer, _ = pair
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(one.connect, two.address) for _ in range(8)]
        assert {thread.result() for thread in found} == {peer}
    assert one.peers == [peer]
    with pytest.raises(TimeoutError):
        one.accept(timeout=0.01)


def test_revoked_region_and_foreign_descriptor_raise_region_error(pair: Pair):
    here, there, one, two = pair
    memory = torch.zeros(PART)
    region = here.register(memory, read=False)
    remote = two.attach(region.descriptor)
    assert (remote.count, remote.dtype, remote.readable, remote.writable) == (PART, torch.float32, False, True)
    with pytest.raises(RegionError, match="does not let it be read"):
        remote.get(torch.zeros(1))
    with pytest.raises(ArgumentError):
        remote.put(torch.zeros(PART + 1))
    region.revoke()
    region.revoke()
    with pytest.raises(RegionError, match="its owner has revoked the region"):
        two.put(torch.ones(PART), region.descriptor)
    with pytest.raises(RegionError), there.register(torch.zeros(1)) as own:
        two.attach(own.descriptor)
    assert remote.closed
    remote.close()
    assert memory.tolist() == [0.0] * PART
    two.send_object("the connection is whole")
    assert one.recv_object().wait() == "the connection is whole"


WAITS: dict[str, Callable[[Pair], object]] = {
    "recv": lambda pair: pair.one_sees.recv(torch.zeros(1)).wait(),
    "wait_signal": lambda pair: pair.one_sees.wait_signal().wait(),
    "accept": lambda pair: pair.one.accept(),
    "lost": lambda pair: pair.one_sees.lost(),
}


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("how", ["abort", "close the connection", "close the endpoint"])
def test_close_or_abort_wakes_a_waiting_thread(pair: Pair, what: str, how: str):
    if what == "accept" and how != "close the endpoint":
        return  # The call belongs to the endpoint, not to a connection.
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(WAITS[what](pair))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    match how:
        case "abort":
            pair.two_sees.abort("enough")
            assert "enough" in str(pair.two_sees.lost())
        case "close the connection":
            pair.one_sees.close()
        case "close the endpoint":
            pair.one.close()
    thread.join(HANGS)
    (ended,) = outcome
    assert isinstance(ended, CommAbortedError if how == "abort" else CommClosedError)
    pair.one_sees.close()
    with pytest.raises((CommClosedError, CommAbortedError)):
        pair.one_sees.attach(b"")


def test_closed_endpoint_refuses_calls(pair: Pair):
    one, two, peer, other = pair
    region = one.register(torch.zeros(1))
    one.close()
    one.close()
    for call in (lambda: one.connect(two.address), one.accept, lambda: one.register(torch.zeros(1))):
        with pytest.raises(CommClosedError, match="the endpoint is closed"):
            call()
    region.revoke()
    assert one.peers == []
    assert peer.closed
    with pytest.raises(CommClosedError):
        other.lost()
    with pytest.raises(CommClosedError):
        other.attach(region.descriptor)


def test_concurrent_endpoint_close_waits_for_the_first(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    one, _, peer, other = pair
    begun, second = threading.Event(), threading.Event()
    values = torch.arange(3_000_000.0)  # This send is under way until it is received.
    sending = peer.send(values)
    close, elsewhere = one._endpoint._connections.close, one._door.elsewhere

    async def first_has_begun(error: CommClosedError) -> None:
        begun.set()
        await close(error)

    def second_has_come(what: str) -> None:
        if begun.is_set():
            second.set()
        elsewhere(what)

    def close_too() -> None:
        try:
            one.close()
        finally:
            second.set()

    monkeypatch.setattr(one._endpoint._connections, "close", first_has_begun)
    monkeypatch.setattr(one._door, "elsewhere", second_has_come)
    with ThreadPoolExecutor(2) as pool:
        closing = pool.submit(one.close)
        assert begun.wait(HANGS)
        closing_too = pool.submit(close_too)
        assert second.wait(HANGS)
        assert other.recv(torch.zeros_like(values)).wait().equal(values)
        assert closing.result() is closing_too.result() is None
    assert sending.wait() is values


def test_exception_in_the_with_block_aborts_the_connection(transport: str):
    with blocking.open_endpoint(transport) as two:
        one = blocking.open_endpoint(transport)
        one.connect(two.address)
        peer = two.accept()
        error = KeyError("lost")
        one.__exit__(KeyError, error, None)  # The `with` statement makes this call.
        assert "KeyError: 'lost'" in str(peer.lost())
    assert loops() == []


def test_wait_signal_past_its_own_timeout_fails_alone(pair: Pair):
    with pytest.raises(CommTimeoutError):
        pair.one_sees.wait_signal(timeout=0.01).wait()
    with pytest.raises(ArgumentError, match="address"):
        pair.one.connect(b"nobody")
    pair.two_sees.signal()
    pair.one_sees.wait_signal().wait()


def test_blocking_calls_on_the_loops_thread_are_refused(pair: Pair):
    refused: list[BaseException] = []

    def hook(_: object) -> None:
        for call in (lambda: pair.one.accept(), lambda: pair.one_sees.attach(b""), pair.one.close):
            try:
                call()
            except RuntimeError as error:
                refused.append(error)

    pair.one_sees.register_abort_hook(hook)
    pair.one_sees.abort("to call the hook")
    pair.one_sees.lost()
    assert ["was called on the loop's own thread" in str(error) for error in refused] == [True] * 3


IN_A_PROCESS = pytest.mark.parametrize("transport", ["local", "ucx"])
HEAD = """
import os, signal, sys, threading, torch
from aiocomms import blocking
signal.signal(signal.SIGINT, signal.default_int_handler)
one, two = blocking.open_endpoint(TRANSPORT), blocking.open_endpoint(TRANSPORT)
peer, back = one.connect(two.address), two.accept()
region = two.register(torch.zeros(4))
"""


@pytest.mark.real
@IN_A_PROCESS
def test_program_exits_silently_with_open_endpoints_and_waiting_threads(transport: str):
    program = """
remote = peer.attach(region.descriptor)
for wait in (peer.recv(torch.zeros(1)).wait, one.accept, peer.lost):
    threading.Thread(target=wait, daemon=True).start()
"""
    assert run(f"TRANSPORT = {transport!r}\n{HEAD}{program}") == ""


@pytest.mark.search
@pytest.mark.real
@IN_A_PROCESS
def test_unclosed_blocking_endpoint_warns_with_its_origin(transport: str):
    program = "import warnings\nwarnings.simplefilter('always', ResourceWarning)\n"
    printed = run(f"{program}from aiocomms import blocking\nhere = blocking.open_endpoint({transport!r})\n")
    assert "unclosed <Endpoint 'endpoint'" in printed
    assert "opened at <string>:4: use `with`, or call its close()" in printed


@pytest.mark.real
@IN_A_PROCESS
def test_ctrl_c_interrupts_accept(transport: str):
    program = """
from aiocomms.communicator.portal import pending
block = pending.Pending._block
def told(self, patience):
    if threading.current_thread() is threading.main_thread():
        sys.stdout.write("now" + chr(10)); sys.stdout.flush()
    return block(self, patience)
pending.Pending._block = told
try:
    one.accept()
except KeyboardInterrupt:
    pass
pending.Pending._block = block
with blocking.open_endpoint(TRANSPORT) as third:
    third.connect(one.address)
    one.accept()
one.close(); two.close()
print(threading.enumerate() == [threading.main_thread()])
"""
    assert run(f"TRANSPORT = {transport!r}\n{HEAD}{program}", signals=1).endswith("True\n")


@pytest.mark.real
@IN_A_PROCESS
def test_forked_child_of_a_blocking_endpoint_is_refused(transport: str):
    program = """
remote = peer.attach(region.descriptor)
child = os.fork()
if not child:
    for call in (
        lambda: one.connect(two.address), one.accept, lambda: one.register(torch.zeros(1)),
        lambda: peer.attach(region.descriptor), lambda: remote.put(torch.ones(4)), lambda: peer.recv(torch.zeros(1)),
        region.revoke, peer.close, one.close, two.close,
    ):
        try:
            call()
            print("returned", flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
    os._exit(0)
os.waitpid(child, 0)
remote.put(torch.ones(4)).wait()
peer.signal()
back.wait_signal().wait()
assert region.tensor.tolist() == [1.0] * 4
one.close(); two.close()
"""
    printed = run(f"TRANSPORT = {transport!r}\n{HEAD}{program}")
    assert printed.split("\n") == [*["CommClosedError"] * 6, *["returned"] * 4, ""]


@pytest.mark.real
def test_killed_peer_fails_pending_ops_with_peer_died_error():
    program = """
import sys, torch
from aiocomms import blocking
with blocking.open_endpoint("ucx") as here:
    peer = here.connect(bytes.fromhex(sys.argv[1]))
    peer.send_object(here.register(torch.ones(4)).descriptor).wait()
    print("now", flush=True)
    peer.recv_object().wait()
"""
    with blocking.open_endpoint("ucx") as here:
        process = subprocess.Popen([sys.executable, "-c", program, here.address.hex()], stdout=-1, text=True)
        try:
            peer = here.accept()
            remote = peer.attach(peer.recv_object().wait())
            assert remote.get(torch.zeros(4)).wait().tolist() == [1.0] * 4
            assert process.stdout.readline() == "now\n"
            pending = peer.recv(torch.zeros(1))
        finally:
            process.kill()
            process.communicate()
        with pytest.raises(PeerDiedError):
            pending.wait()
        assert isinstance(peer.lost(), PeerDiedError)
        with pytest.raises(RegionError):
            remote.get(torch.zeros(4))
        with pytest.raises(CommAbortedError):
            peer.attach(b"")
        assert here.peers == []
