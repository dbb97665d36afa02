from __future__ import annotations

import errno
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from processes import HANGS, PATIENCE
from torch.distributed import DistStoreError, TCPStore

from aiocomms.bootstrap import stores
from aiocomms.bootstrap.stores import connect_store
from aiocomms.errors import ArgumentError, AuthError, ProtocolError, StoreLostError
from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.stores import reach_store
from aiocomms.lowlevel.storeserver import LENGTH, LONGEST

pytestmark = pytest.mark.real

HOST = "127.0.0.1"
PORT = 29500
"""A port without a listener, for calls that are refused before they connect."""
HAS_IPV6 = Path("/proc/net/if_inet6").exists() and "00000001" in Path("/proc/net/if_inet6").read_text()


def rank0(port, host=HOST, timeout=HANGS, size=2):
    return connect_store(host, port, 0, size, agent_store=False, timeout=timeout)


def client(port, host=HOST, timeout=HANGS, rank=1, size=2):
    return connect_store(host, port, rank, size, agent_store=False, timeout=timeout)


@pytest.fixture
def port():
    """Reserve a port that the kernel gives to no other socket: see `processes.free_port`."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((HOST, 0))
        yield kept.getsockname()[1]


@pytest.fixture(scope="module", autouse=True)
def _libuv_is_loaded():
    """Start a first server: libuv opens a signal pipe that stays for the life of the process."""
    TCPStore(HOST, 0, 1, is_master=True, timeout=timedelta(seconds=10))


@pytest.fixture(autouse=True)
def _no_descriptor_is_left():
    before = Counter(descriptors())
    yield
    if Counter(descriptors()) - before:  # Fewer may be left: threads of earlier tests may end at any time.
        gc.collect()  # A collection is slow, so it runs only if a traceback may hold a store.
        for thread in threading.enumerate():
            if thread.name == "aiocomms store":  # The thread ends when it has seen that the last rank has gone.
                thread.join(HANGS)
    assert not Counter(descriptors()) - before


def descriptors():
    """Return the target of each open descriptor, because the number of a closed one may be reused."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # The listing's own descriptor is closed by now.
            continue
    return sorted(links)


def listeners(port):
    """Return the addresses, as the kernel prints them, of the sockets that listen on a port."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                found.append(address)
    return found


CLIENT = """
import sys
from aiocomms.bootstrap.stores import connect_store
port, rank = int(sys.argv[1]), int(sys.argv[2])
store = connect_store("127.0.0.1", port, rank, 3, agent_store=False, timeout=30)
store.set(f"from {rank}", str(rank))
print(*(int(store.get(f"from {peer}")) for peer in range(3)))
store.set(f"done {rank}", "")
"""


@pytest.mark.real
def test_store_exchanges_keys_among_three_processes(port):
    command = [sys.executable, "-c", CLIENT, str(port)]
    root = Path(__file__).parents[3]
    clients = [subprocess.Popen([*command, str(rank)], cwd=root, stdout=subprocess.PIPE, text=True) for rank in (1, 2)]
    store = rank0(port, size=3)
    store.set("from 0", "0")
    assert [int(store.get(f"from {rank}")) for rank in (1, 2)] == [1, 2]
    store.wait(["done 1", "done 2"])
    assert [process.communicate(timeout=HANGS)[0] for process in clients] == ["0 1 2\n", "0 1 2\n"]


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        (HOST, ["0100007F"]),
        ("127.0.0.2", ["0200007F"]),
        pytest.param(
            "::1",
            ["00000000000000000000000001000000"],
            marks=pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1"),
        ),
    ],
)
def test_rank_0_listens_on_the_given_address_only(port, host, addresses):
    store = rank0(port, host)
    assert listeners(port) == addresses
    peer = client(port, host)
    peer.set("key", "value")
    assert store.get("key") == b"value"
    del peer, store
    assert listeners(port) == []


@pytest.mark.deterministic
def test_host_name_with_a_loopback_address_is_served_on_the_other_first(monkeypatch):
    addresses = [("127.0.1.1", PORT), ("192.0.2.77", PORT)]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(stores.socket, "getaddrinfo", lambda *_, **__: found)
    tried = []

    def create_server(address, **_):
        tried.append(address[0])
        raise OSError(errno.EADDRNOTAVAIL, "not here")

    monkeypatch.setattr(stores.socket, "create_server", create_server)
    with pytest.raises(ArgumentError, match="no address of this machine"):
        rank0(PORT, "node01")
    assert tried == ["192.0.2.77", "127.0.1.1"]


def test_client_waits_for_a_late_master(monkeypatch, port):
    knocked = threading.Event()
    knock = stores._knock  # Only the end of this call shows that an attempt is over.

    def observed(addresses, target, **how):
        outcome = knock(addresses, target, **how)
        knocked.set()
        return outcome

    monkeypatch.setattr(stores, "_knock", observed)
    with ThreadPoolExecutor() as threads:
        late = threads.submit(client, port)
        assert knocked.wait(PATIENCE)
        store = rank0(port)
        late.result().set("key", "value")
    assert store.get("key") == b"value"


def test_agent_store_is_joined_and_not_hosted_again(port):
    agent = TCPStore(HOST, port, 2, is_master=True, wait_for_workers=False)
    worker = connect_store(HOST, port, 0, 2, agent_store=True, timeout=HANGS)
    worker.set("key", "value")
    assert agent.get("key") == b"value"


def a_second_store_outlives_the_first(port):
    first, second = rank0(port), rank0(port)
    peer = client(port)
    assert listeners(port) == ["0100007F"]
    del first
    peer.set("key", "value")
    assert second.get("key") == b"value"
    third = rank0(port)
    del second
    assert third.get("key") == b"value"
    del third
    assert listeners(port) == []


def stores_are_opened_at_once(port):
    """Check that stores which threads open at once share a server."""
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(rank0, [port] * 4))
    together[0].set("key", "value")
    assert [store.get("key") for store in together] == [b"value"] * 4


def clients_outlive_the_reference_of_rank_0(port):
    """Check that the clients keep the server alive."""
    store = rank0(port)
    peer, another = client(port), client(port, rank=2, size=3)
    del store
    assert listeners(port) == []
    peer.set("key", "value")
    assert another.get("key") == b"value"
    store = rank0(port)
    assert store.get("key") == b"value"
    del peer, another, store  # The order matters: the last user waits for the end of the server's thread.


def a_second_address_is_refused(port):
    store = rank0(port)
    with pytest.raises(ArgumentError, match=rf"this process serves that port on {HOST} already"):
        rank0(port, "127.0.0.2")
    del store


def test_stores_of_rank_0_share_a_server_as_long_as_anybody_uses_it(port):
    a_second_store_outlives_the_first(port)
    stores_are_opened_at_once(port)
    clients_outlive_the_reference_of_rank_0(port)
    a_second_address_is_refused(port)


def a_name_is_resolved(port):
    """Check that the server listens only at the address of the name."""
    store = rank0(port, "localhost")
    assert set(listeners(port)) <= {"0100007F", "00000000000000000000000001000000"}
    client(port, "localhost").set("key", "value")
    assert store.get("key") == b"value"


def the_timeout_is_kept(port):
    assert rank0(port, timeout=7.5).timeout == timedelta(seconds=7.5)


def test_store_resolves_a_host_name_and_keeps_the_given_timeout(port):
    a_name_is_resolved(port)
    the_timeout_is_kept(port)


def it_listens_while_ranks_meet(port):
    """Check that the store listens again for each meeting."""
    store = rank0(port)
    with store.admitting():
        peer = client(port)
        with store.admitting():
            assert listeners(port) == ["0100007F"]
        assert listeners(port) == ["0100007F"]
    assert listeners(port) == []
    peer.set("key", "value")
    with store.admitting():
        assert client(port).get("key") == b"value"
    assert listeners(port) == []


def the_port_is_free_for_torch(port, caplog):
    """Check that connected ranks meet although torch has taken the port."""
    store = rank0(port)
    with store.admitting():
        peer = client(port)
    torchs = TCPStore(HOST, port, 2, is_master=True, multi_tenant=True, wait_for_workers=False)
    torchs.set("key", "torch's")
    with store.admitting():  # A rank that is connected already needs no port to meet.
        peer.set("key", "value")
        assert store.get("key") == b"value"
    assert "accepts no new connections" in caplog.text
    assert torchs.get("key") == b"torch's"


def test_store_listens_only_while_a_communicator_forms(port, caplog):
    it_listens_while_ranks_meet(port)
    the_port_is_free_for_torch(port, caplog)


def the_port_is_in_use(port):
    """Check that the error says what is wrong and which variable to set."""
    with (
        socket.create_server((HOST, port)),
        pytest.raises(ArgumentError, match="the port is in use: set MASTER_PORT") as caught,
    ):
        rank0(port)
    assert f"the store at MASTER_ADDR='{HOST}', MASTER_PORT={port}" in str(caught.value)
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, OSError)


def it_is_the_wrong_machine(port):
    """Check that the error says what is wrong and which variable to set."""
    with pytest.raises(ArgumentError, match="no address of this machine: set MASTER_ADDR") as caught:
        rank0(port, "198.51.100.7")  # This address is reserved for documentation.
    assert "198.51.100.7" in str(caught.value)


@pytest.mark.fault(35)
def test_rank_0_that_cannot_listen_is_refused_at_once(port):
    the_port_is_in_use(port)
    it_is_the_wrong_machine(port)


@pytest.mark.deterministic
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "::ffff:0.0.0.0"])
def test_wildcard_address_is_refused(host, rank):
    with pytest.raises(ArgumentError, match="every interface") as caught:
        connect_store(host, PORT, rank, 2, agent_store=False, timeout=HANGS)
    assert f"MASTER_ADDR={host!r}, MASTER_PORT={PORT}" in str(caught.value)


@pytest.mark.deterministic
def test_loopback_only_name_is_refused_when_ranks_are_on_other_hosts():
    with pytest.raises(ArgumentError, match=r"'localhost'.*would be at (127\.0\.0\.1|::1).*ranks are on other hosts"):
        connect_store("localhost", PORT, 0, 2, agent_store=False, elsewhere=True, timeout=HANGS)


def fails_after(timeout, error, call, *args):
    """Return the error message of a call that gives up after its timeout, or before it to avoid a longer pause."""
    with pytest.raises(error) as caught:
        call(*args, timeout=timeout)
    return str(caught.value)


def nobody_listens(port):
    """Check that the error says the address, the time and the cause."""
    message = fails_after(0.3, StoreLostError, client, port)
    assert f"the store at MASTER_ADDR='{HOST}', MASTER_PORT={port}" in message
    assert "within 0.3 s" in message
    assert "refused" in message


def it_is_silent(port):
    """Check that the error says that the time is up."""
    with socket.socket() as full, socket.socket() as taker:
        full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        full.bind((HOST, port))
        full.listen(0)
        taker.connect((HOST, port))  # The queue is full now, and the kernel drops further connections.
        message = fails_after(0.3, StoreLostError, client, port)
    assert "timed out" in message


def it_meets_itself(monkeypatch, port):
    """Check that a connection of the client to itself does not count as one to the master."""

    class Unlucky(socket.socket):
        def connect(self, address):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)  # The kernel may choose the same port.
            super().connect(address)

    monkeypatch.setattr(stores.socket, "socket", Unlucky)
    assert "refused" in fails_after(0.2, StoreLostError, client, port)


@pytest.mark.fault(35)
def test_client_without_a_master_that_answers_raises_store_lost_error(monkeypatch, port):
    nobody_listens(port)
    it_is_silent(port)
    it_meets_itself(monkeypatch, port)


def test_client_of_a_foreign_server_raises_protocol_error(port, capfd):
    def talk(server):
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            with connection:
                connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with ThreadPoolExecutor() as threads, socket.create_server((HOST, port)) as server:
        threads.submit(talk, server)
        try:
            with pytest.raises(ProtocolError, match=r"could not be opened: the process in .* sent what makes no sense"):
                client(port)
        finally:
            server.shutdown(socket.SHUT_RDWR)
    capfd.readouterr()  # This drops torch's stack traces.


@pytest.mark.deterministic
@pytest.mark.fault(35)
@pytest.mark.parametrize("call", [rank0, client])
def test_host_name_that_does_not_resolve_is_refused_at_the_deadline(monkeypatch, caplog, call):
    def getaddrinfo(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(stores.socket, "getaddrinfo", getaddrinfo)
    message = fails_after(0.7, ArgumentError, call, PORT, "no.such.invalid")
    assert f"MASTER_ADDR='no.such.invalid', MASTER_PORT={PORT}" in message
    assert "does not resolve" in message
    assert len(caplog.records) == 1


@pytest.mark.deterministic
def test_invalid_host_name_is_refused_at_once():
    with pytest.raises(ArgumentError, match="no valid host name: set MASTER_ADDR"):
        client(PORT, "a" * 64)


def as_another_user(call):
    """Return whether a process of another user makes a call without an error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setuid(65534)
            call()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.fault(94, transport="c10d")
@pytest.mark.fault(94, transport="ucx")
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_other_local_user_is_admitted_only_with_the_token(port, monkeypatch):
    def write():
        stranger.append(reach_store(HOST, port, 1, 20))
        stranger[0].set("forged", "value")

    stranger = []  # The list keeps the connection open until its process ends.
    store = rank0(port)
    assert not as_another_user(write)
    assert not store.check(["forged"])
    client(port).set("key", "value")
    assert store.get("key") == b"value"
    del store
    monkeypatch.setenv("AIOCOMMS_TOKEN", "a token of these tests")
    store = rank0(port)
    assert as_another_user(write)
    assert store.get("forged") == b"value"
    monkeypatch.setenv("AIOCOMMS_TOKEN", "another token of these tests")
    with pytest.raises(AuthError, match=r"the store .* could not be opened"):
        client(port)
    monkeypatch.delenv("AIOCOMMS_TOKEN")
    with pytest.raises(AuthError):
        client(port)


@pytest.mark.parametrize(
    "request_",
    [
        b"\xff" * 8,
        struct.pack("!I", 3) + b"abc",
        struct.pack("!I", 6) + b"\x91\xa4exec",
        struct.pack("!I", 8) + b"\x93\xa3add\xa1n\x01",  # torch raises IndexError, as the number is too large.
    ],
    ids=repr,
)
def test_client_with_a_malformed_request_is_disconnected(port, request_):
    store, peer, broken = rank0(port), client(port), client(port)
    store.set("n", "9" * 30)
    broken._connection.sendall(request_)
    assert broken._connection.recv(1) == b""
    peer.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.deterministic
def test_client_refuses_a_request_that_the_server_would_not_read():
    mine, server = socket.socketpair()
    store = JobStore("127.0.0.1", 1, mine, timeout=HANGS)
    with pytest.raises(DistStoreError, match=f"wanted at most {LONGEST}"):
        store.set("key", bytes(LONGEST))
    server.sendall(LENGTH.pack(1) + b"\xc0")  # the answer None
    store.set("key", "value")
    request = b"\x93\xa3set\xa3key\xc4\x05value"
    assert server.recv(2 * len(request)) == LENGTH.pack(len(request)) + request
    server.close()
