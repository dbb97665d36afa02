"""Endpoints: the end of a connection, and the cost of an idle connection."""

from __future__ import annotations

import re

import pytest
import torch

from aiocomms import open_endpoint
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    RegionError,
)
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.test_endpoints import connected, descriptor
from aiocomms.testing.conformance.test_idle import expect_silence

pytestmark: pytest.MarkDecorator = pytest.mark.network


@pytest.mark.loops
@pytest.mark.fault(125)
@pytest.mark.memory
@ranks(2)
async def test_peer_close_ends_the_connection_on_both_sides(comm: Communicator, case: Case) -> None:
    """A message that was sent before the close is still received."""
    async with connected(comm, case) as (here, peer):
        slot = case.full(torch.zeros(4))
        if comm.rank == 1:
            await descriptor(comm, here.register(slot.tensor).descriptor)
            await comm.recv_object(0)
            await peer.send_object("last")
            await peer.aclose()
        else:
            remote = await peer.attach(await descriptor(comm))
            pending = peer.recv_object()
            await comm.send_object(None, 1)
        with pytest.raises(CommClosedError):
            await peer.lost()
        if comm.rank == 0:
            assert await pending == "last"
        by = "on this endpoint" if comm.rank else "the other endpoint has closed the connection"
        with pytest.raises(CommClosedError, match=by) as caught:
            await peer.recv(torch.zeros(1, device=comm.device))
        where, what = re.escape(f"endpoint, peer {peer.name} at "), re.escape(caught.value.message)
        assert re.search(rf" on '{where}\S+:\d+': {what}\Z", str(caught.value))
        assert (caught.value.rank, caught.value.peer) == (None, None)
        if comm.rank == 0:
            with pytest.raises(RegionError):
                remote.put(torch.zeros(4, device=comm.device))
        assert here.peers == []
        await comm.barrier()


@ranks(2)
async def test_connections_that_are_never_accepted_release_their_resources(comm: Communicator, case: Case) -> None:
    """An endpoint keeps only a few of the connections that the program never accepts, and releases the rest."""
    async with connected(comm, case) as (here, peer):
        for _ in range(25):
            async with open_endpoint(case.place.transport, case.place.device, timeout=case.place.deadline) as other:
                await other.connect(here.address)
        while len(here.peers) > 1:
            await (set(here.peers) - {peer}).pop()._over
        assert here.peers == [peer]
        assert len(here._connections._left) <= 17


@pytest.mark.fault(125)
@pytest.mark.memory
@ranks(2)
async def test_abort_of_a_peer_ends_only_its_connection(comm: Communicator, case: Case) -> None:
    """The connection's hooks run, and its ops fail on both sides. The endpoint's other connection stays usable."""
    async with connected(comm, case) as (here, peer):
        transport, device = case.place.transport, case.place.device
        async with open_endpoint(transport, device, timeout=case.place.deadline) as second:
            if comm.rank == 0:
                another = await second.connect(await comm.recv_object(1))
            else:
                await comm.send_object(second.address, 0)
                another = await second.accept()
            heard: list[CommError] = []
            peer.register_abort_hook(heard.append)
            pending = peer.recv(torch.zeros(1, device=comm.device))
            await comm.barrier()
            if comm.rank == 0:
                peer.abort("enough")
            by = "the other endpoint" if comm.rank else "this endpoint"
            with pytest.raises(CommAbortedError, match=f"^recv #[0-9]+ on '[^']*': aborted by {by}: enough$"):
                await pending
            assert (await peer.lost()).message == f"aborted by {by}: enough"
            assert [error.message for error in heard] == [f"aborted by {by}: enough"]
            assert here.peers == []
            work = another.send_object("still here")
            assert await another.recv_object() == "still here"
            await work
            await comm.barrier()


@pytest.mark.loops
@pytest.mark.memory
@pytest.mark.clock
@ranks(2)
async def test_idle_endpoint_never_wakes_the_loop(comm: Communicator, case: Case) -> None:
    async with connected(comm, case) as (here, peer):
        await expect_silence(case, "with an endpoint that is connected")
        if comm.rank == 1:
            await descriptor(comm, here.register(case.full(torch.zeros(4)).tensor).descriptor)
        else:
            await peer.attach(await descriptor(comm))
        await expect_silence(case, "with a region that is attached")


@pytest.mark.fault(111)
@pytest.mark.memory
@pytest.mark.clock
@ranks(2)
async def test_attach_to_an_unresponsive_peer_times_out_alone(comm: Communicator, case: Case) -> None:
    """The attach does not end before its deadline, and only the attach fails. The connection stays usable."""
    case.need_processes()
    async with connected(comm, case) as (here, peer):
        if comm.rank == 1:
            region = here.register(case.full(torch.zeros(4)).tensor)
            await descriptor(comm, region.descriptor)
            case.wait_blocking("late")
            await comm.recv_object(0)
        else:
            given = await descriptor(comm)
            with pytest.raises(CommTimeoutError, match="has not opened the region"):
                await peer.attach(given, timeout=0.05)
            with pytest.raises(CommTimeoutError, match="has not opened the region"):
                await peer.put(torch.ones(4, device=comm.device), given, timeout=0.05)
            case.tell_blocking("late")
            await peer.put(torch.ones(4, device=comm.device), given)
            await comm.send_object(None, 1)
