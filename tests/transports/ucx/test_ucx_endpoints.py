"""An endpoint's connections over ucx share an engine, whose peers come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import torch
from aiocomms_ucx import shared_engine
from aiocomms_ucx.shared_engine import SharedEngine
from processes import KILLED, Rank, Run, held, in_turn

import aiocomms
from aiocomms.errors import PeerDiedError

pytestmark = pytest.mark.real

LARGE = 100_000
"""Elements: more than UCX copies."""


@pytest.fixture
def transport() -> str:
    return "ucx"


def engine_of(peer: aiocomms.Peer) -> SharedEngine:
    (carrier,) = cast("list[Any]", peer._comm._core.transports)
    shared: SharedEngine = carrier.shared
    return shared


async def talk(one: aiocomms.Peer, other: aiocomms.Peer, value: float) -> None:
    """Small and large messages, both ways, and a put."""
    for count in (1, LARGE):
        sends = [end.send(torch.full((count,), float(value + at))) for at, end in enumerate((one, other))]
        assert bool(((await other.recv(torch.empty(count))) == value).all())
        assert bool(((await one.recv(torch.empty(count))) == value + 1).all())
        await asyncio.gather(*sends)
    await one.signal()
    await other.wait_signal()


@contextlib.asynccontextmanager
async def endpoints(count: int) -> AsyncIterator[list[aiocomms.Endpoint]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(aiocomms.open_endpoint("ucx")) for _ in range(count)]


async def one_engine(place: Rank) -> None:
    """Whatever order they connect in, and whoever has which number with whom."""
    async with endpoints(4) as all_of_them:
        ends: dict[tuple[int, int], aiocomms.Peer] = {}
        for one, other in [(0, 1), (2, 0), (1, 2), (3, 0), (3, 2), (1, 3)]:
            ends[one, other] = await all_of_them[one].connect(all_of_them[other].address)
            ends[other, one] = await all_of_them[other].accept()
        for one in range(4):
            assert len({engine_of(ends[one, other]) for other in range(4) if other != one}) == 1
        await asyncio.gather(*(talk(ends[one, other], ends[other, one], one) for one, other in ends if one < other))
        shared = engine_of(ends[0, 1])
        await ends[0, 1].aclose()
        await ends[1, 0].aclose()
        await talk(ends[0, 2], ends[2, 0], 7)
        again = await all_of_them[0].connect(all_of_them[1].address)
        assert engine_of(again) is shared
        await talk(again, await all_of_them[1].accept(), 8)
    assert not shared.lasts


async def come_and_go(place: Rank) -> None:
    """UCX keeps something of each peer with which it has exchanged more than a few bytes."""
    shared_engine._MOST_PARTED = 3
    async with endpoints(2) as (hub, other):
        constant, there = await hub.connect(other.address), await other.accept()
        first, engines = engine_of(constant), []
        for _ in range(5):
            async with aiocomms.open_endpoint("ucx") as guest:
                peer, here = await guest.connect(hub.address), await hub.accept()
                sending = peer.send(torch.ones(1000))
                await here.recv(torch.empty(1000))
                await sending
                engines.append(engine_of(here) is first)
                await here.aclose()
        await talk(constant, there, 3)
        assert not first.lasts
        await constant.aclose()
        assert first._closed
    assert engines == [True, True, True, False, False]


def test_endpoint_has_one_engine_for_all_peers_until_it_has_lost_many(ranks: Run) -> None:
    """Replace it then."""
    ranks(1, in_turn, one_engine, come_and_go)


async def be_hub(place: Rank) -> Counter[str]:
    """Return the cost of the peers behind the first one."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank > 0:
            if place.rank > 1:
                await asyncio.to_thread(place.told, "the first is there")
            await here.connect(await asyncio.to_thread(place.given, "address of the hub"))
            await asyncio.to_thread(place.told, "counted")
            return Counter()
        place.give("address of the hub", here.address)
        await here.accept()
        before = Counter(held()[1])
        place.tell("the first is there")
        for _ in range(place.size - 2):
            await here.accept()
        after = Counter(held()[1])
        place.tell("counted")
        return after - before


def test_peer_costs_four_sockets_and_four_shared_memories(ranks: Run) -> None:
    """The control connection, and the memory of the window for signals."""
    cost = ranks(6, be_hub)[0]
    assert {kind.partition("_")[0]: count for kind, count in cost.items()} == {"socket:[]": 4, "/dev/shm/torch": 4}


async def send_for_ever(peer: aiocomms.Peer) -> None:
    while True:
        await asyncio.gather(*(peer.send(torch.empty(count)) for count in (1, 1000, LARGE)))


async def lose_some(place: Rank) -> Any:
    """Rank 1 dies, with messages for it that UCX has; rank 2 goes on; rank 3 comes later."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank > 0:
            if place.rank == 3:
                await asyncio.to_thread(place.told, "rank 1 is gone")
            peer = await here.connect(await asyncio.to_thread(place.given, "address"))
            await peer.send_object(place.rank)
            if place.rank == 1:
                await peer.recv(torch.empty(1))
                await place.die()
            while (value := float(await peer.recv(torch.empty(1)))) >= 0:
                await peer.send(torch.full((LARGE,), value))
            return None
        place.give("address", here.address)
        peers = {}
        for _ in range(2):
            peer = await here.accept()
            peers[await peer.recv_object()] = peer
        shared = engine_of(peers[1])
        assert engine_of(peers[2]) is shared
        with pytest.raises(PeerDiedError):
            await send_for_ever(peers[1])
        while peers[1] in here.peers or not peers[1].closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        place.tell("rank 1 is gone")
        peers[3] = await here.accept()
        assert await peers[3].recv_object() == 3
        assert engine_of(peers[3]) is not shared  # UCX keeps what it has of rank 1
        for rank in (2, 3):
            await peers[rank].send(torch.ones(1))
            assert bool((await peers[rank].recv(torch.empty(LARGE)) == 1).all())
        await peers[2].send(-torch.ones(1))
        await peers[2].aclose()
        assert shared._closed  # with its last communicator
        await peers[3].send(-torch.ones(1))
        return engine_of(peers[3]).lasts


@pytest.mark.fault(112, transport="ucx")
def test_death_of_a_peer_leaves_the_engine_usable_for_others(ranks: Run) -> None:
    assert ranks(4, lose_some) == [True, KILLED, None, None]
