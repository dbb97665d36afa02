"""Endpoints whose other end dies, lies, is a stranger, or uses what was revoked: the cases 108 to 113."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import random
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from concurrency import turns
from oracle import forgotten, holdings, settled
from processes import KILLED, LARGE, Rank, Run, allocated, in_turn
from simulated import NET
from unix_lines import use_unix_sockets

import aiocomms
from aiocomms.bootstrap.notes import Passed
from aiocomms.endpoints import credentials
from aiocomms.endpoints.meeting import EndpointCall
from aiocomms.endpoints.words import Leave, RegionOpening
from aiocomms.errors import (
    AuthError,
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    PeerDiedError,
    ProtocolError,
    RegionError,
)
from aiocomms.lowlevel import jobstore
from aiocomms.lowlevel.lines import ENDPOINT

pytestmark = pytest.mark.real

Notice = Callable[[Sequence[float]], None]
MIB = 2**18
"""Elements of float32."""


@pytest.fixture
def transport() -> str:
    return "ucx"


IN_NET = pytest.mark.parametrize("transport", [NET, "ucx"])
"""The mark of a test of the endpoints alone, whatever carries their messages."""


# --------------------------------------------------------------------------------------------- 112: one of them dies


async def hub_and_two(place: Rank, doing: str) -> Any:
    if place.rank > 0:
        async with aiocomms.open_endpoint("ucx") as here:
            peer = await here.connect(await asyncio.to_thread(place.given, "address"))
            await peer.send_object(place.rank)
            region = here.register(torch.zeros(MIB))
            await peer.send_object((region.descriptor, here.register(torch.zeros(4)).descriptor))
            if place.rank == 2:
                await peer.recv_object()
                place.tell("it answers nobody")
                place.told("it is asked")  # The loop is blocked.
                await place.die()
            assert await peer.recv_object() == "go on"
            return region.tensor.sum().item()
    async with aiocomms.open_endpoint("ucx") as here:
        place.give("address", here.address)
        peers = {}
        for _ in range(2):
            peer = await here.accept()
            peers[await peer.recv_object()] = peer
        descriptors = {rank: await peers[rank].recv_object() for rank in (1, 2)}
        remotes = {rank: await peers[rank].attach(descriptors[rank][0]) for rank in (1, 2)}
        unused = descriptors[2][1]
        mine = here.register(torch.zeros(8))
        heard: list[CommError] = []
        peers[2].register_abort_hook(heard.append)
        pending: dict[str, Callable[[], Any]] = {
            "receiving": lambda: peers[2].recv(torch.zeros(4)),
            "a stream": lambda: stream_of(peers[2]),
            "attaching": lambda: peers[2].attach(unused),
            "waiting for a signal": lambda: peers[2].wait_signal(),
        }
        await peers[2].send_object("die")
        await asyncio.to_thread(place.told, "it answers nobody")
        waits = asyncio.ensure_future(pending[doing]() if doing != "nothing" else asyncio.sleep(0))
        await turns()
        place.tell("it is asked")
        if doing != "nothing":
            with pytest.raises(PeerDiedError):
                await waits
        assert isinstance(await peers[2].lost(), PeerDiedError)
        noticed = place.since_death()
        assert [type(error) for error in heard] == [PeerDiedError]
        with pytest.raises(RegionError):
            remotes[2].put(torch.ones(MIB))
        with pytest.raises(CommAbortedError):
            await peers[2].send(torch.ones(1))
        assert here.peers == [peers[1]]
        await mine.revoke()
        await remotes[1].put(torch.ones(MIB))
        await peers[1].signal()
        await peers[1].send_object("go on")
        return noticed


async def stream_of(peer: aiocomms.Peer) -> None:
    async with await peer.open_stream() as stream:
        await stream.receive()


@pytest.mark.fault(112, transport="ucx")
@pytest.mark.parametrize("doing", ["receiving", "a stream", "attaching", "waiting for a signal", "nothing"])
def test_death_of_a_peer_ends_only_its_connection(ranks: Run, notice: Notice, doing: str) -> None:
    noticed, total, killed = ranks(3, hub_and_two, doing)
    assert killed == KILLED
    assert total == MIB
    notice([noticed])


async def put_for_ever(peer: aiocomms.Peer, remote: aiocomms.RemoteRegion, source: torch.Tensor) -> None:
    while True:
        works = [remote.put(source) for _ in range(4)]
        await peer.signal()
        for work in works:
            await work


async def die_amid_puts(place: Rank, rounds: int) -> Any:
    """Let the owner die while megabytes are put into its memory."""
    count = LARGE if place.simulated else 16 * MIB
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank == 1:
            region = here.register(torch.zeros(count))
            place.give("descriptor", region.descriptor)
            place.give("address", here.address)
            peer = await here.accept()
            for _ in range(rounds):
                await peer.wait_signal()
            await place.die()
        peer = await here.connect(await place.heard_of("address"))
        remote = await peer.attach(await place.heard_of("descriptor"))
        source = torch.ones(count)
        with pytest.raises(CommError):
            await put_for_ever(peer, remote, source)
        assert isinstance(await peer.lost(), PeerDiedError)
        assert here.peers == []
        return None


@IN_NET
@pytest.mark.fault(112, transport="ucx")
def test_death_of_the_region_owner_amid_puts_fails_them(ranks: Run) -> None:
    assert ranks(2, die_amid_puts, 3) == [None, KILLED]


def unshared(count: int) -> torch.Tensor:
    """Return memory that torch does not own, and so cannot move into shared memory."""
    return torch.frombuffer(bytearray(4 * count), dtype=torch.float32)


async def leave_amid_puts(place: Rank, how: str, mapped: bool) -> None:
    """Close a connection amid puts: no put writes any more once the owner has heard of the close."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank == 1:
            memory = torch.zeros(8 * MIB) if mapped else unshared(8 * MIB)
            region = here.register(memory)
            place.give("descriptor", region.descriptor)
            place.give("address", here.address)
            peer = await here.accept()
            with contextlib.suppress(CommClosedError):
                error = await peer.lost()
                assert (how, type(error)) == ("cancelled", CommAbortedError)
            await region.revoke()
            memory.fill_(5)
            await asyncio.to_thread(place.told, "closed")
            assert (memory == 5).all()
            return
        peer = await here.connect(await asyncio.to_thread(place.given, "address"))
        remote = await peer.attach(place.given("descriptor"))
        works = [remote.put(torch.ones(8 * MIB)) for _ in range(4)]
        closing = asyncio.ensure_future(peer.aclose())
        await asyncio.sleep(0)
        with pytest.raises(RegionError, match="the connection was closed"):
            remote.put(torch.ones(8 * MIB))
        if how == "cancelled":
            closing.cancel()
        await asyncio.gather(closing, *works, return_exceptions=True)
    place.tell("closed")


async def signal_behind_puts(place: Rank, how: str) -> None:
    """Put into unshared memory, so that puts and signals take different paths: no signal overtakes a put."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank == 1:
            memory = unshared(16 * MIB)
            place.give("descriptor", here.register(memory).descriptor)
            place.give("address", here.address)
            peer = await here.accept()
            await peer.wait_signal()
            assert memory[-1] == 1
            await peer.send_object(None)
            with contextlib.suppress(CommError):
                await peer.lost()
            return
        peer = await here.connect(await asyncio.to_thread(place.given, "address"))
        remote = await peer.attach(place.given("descriptor"))
        work = remote.put(torch.ones(16 * MIB))
        first = asyncio.ensure_future(peer.signal())
        await asyncio.sleep(0)
        if how == "cancelled":
            first.cancel()
        if how == "closed":
            closing = asyncio.ensure_future(remote.aclose())
            await asyncio.sleep(0)
        await asyncio.gather(peer.signal(), first, return_exceptions=True)
        await peer.recv_object()
        if how == "closed":
            await closing
        await work


async def hold_on(place: Rank) -> None:
    """Revoke a region while the peer's loop is blocked: the owner gets a timeout, and loses only that connection."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank == 1:
            region = here.register(torch.zeros(4))
            place.give("descriptor", region.descriptor)
            place.give("address", here.address)
            peer = await here.accept()
            await asyncio.to_thread(place.told, "attached")
            with pytest.raises(CommTimeoutError, match="did not release"):
                await region.revoke(timeout=0.1)
            place.tell("revoked")
            assert isinstance(await peer.lost(), CommTimeoutError)
            assert here.peers == []
            return
        peer = await here.connect(await asyncio.to_thread(place.given, "address"))
        await peer.attach(place.given("descriptor"))
        place.tell("attached")  # No message says so: the loop might see its end together with the question.
        place.told("revoked")
        assert isinstance(await peer.lost(), CommTimeoutError)
        assert here.peers == []


@pytest.mark.fault(108, 111, transport="ucx")
def test_puts_of_one_that_has_closed_write_nothing_and_revoke_times_out_for_a_busy_loop(ranks: Run) -> None:
    leaving = [(leave_amid_puts, how, mapped) for how in ("closed", "cancelled") for mapped in (True, False)]
    ranks(2, in_turn, *leaving, hold_on)


# --------------------------------------------------------------------------- 113: cancelled puts, and their tensors


async def cancel_puts(place: Rank) -> None:
    """Cancel a thousand puts, drop their tensors, and fill the memory with something else."""
    count = 1000
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank == 1:
            region = here.register(torch.zeros(count, 1024))
            place.give("descriptor", region.descriptor)
            place.give("address", here.address)
            peer = await here.accept()
            await peer.wait_signal()
            assert (region.tensor == torch.arange(1.0, count + 1)[:, None]).all()
            return
        peer = await here.connect(await asyncio.to_thread(place.given, "address"))
        descriptor = place.given("descriptor")
        remote = await peer.attach(descriptor)
        left = []
        for number in range(count):
            tensor = torch.full((1024,), float(number + 1))
            left.append(weakref.ref(tensor))
            if number % 2:
                task = asyncio.ensure_future(peer.put(tensor, descriptor, number * 1024))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                work = remote.put(tensor, number * 1024)
                await work.cancel()
            del tensor
            torch.full((1024,), -1.0)  # A put from memory that was freed would put this.
        await remote.flush()
        await peer.signal()
        del work, task
        for one in left:
            await forgotten(one)


@pytest.mark.fault(113, transport="ucx")
def test_signals_arrive_behind_puts_and_cancelled_puts_complete(ranks: Run) -> None:
    ranks(2, in_turn, *((signal_behind_puts, how) for how in ("twice", "cancelled", "closed")), cancel_puts)


async def come_and_go(place: Rank, count: int) -> Any:
    """Connect endpoints with a hub one after the other: their descriptors, threads and memory are released."""
    if place.rank == 1:
        address = await asyncio.to_thread(place.given, "address")
        for number in range(count):
            async with aiocomms.open_endpoint("ucx") as here:
                peer = await here.connect(address)
                await peer.send_object(here.register(torch.zeros(1024)).descriptor)
                await peer.wait_signal()
            await asyncio.to_thread(place.told, f"next {number}")
        return None
    async with aiocomms.open_endpoint("ucx") as here:
        place.give("address", here.address)
        for number in range(count):
            peer = await here.accept()
            await peer.put(torch.ones(1024), await peer.recv_object())
            await peer.signal()
            with contextlib.suppress(CommError):  # The peer has closed.
                await peer.lost()
            await peer.aclose()
            del peer
            if number == count // 2:
                gc.collect()
                before, memory = holdings(), allocated()
            place.tell(f"next {number}")
        await settled(before)
        return (allocated() - memory) / (count // 2)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.search)])
def test_repeated_connections_leak_no_memory(ranks: Run, count: int) -> None:
    growth, _ = ranks(2, come_and_go, count)
    assert growth < (2**16 if count < 100 else 2**12), "bytes for each"


# ------------------------------------------------------------------------------ 22, 60, 110: strangers, and liars


async def knock(place: Rank) -> Any:
    """Send garbage to the listener, and open silent connections: endpoints of the job still connect."""
    async with aiocomms.open_endpoint("ucx") as here, aiocomms.open_endpoint("ucx") as other:
        there = (here._address.host, here._address.port)
        silent = [socket.create_connection(there) for _ in range(200)]
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), os.urandom(1000), b"aioG\x02\x00" + bytes(100)):
            with socket.create_connection(there) as stranger:
                stranger.sendall(rubbish)
        for _ in range(50):  # Each caller proves to be of the job, and resets the connection.
            caller = socket.create_connection(there)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            prove = functools.partial(jobstore.prove, caller, here._address.secret("connect"), 0, 10, ENDPOINT)
            (await asyncio.to_thread(prove)).close()
        peer = await other.connect(here.address)
        found = await here.accept()
        work = peer.send_object("hello")
        assert await found.recv_object() == "hello"
        await work
        for one in silent:
            one.close()
    return None


async def close_on_the_silent(place: Rank) -> None:
    """Close an endpoint beside a silent caller and a silent callee: neither delays the close."""
    async with aiocomms.open_endpoint("ucx") as here:
        there = credentials.read_address(here.address)
        async with aiocomms.open_endpoint("ucx") as other:
            mine = other.address
        call = EndpointCall(there, mine, 1, 60)
        line, _ = await asyncio.to_thread(call.run)
        line.tell(b"")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = msgspec.structs.replace(there, endpoint=b"silent".ljust(16), port=silent.getsockname()[1])
            pending = asyncio.ensure_future(here.connect(address.pack()))
            while not here._connections._forming:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await here.aclose()
            with pytest.raises(CommClosedError):
                await pending
            while any(it.name == "aiocomms blocking call" for it in threading.enumerate()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        call.hang_up()


async def connect_and_give_up(place: Rank) -> None:
    """Cancel calls from either side, at any turn of the loop: both sides can still connect."""
    turns = random.Random(1)
    for _ in range(60):
        async with aiocomms.open_endpoint("local") as one, aiocomms.open_endpoint("local") as two:
            for _ in range(2):
                here, there = (one, two) if turns.random() < 0.5 else (two, one)
                task = asyncio.ensure_future(here.connect(there.address))
                for _ in range(turns.randrange(40)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            peer, other = await asyncio.gather(one.connect(two.address), two.connect(one.address))
            work = peer.send_object("connected")
            assert await other.recv_object() == "connected"
            await work


async def call_and_hang_up(place: Rank) -> None:
    """Call in another endpoint's name, and hang up: this ends no connection of that endpoint."""
    async with aiocomms.open_endpoint("ucx") as here, aiocomms.open_endpoint("ucx") as other:
        peer = await here.connect(other.address)
        call = EndpointCall(credentials.read_address(here.address), other.address, 1, 60)
        line, _ = await asyncio.to_thread(call.run)
        line.tell(b"")
        call.hang_up()
        found = await other.accept()
        work = peer.send_object("still here")
        assert await found.recv_object() == "still here"
        await work
        assert here.peers == [peer]


@pytest.mark.fault(22, 110, transport="ucx")
def test_strangers_and_callers_in_anothers_name_do_no_harm_and_delay_no_close(ranks: Run) -> None:
    """Cancelled calls do no harm either."""
    ranks(1, in_turn, knock, close_on_the_silent, connect_and_give_up, call_and_hang_up)


async def other_tokens(place: Rank) -> Any:
    async with aiocomms.open_endpoint("ucx") as here:
        place.give(f"address of {place.rank}", here.address)
        address = await asyncio.to_thread(place.given, f"address of {1 - place.rank}")
        with pytest.raises(AuthError, match="token"):
            await here.connect(address)
        await asyncio.to_thread(lambda: (place.tell(f"tried {place.rank}"), place.told(f"tried {1 - place.rank}")))
        return here.peers == []


def set_token(rank: int) -> None:
    os.environ["AIOCOMMS_TOKEN"] = f"a token of rank {rank}, and of nobody else"


@pytest.mark.fault(110, transport="ucx")
def test_connect_with_another_token_raises_auth_error(ranks: Run) -> None:
    assert ranks(2, other_tokens, before=set_token) == [True, True]


async def lie(word: str) -> Any:
    """Send a forbidden message: only the connection of its sender ends, and no byte of the region changes."""
    async with aiocomms.open_endpoint("local") as here, aiocomms.open_endpoint("local") as liar:
        peer = await liar.connect(here.address)
        found = await here.accept()
        region = here.register(torch.zeros(4))
        said: dict[str, Any] = {
            "nonsense": b"\xff\xff",
            "a decision": Leave(0, 1, "") if found._comm.rank else RegionOpening(0, 1, 1),
            "what nobody wants": RegionOpening(1, region._number, 7),
        }
        what = said[word]
        say: Callable[[Any], Any] = peer._attachments.say
        if isinstance(what, bytes):
            peer._comm._core.notes.say(1, Passed(what))
        else:
            say(what)
        assert isinstance(await found.lost(), (ProtocolError, CommAbortedError))
        assert here.peers == []
        again = await liar.connect(here.address)
        await again.put(torch.ones(4), region.descriptor)
        return region.tensor.tolist()


@pytest.mark.fault(110, transport="local")
@pytest.mark.parametrize("word", ["nonsense", "a decision", "what nobody wants"])
@pytest.mark.deterministic
def test_peer_with_malformed_messages_ends_only_its_connection(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    use_unix_sockets(monkeypatch)
    assert asyncio.run(lie(word)) == [1.0] * 4


async def connect_anew(place: Rank) -> Any:
    """Let a process die without a close: its successor connects with the same hub."""
    async with aiocomms.open_endpoint("ucx") as here:
        if place.rank == 0:
            place.give("address", here.address)
            first = await here.accept()
            with contextlib.suppress(PeerDiedError):  # The peer may die before it confirms the message.
                await first.send_object("die")
            assert isinstance(await first.lost(), PeerDiedError)
            place.tell("noticed")
            second = await here.accept()
            return await second.recv_object()
        address = await place.heard_of("address")
        if place.rank == 1:
            await (await here.connect(address)).recv_object()
            await place.die()
        await place.heard("noticed")
        await (await here.connect(address)).send_object("anew")
        return True


@IN_NET
@pytest.mark.fault(112, transport="ucx")
def test_restarted_process_connects_anew(ranks: Run) -> None:
    assert ranks(3, connect_anew) == ["anew", KILLED, True]
