"""Deadlines of ops: a watchdog thread keeps them, and a late collective aborts its communicator."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
from concurrency import in_threads, ranks, run_on, together, turns
from processes import PATIENCE, no_threads
from torch.distributed import HashStore

import aiocomms
from aiocomms.errors import ArgumentError, CommAbortedError, CommError, CommTimeoutError
from aiocomms.lowlevel import clock
from aiocomms.progress.deadlines import Watchdog, watchdog
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

SHORT = 0.1


def watching():
    return [t for t in threading.enumerate() if t.name == "aiocomms deadlines"]


COLLECTIVES = {
    "all_reduce": lambda comm, **o: comm.all_reduce(torch.ones(2), **o),
    "barrier": lambda comm, **o: comm.barrier(**o),
    "all_gather_object": lambda comm, **o: comm.all_gather_object(1, **o),
    "send": lambda comm, **o: comm.send(torch.ones(2), 1, **o),
    "send_object": lambda comm, **o: comm.send_object("x", 1, **o),
    "batch": lambda comm, **o: comm.batch().recv(torch.zeros(1), 1).issue(**o),
}


@pytest.mark.virtual_time
@pytest.mark.parametrize("call", COLLECTIVES.values(), ids=COLLECTIVES)
def test_op_past_its_deadline_aborts_the_communicator_on_every_rank(run, call):
    async def main():
        async with local_world(2) as world:
            others = [comm.recv(torch.zeros(1), 1 - comm.rank, tag=9) for comm in world]
            started = clock.now()
            work = call(world[0], timeout=SHORT)
            with pytest.raises(CommTimeoutError, match="its deadline passed") as caught:
                await work
            assert clock.now() - started >= SHORT
            assert isinstance(caught.value, TimeoutError)
            assert (caught.value.op, caught.value.seq, caught.value.rank) == (work.op.name, 1, 0)
            for other in others:
                with pytest.raises(CommTimeoutError, match=f"{work.op.name} #1 on 'world' .*its deadline passed"):
                    await other
            for comm in world:
                assert comm.aborted
                with pytest.raises(CommAbortedError, match="its deadline passed"):
                    comm.barrier()

    run(main)


@pytest.mark.fault(16, transport="local")
@pytest.mark.parametrize("n", [2, 4])
def test_timeout_error_names_the_missing_ranks(run, n):
    async def main():
        async with local_world(n) as world:
            for comm in world[2:]:
                comm.barrier()
            with pytest.raises(CommTimeoutError, match=r"waiting for rank 1(\D|$)"):
                await world[0].barrier(timeout=SHORT)
        async with local_world(n) as world:
            with pytest.raises(CommTimeoutError, match="waiting for ranks 1, 2, 3" if n == 4 else "waiting for rank 1"):
                await world[0].barrier(timeout=SHORT)

    run(main)


LATE_SEND = (
    lambda comm: comm.send_object("x", 1, tag=7, timeout=SHORT),
    "send_object(dst=1, tag=7); waiting for rank 1",
)
LATE_BATCH = (
    lambda comm: comm.batch().recv(torch.zeros(1), 1, tag=3).recv(torch.zeros(1), 2).issue(timeout=SHORT),
    "recv(src=1, tag=3), recv(src=2, tag=0); waiting for ranks 1, 2",
)


@pytest.mark.parametrize(
    ("transport", "late"),
    [("local", LATE_SEND), ("local", LATE_BATCH), ("c10d", LATE_BATCH)],  # c10d sends small messages at once
    ids=["local-send", "local-batch", "c10d-batch"],
)
@pytest.mark.usefixtures("patient")
def test_timeout_error_of_a_message_names_peer_tag_and_peers_op(run, transport, late):
    call, named = late

    async def main():
        async with local_world(3, transport) as world:
            elsewhere = world[1].recv(torch.zeros(1), 2, tag=5)
            with pytest.raises(CommTimeoutError) as caught:
                await call(world[0])
            assert f"its deadline passed: {named}: " in str(caught.value)
            assert "rank 1 has finished no collective and is in recv(src=2, tag=5)" in str(caught.value)
            with pytest.raises(CommTimeoutError):
                await elsewhere

    run(main)


RECEIVES = {
    "recv": lambda comm, **o: comm.recv(torch.zeros(1), 1, **o),
    "recv_object": lambda comm, **o: comm.recv_object(1, **o),
}


@pytest.mark.parametrize("call", RECEIVES.values(), ids=RECEIVES)
def test_unmatched_recv_past_its_deadline_fails_alone(run, call):
    async def main():
        async with local_world(2) as world:
            other = world[0].recv(torch.zeros(1), 1, tag=3)
            wanted = r"nothing matched recv\w*\(src=1, tag=0\) before its deadline; it was withdrawn"
            with pytest.raises(CommTimeoutError, match=wanted) as caught:
                await call(world[0], timeout=SHORT)
            assert caught.value.peer == 1
            assert not other.done()
            assert not world[0].aborted
            again = call(world[0])  # This receive gets the next message.
            if "object" in again.op.name:
                await world[1].send_object("late", 0)
                assert await again == "late"
            else:
                await world[1].send(torch.ones(1), 0)
                assert (await again).item() == 1
            await world[1].send(torch.ones(1), 0, tag=3)
            await other
            await ranks(world, lambda comm: comm.barrier())

    run(main)


def test_wait_signal_past_its_deadline_fails_alone(run):
    async def main():
        async with local_world(2) as world:
            windows = await ranks(world, lambda comm: comm.new_window(torch.zeros(1)))
            with pytest.raises(CommTimeoutError, match=r"nothing matched wait_signal\(src=1\) of window 1 before"):
                await windows[0].wait_signal(1, timeout=SHORT)
            await windows[1].signal(0)
            await windows[0].wait_signal(1)
            await together(*(window.aclose for window in windows))

    run(main)


@pytest.mark.parametrize("timeout", [SHORT, timedelta(seconds=SHORT)], ids=["seconds", "timedelta"])
@pytest.mark.parametrize("said", ["by the op", "when opened", "later"])
def test_deadline_may_be_set_by_op_communicator_or_new_comm(run, timeout, said):
    async def main():
        async with local_world(2) as world:
            place = {"store": HashStore(), "size": 2, "name": "timed"}
            if said == "when opened":
                place["timeout"] = PATIENCE  # The opening has this timeout, too.
            comms = await together(*(lambda r=r: aiocomms.new_comm("local", rank=r, **place)._open() for r in range(2)))
            if said == "when opened":
                assert comms[0].timeout == PATIENCE
            if said != "by the op":
                for comm in comms:
                    comm.set_timeout(timeout)
                    assert comm.timeout == SHORT
            work = comms[0].barrier(**({"timeout": timeout} if said == "by the op" else {}))
            with pytest.raises(CommTimeoutError):
                await work
            await ranks(comms, lambda comm: comm.aclose())
            await ranks(world, lambda comm: comm.barrier())

    run(main)


BAD = [0, -1, -0.5, float("nan"), float("inf"), True, False, "1", [1], 1j, timedelta(0), timedelta(days=-1), 1e9]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_invalid_timeout_is_refused(run, bad):
    async def main():
        async with local_world(2) as world:
            calls = [
                lambda: world[0].barrier(timeout=bad),
                lambda: world[0].recv(torch.zeros(1), 1, timeout=bad),
                lambda: world[0].recv_object(1, timeout=bad),
                lambda: world[0].set_timeout(bad),
                lambda: aiocomms.new_comm(timeout=bad),
            ]
            for call in calls:
                with pytest.raises(ArgumentError, match=r"timeout is .*, wanted seconds"):
                    call()
            assert world[0].timeout == 30.0
            await ranks(world, lambda comm: comm.barrier())

    run(main)


@pytest.mark.real
@pytest.mark.fault(14, transport="local")
def test_deadline_passes_while_the_loop_is_busy(loop):
    """A deadline passes while the loop of its rank is blocked: the peer gets the error meanwhile."""
    store, heard = HashStore(), threading.Event()

    async def rank(r):
        async with aiocomms.new_comm("local", store=store, rank=r, size=2) as comm:
            await comm.barrier()
            if r == 0:
                work = comm.all_reduce(torch.ones(1), timeout=SHORT)
                assert heard.wait(PATIENCE), "the peer waits until this loop comes round"
                with pytest.raises(CommTimeoutError, match="waiting for rank 1"):
                    await work
            else:
                with pytest.raises(CommTimeoutError, match="its deadline passed; waiting for rank 1"):
                    await comm.recv(torch.zeros(1), 0)
                heard.set()

    in_threads(*(lambda r=r: run_on(loop, rank, r) for r in range(2)))


def test_deadline_of_a_completed_op_is_dropped(run):
    async def main():
        async with local_world(2) as world:
            for _ in range(2):
                await ranks(world, lambda comm: comm.all_reduce(torch.ones(1)))
                for comm in world:  # The watchdog makes this call after the deadlines.
                    assert comm._core.in_flight.expire(time.monotonic() + 10 * comm.timeout) == float("inf")

    run(main)


@pytest.mark.virtual_time
def test_deadlines_expire_in_order_of_time(run):
    async def main():
        async with local_world(2) as world:
            started = clock.now()

            async def wait(i, timeout):
                with pytest.raises(CommTimeoutError):
                    await world[0].recv(torch.zeros(1), 1, tag=i, timeout=timeout)
                assert clock.now() - started >= timeout

            timeouts = [0.09, 0.03, 0.12, 0.06, 0.03]
            await together(*(lambda i=i, t=t: wait(i, t) for i, t in enumerate(timeouts)))

    run(main)


def test_watchdog_thread_lives_from_the_first_deadline_to_the_last_close(run):
    async def main():
        async with local_world(2) as world:
            assert not watching()
            await ranks(world, lambda comm: comm.barrier())
            async with local_world(2, name="other") as others:
                recv = world[0].recv(torch.zeros(1), 1)
                assert len(watching()) == 1
                assert await recv.cancel()
                await ranks(others, lambda comm: comm.barrier())
            assert len(watching()) == 1
        assert not watching()

    assert not watching()
    run(main)


def test_abort_drops_all_deadlines(run):
    async def main():
        async with local_world(2) as world:
            works = [comm.recv(torch.zeros(1), 1 - comm.rank) for comm in world]
            world[0].abort("enough")
            for work in works:
                await work.wait()
            await turns()
            for thread in watchdog.leaving:
                thread.join()
            assert not watching()

    run(main)


@pytest.mark.fault(59)
def test_communicator_is_lost_when_no_watchdog_thread_can_start(run):
    """Ops without a watchdog might never end, so the communicator is lost; a later one starts its watchdog."""

    async def main():
        async with local_world(2) as world:
            with no_threads():
                work = world[0].recv(torch.zeros(1), 1)
                with pytest.raises(CommAbortedError, match="its deadlines are not watched: can't start new thread"):
                    await work
            assert all(comm.aborted for comm in world)
        async with local_world(2) as world:
            with pytest.raises(CommTimeoutError):
                await world[0].recv(torch.zeros(1), 1, timeout=SHORT)
            assert len(watching()) == 1

    run(main)
    assert not watching()


@pytest.mark.fault(59)
def test_new_comm_without_threads_opens_only_a_single_rank(run):
    async def main():
        with no_threads():
            async with aiocomms.new_comm() as comm:
                assert (await comm.all_reduce(torch.ones(1))).item() == 1
            with pytest.raises(CommError, match="no thread can be started: can't start new thread"):
                await aiocomms.new_comm("local", store=HashStore(), rank=0, size=2, timeout=5)

    run(main)


class Expiring:
    """An owner of deadlines that records which of them have expired."""

    def __init__(self, *deadlines):
        self.deadlines = list(deadlines)
        self.told = []
        self.all_told = threading.Event()

    def expire(self, now):
        self.told += [d for d in self.deadlines if d <= now]
        self.deadlines = [d for d in self.deadlines if d > now]
        if not self.deadlines:
            self.all_told.set()
        return min(self.deadlines, default=float("inf"))


def test_watchdog_expires_each_owner_at_its_deadlines():
    dog, now = Watchdog(), time.monotonic()
    who = Expiring(now + 0.04, now + 0.02, now + 0.06)
    other = Expiring(now + 0.03)
    for it in (who, other):
        dog.register(it)
    dog.wake_by(now + 100)
    dog.wake_by(now + 0.02)
    dog.wake_by(now + 50)
    for it in (who, other):
        assert it.all_told.wait(PATIENCE)
    assert (len(who.told), len(other.told)) == (3, 1)
    assert dog._thread.is_alive()
    thread = dog._thread
    dog.unregister(who)
    assert thread.is_alive()
    dog.unregister(other)
    assert dog.leaving in ([thread], [])  # The thread may have ended already.
    thread.join(PATIENCE)
    assert dog.leaving == []
    dog.unregister(other)
    assert watchdog._thread is None


@pytest.mark.parametrize("runs", [False, True], ids=["before it runs", "when it runs"])
def test_watchdog_whose_start_was_interrupted_starts_at_the_next_deadline(monkeypatch, runs):
    dog, start, broken_off = Watchdog(), threading.Thread.start, []

    def interrupted(thread):
        if runs:
            start(thread)
        broken_off.append(thread)
        raise KeyboardInterrupt

    who = Expiring(time.monotonic())
    dog.register(who)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dog.wake_by(time.monotonic())
    if runs:
        broken_off[0].join(PATIENCE)
    assert not broken_off[0].is_alive()
    dog.wake_by(time.monotonic())
    assert who.all_told.wait(PATIENCE)
    dog.unregister(who)


def test_watchdog_starts_no_thread_for_an_owner_that_unregistered():
    dog, now, left = Watchdog(), time.monotonic(), threading.Event()

    class Leaving:
        def expire(self, now):
            dog.unregister(self)
            left.set()
            return now + 100

    who = Leaving()
    dog.register(who)
    dog.wake_by(now)
    thread = dog._thread
    assert left.wait(PATIENCE)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert dog._thread is None
    assert dog.wakes_at == float("inf")


def test_watchdog_keeps_no_owner_alive():
    dog, now, gone = Watchdog(), time.monotonic(), threading.Event()
    dog.register(Expiring())
    assert not list(dog._watched)
    who, sleeps_on = Expiring(now), Expiring(now + 100)
    weakref.finalize(who, gone.set)
    dog.register(who)
    dog.register(sleeps_on)
    dog.wake_by(now)
    assert who.all_told.wait(PATIENCE)
    del who
    assert gone.wait(PATIENCE)
    dog.unregister(sleeps_on)
