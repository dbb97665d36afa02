"""Faults of a rank's environment are named while the communicator forms, on all ranks; and no rank is dead."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aiocomms_ucx.circumstances import usable_cores
from processes import Rank, Run, exchange, listening, runner

from aiocomms.errors import ArgumentError, CommError, PeerDiedError

pytestmark = pytest.mark.deterministic

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="changing capabilities and mounts needs root")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Run]:
    with runner("ucx", tmp_path) as run:
        yield run


async def refused(place: Rank) -> str:
    with pytest.raises(CommError) as caught:
        await place.open(timeout=30)
    assert type(caught.value) is CommError, repr(caught.value)
    return caught.value.message


async def works(place: Rank) -> None:
    """Messages of all sizes on both sides of UCX's and the engine's thresholds, and each kind of op."""
    async with place.open(timeout=30) as comm:
        for count in (0, 1, 100, 3000, 2**18, 2**20):
            got = torch.zeros(count)
            sending = comm.send(torch.full((count,), 3.0), 1 - place.rank)
            await comm.recv(got, 1 - place.rank)
            await sending
            assert bool((got == 3).all())
        await exchange(comm, 100)
        assert all(address.startswith("0100007F") for address in listening()[0]), "another host reaches it"


class Setting:
    """Sets variables on some ranks."""

    def __init__(self, *ranks: int, **variables: str) -> None:
        self.ranks, self.variables = ranks, variables

    def __call__(self, rank: int) -> None:
        if rank in self.ranks:
            os.environ.update(self.variables)


@pytest.mark.real
@pytest.mark.fault(89, transport="ucx")
@pytest.mark.parametrize("threshold", ["0", "1", "inf"])
@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=str)
def test_ops_are_right_for_any_ucx_rndv_thresh(ranks: Run, who: tuple[int, ...], threshold: str) -> None:
    ranks(2, works, before=Setting(*who, UCX_RNDV_THRESH=threshold))


@pytest.mark.real
@pytest.mark.fault(89, transport="ucx")
def test_tcp_on_one_host_works_without_a_token(ranks: Run) -> None:
    ranks(2, works, before=Setting(0, 1, UCX_TLS="tcp,self"))


@pytest.mark.real
@pytest.mark.fault(89, transport="ucx")
def test_tcp_on_one_host_by_a_public_interface_needs_a_token(ranks: Run) -> None:
    messages = ranks(2, needs_a_token, before=Setting(0, 1, UCX_TLS="tcp", UCX_NET_DEVICES="eth0"))
    assert all("this job has no token" in message for message in messages), messages


async def needs_a_token(place: Rank) -> str:
    with pytest.raises(CommError) as caught:
        await place.open(timeout=30)
    return caught.value.message


@pytest.mark.real
@pytest.mark.fault(89, transport="ucx")
@pytest.mark.parametrize(("name", "value"), [("UCX_TLS", "nonsense"), ("UCX_RNDV_THRESH", "banana")])
def test_invalid_ucx_variable_of_one_rank_is_named_on_all(ranks: Run, name: str, value: str) -> None:
    for message in ranks(2, refused, before=Setting(1, **{name: value})):
        assert message.startswith("rank 1 cannot open UCX: "), message
        assert f"{name}={value}" in message


def few_descriptors(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))


@pytest.mark.real
@pytest.mark.fault(89, transport="ucx")
def test_descriptor_limit_of_one_rank_is_named_on_all(ranks: Run) -> None:
    for message in ranks(2, refused, before=few_descriptors):
        assert "rank 1" in message
        assert "RLIMIT_NOFILE 24" in message


@pytest.mark.real
@pytest.mark.fault(88, transport="ucx")
@pytest.mark.parametrize("theirs", ["tcp,self", "self"])
def test_ucx_tls_without_a_common_transport_is_refused_on_all(ranks: Run, theirs: str) -> None:
    for message in ranks(2, refused, before=Setting(1, UCX_TLS=theirs)):
        assert "could not send a message of 8 bytes to rank" in message
        assert f"rank 1 has UCX_TLS={theirs}" in message


def without_capabilities(rank: int) -> None:
    """Root may open everybody's memory, dumpable or not."""
    libc = ctypes.CDLL(None)
    assert libc.capset(struct.pack("II", 0x20080522, 0), bytes(24)) == 0


def first_not_dumpable(rank: int) -> None:
    without_capabilities(rank)
    if rank == 0:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def second_not_dumpable(rank: int) -> None:
    first_not_dumpable(1 - rank)


@pytest.mark.real
@ROOT
@pytest.mark.fault(88, transport="ucx")
@pytest.mark.parametrize("before", [first_not_dumpable, second_not_dumpable])
def test_rank_that_is_not_dumpable_is_named_on_all(ranks: Run, before: object) -> None:
    who = 0 if before is first_not_dumpable else 1
    for message in ranks(2, refused, before=before):
        assert f"rank {1 - who} may not open the shared memory of rank {who}" in message
        assert f"rank {who} has PR_SET_DUMPABLE 0" in message


def shared_memory(size: bytes) -> None:
    """Get a /dev/shm of one's own."""
    libc = ctypes.CDLL(None)
    new_mounts, recursive_and_private = 0x20000, 0x44000
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(b"none", b"/", None, recursive_and_private, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=" + size) == 0


def little_shared_memory(rank: int) -> None:
    if rank == 1:
        shared_memory(b"64k")


def enough_shared_memory(rank: int) -> None:
    shared_memory(b"5m")


@pytest.mark.real
@ROOT
@pytest.mark.fault(88, transport="ucx")
def test_too_little_shared_memory_on_one_rank_is_named_on_all(ranks: Run) -> None:
    for message in ranks(2, refused, before=little_shared_memory):
        assert "rank 1 cannot open UCX" in message
        assert "65536 bytes left in /dev/shm" in message


@pytest.mark.search
@pytest.mark.real
@ROOT
@pytest.mark.fault(88, transport="ucx")
def test_five_mebibytes_of_shared_memory_for_each_rank_are_enough(ranks: Run) -> None:
    """UCX would want 16, and crashed where others took them while it opened."""
    ranks(2, works, before=enough_shared_memory)


@pytest.mark.fault(88, transport="ucx")
def test_partners_of_ranks_are_mutual_and_few() -> None:
    from aiocomms_ucx.meeting import _partners

    for size in (2, 3, 16, 17, 100, 1000):
        partners = [_partners(rank, size) for rank in range(size)]
        assert all(rank in partners[peer] for rank in range(size) for peer in partners[rank])
        assert all(len(some) <= 2 * size.bit_length() or size <= 16 for some in partners)


@pytest.mark.fault(87, transport="ucx")
def test_more_than_2048_ranks_of_one_host_are_refused() -> None:
    from aiocomms_ucx.meeting import check_crowd

    check_crowd(["a"] * 2048 + ["b"] * 2048)
    for count in (2049, 16385):
        with pytest.raises(ArgumentError, match=rf"^{count} ranks are on one host \(b\), .* at most 2048 there"):
            check_crowd(["a"] * 3 + ["b"] * count)


def test_unreachable_local_process_that_lives_is_not_called_dead() -> None:
    """A process of this host that lives is never called dead, whatever UCX says."""
    from aiocomms_ucx.status import BROKEN, error_of

    from aiocomms import ops

    op = ops.Send(torch.zeros(1), 1)
    for status in (3, 24, 25, 80):
        assert isinstance(error_of(op, BROKEN, status, 0, 0, 2), PeerDiedError)
        assert type(error_of(op, BROKEN, status, 0, 0, 2, lives=True)) is CommError


def test_usable_cores_respects_the_cgroup_cpu_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that the process's cgroup and those around it allow, and one core at least."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 5, 3})
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/elsewhere\n0::/pod/container\n")
    pod = tmp_path / "sys/pod"
    (pod / "container").mkdir(parents=True)
    cores = lambda: usable_cores(tmp_path / "sys", own)  # noqa: E731
    assert cores() == [2, 3, 5, 7], "nothing limits it"
    (pod / "cpu.max").write_text("350000 100000\n")
    assert cores() == [2, 3, 5]
    (pod / "container/cpu.max").write_text("max 100000\n")
    assert cores() == [2, 3, 5]
    (pod / "container/cpu.max").write_text("20000 100000\n")
    assert cores() == [2]
    own.write_text("1:cpu:/pod/container\n")
    assert cores() == [2, 3, 5, 7], "a cgroup of the first version has no cpu.max"
    assert usable_cores(tmp_path / "sys", tmp_path / "none") == [2, 3, 5, 7]
