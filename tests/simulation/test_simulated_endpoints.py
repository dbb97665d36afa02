"""Endpoints in a simulated world: connections, regions and streams over peers, and what becomes of them by deaths."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import anyio
import pytest
import torch
from repeating import repeated

import aiocomms
from aiocomms.endpoints.endpoint import Endpoint
from aiocomms.endpoints.peer import Peer
from aiocomms.errors import AuthError, CommAbortedError, CommClosedError, CommTimeoutError, PeerDiedError, RegionError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.threads import start_awaited
from aiocomms.lowlevel.wires import wires
from aiocomms.progress.driver import LoopDriver
from aiocomms.testing.simulation import Faults, here

pytestmark = pytest.mark.deterministic


def tell(name: str, value: bytes) -> None:
    """Leave something for the other ranks, as in a file that all of them see."""
    assert clock.simulation is not None
    clock.simulation.launched()[0].set(name, value)


async def told(name: str) -> bytes:
    """Wait for what another rank has left."""
    assert clock.simulation is not None
    store = clock.simulation.launched()[0]
    while not store.check([name]):  # noqa: ASYNC110 - another process sets it
        await asyncio.sleep(0.001)
    return store.get(name)


async def use(peer: Peer, mine: Endpoint, number: int) -> None:
    """Use a connection in each way that it has. Both ends do so."""
    x = torch.zeros(3)
    await asyncio.gather(peer.send(torch.full((3,), float(number))), peer.recv(x))
    assert x.tolist() == [1.0 - number] * 3
    async with mine.register(torch.zeros(4)) as region:
        _, descriptor = await asyncio.gather(peer.send_object(region.descriptor), peer.recv_object())
        async with await peer.attach(descriptor) as remote:
            await remote.put(torch.full((2,), number + 1.0), 1)
            await remote.flush()
            await peer.signal()
            await peer.wait_signal()
            assert region.tensor.tolist() == [0, 2.0 - number, 2.0 - number, 0]
            got = torch.zeros(2)
            await remote.get(got, 1)
            assert got.tolist() == [number + 1.0] * 2
            assert await asyncio.gather(peer.send_object("done"), peer.recv_object()) == [None, "done"]
    async with await peer.open_stream(2) as stream:
        for n in range(4):
            await stream.send(torch.tensor([n]))
            assert (await stream.receive()).item() == n


async def meet() -> Any:
    """Connect with another endpoint, which accepts, and use the connection."""
    rank = here().rank
    async with aiocomms.open_endpoint(timeout=10) as mine:
        tell(f"address {rank}", mine.address)
        if rank:
            peer = await mine.accept()
        else:
            peer = await mine.connect(await told("address 1"))
        async with peer:
            await use(peer, mine, rank)
        return "met"


def test_two_endpoints_use_their_connection_in_each_way():
    for seed in range(6):
        assert repeated(meet, 2, seed=seed).results == ["met", "met"]


async def meet_if_possible() -> Any:
    """Do the same, as often as something goes wrong; return how it ended."""
    try:
        return await meet()
    except (PeerDiedError, CommAbortedError, CommTimeoutError, CommClosedError) as error:
        return type(error).__name__
    except anyio.BrokenResourceError:
        return "broken"


@pytest.mark.parametrize("seed", range(8))
def test_each_end_of_a_connection_ends_in_time_whatever_goes_wrong(seed):
    async def bounded() -> Any:
        try:
            async with asyncio.timeout(100):
                return await meet_if_possible()
        except TimeoutError:  # The other one has died before it had an address, or called.
            return "alone"

    faults = Faults(deaths=1, cuts=1, partitions=1, pauses=1, within=0.03)
    history = repeated(bounded, 2, seed=seed, faults=faults)
    assert any(result is not None for result in history.results)


async def give_up_and_cross() -> Any:
    """Give up some calls, and then connect, while the other endpoint does the same."""
    rank = here().rank
    async with aiocomms.open_endpoint(timeout=10) as mine:
        tell(f"address {rank}", mine.address)
        other = await told(f"address {1 - rank}")
        for _ in range(random.randrange(3)):
            with anyio.move_on_after(random.random() * 0.01):
                await mine.connect(other)
        await mine.connect(other)
        tell(f"connected {rank}", b"")
        await told(f"connected {1 - rank}")
        return "met"


@pytest.mark.parametrize("seed", [26, 345, 382])
def test_call_that_was_given_up_ends_no_later_one_that_has_overtaken_it(seed):
    assert repeated(give_up_and_cross, 2, seed=seed).results == ["met", "met"]


async def cross() -> Any:
    """Connect with each other endpoint, which does the same at that time."""
    rank, ranks = here().rank, here().ranks
    async with aiocomms.open_endpoint(timeout=10) as mine:
        tell(f"address {rank}", mine.address)
        others = [await told(f"address {it}") for it in range(ranks) if it != rank]
        peers = await asyncio.gather(*(mine.connect(other) for other in others))
        assert len(mine.peers) == ranks - 1
        sent = [peer.send_object(rank) for peer in peers]
        heard = sorted([await peer.recv_object() for peer in peers])
        await asyncio.gather(*sent)
        tell(f"done {rank}", b"")
        for other in range(ranks):
            await told(f"done {other}")
        return heard


def test_of_calls_that_cross_one_counts():
    for seed in range(6):
        history = repeated(cross, 3, seed=seed)
        assert history.results == [[1, 2], [0, 2], [0, 1]]


async def refuse_and_leave() -> Any:
    """Offer a region whose memory is gone, and close the connection; the other endpoint is told so."""
    async with aiocomms.open_endpoint(timeout=10) as mine:
        if here().rank:
            tell("address", mine.address)
            memory, peer = torch.zeros(4), await mine.accept()
            region = mine.register(memory)
            memory.untyped_storage().resize_(0)
            await peer.send_object(region.descriptor)
            await peer.recv_object()
            await peer.aclose()
            return "refused"
        peer = await mine.connect(await told("address"))
        with pytest.raises(RegionError, match="its owner has freed or resized the memory of the region"):
            await peer.attach(await peer.recv_object())
        await peer.send_object("go")
        with pytest.raises(CommClosedError):
            await peer.lost()
        with pytest.raises(CommClosedError, match=r"signal on .* the other endpoint has closed the connection"):
            await peer.signal()
        return "told"


def test_region_without_memory_and_signal_to_an_end_that_has_left_are_refused():
    assert repeated(refuse_and_leave, 2, seed=0).results == ["told", "refused"]


async def lose_peer() -> Any:
    """Lose the other endpoint, in the middle of whatever it does."""
    rank, world = here().rank, here().world
    async with aiocomms.open_endpoint(timeout=10) as mine:
        if rank:
            tell("address", mine.address)
            peer = await mine.accept()
            await peer.recv_object()
            world.kill(1)
            await asyncio.sleep(0)
        peer = await mine.connect(await told("address"))
        with pytest.raises(PeerDiedError):
            await asyncio.gather(peer.send_object("go"), peer.recv_object())
        assert isinstance(await peer.lost(), PeerDiedError)
        with pytest.raises(PeerDiedError, match="cannot be reached"):
            await mine.connect(await told("address"))
        return "noticed"


async def revoke_by_cancellation() -> None:
    """End a region's block by its scope, while the other endpoint writes the region again and again."""
    async with aiocomms.open_endpoint(timeout=10) as mine:
        if here().rank:
            tell("address", mine.address)
            memory, peer = torch.zeros(4), await mine.accept()
            with anyio.move_on_after(1):
                async with mine.register(memory) as region:
                    await peer.send_object(region.descriptor)
                    await anyio.sleep_forever()
            then = memory.tolist()
            await peer.recv_object()
            assert memory.tolist() == then != [0.0] * 4
            return
        peer = await mine.connect(await told("address"))
        descriptor = await peer.recv_object()

        async def write() -> None:
            while True:
                await peer.put(torch.full((4,), random.random()), descriptor)

        with pytest.raises(RegionError, match="its owner has revoked the region"):
            await write()
        await peer.send_object("refused")


def test_block_of_a_region_that_is_cancelled_ends_when_nobody_writes_the_region_any_more():
    repeated(revoke_by_cancellation, 2, seed=0)


def test_the_death_of_an_endpoint_is_noticed_and_nothing_listens_there():
    for seed in range(6):
        assert repeated(lose_peer, 2, seed=seed).results == ["noticed", None]


# ------------------------------------------------------------------------------------------------ the wires themselves


def call(key: bytes, port: int, seconds: float = 5.0) -> Any:
    """Return a call of what listens at a port."""
    return wires().call("127.0.0.1", port, key, seconds, "there")


async def wired(body: Any) -> Any:
    """Have rank 1 listen, and give what it has let in to ``body``; rank 0 calls ``body`` with the port."""
    if here().rank == 0:
        return await asyncio.to_thread(body, int(await told("port")), None)
    came: asyncio.Queue[Any] = asyncio.Queue()
    reception = wires().find("127.0.0.1")(LoopDriver.current())
    reception.open(b"key", came.put_nowait)
    tell("port", b"%d" % reception.port)
    try:
        line = await asyncio.wait_for(came.get(), 20)
        line.extend(5)
        return await asyncio.to_thread(body, reception.port, line)
    except TimeoutError:
        return "nobody"
    finally:
        reception.close()


def say_and_leave(port: int, line: Any) -> Any:
    if line is None:
        calling = call(b"key", port)
        mine = calling.run()
        for word in (b"one", b"two"):
            mine.tell(word)
        calling.hang_up()
        calling.hang_up()
        with pytest.raises(PeerDiedError):
            mine.hear()
        return "said"
    heard = [line.hear(), line.hear()]
    with pytest.raises(PeerDiedError):
        line.hear()
    line.close()
    line.close()
    return heard


def test_all_that_was_said_before_the_hang_up_is_heard():
    for seed in range(6):
        history = repeated(lambda: wired(say_and_leave), 2, seed=seed)
        assert history.results == ["said", [b"one", b"two"]]


def call_with_a_wrong_key(port: int, line: Any) -> Any:
    with pytest.raises(AuthError, match="is not the endpoint of this job"):
        call(b"another", port).run()
    with pytest.raises(PeerDiedError, match="cannot be reached"):
        call(b"key", port + 1000).run()
    return "refused"


def test_a_call_with_another_key_or_to_nobody_is_refused():
    assert repeated(lambda: wired(call_with_a_wrong_key), 2, seed=1).results == ["refused", "nobody"]


def call_in_vain(port: int, line: Any) -> Any:
    here().world.part(0, 1, 60.0)
    began = clock.now()
    with pytest.raises(CommTimeoutError, match="did not answer within 2 s"):
        call(b"key", port, 2.0).run()
    return round(clock.now() - began)


def test_a_call_ends_in_time_that_nobody_answers():
    assert repeated(lambda: wired(call_in_vain), 2, seed=1).results == [2, "nobody"]


def wait_and_be_freed(port: int, line: Any) -> Any:
    if line is not None:
        line.extend(0.01)
        with pytest.raises(CommTimeoutError):
            line.hear()
        line.extend(60)
        with pytest.raises(PeerDiedError):
            line.hear()
        return "left alone"
    calling = call(b"key", port, 60.0)
    mine = calling.run()

    def free() -> None:
        clock.sleep(3.0)
        calling.hang_up()

    began = clock.now()
    start_awaited(free)
    with pytest.raises(PeerDiedError):
        mine.hear()
    return round(clock.now() - began)


def test_a_thread_that_waits_for_a_line_is_freed_by_the_hang_up_of_another_one():
    assert repeated(lambda: wired(wait_and_be_freed), 2, seed=1).results == [3, "left alone"]
