"""What the error of a late receive says of the ranks that the others wait for."""

from __future__ import annotations

import threading

import pytest
import torch
from concurrency import ranks
from processes import PATIENCE, no_threads

from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.diagnosis import inquiry
from aiocomms.diagnosis.inquiry import Inquiry, Waited
from aiocomms.errors import CommTimeoutError, StoreLostError
from aiocomms.testing import local_world

ALONE = "nothing matched recv(src=1, tag=7) before its deadline; it was withdrawn"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The store of a busy machine may take longer than a program would wait."""
    monkeypatch.setattr(inquiry, "PATIENCE", PATIENCE)


async def late(work):
    with pytest.raises(CommTimeoutError) as caught:
        await work
    return caught.value


@pytest.mark.parametrize("transport", ["local", "c10d"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_last_of_a_circle_of_receives_finds_it(run, size, transport):
    async def main():
        async with local_world(size, transport) as world:

            def receive(comm, timeout):
                return comm.recv(torch.zeros(1), (comm.rank + 1) % size, tag=7, timeout=timeout)

            last = receive(world[0], 30)
            for work in [receive(comm, 0.05) for comm in world[1:]]:
                assert (await late(work)).peer == (work.op.src)
            world[0]._core.expire(last)  # as the watchdog does, when the others' deadlines have passed
            error = await late(last)
            others = ", ".join(f"rank {r} was late in recv(src={(r + 1) % size}, tag=7)" for r in range(1, size))
            circle = " -> ".join(f"rank {r % size}" for r in range(size + 1))
            assert error.message == f"{ALONE}: {others}: they waited in a circle: {circle}"
            assert error.peer == 1
            await ranks(world, lambda comm: comm.barrier())  # and the communicator goes on

    run(main)


def test_a_circle_within_a_lane_names_it(run):
    async def main():
        async with local_world(2) as (one, two):
            last = one.lane("req-17").recv(torch.zeros(1), 1, tag=7, timeout=30)
            await late(two.lane("req-17").recv(torch.zeros(1), 0, tag=8, timeout=0.05))
            one._core.expire(last)
            error = await late(last)
            assert "rank 1 was late in recv(src=0, tag=8) in lane req-17: they waited in a circle" in error.message
            assert error.comm == "world, lane req-17"

    run(main)


def test_a_chain_that_is_no_circle_and_a_circle_of_others(run):
    async def main():
        async with local_world(4) as world:
            last = world[0].recv(torch.zeros(1), 1, tag=7, timeout=30)
            await late(world[1].recv_object(2, tag=3, timeout=0.05))
            world[0]._core.expire(last)
            assert (await late(last)).message == f"{ALONE}: rank 1 was late in recv_object(src=2, tag=3)"
        async with local_world(4) as world:
            last = world[0].recv(torch.zeros(1), 1, tag=7, timeout=30)
            works = [world[1].recv_object(2, timeout=0.05), world[2].recv_object(1, timeout=0.05)]
            for work in works:
                await late(work)
            world[0]._core.expire(last)
            assert (await late(last)).message.endswith("they waited in a circle: rank 1 -> rank 2 -> rank 1")

    run(main)


def test_who_waited_at_another_time_is_not_named(run):
    async def main():
        async with local_world(2) as world:
            await late(world[1].recv(torch.zeros(1), 0, tag=7, timeout=0.05))
            error = await late(world[0].recv(torch.zeros(1), 1, tag=7, timeout=0.05))
            assert error.message == ALONE

    run(main)


def test_a_message_that_comes_meanwhile_is_taken(run, monkeypatch):
    """The receive is withdrawn when it is known what to say, and not before."""

    async def main():
        asked, go_on = threading.Event(), threading.Event()

        def follow(self, mine):
            asked.set()
            assert go_on.wait(PATIENCE)
            return ""

        monkeypatch.setattr(Inquiry, "_follow", follow)
        async with local_world(2) as world:
            work = world[0].recv(torch.zeros(1), 1, timeout=0.02)
            assert asked.wait(PATIENCE)
            await world[1].send(torch.ones(1), 0)
            assert (await work).item() == 1
            go_on.set()
            await ranks(world, lambda comm: comm.barrier())

    run(main)


def test_who_polls_asks_now_and_then(run, monkeypatch):
    async def main():
        followed = []
        monkeypatch.setattr(Inquiry, "_follow", lambda self, mine: followed.append(mine) or "")
        monkeypatch.setattr(inquiry, "PERIOD", 1000.0)
        async with local_world(2) as world:
            for _ in range(10):
                assert (await late(world[0].recv(torch.zeros(1), 1, tag=7, timeout=0.001))).message == ALONE
            assert len(followed) == 1

    run(main)


@pytest.mark.parametrize("why", ["no thread", "no store", "the store is gone", "it hangs"])
def test_what_cannot_be_learnt_leaves_the_error(run, monkeypatch, why):
    async def main():
        hangs = threading.Event()

        def told(self, key, rank):
            if why == "it hangs":
                hangs.wait(PATIENCE)
            raise StoreLostError("gone")

        if why in ("the store is gone", "it hangs"):
            monkeypatch.setattr(StoreRendezvous, "told", told)
            monkeypatch.setattr(inquiry, "PATIENCE", 0.2)
        async with local_world(2) as world:
            for comm in world:
                comm.recv(torch.zeros(1), 1 - comm.rank, tag=8, timeout=30)  # there is a watchdog
            if why == "no store":
                world[0]._rendezvous.leave()
            work = world[0].recv(torch.zeros(1), 1, tag=7, timeout=30)
            if why == "no thread":
                with no_threads():
                    world[0]._core.expire(work)
            else:
                world[0]._core.expire(work)
            assert (await late(work)).message == ALONE
            hangs.set()

    run(main)


NOW = 1000.0
SAID = [
    b"", b"null", b"[]", b"[1,0,7,1.0,2.0]", b'["1",0,"recv",1.0,2.0]', b'[0,1,"recv",999.0,1000.0]',
    b'[1,2,"recv",999.0,1000.0]', b'[1,-1,"recv",999.0,1000.0]', b'[1,0,"recv",1e999,1.0]', b"\xff" * 50,
    b'[1,0,"\xff\xfe",999.0,1000.0]',
    b'[1,0,"' + b"x" * 2000 + b'",999.0,1000.0]', b'[1,0,"recv",1000.5,1000.0]',
]  # fmt: skip


@pytest.mark.parametrize("said", SAID)
def test_what_makes_no_sense_is_not_believed(said):
    class Board:
        store = True

        def tell(self, key, value):
            self.mine = value

        def told(self, key, rank):
            return said if rank == 1 else self.mine

    mine = Waited(0, 1, "recv(src=1, tag=7)", NOW - 1, NOW)
    assert Inquiry(Board(), 2)._follow(mine) == ""


def test_what_others_say_is_fit_for_a_message():
    class Board:
        store = True

        def tell(self, key, value):
            pass

        def told(self, key, rank):
            return b'[1,0,"re\\u001bcv\\n",999.0,1000.0]'

    mine = Waited(0, 1, "recv(src=1, tag=7)", NOW - 1, NOW)
    said = Inquiry(Board(), 2)._follow(mine)
    assert said == ": rank 1 was late in re?cv?: they waited in a circle: rank 0 -> rank 1 -> rank 0"
