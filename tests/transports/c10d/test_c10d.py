"""The c10d transport: what is particular to it, between real processes. See also `test_processes.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from aiocomms_c10d import bringup, wire
from aiocomms_c10d.collectives import PLANS
from aiocomms_c10d.matching import PeerMatcher
from aiocomms_c10d.transport import C10dTransport
from processes import LARGE, PATIENCE, Rank, Run, held, in_turn, let_go, listening, numbers

import aiocomms
from aiocomms.errors import ArgumentError, CommAbortedError, CommError, PeerDiedError, StoreLostError

pytestmark = pytest.mark.real


@pytest.fixture
def transport() -> str:
    return "c10d"


def group_of(place: Rank) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.FileStore(str(place.folder / "group"), place.size)
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


async def adopt(place: Rank) -> None:
    rank, size = place.rank, place.size
    group = await asyncio.to_thread(group_of, place)
    async with await aiocomms.from_process_group(group) as comm:
        assert (comm.rank, comm.size) == (rank, size)
        for dtype in (torch.int64, torch.int16):
            for count in (3, LARGE):
                total = await comm.all_reduce(numbers(count, rank).to(dtype))
                assert torch.equal(total, sum(numbers(count, r) for r in range(size)).to(dtype))
        right, left = (rank + 1) % size, (rank - 1) % size
        sent = comm.send(numbers(LARGE, rank), right)
        assert torch.equal(await comm.recv(torch.zeros(LARGE, dtype=torch.int64), left), numbers(LARGE, left))
        await sent
        other = await aiocomms.from_process_group(group, name="other")
        child = await comm.split([2, 0, 1])
        at_once = [
            it.all_reduce(torch.full((LARGE,), 1.0)) for it in ((comm, child, other), (other, child, comm))[rank % 2]
        ]
        for work in at_once:
            assert (await work == size).all()
        await other.aclose()
        await child.aclose()
        for how in ("close", "abort"):
            tensor = torch.ones(2)
            await asyncio.to_thread(lambda tensor=tensor: group.allreduce([tensor]).wait())
            assert (tensor == size).all(), how
            if how == "close":
                lost = await aiocomms.from_process_group(group, name="lost")
                await lost.barrier()
                place.tell(f"met {rank}")
                await place.all_told("met", *range(size))
                lost.abort("it stays its owner's")
                await lost.aclose()


async def split_what_is_left_of_an_adopted_group(place: Rank) -> None:
    """The communicator over the group is closed when its child is split: the group has other ranks than the child."""
    group = await asyncio.to_thread(group_of, place)
    comm = await aiocomms.from_process_group(group)
    child = await comm.split([0, 1] if place.rank < 2 else [])
    await comm.barrier()
    await comm.aclose()
    if child is not None:
        async with child, await child.split([1, 0]) as turned:
            got = await turned.broadcast(torch.full((LARGE,), place.rank), root=0)
            assert (got == 1).all()
            place.tell(f"split {place.rank}")
    await place.all_told("split", 0, 1)  # a rank that closes an adopted group's communicator still owns the group


def test_process_group_is_adopted_and_split_or_left_as_it_was(ranks: Run) -> None:
    ranks(3, in_turn, adopt_in_vain, adopt, split_what_is_left_of_an_adopted_group)


async def adopt_in_vain(place: Rank) -> None:
    """Rank 0 may not serve a store: all are told at once, and the group is as it was."""
    group = await asyncio.to_thread(group_of, place)
    refused = (ArgumentError, "no token") if place.rank == 0 else (StoreLostError, "rank 0 could not serve a store")
    with (
        patch.object(bringup, "listen_on", side_effect=ArgumentError("no token")),
        pytest.raises(refused[0], match=refused[1]),
    ):
        await aiocomms.from_process_group(group)
    tensor = torch.ones(2)
    await asyncio.to_thread(lambda: group.allreduce([tensor]).wait())
    assert (tensor == place.size).all()
    async with await aiocomms.from_process_group(group) as comm:
        await comm.barrier()


async def listen(place: Rank) -> None:
    """Ranks of one host listen on the loopback interface only."""
    async with place.open():
        addresses = listening()[0]
        assert addresses
        assert all(address.startswith("0100007F:") for address in addresses), addresses


async def knock_over_ipv6(place: Rank) -> None:
    """Gloo accepts no foreign connection there; without IPv6 there is nothing to show."""
    if not has_ipv6():
        return
    with patch.object(bringup, "LOOPBACK", "::1"):
        async with place.open() as comm:
            mine = [address for address in listening()[0] if len(address) > 13]
            assert mine, "gloo does not listen on ::1"
            for address in mine:
                with socket.socket(socket.AF_INET6) as stranger:
                    stranger.settimeout(0.2)
                    with pytest.raises(TimeoutError):
                        stranger.connect(("::1", int(address.partition(":")[2], 16)))
            await comm.barrier()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


async def cancel_a_close(place: Rank) -> None:
    async with place.open("first") as comm:
        await comm.barrier()
    before = held()
    comm = await place.open("second")
    await comm.barrier()
    left, cancelled, close = list[threading.Thread](), threading.Event(), C10dTransport._close

    def close_late(transport: C10dTransport) -> None:
        left.append(threading.current_thread())
        cancelled.wait(PATIENCE)
        close(transport)

    with patch.object(C10dTransport, "_close", close_late):
        closing = asyncio.ensure_future(comm.aclose())
        while not left:  # noqa: ASYNC110 - a thread's
            await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    cancelled.set()
    left.pop().join(PATIENCE)
    del comm, closing
    await let_go(before)


def test_ranks_of_one_host_are_reached_by_nobody_else_and_let_go_of_all(ranks: Run) -> None:
    """Let go of a large tensor after its op, and of all by a close that is cancelled."""
    ranks(2, in_turn, listen, knock_over_ipv6, let_go_of, cancel_a_close)


WHOLE = 8 * 2**20
"""Elements of int64, 64 MiB: more than the kernel takes off a rank whose peer does not read."""


def stop_when(place: Rank, what: str) -> None:
    """This process stops as soon as it has asked for the data of an op, and tells when gloo has it all."""
    if what == "message":
        # between a request and its data, a moment that nothing else shows
        request_data, handle = PeerMatcher._request_data, PeerMatcher.handle

        def stop_then(*args: Any) -> Any:
            outcome = request_data(*args)
            place.tell("asked")
            os.kill(os.getpid(), signal.SIGSTOP)
            return outcome

        def handle_then(matcher: PeerMatcher, frame: wire.C10dFrame) -> None:
            handle(matcher, frame)
            if frame.header.kind in (wire.DATA, wire.VOID):
                place.tell("read")

        patch.multiple(PeerMatcher, _request_data=stop_then, handle=handle_then).start()
        return
    plan = PLANS[what]
    start, end = plan.start, plan.end

    def start_then(*args: Any) -> list[Any]:
        works = start(*args)
        place.tell("asked")
        os.kill(os.getpid(), signal.SIGSTOP)
        return works

    def end_then(*args: Any) -> None:
        end(*args)
        place.tell("read")

    patch.multiple(plan, start=start_then, end=end_then).start()


async def give_up_amid(place: Rank, what: str) -> None:
    """Rank 0 loses the communicator while it sends, and fills its tensor anew; rank 1 hears of it as late as can be."""
    async with place.open() as comm:
        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "message": lambda it: comm.recv(it, 0) if place.rank else comm.send(it, 1),
            "broadcast": lambda it: comm.broadcast(it, root=0),
            "all_reduce": lambda it: comm.all_reduce(it),
            "all_gather": lambda it: comm.all_gather_single(torch.zeros(2 * WHOLE, dtype=torch.int64), it),
        }
        tensor = torch.full((WHOLE,), 1 - place.rank)
        if place.rank == 1:
            stop_when(place, what)
            (place.folder / "pid").write_text(str(os.getpid()))
            place.tell("ready")
            with contextlib.suppress(CommAbortedError, PeerDiedError):
                got = await calls[what](tensor)
                assert (got[:WHOLE] == 1).all(), "rank 1 has taken for data what rank 0 wrote later"
            return
        await asyncio.to_thread(place.told, "ready")
        send_abort = C10dTransport._send_abort  # the connection's end is heard before the reason

        def send_abort_late(transport: C10dTransport, error: CommError) -> None:
            with contextlib.suppress(AssertionError):  # where a connection has broken, no rank reads it all
                place.told("read")
            send_abort(transport, error)

        patch.object(C10dTransport, "_send_abort", send_abort_late).start()
        work = calls[what](tensor)
        await asyncio.to_thread(place.told, "asked")
        pid = int((place.folder / "pid").read_text())
        await asyncio.to_thread(stopped, pid)
        comm.abort("it gives up")
        with contextlib.suppress(CommAbortedError):
            await work
        tensor.fill_(-1)
        os.kill(pid, signal.SIGCONT)


def stopped(pid: int) -> None:
    ends = time.monotonic() + PATIENCE
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < ends, "it does not stop"
        time.sleep(0.001)


@pytest.mark.parametrize("what", ["message", "broadcast", "all_reduce", "all_gather"])
def test_op_aborted_midway_delivers_no_partial_data(ranks: Run, what: str) -> None:
    ranks(2, give_up_amid, what)


async def let_go_of(place: Rank) -> None:
    async with place.open() as comm:
        tensor = torch.ones(10 * LARGE)
        kept = weakref.ref(tensor)
        await comm.all_reduce(tensor)
        del tensor
        ends = time.monotonic() + PATIENCE
        while kept() is not None:  # the thread that carried it may be a moment behind
            assert time.monotonic() < ends, gc.get_referrers(kept())
            await asyncio.sleep(0.01)
