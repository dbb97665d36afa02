"""Ops with ``timeout=None``: they have no deadline, and cost the watchdog nothing.

Such an op waits while the deadline of a later op of the same communicator passes.
"""

from __future__ import annotations

import inspect
import json
import math
import threading
import time

import anyio
import pytest
import torch
from concurrency import new_store, ranks, together, turns
from processes import no_threads
from torch.distributed import HashStore

import aiocomms
from aiocomms import COMM_TIMEOUT
from aiocomms.bootstrap import rendezvous
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommAbortedError, CommClosedError, CommTimeoutError
from aiocomms.progress.deadlines import watchdog
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

SHORT = 0.05


async def a_deadline_passes(comm):
    """Let the deadline of a new receive pass, which fails alone."""
    with pytest.raises(CommTimeoutError):
        await comm.recv(torch.zeros(1), (comm.rank + 1) % comm.size, tag=99, timeout=SHORT)


WAITS = {
    "recv": (lambda c, **o: c.recv(torch.zeros(1), 1, **o), lambda c: c.send(torch.ones(1), 0)),
    "send": (lambda c, **o: c.send(torch.zeros(1), 1, **o), lambda c: c.recv(torch.ones(1), 0)),
    "batch": (lambda c, **o: c.batch().recv(torch.zeros(1), 1).issue(**o), lambda c: c.send(torch.ones(1), 0)),
    "recv_object": (lambda c, **o: c.recv_object(1, **o), lambda c: c.send_object("x", 0)),
    "broadcast_object": (lambda c, **o: c.broadcast_object(None, 1, **o), lambda c: c.broadcast_object("x", 1)),
    "broadcast": (lambda c, **o: c.broadcast(torch.zeros(1), 1, **o), lambda c: c.broadcast(torch.ones(1), 1)),
    "all_reduce": (lambda c, **o: c.all_reduce(torch.ones(1), **o), lambda c: c.all_reduce(torch.ones(1))),
    "barrier": (lambda c, **o: c.barrier(**o), lambda c: c.barrier()),
}


@pytest.mark.parametrize("said", ["by the op", "later", "when opened"])
@pytest.mark.parametrize("op", WAITS)
def test_op_without_a_deadline_outlives_the_deadline_of_others(run, op, said):
    wait, answer = WAITS[op]

    async def main():
        async with local_world(2, timeout=None if said == "when opened" else 30) as (waiting, late):
            if said != "when opened":
                waiting.set_timeout(SHORT if said == "by the op" else None)
            late.set_timeout(30)
            work = wait(waiting, **({"timeout": None} if said == "by the op" else {}))
            for _ in range(3):
                await a_deadline_passes(waiting)
            assert not work.done() or op == "send"
            await together(work.wait, answer(late).wait)
            assert work.exception() is None
            assert not waiting.aborted

    run(main)


def test_window_ops_may_have_no_deadline(run):
    async def main():
        async with local_world(2, {"p2p": "local"}) as world:  # These windows work over messages.
            for comm in world:
                comm.set_timeout(SHORT)
                assert comm.transports["rma"] == "two-sided over local"
            windows = await ranks(world, lambda comm: comm.new_window(torch.zeros(2), timeout=None))
            waits = [windows[0].wait_signal(1, timeout=None)]
            await a_deadline_passes(world[0])
            assert not waits[0].done()
            await windows[1].put(torch.ones(1), 0, timeout=None)
            await windows[1].signal(0, timeout=None)
            await waits[0]
            assert windows[0].tensor.tolist() == [1, 0]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: windows[0].aclose(timeout=None))
                await turns()
                await a_deadline_passes(world[0])
                assert windows[0].closed
                tasks.start_soon(lambda: windows[1].aclose(timeout=None))

    run(main)


@pytest.mark.parametrize("end", ["an abort", "a peer's abort", "a close", "a peer's close", "a deadline"])
def test_op_without_a_deadline_fails_when_its_communicator_ends(run, end):
    async def main():
        async with local_world(2, timeout=None) as (here, there):
            collective, receive = here.all_reduce(torch.ones(1)), here.recv(torch.zeros(1), 1)
            await a_deadline_passes(here)
            match end:
                case "an abort" | "a peer's abort":
                    (here if end == "an abort" else there).abort("enough")
                    expected = CommAbortedError
                case "a deadline":
                    there.set_timeout(SHORT)
                    with pytest.raises(CommTimeoutError):
                        await there.all_gather_object(1)
                    expected = CommTimeoutError
                case "a peer's close":
                    await there.aclose()
                    expected = CommAbortedError
                case "a close":
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(here.aclose)
                        await receive.wait()
                        tasks.cancel_scope.cancel()  # The cancellation ends the grace period of ops under way.
                    expected = CommClosedError
            for work in (collective, receive):
                with pytest.raises(expected):
                    await work

    run(main)


# ------------------------------------------------------------------------------------------------- the watchdog


def test_ops_without_deadlines_start_no_watchdog(run):
    async def main():
        async with local_world(2, timeout=None) as world:
            stream, other = await together(
                lambda: world[0].open_stream(1), lambda: world[1].open_stream(0)
            )  # Messages of streams never have a deadline.
            with no_threads():
                works = [world[0].recv(torch.zeros(1), 1), world[0].barrier()]
                await turns()
            assert watchdog._thread is None
            assert watchdog.wakes_at == math.inf
            await world[1].send(torch.ones(1), 0)
            await world[1].barrier()
            for work in works:
                await work
            await together(stream.aclose, other.aclose)

    run(main)


def test_watchdog_ignores_ops_without_a_deadline(run):
    """The watchdog has no next wake-up after the last deadline, although ops without one are pending."""

    async def main():
        async with local_world(2) as world:
            works = [world[0].recv(torch.zeros(1), 1, tag=tag, timeout=None) for tag in range(10)]
            await a_deadline_passes(world[0])
            flying = world[0]._core.in_flight
            assert flying.expire(time.monotonic() + 1e9) == math.inf
            assert not any(work.done() for work in works)
            last = world[0].recv(torch.zeros(1), 1, tag=10, timeout=100)
            assert time.monotonic() + 90 < flying.expire(time.monotonic()) < time.monotonic() + 110
            for work in (*works, last):
                assert await work.cancel()

    run(main)


def test_recorder_has_the_start_of_an_op_without_a_deadline(run, tmp_path):
    async def main():
        async with local_world(2, timeout=None) as world:
            before = time.monotonic()
            work = world[0].all_reduce(torch.ones(1))
            await turns()
            (flying,) = world[0]._core.in_flight.look()
            assert flying.work is work
            assert before <= flying.posted <= time.monotonic()
            text = world[0].dump(tmp_path).read_text()
            await world[1].all_reduce(torch.ones(1))
            await work
            text += world[0].dump(tmp_path).read_text()
            for line in text.splitlines():
                json.loads(line, parse_constant=pytest.fail)  # NaN and infinities

    run(main)


# -------------------------------------------------------------------------------------------- where it is said


def test_op_without_a_timeout_argument_uses_the_communicators(run):
    """An op takes the communicator's timeout at its call, without an argument or with ``COMM_TIMEOUT``."""

    async def main():
        async with local_world(2, timeout=None) as (comm, _):
            assert comm.timeout is None
            before = comm.recv(torch.zeros(1), 1, tag=1)
            comm.set_timeout(SHORT)
            assert comm.timeout == SHORT
            for given in ({}, {"timeout": COMM_TIMEOUT}):
                with pytest.raises(CommTimeoutError):
                    await comm.recv(torch.zeros(1), 1, **given)
            assert not before.done()
            comm.set_timeout(None)
            assert comm.timeout is None
            with pytest.raises(CommTimeoutError):
                await comm.recv(torch.zeros(1), 1, timeout=SHORT)
            assert await before.cancel()

    run(main)


def test_every_op_has_the_same_timeout_parameter():
    found = []
    for owner in (aiocomms.Communicator, aiocomms.Window, aiocomms.communicator.p2p.Batch):
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            timeout = inspect.signature(method).parameters.get("timeout")
            if timeout is not None and not name.startswith("_") and name not in ("set_timeout", "reconfigure"):
                assert (timeout.default, timeout.annotation) == (COMM_TIMEOUT, "OpTimeout"), name
                found.append(name)
    assert len(found) > 30
    assert repr(COMM_TIMEOUT) == "COMM_TIMEOUT"


def test_invalid_timeout_error_mentions_none_for_no_deadline(run):
    async def main():
        async with local_world(1) as (comm,):
            for call in (
                lambda: comm.barrier(timeout=0),
                lambda: comm.set_timeout(0),
                lambda: aiocomms.new_comm(timeout=0),
            ):
                with pytest.raises(ArgumentError, match=r"timeout is 0, wanted seconds: .*; or None, for no deadline"):
                    call()
            for call in (lambda: comm.set_timeout(COMM_TIMEOUT), lambda: aiocomms.new_comm(timeout=COMM_TIMEOUT)):
                with pytest.raises(ArgumentTypeError, match=r"timeout is COMM_TIMEOUT .*wanted seconds as a number"):
                    call()
            comm.abort("enough")
            for timeout in (None, COMM_TIMEOUT):  # A recovery needs a deadline to find the ranks that are left.
                with pytest.raises(
                    ArgumentTypeError, match=r"timeout is .*, wanted seconds as a number, or a timedelta$"
                ):
                    await comm.reconfigure(timeout=timeout)
            await (await comm.reconfigure()).aclose()

    run(main)


@pytest.mark.virtual_time
def test_new_comm_without_a_timeout_still_ends(run, monkeypatch):
    async def main():
        monkeypatch.setattr(rendezvous, "FORMING", 0.2)
        with pytest.raises(CommTimeoutError, match=r"after 0\.2 s these ranks had not joined: 1"):
            await aiocomms.new_comm("local", store=new_store(), rank=0, size=2, timeout=None)
        with pytest.raises(CommTimeoutError, match=r"within 0\.2 s no communicator took this process in"):
            await aiocomms.new_comm("local", store=new_store(), rank=0, size=2, timeout=None, join=True)

    run(main)


def test_communicators_derived_from_one_without_a_timeout_have_none(run):
    async def main():
        store = HashStore()
        place = {"store": store, "size": 2, "timeout": None}
        comms = await together(*(lambda r=r: aiocomms.new_comm("local", rank=r, **place)._open() for r in range(2)))
        children = await ranks(comms, lambda comm: comm.split([0, 1]))
        grandchildren = await ranks(children, lambda comm: comm.split([0, 1]))
        comms[0].abort("enough")
        successors = await ranks(comms, lambda comm: comm.reconfigure())
        after = await ranks(successors, lambda comm: comm.split([0, 1]))
        for world in (comms, children, grandchildren, successors, after):
            assert [comm.timeout for comm in world] == [None, None]
        for world in (children, grandchildren, successors, after):
            await ranks(world, lambda comm: comm.aclose())

    run(main)


def test_wait_blocking_on_a_thread_may_have_no_deadline(run):
    async def main():
        async with local_world(2) as world:
            world[0].set_timeout(SHORT)
            work, got = world[0].recv(torch.zeros(1), 1, timeout=None), []
            thread = threading.Thread(target=lambda: got.append(work.wait_blocking()))
            thread.start()
            await a_deadline_passes(world[0])
            assert not got
            await world[1].send(torch.ones(1), 0)
            await work
            await anyio.to_thread.run_sync(thread.join)
            assert got[0].item() == 1

    run(main)
