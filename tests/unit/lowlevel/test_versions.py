"""Versions of all data between ranks: they are compared before anything else is decoded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import msgspec
import pytest
import torch
from aiocomms_c10d import wire as c10d_wire
from aiocomms_nccl import wire as nccl_wire
from aiocomms_ucx import bringup as ucx_bringup
from aiocomms_ucx import wire as ucx_wire
from processes import PATIENCE
from torch.distributed import HashStore

from aiocomms.bootstrap import generations
from aiocomms.bootstrap.records import framed
from aiocomms.communicator import parcels
from aiocomms.errors import AuthError, CommTimeoutError, ProtocolError
from aiocomms.lowlevel import Dialect, Gate, gate, handshake
from aiocomms.lowlevel.auth import RENDEZVOUS, Seal

pytestmark = pytest.mark.deterministic

OTHER = 4711
"""The version of the other rank, whose records also have another shape."""
SHORT = msgspec.msgpack.encode([1])


def of_other_version(dialect: Dialect) -> bytes:
    return dialect._replace(version=OTHER).head


def c10d_frame() -> bytes:
    frame = bytearray(c10d_wire.pack(c10d_wire.C10dHeader(c10d_wire.BYE)).tolist())
    frame[4] = OTHER & 0xFF
    return bytes(frame)


def read_c10d(data: bytes) -> object:
    buffer = bytearray(data)
    return c10d_wire.unpack(buffer, torch.frombuffer(buffer, dtype=torch.uint8))


def read_object(data: bytes) -> object:
    return parcels.ArrivingObject(data.ljust(parcels.HEADER_BYTES, b"\0"), torch.device("cpu"))


PARSERS: dict[str, tuple[Callable[[bytes], object], bytes, int, int]] = {
    "a record of the store": (
        lambda data: Seal(None).verify("k", 1, data), of_other_version(RENDEZVOUS) + SHORT, RENDEZVOUS.version, OTHER,
    ),
    "a signed record of the store": (
        lambda data: Seal(b"token").verify("k", 1, data), of_other_version(RENDEZVOUS) + SHORT, RENDEZVOUS.version,
        OTHER,
    ),
    "a hello of ucx": (
        lambda data: ucx_bringup._hello(1, data), of_other_version(ucx_wire.dialect()) + SHORT, ucx_wire.VERSION, OTHER,
    ),
    "a hello of nccl": (
        lambda data: nccl_wire.dialect().check(data, "rank 1", 1), of_other_version(nccl_wire.dialect()) + SHORT,
        nccl_wire.VERSION, OTHER,
    ),
    "a frame of c10d": (read_c10d, c10d_frame(), c10d_wire.VERSION, OTHER & 0xFF),
    "an object": (read_object, of_other_version(parcels._OBJECTS) + b"\xff" * 40, parcels._OBJECTS.version, OTHER),
}  # fmt: skip


@pytest.mark.fault(105)
@pytest.mark.parametrize(("read", "data", "ours", "theirs"), PARSERS.values(), ids=PARSERS)
def test_version_mismatch_names_both_versions(
    read: Callable[[bytes], object], data: bytes, ours: int, theirs: int
) -> None:
    with pytest.raises(ProtocolError, match=rf"version {theirs} .*version {ours}\b"):
        read(data)


@pytest.mark.fault(105)
@pytest.mark.parametrize("token", [None, b"a token of this test"])
def test_record_of_another_version_fails_authentication_with_a_token(token: bytes | None) -> None:
    with pytest.raises(ProtocolError) as caught:
        Seal(token).verify("k", 1, of_other_version(RENDEZVOUS))
    assert isinstance(caught.value, AuthError) == (token is not None)


@pytest.mark.fault(105)
def test_message_without_a_version_is_quoted_in_the_error() -> None:
    with pytest.raises(ProtocolError, match=r"^rank 1 sent what makes no sense: it begins with 474554202f20") as caught:
        Dialect("a test", b"test", 1).check(b"GET / HTTP/1.1", "rank 1", 1)
    assert caught.value.peer == 1


# ------------------------------------------------------------------------------------------------- where ranks meet


def arrive(store: HashStore, rank: int) -> BaseException | str:
    try:
        return generations.Arrival(store, rank, 2, Seal(None, "world")).meet(threading.Event())
    except ProtocolError as error:
        return error


def record(text: str) -> bytes:
    """Return a record that a rank of another version has written, without a token."""
    return RENDEZVOUS._replace(version=OTHER).head + b"\x01" + text.encode()


@pytest.mark.fault(105)
@pytest.mark.parametrize("other", range(2))
def test_rank_of_another_version_raises_protocol_error_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    """The other process has seen this rank, so it belongs to this run, and it has arrived."""
    store, mine, theirs = HashStore(), "0" * 16, "1" * 16
    monkeypatch.setattr(generations.secrets, "token_hex", lambda _: mine)
    store.set(f"came/{other}", record(theirs if other else f"{theirs} digest "))
    store.set(f"met/{theirs}", theirs + mine)
    store.append(f"here/2/{mine}", framed(1, record(theirs)))  # type: ignore[attr-defined]  # torch has it
    error = arrive(store, 1 - other)
    assert isinstance(error, ProtocolError)
    ours = RENDEZVOUS.version
    assert f"rank {other} speaks version {OTHER} of the rendezvous, this rank version {ours}" in error.message
    assert error.peer == other


@pytest.mark.fault(105)
@pytest.mark.parametrize("other", range(2))
def test_record_of_a_gone_process_of_another_version_is_ignored(other: int) -> None:
    """The other process has not seen the present rank."""
    store, theirs = HashStore(), "1" * 16
    store.set(f"came/{other}", record(theirs if other else f"{theirs} digest "))
    store.set(f"met/{theirs}", theirs + "2" * 16)
    store.append(f"here/2/{theirs}", framed(1, record("2" * 16)))  # type: ignore[attr-defined]  # torch has it
    results: list[BaseException | str] = []
    threads = [threading.Thread(target=lambda r=r: results.append(arrive(store, r))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == 2
    assert results[0] == results[1]


# ---------------------------------------------------------------------------------------------------- the handshake


@pytest.fixture
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def handshakes(monkeypatch: pytest.MonkeyPatch, dialects: dict[int, Dialect], listener: socket.socket) -> list[object]:
    """Return the results of two ranks at a gate each, each of which speaks its own version."""
    results: list[object] = [None, None]
    local, connected = threading.local(), threading.Event()

    class Speaker:
        def __getattr__(self, name: str) -> object:
            return getattr(dialects[local.rank], name)

    for module in (gate, handshake):
        monkeypatch.setattr(module, "HANDSHAKE", Speaker())

    def connect() -> socket.socket:
        connection = socket.create_connection(listener.getsockname())
        connected.set()
        return connection

    def run(rank: int) -> None:
        local.rank = rank
        own = Gate(rank, b"key", {0: connect} if rank else {}, 2)
        try:
            assert rank or connected.wait(PATIENCE)
            results[rank] = own.run([] if rank else [listener], PATIENCE if rank else 1.0)
        except (ProtocolError, CommTimeoutError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


@pytest.mark.real
@pytest.mark.fault(105)
def test_handshake_between_versions_names_both_versions(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    """The rank that connects fails at once; the one that accepts does not know that the other is a rank."""
    ours = handshake.HANDSHAKE
    accepts, connects = handshakes(monkeypatch, {0: ours, 1: ours._replace(version=OTHER)}, listener)
    assert isinstance(connects, ProtocolError)
    assert f"rank 0 speaks version {ours.version} of the handshake, this rank version {OTHER}" in str(connects)
    assert isinstance(accepts, CommTimeoutError)
    assert f"a process that connected speaks version {OTHER} of the handshake" in str(accepts)
