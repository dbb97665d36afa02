"""The parts of the c10d transport that need no other rank: its frames, and where it listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from aiocomms_c10d import bringup, transport, wire
from aiocomms_c10d.control import ControlConnection
from aiocomms_c10d.transport import C10dTransport
from aiocomms_c10d.wire import C10dHeader
from processes import HANGS
from torch import Tensor

from aiocomms.errors import ArgumentError, CommAbortedError, CommError, MismatchError, PeerDiedError, ProtocolError

pytestmark = pytest.mark.deterministic


def unpack(frame: Tensor) -> wire.C10dFrame:
    buffer = bytearray(wire.capacity(3))
    buffer[: frame.numel()] = bytes(frame.tolist())
    return wire.unpack(buffer, torch.frombuffer(buffer, dtype=torch.uint8))


def test_frame_round_trip_preserves_all_fields() -> None:
    payload = torch.arange(100, dtype=torch.uint8)
    header = C10dHeader(wire.CALL, channel=2, dtype=wire.CODES[torch.float16], tag=-(2**31), ident=2**62, nbytes=100)
    frame = unpack(wire.pack(header, b"all_reduce(...)", (1, -2), payload))
    assert frame.header == header._replace(text=15, sizes=2)
    assert frame.header.type is torch.float16
    assert (frame.text, frame.sizes) == (b"all_reduce(...)", (1, -2))
    assert torch.equal(frame.payload, payload)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"GET "),
        (4, b"\x63"),
        (5, b"\x63"),
        (7, b"\x63"),
        (16, b"\xff\xff\xff\xff"),
        (28, b"\xff" * 8),
        (28, b"\x7f" * 7 + b"\0"),
    ],
    ids=["magic", "version", "kind", "dtype", "lengths", "negative size", "huge size"],
)
def test_malformed_frame_raises_protocol_error(at: int, value: bytes) -> None:
    """Everything in it that is used is looked at first."""
    frame = wire.pack(C10dHeader(wire.EAGER, nbytes=8), payload=torch.zeros(8, dtype=torch.uint8))
    frame[at : at + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match=r"makes no sense|is of version 99 of c10d's frames"):
        unpack(frame)


@pytest.mark.parametrize(
    "error", [PeerDiedError("a", peer=2), MismatchError("b", peer=1), CommAbortedError("c", peer=0)], ids=repr
)
def test_abort_reason_keeps_its_class(error: CommError) -> None:
    told = wire.unpack_error(unpack(wire.pack_error(error, 1, 5)))
    assert (type(told), told.message, told.peer) == (type(error), error.message, error.peer)


def test_unknown_abort_reason_becomes_comm_aborted_error() -> None:
    told = wire.unpack_error(unpack(wire.pack_error(CommError("ö" * 5000), 1, -1)))
    assert type(told) is CommAbortedError
    assert told.peer == 1
    assert told.message == "ö" * (wire.TEXT // 2)  # the core says whose abort it is, and a frame takes so much


def said(host: str = "here/1", version: int = wire.VERSION) -> bytes:
    return f"{version}/{sys.byteorder} 0 1000 0 {host} localhost".encode()


def test_ranks_of_one_host_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOMMS_IFACE", "nonsense")
    assert bringup.listen_on([bringup.hello(adopt=False, left=1)] * 3, None) == "127.0.0.1"


def test_ranks_of_several_hosts_listen_on_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    hellos = [said("here/1"), said("there/1")]
    monkeypatch.setenv("AIOCOMMS_IFACE", "lo")
    with pytest.raises(ArgumentError, match=r"several hosts, and this job has no token.*AIOCOMMS_TOKEN"):
        bringup.listen_on(hellos, None)
    monkeypatch.setenv("AIOCOMMS_TOKEN", "a token of this test")
    assert bringup.listen_on(hellos, None) == "127.0.0.1"
    monkeypatch.setenv("AIOCOMMS_IFACE", "nonsense")
    with pytest.raises(ArgumentError, match=r"AIOCOMMS_IFACE is 'nonsense'.* there are: .*lo"):
        bringup.listen_on(hellos, None)


@pytest.mark.real
def test_ranks_of_several_hosts_listen_on_the_route_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCOMMS_IFACE", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("AIOCOMMS_ALLOW_UNAUTHENTICATED", "1")
    hellos = [said("here/1"), said("there/1")]
    with pytest.raises(ArgumentError, match="set AIOCOMMS_IFACE"):
        bringup.listen_on(hellos, None)  # loopback is no way to another host
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no route to others")
        mine = probe.getsockname()[0]
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert bringup.listen_on(hellos, None) == mine


def test_ranks_of_two_versions_raise_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="rank 1 speaks version 77"):
        bringup.listen_on([said(), said(version=77)], None)


def test_group_is_poisoned_even_if_no_reason_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = Mock()
    monkeypatch.setattr(bringup, "poison", poisoned)
    alone = C10dTransport(0, 1, None, None)
    alone._gloo, alone._abort_error = Mock(), CommError("\udcff")
    with pytest.raises(UnicodeEncodeError):
        alone._stop()
    poisoned.assert_called_once_with(alone._gloo)
    alone._inbox.close()


@pytest.mark.parametrize(
    ("begin", "error", "match"),
    [
        (Mock(side_effect=RuntimeError("none\nhere")), ArgumentError, "cannot gather .* on the cpu: none$"),
        (lambda *_: Mock(wait=Mock(side_effect=RuntimeError("closed"))), PeerDiedError, "a rank has died .*: closed$"),
    ],
    ids=["refused", "broken off"],
)
def test_error_of_an_adopted_group_says_whether_the_group_or_a_rank_is_at_fault(
    begin: Callable[..., object], error: type[CommError], match: str
) -> None:
    group = Mock(rank=lambda: 1, size=lambda: 2, allgather=begin)
    with pytest.raises(error, match=match):
        bringup.store_over(group, 1)


def test_adopted_group_is_free_again_after_a_failed_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def meet(*_: object) -> tuple[Mock, bool]:
        return Mock(), True

    monkeypatch.setattr(C10dTransport, "_bring_up", meet)  # gloo would need a second rank
    monkeypatch.setattr(C10dTransport, "adopts", lambda _: True)
    monkeypatch.setattr(ControlConnection, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(CommError, match="no thread can be started"):
        asyncio.run(C10dTransport.open(Mock(rank=0, size=2), {"adopt": object()}))
    assert not transport._adopted_groups


@pytest.mark.fault(1, transport="c10d")
def test_group_whose_destructor_hangs_does_not_delay_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its destructor waits for gloo's threads, of which one waits for a send that gloo has lost."""
    released, ended = threading.Event(), threading.Event()

    class Group:
        def __del__(self) -> None:
            released.wait(HANGS)
            ended.set()

    monkeypatch.setattr(transport, "_RELEASE", 0.01)
    transport._let_go([Group()])
    assert [record.getMessage()[:23] for record in caplog.records] == ["gloo waits without end "]
    released.set()
    assert ended.wait(HANGS)
    monkeypatch.setattr(transport, "_RELEASE", HANGS)
    transport._let_go([Group()])
    assert len(caplog.records) == 1
