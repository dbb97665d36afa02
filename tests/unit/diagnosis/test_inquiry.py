"""Inquiries: the words in the error of a late receive about the ranks that other ranks wait for."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from aiocomms_local import LocalTransport
from concurrency import ranks, together
from hypothesis import given
from hypothesis import strategies as st
from processes import PATIENCE, no_threads

from aiocomms.bootstrap import notes
from aiocomms.bootstrap.notes import Answer, Late, MeetingPlace, Notes, Question, Waiting
from aiocomms.core import inquiry
from aiocomms.core.inquiry import Inquiry, Wait
from aiocomms.errors import CommTimeoutError
from aiocomms.testing import local_world
from aiocomms.transport import Transport

pytestmark = pytest.mark.deterministic

ALONE = "nothing matched recv(src=1, tag=7) before its deadline; it was withdrawn"
IDLE = "has finished no collective and is in no operation"


class Standing:
    """A clock of inquiries that stands still while ranks are asked.

    An inquiry drops a wait that may have ended, also because an answer came late. On a busy machine an answer takes
    longer than the deadlines of these tests.
    """

    def __init__(self):
        self.time = time.monotonic()

    def now(self):
        return self.time


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Give ranks the time that they need to answer on a busy machine, and stop the clock of inquiries."""
    clock, begin = Standing(), Inquiry.begin

    def begin_now(self, late, end):
        clock.time = time.monotonic()
        begin(self, late, end)

    monkeypatch.setattr(inquiry, "clock", clock)
    monkeypatch.setattr(Inquiry, "begin", begin_now)
    monkeypatch.setattr(inquiry, "PATIENCE", PATIENCE)
    monkeypatch.setattr(inquiry, "PERIOD", 0.0)


async def late(work):
    with pytest.raises(CommTimeoutError) as caught:
        await work
    return caught.value


async def all_late(world, works):
    """Let the deadline of every receive pass after all ranks have begun to wait; return the errors."""
    for comm, work in zip(world, works, strict=True):
        comm._core.expire(work)  # The watchdog makes this call.
    return [await late(work) for work in works]


def receive(comm, src, timeout=0.05):
    return comm.recv(torch.zeros(1), src, tag=7, timeout=timeout)


EVERY = pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])


@EVERY
def test_late_recv_says_whether_its_source_is_idle_or_in_a_collective(run, transport):
    async def main():
        async with local_world(3, transport) as world:
            error = await late(receive(world[0], 1))
            assert error.message == f"{ALONE}: rank 1 {IDLE}"
            assert error.peer == 1
            await ranks(world, lambda comm: comm.barrier())
            barrier = world[1].barrier(timeout=30)
            said = (await late(receive(world[0], 1))).message
            assert said.startswith(f"{ALONE}: rank 1 has finished collective 1 (barrier #")
            assert ") and is in barrier: they waited in a circle: rank 0 -> rank 1 -> rank 0" in said
            await ranks([world[0], world[2]], lambda comm: comm.barrier())
            await barrier

    run(main)


@EVERY
def test_circle_of_recvs_is_named_when_one_has_a_deadline(run, transport):
    async def main():
        async with local_world(3, transport) as world:
            others = [receive(world[1], 2, 30), world[2].recv_object(0, tag=8, timeout=None)]
            assert (await late(receive(world[0], 1))).message == (
                f"{ALONE}: rank 1 has finished no collective and is in recv(src=2, tag=7), "
                "rank 2 has finished no collective and is in recv_object(src=0, tag=8): "
                "they waited in a circle: rank 0 -> rank 1 -> rank 2 -> rank 0"
            )
            await world[0].send_object("go on", 2, tag=8)
            await world[2].send(torch.zeros(1), 1, tag=7)
            for work in others:
                await work

    run(main)


@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_circle_of_recvs_that_all_timed_out_is_named(run, size, transport):
    async def main():
        async with local_world(size, transport) as world:
            last, *works = [receive(comm, (comm.rank + 1) % size, 30) for comm in world]
            await all_late(world[1:], works)
            (error,) = await all_late(world[:1], [last])
            others = ", ".join(f"rank {r} was late in recv(src={(r + 1) % size}, tag=7)" for r in range(1, size))
            circle = " -> ".join(f"rank {r % size}" for r in range(size + 1))
            assert error.message == f"{ALONE}: {others}: they waited in a circle: {circle}"
            assert error.peer == 1
            await ranks(world, lambda comm: comm.barrier())  # The communicator stays usable.

    run(main)


def test_every_rank_of_a_long_circle_names_it(run, monkeypatch):
    """The error describes only the first few ranks, but names the whole circle."""
    all_begun, inquire = threading.Event(), Inquiry._inquire

    def when_all_have_begun(self, wait, end):  # Each inquiry that begins moves the clock.
        if self._comm.rank == 11:
            all_begun.set()
        assert all_begun.wait(PATIENCE)
        inquire(self, wait, end)

    monkeypatch.setattr(Inquiry, "_inquire", when_all_have_begun)

    async def main():
        async with local_world(12) as world:
            works = [receive(comm, (comm.rank + 1) % 12, 30) for comm in world]
            for error in await all_late(world, works):
                assert "), and 3 more: they waited in a circle: rank" in error.message
                assert error.message.count(" -> ") == 12

    run(main)


def test_circle_within_a_lane_names_the_lane(run):
    async def main():
        async with local_world(2) as (one, two):
            last = one.lane("req-17").recv(torch.zeros(1), 1, tag=7, timeout=30)
            await late(two.lane("req-17").recv(torch.zeros(1), 0, tag=8, timeout=0.05))
            (error,) = await all_late([one], [last])
            assert "rank 1 was late in recv(src=0, tag=8) in lane req-17: they waited in a circle" in error.message
            assert error.comm == "world, lane req-17"
            two.lane("b").recv(torch.zeros(1), 0, tag=8)
            assert "is in recv(src=0, tag=8) in lane b" in (await late(receive(one, 1))).message

    run(main)


def test_chain_of_waiting_ranks_is_followed_to_its_end_or_a_circle(run):
    async def main():
        async with local_world(4) as world:
            last = receive(world[0], 1, 30)
            await late(world[1].recv_object(2, tag=3, timeout=0.05))
            (error,) = await all_late(world[:1], [last])
            assert error.message == f"{ALONE}: rank 1 was late in recv_object(src=2, tag=3), rank 2 {IDLE}"
        async with local_world(4) as world:
            last = receive(world[0], 1, 30)
            await all_late(world[1:3], [world[1].recv_object(2), world[2].recv_object(1)])
            (error,) = await all_late(world[:1], [last])
            assert error.message.endswith("they waited in a circle: rank 1 -> rank 2 -> rank 1")

    run(main)


def test_recvs_that_waited_at_different_times_form_no_circle(run):
    async def main():
        async with local_world(2) as world:
            await late(receive(world[1], 0))
            assert (await late(receive(world[0], 1))).message == f"{ALONE}: rank 1 {IDLE}"

    run(main)


@pytest.mark.real
@EVERY
def test_rank_whose_loop_is_busy_answers_an_inquiry(run, transport):
    """Both ranks share a loop, which is blocked until the answer has come; only the error waits for the loop."""

    async def main():
        async with local_world(2, transport) as world:
            heard = threading.Event()
            hear = world[0]._core.notes.on_word
            world[0]._core.notes.on_word = lambda rank, word: (hear(rank, word), heard.set())
            work = receive(world[0], 1)
            assert heard.wait(PATIENCE)  # The loop does not turn meanwhile.
            assert not work.done()
            assert (await late(work)).message == f"{ALONE}: rank 1 {IDLE}"

    run(main)


def test_rank_that_does_not_answer_is_called_dead_stopped_or_busy(run, monkeypatch):
    monkeypatch.setattr(inquiry, "PATIENCE", 0.05)
    monkeypatch.setattr(Inquiry, "_answer", lambda self: None)

    async def main():
        async with local_world(2) as world:
            said = f"{ALONE}: rank 1 does not answer: dead, stopped or busy"
            assert (await late(receive(world[0], 1))).message == said

    run(main)


@pytest.mark.parametrize("why", ["no thread", "no notes"])
def test_inquiry_that_cannot_be_made_leaves_the_timeout_error(run, monkeypatch, why):
    if why == "no notes":
        monkeypatch.setattr(LocalTransport, "say", Transport.say)

    async def main():
        async with local_world(2) as world:
            for comm in world:
                comm.recv(torch.zeros(1), 1 - comm.rank, tag=8, timeout=30)  # These deadlines start the watchdog.
            work = receive(world[0], 1, 30)
            if why == "no thread":
                with no_threads():
                    world[0]._core.expire(work)
            else:
                world[0]._core.expire(work)
            assert (await late(work)).message == ALONE

    run(main)


@pytest.mark.real
def test_message_that_arrives_during_an_inquiry_is_received(run, monkeypatch):
    """The receive is withdrawn only when the inquiry has ended."""

    async def main():
        asked, go_on = threading.Event(), threading.Event()

        def follow(self, wait):
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


@pytest.mark.real
@pytest.mark.parametrize("who", ["the asker", "the asked"])
@EVERY
def test_inquiry_ends_although_both_ranks_close_meanwhile(run, monkeypatch, who, transport):
    """The answer comes after both communicators have closed."""
    monkeypatch.setattr(inquiry, "PATIENCE", 0.05)

    async def main():
        asked, closed, ended = threading.Event(), threading.Event(), threading.Event()
        answer, look = Inquiry._answer, Inquiry._look

        def slow(self):
            asked.set()
            assert closed.wait(PATIENCE)
            return look(self)

        def ends(self):
            answer(self)
            ended.set()

        monkeypatch.setattr(Inquiry, "_look", slow)
        monkeypatch.setattr(Inquiry, "_answer", ends)
        async with local_world(2, transport) as world:
            work = receive(world[0], 1)
            assert asked.wait(PATIENCE)
            await together(*(comm.aclose for comm in (world if who == "the asker" else reversed(world))))
            closed.set()
            assert ended.wait(PATIENCE)
            await work.wait()
            assert work.exception() is not None

    run(main)


@pytest.mark.virtual_time
def test_repeated_timeouts_inquire_once_per_period(run, monkeypatch):
    async def main():
        followed = []
        monkeypatch.setattr(Inquiry, "_follow", lambda self, wait: followed.append(wait) or "")
        monkeypatch.setattr(inquiry, "PERIOD", 1000.0)
        async with local_world(2) as world:
            for _ in range(10):
                assert (await late(receive(world[0], 1, 0.001))).message == ALONE
            assert len(followed) == 1

    run(main)


def test_one_thread_answers_all_inquiries(run, monkeypatch):
    async def main():
        looks, go_on, answered = [], threading.Event(), threading.Event()
        look, heard = Inquiry._look, []

        def slow(self):
            looks.append(self)
            assert go_on.wait(PATIENCE)
            return look(self)

        monkeypatch.setattr(Inquiry, "_look", slow)
        async with local_world(8) as world:
            for comm in world[1:]:
                comm._core.notes.on_word = lambda rank, word: (heard.append(word), len(heard) == 7 and answered.set())
                for number in range(100):
                    assert comm._core.notes.say(0, Question(number))
            go_on.set()
            assert answered.wait(PATIENCE)
            assert len(looks) == 1
            assert {word.number for word in heard} == {99}

    run(main)


def test_lost_communicator_asks_no_questions(run):
    """The abort's own error says more than an answer."""

    async def main():
        async with local_world(2, "c10d") as world:
            world[0].abort("enough")
            assert not world[0]._core.notes.say(1, Question(1))

    run(main)


# ------------------------------------------------------------------------------------------------------- what is said


class Telling:
    """A transport of rank 0 on which rank 1 answers at once."""

    def __init__(self, answer):
        self.answer = answer

    def say(self, rank, note):
        question = notes.read(note, 2)
        assert type(question) is Question
        self.on_note(rank, self.answer(question.number))
        return True


class Comm:
    rank, size = 0, 2


def follow(answer):
    transport = Telling(answer)
    told = Notes([transport], 2)
    transport.on_note = told.hear
    asking, now = Inquiry(Comm(), told), time.monotonic()
    return asking._follow(Wait(1, now - 5.0, now, "recv(src=1, tag=7)"))


def packed(number, **changed):
    fields = {"doing": "is in barrier", "waits": [Waiting(0, 9.0)], "late": Late(0, 9.0, "recv(src=0)", 1.0)}
    return notes.NOTES.encode(Answer(number, **{**fields, **changed}))


def test_well_formed_forged_answer_is_understood():
    """The unchanged answer is valid; otherwise the next test would test nothing."""
    assert follow(packed) == ": rank 1 is in barrier: they waited in a circle: rank 0 -> rank 1 -> rank 0"


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: packed(number + 1),
        lambda number: packed(number)[:-1],
        lambda number: packed(number, doing="x" * 2000),
        lambda number: packed(number, waits=[Waiting(2, 9.0)]),
        lambda number: packed(number, waits=[Waiting(-1, 9.0)]),
        lambda number: packed(number, waits=[Waiting(2**63, 9.0)]),
        lambda number: packed(number, waits=[Waiting(0, math.inf)]),
        lambda number: packed(number, waits=[Waiting(0, math.nan)]),
        lambda number: packed(number, waits=[Waiting(0, -1.0)]),
        lambda number: packed(number, late=Late(2, 9.0, "recv", 1.0)),
        lambda number: packed(number, late=Late(0, 9.0, "recv", math.nan)),
        lambda number: packed(number).replace(b"is in", b"is \xff\xfe"),
        lambda number: b"",
        lambda number: b"\xdd\xff\xff\xff\xff" * 3,
    ],
)
def test_malformed_answer_counts_as_no_answer(monkeypatch, answer):
    monkeypatch.setattr(inquiry, "PATIENCE", 0.01)
    assert follow(answer) == ": rank 1 does not answer: dead, stopped or busy"


def test_answer_from_another_rank_is_ignored(monkeypatch):
    monkeypatch.setattr(inquiry, "PATIENCE", 0.01)
    transport = Telling(packed)
    told = Notes([transport], 3)
    transport.on_note = lambda rank, note: told.hear(2, note)
    said = Inquiry(Comm(), told)._follow(Wait(1, 0.0, time.monotonic()))
    assert said == ": rank 1 does not answer: dead, stopped or busy"


def test_answer_is_made_printable():
    assert follow(lambda number: packed(number, doing="is\x1b in\n", waits=[], late=None)) == ": rank 1 is? in?"
    said = follow(lambda number: packed(number, waits=[], late=Late(0, 9.0, "re\x1bcv\n", 1.0)))
    assert said.startswith(": rank 1 was late in re?cv?: they")


@given(st.text(), st.text(), st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e300)), max_size=8))
def test_any_answer_fits_in_a_note(doing, what, waits):
    cut = Answer(2**63, inquiry._cut(doing * 100, inquiry._ROOM), [Waiting(*one) for one in waits], None)
    cut.late = Late(10**6, 1e300, inquiry._cut(what * 100, inquiry.LONGEST), 1e300)
    assert notes.read(notes.NOTES.encode(cut), 10**6 + 1) == cut


class ToldEarly(LocalTransport):
    """A transport that gets notes of another rank before this rank has a communicator."""

    @classmethod
    async def open(cls, rendezvous, options):
        self = await super().open(rendezvous, options)
        for where in (b"one place", b"another place"):
            self.on_note(1, notes.NOTES.encode(MeetingPlace(where)))
        return self


def test_note_received_before_the_communicator_exists_is_kept(run, install):
    install(early=ToldEarly)

    async def main():
        async with local_world(2, "early") as world:
            assert world[0]._core.notes.places == {1: b"another place"}

    run(main)
