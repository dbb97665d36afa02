"""Groups of simulated ranks that give up, call again, die or close while the group forms."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from aiocomms_net import NetTransport
from repeating import repeated

import aiocomms
from aiocomms.errors import ArgumentError, CommAbortedError, CommClosedError, CommError, CommTimeoutError, PeerDiedError
from aiocomms.testing import here, simulate
from aiocomms.transport import Rendezvous

pytestmark = pytest.mark.deterministic

MEMBERS = [0, 1, 2]
PATIENCE = 30.0
"""The deadline of calls that must form the group."""


async def give_up(comm: aiocomms.Communicator) -> aiocomms.Communicator | None:
    """Call with a short deadline, or cancel the call, at a random time; return the group if it forms before that."""
    seconds = random.choice([0.001, 0.005, 0.025, 0.1]) * random.random() + 0.0005
    late = random.random() < 0.5
    try:
        async with asyncio.timeout(None if late else seconds):
            return await comm.create_group(MEMBERS, "g", timeout=seconds if late else PATIENCE)
    except PeerDiedError:
        raise  # Every rank lives.
    except (CommAbortedError, TimeoutError):
        return None


async def insist(comm: aiocomms.Communicator) -> None:
    """Call again after some calls that are given up, until the group has formed on all members."""
    hasty = random.choice([0, 1, 1, 2, 3])
    while True:
        await asyncio.sleep(0.01 * random.random())
        hasty -= 1
        group = await (give_up(comm) if hasty >= 0 else comm.create_group(MEMBERS, "g", timeout=PATIENCE))
        if group is None:
            continue
        try:
            await group.barrier(timeout=PATIENCE)
            return
        except CommError:  # A member has given up at the last moment.
            continue
        finally:
            await group.aclose()


async def form_at_last() -> None:
    async with aiocomms.new_comm() as comm:
        for _ in range(4):
            await insist(comm)
            await comm.barrier()


@pytest.mark.parametrize("seed", [0, 1, 7, 17, 31, 33])
def test_members_meet_after_calls_that_any_of_them_gave_up(seed: int) -> None:
    history = repeated(form_at_last, 3, seed=seed)
    assert history.seconds < PATIENCE


async def call_alone_first() -> None:
    async with aiocomms.new_comm() as comm:
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError, match="these ranks had not joined: 1, 2"):
                await comm.create_group(MEMBERS, "g", timeout=1)
        for _ in range(2):
            await comm.barrier()
            async with await comm.create_group(MEMBERS, "g", timeout=3) as group:
                await group.barrier()


def test_members_meet_after_one_called_alone() -> None:
    repeated(call_alone_first, 3, seed=1)


async def time_out_after_the_meeting() -> float:
    now = asyncio.get_running_loop().time
    async with aiocomms.new_comm() as comm:
        began = now()
        error = CommTimeoutError if comm.rank == 0 else CommAbortedError
        with pytest.raises(
            error, match="rank 0 could not form the communicator: too slow" if comm.rank else "too slow"
        ):
            await comm.create_group(MEMBERS, "g")
        return now() - began


def test_deadline_of_one_member_ends_the_calls_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = NetTransport.open

    async def late(rendezvous: Rendezvous, options: Mapping[str, Any]) -> NetTransport:
        if (rendezvous.name, rendezvous.rank) == ("g", 0):
            raise CommTimeoutError("too slow")
        return await opens(rendezvous, options)

    monkeypatch.setattr(NetTransport, "open", staticmethod(late))
    assert max(repeated(time_out_after_the_meeting, 3, seed=1).results) < 1


async def wait_for_rank_2(end: str) -> tuple[float, str]:
    now = asyncio.get_running_loop().time
    comm = await aiocomms.new_comm()
    async with asyncio.TaskGroup() as tasks:
        if comm.rank == 2 and end != "close":
            await asyncio.sleep(0.5)
            if end == "die":
                here().world.kill(2)
            comm.abort("enough")
        elif end == "close":
            asyncio.get_running_loop().call_later(0.5, lambda: tasks.create_task(comm.aclose()))
        began, error = now(), CommClosedError if end == "close" else CommAbortedError
        with pytest.raises(error, match="create_group on 'world'") as caught:
            await comm.create_group([comm.rank, (comm.rank + 1) % 3], f"of {comm.rank}")
    await comm.aclose()
    return now() - began, caught.value.message


@pytest.mark.parametrize(
    ("end", "why"), [("die", "rank 2 has died"), ("abort", "enough"), ("close", "was closed on this rank")]
)
def test_group_that_waits_ends_with_its_parent(end: str, why: str) -> None:
    for seconds, message in repeated(lambda: wait_for_rank_2(end), 3, seed=1).results[:2]:
        assert seconds < 1
        assert why in message


async def call_twice_at_once() -> None:
    async with aiocomms.new_comm() as comm:
        first = asyncio.create_task(comm.create_group(MEMBERS, "g"))
        await asyncio.sleep(0)
        with pytest.raises(ArgumentError, match="name is 'g', wanted another one"):
            await comm.create_group(MEMBERS, "g")
        async with await first as group, await comm.create_group(MEMBERS, "h") as other:
            await group.barrier()
            await other.barrier()


def test_second_call_for_a_group_that_forms_is_refused() -> None:
    repeated(call_twice_at_once, 3, seed=1)


async def form_at_once() -> None:
    """Form groups of one name in a row, while rank 0 stands still at times."""
    async with aiocomms.new_comm(timeout=60) as comm:
        if comm.rank == 0:
            for _ in range(6):
                later = asyncio.get_running_loop().call_later
                later(random.random() * 0.8, lambda: here().world.pause(0, 0.05 + 0.2 * random.random()))
        groups = [await comm.create_group([0, 1], "g", timeout=20) for _ in range(4)]
        for number, group in enumerate(groups):
            if comm.rank == 0:
                await group.send(torch.tensor([number]), 1)
            else:
                assert await group.recv(torch.zeros(1, dtype=torch.int64), 0) == number
        for group in groups:
            await group.aclose()


@pytest.mark.parametrize(("latency", "seed"), [(0.02, 43), (0.1, 2), (0.1, 5)])
def test_member_that_forms_the_next_group_has_not_given_up_the_last_one(latency: float, seed: int) -> None:
    simulate(form_at_once, ranks=2, seed=seed, latency=(0.001, latency))
