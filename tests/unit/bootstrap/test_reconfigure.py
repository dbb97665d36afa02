"""Reconfiguration after a failed reconfiguration, which must not prevent a later one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch
from concurrency import new_store, run_on, together
from processes import HANGS, free_port
from torch.distributed import DistNetworkError, HashStore, Store

import aiocomms
from aiocomms.bootstrap import newcomers, recovery
from aiocomms.bootstrap.board import Board
from aiocomms.bootstrap.forming import given_up, kept
from aiocomms.bootstrap.meeting import Meeting
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.errors import CommError, CommTimeoutError, MismatchError, PeerDiedError
from aiocomms.lowlevel.auth import Seal
from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.stores import serve_store
from aiocomms.lowlevel.waker import Waker
from aiocomms.progress.driver import LoopDriver
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities

pytestmark = pytest.mark.real

SHORT = 1.0
"""The timeout in seconds of calls that cannot succeed."""
LONG = 4.0
"""The timeout in seconds of calls in virtual time that make a second attempt."""


@pytest.fixture(params=["local", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@asynccontextmanager
async def world(transport: str, store: Store, size: int) -> AsyncIterator[list[aiocomms.Communicator]]:
    async def one(rank: int) -> aiocomms.Communicator:
        return await aiocomms.new_comm(transport, store=store, rank=rank, size=size)

    comms = await together(*(lambda rank=rank: one(rank) for rank in range(size)))
    try:
        yield comms
    finally:
        await together(*(comm.aclose for comm in comms))


async def in_vain(comm: aiocomms.Communicator, *, timeout: float = SHORT, **how: Any) -> CommError:
    """Reconfigure with an expected failure, check that the communicator is unchanged, and return the error."""
    with pytest.raises(CommError) as caught:
        await comm.reconfigure(timeout=timeout, **how)
    assert not comm.closed
    assert not comm.aborted
    return caught.value


async def succeed(comms: list[aiocomms.Communicator], **how: Any) -> None:
    """Reconfigure all communicators, and use the new ones."""
    new = await together(*(lambda comm=comm: comm.reconfigure(**how) for comm in comms))
    try:
        sums = await together(*(lambda comm=comm: comm.all_reduce(torch.ones(1)) for comm in new))
        assert [each.item() for each in sums] == [len(comms)] * len(comms)
    finally:
        await together(*(comm.aclose for comm in new))


def test_reconfigure_succeeds_after_an_invited_newcomer_died(transport: str, monkeypatch: pytest.MonkeyPatch):
    claim = newcomers.Claims.claim

    def die(self: newcomers.Claims, *args: Any) -> None:
        claim(self, *args)
        raise CommError("the newcomer dies")

    async def main() -> None:
        store = HashStore()
        async with world(transport, store, 2) as comms:

            async def newcomer() -> None:
                with pytest.raises(CommError, match="the newcomer dies"):
                    await aiocomms.new_comm(transport, store=store, rank=2, size=3, join=True)

            with monkeypatch.context() as patch:
                patch.setattr(newcomers.Claims, "claim", die)
                await together(newcomer, *(lambda comm=comm: in_vain(comm, size=3) for comm in comms))
            await succeed(comms)

    run_on("asyncio", main)


@pytest.mark.deterministic
def test_rank_whose_reconfigure_timed_out_does_not_count_as_present(transport: str):
    """All three ranks meet after two of them have timed out."""

    async def main() -> None:
        async with world(transport, HashStore(), 3) as comms:
            for comm, absent in zip(comms, ([1, 2], [0, 2]), strict=False):
                error = await in_vain(comm, ranks=[0, 1, 2])
                assert isinstance(error, CommTimeoutError)
                assert f"ranks {absent} had not joined" in str(error)
            await succeed(comms, ranks=[0, 1, 2])

    run_on("asyncio", main)


@pytest.mark.deterministic
def test_look_for_newcomers_ends_after_some_free_ranks():
    """The look for a very large size would never end."""

    async def main() -> None:
        async with local_world(1) as (comm,):
            error = await in_vain(comm, size=1000)
            assert isinstance(error, CommTimeoutError)
            assert error.late == tuple(range(1, 17))

    run_on("simulated", main)


@pytest.mark.deterministic
def test_error_of_an_attempt_names_ranks_of_the_old_communicator(monkeypatch: pytest.MonkeyPatch):
    dead: set[int] = set()

    async def die(rendezvous: StoreRendezvous, opening: Any, missing: Any) -> None:
        opening.close()
        await anyio.sleep(rendezvous.left())  # There is no time for another attempt.
        dead.add(2)
        raise missing()

    async def main() -> None:
        async with local_world(3) as (_, *comms):
            monkeypatch.setattr(recovery, "formed", die)
            monkeypatch.setattr(Meeting, "dead", lambda self, rank: rank in dead)
            for error in await together(*(lambda comm=comm: in_vain(comm, ranks=[1, 2]) for comm in comms)):
                assert (error.comm, error.peer) == ("world", 2)
                assert "rank 1 has died or was cut off; these are ranks [2] of the old communicator" in str(error)

    run_on("simulated", main)


@pytest.mark.deterministic
@pytest.mark.parametrize("odd", [1, 2])
def test_ranks_that_wait_are_told_of_a_mismatch(odd: int):
    """Rank 1 reconfigures without ``size``, or the newcomer has another size."""

    async def main() -> None:
        store = new_store()

        async def newcomer() -> CommError:
            size = 4 if odd == 2 else 3
            with pytest.raises(CommError) as caught:
                await aiocomms.new_comm("local", store=store, rank=2, size=size, timeout=LONG, join=True)
            return caught.value

        async with world("local", store, 2) as (one, two):
            errors = await together(
                lambda: in_vain(one, size=3, timeout=LONG),
                lambda: in_vain(two, size=None if odd == 1 else 3, timeout=LONG),
                newcomer,
            )
        mismatch = errors.pop(odd)
        assert isinstance(mismatch, MismatchError)
        for error in errors:
            assert isinstance(error, CommTimeoutError)
            assert f"rank {odd} could not form the communicator: {mismatch.message}" in str(error)

    run_on("simulated", main)


class Dying:
    """A transport that finds out in ``progress`` that the other rank has died."""

    capabilities = Capabilities(ops=frozenset())
    early_failure: CommError | None = None

    def __init__(self) -> None:
        self._waker = Waker()
        self._waker.wake()
        self.fileno = self._waker.fileno

    def progress(self) -> bool:
        self._waker.clear()
        self.early_failure = PeerDiedError("rank 1 has died", peer=1)
        return False

    async def aclose(self) -> None:
        self._waker.close()


@pytest.mark.deterministic
def test_rank_that_has_formed_its_part_does_not_wait_for_a_dead_rank():
    """The driver serves a transport once, although it carries two families."""

    async def main() -> None:
        transport: Any = Dying()
        rendezvous = StoreRendezvous(
            HashStore(), 0, 2, name="world@2", device=torch.device("cpu"), timeout=HANGS, seal=Seal(None, "world")
        )
        assert not await kept(rendezvous, {"p2p": transport, "rma": transport})
        failure = given_up(rendezvous)
        assert failure is not None
        assert "ranks [1] could not" in failure.message
        assert not LoopDriver.current()._watched

    run_on("asyncio", main)


def test_unreachable_address_of_an_earlier_meeting_is_dropped():
    async def main() -> None:
        port = free_port()
        async with world("ucx", HashStore(), 2) as comms:
            for comm, teller in zip(comms, (1, 0), strict=True):
                comm._core.notes.places[teller] = f"127.0.0.1 {port}".encode()
            await succeed(comms)

    run_on("asyncio", main)


@pytest.mark.parametrize("moment", ["decide", "form"])
def test_reconfigure_succeeds_when_the_store_dies_meanwhile(moment: str, monkeypatch: pytest.MonkeyPatch):
    """The store dies when the ranks are about to decide, or about to form the new communicator."""
    store, _ = serve_store("127.0.0.1", HANGS)
    of, name = (Board, "decide") if moment == "decide" else (recovery.Recovery, "_form")
    alive, ask, refused = getattr(of, name), JobStore._ask, []

    def refuse(self: JobStore, what: str, *args: Any) -> Any:
        if self is store:
            refused.append(what)
            raise DistNetworkError("the server is dead")
        return ask(self, what, *args)

    def die(self: Any, *args: Any) -> Any:
        monkeypatch.setattr(of, name, alive)
        monkeypatch.setattr(JobStore, "_ask", refuse)
        return alive(self, *args)

    async def main() -> None:
        async with world("ucx", store, 3) as comms:
            monkeypatch.setattr(of, name, die)
            await succeed(comms, timeout=HANGS)
            assert refused

    run_on("asyncio", main)
