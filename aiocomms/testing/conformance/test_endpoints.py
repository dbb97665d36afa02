"""Endpoints: two processes connect by an address. With descriptors, each process can access memory of the other."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import AsyncIterator
from typing import NamedTuple

import anyio
import anyio.lowlevel
import pytest
import torch

from aiocomms import Endpoint, Peer, errors, open_endpoint
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    RegionError,
)
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks

pytestmark: pytest.MarkDecorator = pytest.mark.network

PART = 11


class EndpointPair(NamedTuple):
    """This rank's endpoint, and its connection to the other rank's endpoint."""

    here: Endpoint
    peer: Peer


@contextlib.asynccontextmanager
async def connected(comm: Communicator, case: Case) -> AsyncIterator[EndpointPair]:
    """Connect rank 0 to rank 1, which accepts the connection. Close the endpoints when both ranks are done."""
    case.need("p2p")
    transport, device = case.place.transport, case.place.device
    async with open_endpoint(transport, device, timeout=case.place.deadline) as here:
        if comm.rank == 0:
            try:
                peer = await here.connect(await comm.recv_object(1))
            except errors.UnsupportedOperation as error:
                await comm.send_object(str(error), 1)
                raise unittest.SkipTest(str(error)) from None
            await comm.send_object("", 1)
        else:
            await comm.send_object(here.address, 0)
            if why := await comm.recv_object(0):
                raise unittest.SkipTest(why)
            peer = await here.accept()
        yield EndpointPair(here, peer)
        await comm.barrier()


async def descriptor(comm: Communicator, given: bytes | None = None) -> bytes:
    """Send a descriptor from rank 1 to rank 0, and return it on both ranks."""
    if comm.rank == 1:
        assert given is not None
        await comm.send_object(given, 0)
        return given
    got: bytes = await comm.recv_object(1)
    return got


@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
async def test_peers_exchange_tensors_objects_and_streams(comm: Communicator, case: Case) -> None:
    """Tensors, objects and streams pass in both directions. Each end knows the address of the other end."""
    async with connected(comm, case) as (here, peer):
        other = 1 - comm.rank
        sent, got = case.full(case.bits(torch.float32, (PART,), comm.rank)), case.empty(torch.float32, (PART,))
        work = peer.send(sent.tensor, tag=7)
        assert await peer.recv(got.tensor, tag=7) is got.tensor
        assert await work is sent.tensor
        got.expect(case.bits(torch.float32, (PART,), other))
        work_ = peer.send_object({"from": comm.rank})
        assert await peer.recv_object() == {"from": other}
        await work_
        async with await peer.open_stream() as stream:
            await stream.send(torch.full((2,), comm.rank, device=comm.device))
            assert (await stream.receive()).tolist() == [other, other]
        assert here.peers == [peer]
        assert not peer.closed
        work_ = comm.send_object(here.address, other)
        assert peer.address == await comm.recv_object(other)
        await work_


@pytest.mark.memory
@ranks(2)
async def test_put_of_every_dtype_is_visible_after_the_signal(comm: Communicator, case: Case) -> None:
    """A put can carry elements of every dtype. The signal arrives after the data."""
    async with connected(comm, case) as (here, peer):
        for dtype in data.ALL_DTYPES:
            content = case.bits(dtype, (PART,))
            if comm.rank == 1:
                slot = case.full(torch.zeros(2 * PART, dtype=dtype))
                async with here.register(slot.tensor) as region:
                    await descriptor(comm, region.descriptor)
                    await peer.wait_signal()
                    slot.expect(torch.cat([torch.zeros(PART, dtype=dtype), content]))
                    await comm.recv_object(0)
                assert region.revoked
            else:
                given, got = case.full(content), case.empty(dtype, (2 * PART,))
                remote = await peer.attach(await descriptor(comm))
                assert (remote.count, remote.dtype, remote.readable, remote.writable) == (2 * PART, dtype, True, True)
                assert await remote.put(given.tensor, PART) is given.tensor
                await peer.signal()
                assert await remote.get(got.tensor) is got.tensor
                got.expect(torch.cat([torch.zeros(PART, dtype=dtype), content]))
                given.expect_untouched()
                await comm.send_object(None, 1)


@pytest.mark.memory
@ranks(2)
async def test_both_peers_attach_and_close_regions_concurrently(comm: Communicator, case: Case) -> None:
    """Each peer attaches and closes several regions of the other peer, in an order of its own.

    The owner of the regions revokes the regions in a different order.
    """
    async with connected(comm, case) as (here, peer):
        slots = [case.full(torch.zeros(4, dtype=torch.int64)) for _ in range(5)]
        regions = [here.register(slot.tensor) for slot in slots]
        work = comm.send_object([region.descriptor for region in regions], 1 - comm.rank)
        theirs = await comm.recv_object(1 - comm.rank)
        await work
        order = [0, 1, 2, 3, 4] if comm.rank else [4, 2, 0, 3, 1]

        async def use(number: int) -> None:
            await peer.put(torch.full((4,), 10 * comm.rank + number, device=comm.device), theirs[number])

        async with anyio.create_task_group() as tasks:
            for number in order:
                tasks.start_soon(use, number)
        await peer.signal()
        await peer.wait_signal()
        for number, slot in enumerate(slots):
            slot.expect(torch.full((4,), 10 * (1 - comm.rank) + number))
        await comm.barrier()
        async with anyio.create_task_group() as tasks:
            for number in reversed(order):
                tasks.start_soon(regions[number].revoke)
        assert all(region.revoked for region in regions)


@pytest.mark.fault(108)
@pytest.mark.memory
@ranks(2)
async def test_revoked_region_completes_pending_ops_and_refuses_new_ones(comm: Communicator, case: Case) -> None:
    """A pending op completes. New ops of the other end fail at once, and no peer can attach the region again."""
    async with connected(comm, case) as (here, peer):
        slot = case.full(torch.zeros(PART))
        if comm.rank == 1:
            region = here.register(slot.tensor)
            await descriptor(comm, region.descriptor)
            await comm.recv_object(0)
            await region.revoke()
            await region.revoke()
            content = slot.tensor.clone()
            await comm.send_object("revoked", 0)
            await comm.recv_object(0)
            assert slot.tensor.equal(content)
        else:
            given = await descriptor(comm)
            remote = await peer.attach(given)
            assert await peer.attach(given) is remote
            work = remote.put(case.full(torch.ones(PART)).tensor)
            await comm.send_object("go on", 1)
            assert await comm.recv_object(1) == "revoked"
            await work
            assert remote.closed
            for attempt in (remote.put, remote.get):
                with pytest.raises(RegionError, match="revoked"):
                    attempt(torch.zeros(PART, device=comm.device))
            with pytest.raises(RegionError, match="revoked"):
                await peer.attach(given)
            await comm.send_object("tried", 1)


@ranks(2)
async def test_leased_blocks_are_read_filled_and_given_back(comm: Communicator, case: Case) -> None:
    """Rank 0 reads and fills leased blocks, whole and in part.

    Rank 1 cancels one hand-over of a block. Rank 0 drops another lease.
    """
    if comm.device.type != "cpu":
        raise unittest.SkipTest("pools are on the CPU")
    async with connected(comm, case) as (here, peer):
        content = case.bits(torch.int64, (5, 2, PART))
        if comm.rank == 1:
            pool = here.new_pool(content.clone())
            async with pool.lease(2), pool.lease(3) as lease:
                assert await peer.hand_over(lease, "read") == 3
                assert await peer.hand_over(lease, "fill", write=True) is None
                assert pool.tensor[2:].equal(content[2:].flip(0))
                with anyio.CancelScope() as scope:
                    comm.recv_object(0).add_done_callback(lambda _: scope.cancel())
                    await peer.hand_over(lease, "cancel")
                assert scope.cancelled_caught
                with pytest.raises(errors.LeaseError, match="has dropped the lease: ZeroDivisionError: enough"):
                    await peer.hand_over(lease, "drop")
            assert (pool.free, pool.leased, pool.held) == (5, 0, 0)
            assert pool.tensor[:2].equal(content[:2])
        else:
            await use_leases(comm, here, content[2:])


async def use_leases(comm: Communicator, here: Endpoint, content: torch.Tensor) -> None:
    """Use each lease that rank 1 sends, on rank 0. The ``meta`` of a lease says how rank 0 uses the lease."""
    leases = here.handed()
    async with await anext(leases) as handed:
        assert (handed.meta, len(handed)) == ("read", 3)
        assert (await handed.read(torch.zeros_like(content))).equal(content)
        assert (await handed.read(torch.zeros_like(content)[:, 1].clone(), 1)).equal(content[:, 1])
        await handed.give_back(len(handed))
    async with await anext(leases) as handed:
        for part in range(2):
            await handed.write(content.flip(0)[:, part].clone(), part)
    handed = await anext(leases)
    await comm.send_object(None, 1)
    with pytest.raises(errors.LeaseError, match="the owner has taken the lease back"):
        while True:
            await handed.read(torch.zeros_like(content))
            await anyio.lowlevel.checkpoint()
    with pytest.raises(ZeroDivisionError):
        async with await anext(leases):
            raise ZeroDivisionError("enough")


@ranks(2)
async def test_region_can_be_attached_again_after_close(comm: Communicator, case: Case) -> None:
    async with connected(comm, case) as (here, peer):
        if comm.rank == 1:
            slot = case.full(torch.zeros(1))
            async with here.register(slot.tensor) as region:
                await descriptor(comm, region.descriptor)
                await comm.recv_object(0)
                slot.expect(torch.tensor([9.0]))
        else:
            given = await descriptor(comm)
            for value in range(10):
                async with await peer.attach(given) as remote:
                    await remote.put(torch.tensor([float(value)], device=comm.device))
                with pytest.raises(RegionError):
                    remote.flush()
            await comm.send_object(None, 1)


@pytest.mark.fault(109)
@pytest.mark.core
@ranks(2)
async def test_region_refuses_access_beyond_its_rights_and_bounds(comm: Communicator, case: Case) -> None:
    async with connected(comm, case) as (here, peer):
        slot = case.full(torch.arange(8.0))
        if comm.rank == 1:
            kinds = [(True, False), (False, True)]
            regions = [here.register(slot.tensor, read=read, write=write) for read, write in kinds]
            await comm.send_object([region.descriptor for region in regions], 0)
            await comm.recv_object(0)
            slot.expect(torch.arange(8.0))
            with pytest.raises(ArgumentError, match="timeout is -1"):
                await regions[0].revoke(timeout=-1)
            assert not regions[0].revoked
            with pytest.raises(ArgumentError, match="read and write are both False"):
                here.register(slot.tensor, read=False, write=False)
            with pytest.raises(ArgumentTypeError, match="tensor is"):
                here.register([1.0])  # type: ignore[arg-type]
        else:
            readable, writable = [await peer.attach(it) for it in await comm.recv_object(1)]
            x = torch.zeros(4, device=comm.device)
            with pytest.raises(RegionError, match="does not let it be written"):
                readable.put(x)
            with pytest.raises(RegionError, match="does not let it be read"):
                writable.get(x)
            with pytest.raises(ArgumentError, match="offset is 5 for 4 elements"):
                writable.put(x, 5)
            with pytest.raises(ArgumentError, match="dtype"):
                writable.put(x.double())
            await readable.get(x, 4)
            assert x.tolist() == [4, 5, 6, 7]
            await comm.send_object(None, 1)


@pytest.mark.fault(110)
@pytest.mark.memory
@ranks(2)
async def test_forged_foreign_or_expired_descriptor_raises_region_error(comm: Communicator, case: Case) -> None:
    """Forged, foreign and expired descriptors are refused, and also values that are not descriptors."""
    async with connected(comm, case) as (here, peer):
        slot = case.full(torch.zeros(8))
        if comm.rank == 1:
            region = here.register(slot.tensor)
            brief = here.register(slot.tensor, lifetime=1e-9)
            await comm.send_object((region.descriptor, brief.descriptor), 0)
            await comm.recv_object(0)
            slot.expect(torch.zeros(8))
        else:
            good, expired = await comm.recv_object(1)
            mine = here.register(torch.zeros(8, device=comm.device)).descriptor
            forged = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
            for _ in ("before it is attached", "and afterwards"):
                for wrong in [*forged, good[:-1], good + b"\0", b"", bytes(40), expired, mine]:
                    with pytest.raises(RegionError):
                        await peer.put(torch.ones(8, device=comm.device), wrong)
                await peer.get(torch.ones(8, device=comm.device), good)
            with pytest.raises(ArgumentTypeError, match="descriptor is"):
                await peer.put(torch.ones(8, device=comm.device), "descriptor")  # type: ignore[arg-type]
            await comm.send_object(None, 1)


@ranks(2)
async def test_wrong_expired_or_dead_address_is_refused_by_connect(comm: Communicator, case: Case) -> None:
    async with connected(comm, case) as (here, _):
        with pytest.raises(ArgumentError, match="this endpoint's own"):
            await here.connect(here.address)
        with pytest.raises(ArgumentTypeError, match="address is"):
            await here.connect("address")  # type: ignore[arg-type]
        for at in range(len(here.address)):
            wrong = bytearray(here.address)
            wrong[at] ^= 1
            with pytest.raises((ArgumentError, errors.AuthError)):
                await here.connect(bytes(wrong))
        async with open_endpoint(case.place.transport, case.place.device, lifetime=1e-9) as brief:
            with pytest.raises(ArgumentError, match="has expired"):
                await here.connect(brief.address)
            assert not (await brief.connect(here.address)).closed
        async with open_endpoint(case.place.transport, case.place.device) as gone:
            address = gone.address
        with pytest.raises(errors.PeerDiedError, match="cannot be reached"):
            await here.connect(address)


@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
async def test_simultaneous_connects_form_one_connection(comm: Communicator, case: Case) -> None:
    """Both peers connect at the same time, several times each, and share one connection."""
    async with connected(comm, case) as (here, peer):
        transport, device = case.place.transport, case.place.device
        for _ in range(4):
            async with open_endpoint(transport, device, timeout=case.place.deadline) as other:
                work = comm.send_object(other.address, 1 - comm.rank)
                address = await comm.recv_object(1 - comm.rank)
                await work
                found: list[Peer] = []

                async def connect(other: Endpoint = other, address: bytes = address, found: list[Peer] = found) -> None:
                    found.append(await other.connect(address))

                async with anyio.create_task_group() as tasks:
                    for _ in range(3):
                        tasks.start_soon(connect)
                assert other.peers == [found[0]] == [*set(found)]
                sent = found[0].send_object(comm.rank)
                assert await found[0].recv_object() == 1 - comm.rank
                await sent
                await comm.barrier()
        assert here.peers == [peer]
