"""Faults of a rank's environment are named while the communicator forms, on all ranks; and no rank is dead."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from aiocomms_ucx.circumstances import usable_cores
from processes import Rank, Run, exchange, in_turn, listening, runner

from aiocomms.errors import ArgumentError, CommAbortedError, CommError, PeerDiedError

pytestmark = pytest.mark.deterministic

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="changing capabilities and mounts needs root")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Run]:
    with runner("ucx", tmp_path) as run:
        yield run


async def refused(place: Rank) -> str:
    with pytest.raises(CommError) as caught:
        await place.open(timeout=30)
    # The other rank hears of it in an exchange, or that this one has given up.
    assert type(caught.value) in (CommError, CommAbortedError), repr(caught.value)
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


Change = contextlib.AbstractContextManager[Any]


def variables(place: Rank, *ranks: int, **more: str) -> Change:
    """Set variables on some ranks."""
    return mock.patch.dict(os.environ, more if place.rank in ranks else {})


async def work_with(place: Rank, ranks: tuple[int, ...], more: dict[str, str]) -> None:
    """Run rightly with these variables on some ranks."""
    with variables(place, *ranks, **more):
        await works(place)


THRESHOLDS = [(who, {"UCX_RNDV_THRESH": value}) for who in ((0, 1), (1,)) for value in ("0", "1", "inf")]


@pytest.mark.real
@pytest.mark.fault(89, transport="ucx")
def test_ops_are_right_for_any_ucx_rndv_thresh_and_over_tcp_on_one_host(ranks: Run) -> None:
    """TCP on the loopback interface needs no token."""
    settings = [*THRESHOLDS, ((0, 1), {"UCX_TLS": "tcp,self"})]
    ranks(2, in_turn, *((work_with, *setting) for setting in settings))


async def refuse_with(place: Rank, ranks: tuple[int, ...], more: dict[str, str], *words: str) -> None:
    """All ranks are told these words about the variables of some."""
    with variables(place, *ranks, **more):
        told(await refused(place), *words)


def told(message: str, *words: str) -> None:
    for word in words:
        assert word in message, message


async def refuse_a_public_interface(place: Rank) -> None:
    """Other hosts reach it, and there is no token."""
    with variables(place, 0, 1, UCX_TLS="tcp", UCX_NET_DEVICES="eth0"), pytest.raises(CommError) as caught:
        await place.open(timeout=30)
    told(caught.value.message, "this job has no token")


async def refuse_few_descriptors(place: Rank) -> None:
    """Rank 1 may open 24."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if place.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))
    told(await refused(place), "rank 1", "RLIMIT_NOFILE 24")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


INVALID = [("UCX_TLS", "nonsense"), ("UCX_RNDV_THRESH", "banana")]
"""Values that UCX does not know."""
NOT_COMMON = ("tcp,self", "self")
"""Transports of one rank that the other one does not choose, or has not."""


@pytest.mark.real
@pytest.mark.fault(88, 89, transport="ucx")
def test_unusable_variables_and_descriptor_limit_of_one_rank_are_named_on_all(ranks: Run) -> None:
    """Afterwards the same processes work."""
    refusals: list[Any] = [refuse_a_public_interface, refuse_few_descriptors]
    for name, value in INVALID:
        refusals.append((refuse_with, (1,), {name: value}, "rank 1 cannot open UCX: ", f"{name}={value}"))
    for theirs in NOT_COMMON:
        words = ("could not send a message of 8 bytes to rank", f"rank 1 has UCX_TLS={theirs}")
        refusals.append((refuse_with, (1,), {"UCX_TLS": theirs}, *words))
    ranks(2, in_turn, *refusals, works)


async def refuse_one_not_dumpable(place: Rank, who: int) -> None:
    """Root may open everybody's memory, dumpable or not: so it goes without its capabilities from here on."""
    set_dumpable, libc = 4, ctypes.CDLL(None)
    assert libc.capset(struct.pack("II", 0x20080522, 0), bytes(24)) == 0
    libc.prctl(set_dumpable, int(place.rank != who), 0, 0, 0)
    words = (f"rank {1 - who} may not open the shared memory of rank {who}", f"rank {who} has PR_SET_DUMPABLE 0")
    told(await refused(place), *words)


def shared_memory(size: bytes) -> None:
    """Get a /dev/shm of one's own."""
    libc = ctypes.CDLL(None)
    new_mounts, recursive_and_private = 0x20000, 0x44000
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(b"none", b"/", None, recursive_and_private, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=" + size) == 0


async def refuse_little_shared_memory(place: Rank) -> None:
    """Rank 1 has 64 KiB."""
    told(await refused(place), "rank 1 cannot open UCX", "65536 bytes left in /dev/shm")
    if place.rank == 1:
        assert ctypes.CDLL(None).umount2(b"/dev/shm", 0) == 0


def little_shared_memory(rank: int) -> None:
    """Act before any thread is there: the others would keep their mounts."""
    if rank == 1:
        shared_memory(b"64k")


def enough_shared_memory(rank: int) -> None:
    shared_memory(b"5m")


@pytest.mark.real
@ROOT
@pytest.mark.fault(88, transport="ucx")
def test_too_little_or_unreadable_shared_memory_of_one_rank_is_named_on_all(ranks: Run) -> None:
    undumpable = [(refuse_one_not_dumpable, who) for who in (0, 1)]
    ranks(2, in_turn, refuse_little_shared_memory, works, *undumpable, before=little_shared_memory)


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
