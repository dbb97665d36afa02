"""``await comm.lost()``: a task waits for the end of a communicator, and learns why."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import anyio
import pytest
import torch
from aiocomms_local import LocalTransport
from concurrency import ranks, run_on, together, turns

import aiocomms
from aiocomms.diagnosis import dumps
from aiocomms.errors import CommAbortedError, CommClosedError, CommTimeoutError, MismatchError, PeerDiedError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

CAUSES = {
    "an abort": (lambda comm: comm.abort("enough"), CommAbortedError),
    "a deadline": (lambda comm: comm.barrier(timeout=0.05), CommTimeoutError),
    "a death": (lambda comm: comm._core.lose(PeerDiedError("rank 1 is gone", peer=1)), PeerDiedError),
    "a disagreement": (lambda comm: comm._core.lose(MismatchError("ranks disagree")), MismatchError),
}


@pytest.mark.virtual_time
@pytest.mark.parametrize("cause", CAUSES)
def test_every_awaiter_of_lost_gets_the_failure_itself(run, cause):
    lose, kind = CAUSES[cause]

    async def main():
        async with local_world(2) as world:
            comm, heard, got = world[0], [], []
            comm.register_abort_hook(heard.append)

            async def wait():
                got.append(await comm.lost())

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(wait)
                await turns()
                assert not got
                lose(comm)
            with pytest.raises(StopIteration) as at_once:
                comm.lost().send(None)
            got.append(at_once.value.value)
            assert len(got) == 4
            assert {id(error) for error in got} == {id(heard[0])}
            assert isinstance(got[0], kind)
            assert comm.aborted
            with pytest.raises(CommAbortedError) as refused:
                comm.barrier()
            assert refused.value.__cause__ is got[0]

    run(main)


def test_lost_returns_the_reason_on_every_rank(run):
    async def main():
        async with local_world(3) as world:
            async with anyio.create_task_group() as tasks:
                found = []

                async def wait(comm):
                    found.append((await comm.lost()).message)

                for comm in world:
                    tasks.start_soon(wait, comm)
                await turns()
                world[1].abort("enough")
            assert found == ["aborted by rank 1: enough"] * 3

    run(main)


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("reason", "text"),
    [("bad \udcff", r"bad \udcff"), (ValueError("\udcff"), r"ValueError: \udcff"), (NoTextError(), "NoTextError")],
    ids=["a text", "an exception", "no text"],
)
def test_any_reason_of_an_abort_reaches_the_other_ranks_as_utf_8(run, reason, text):
    async def main():
        async with local_world(2) as (one, two):
            if isinstance(reason, str):
                one.abort(reason)
            else:
                with pytest.raises(type(reason)):
                    async with one:
                        raise reason
            lost = str(await two.lost())
            assert lost.encode().decode().endswith(text)

    run(main)


def test_lost_raises_when_the_communicator_closes(run):
    async def main():
        async with local_world(2) as (one, two):
            raised = []

            async def wait():
                try:
                    await one.lost()
                except CommClosedError as error:
                    raised.append(str(error))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                tasks.start_soon(wait)
                await turns()
                await one.aclose()
            await wait()  # A later call raises, too.
            assert raised == ["lost on 'world' (rank 0): the communicator was closed on this rank"] * 3
            two.abort("enough")
            await wait()
            assert len(raised) == 4

    run(main)


def test_lost_returns_an_abort_that_preceded_the_close(run):
    async def main():
        async with local_world(2) as (one, two):
            one.abort("enough")
            await one.aclose()
            await two.aclose()
            assert (await one.lost()).message == (await two.lost()).message == "aborted by rank 0: enough"

    run(main)


def test_lost_returns_an_abort_during_the_close(run):
    async def main():
        async with local_world(2) as (one, two):
            work = one.all_reduce(torch.ones(1))
            got = []

            async def wait():
                got.append((await one.lost()).message)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await turns()
                tasks.start_soon(one.aclose)
                await turns()
                assert one.closed
                assert not got  # Works under way may still end.
                two.abort("enough")
            assert got == ["aborted by rank 1: enough"]
            with pytest.raises(CommAbortedError):
                await work

    run(main)


def test_cancelled_awaiter_of_lost_leaves_nothing_behind(run):
    async def main():
        async with local_world(2) as (one, _):
            async with anyio.create_task_group() as tasks:
                for _ in range(100):
                    tasks.start_soon(one.lost)
                await turns()
                assert len(one._core.over._waiters.waiting) == 100
                tasks.cancel_scope.cancel()
            assert not one._core.over._waiters.waiting
            with anyio.move_on_after(0):
                await one.lost()
            assert not one._core.over._waiters.waiting
            one.abort("enough")
            assert (await one.lost()).message == "aborted by rank 0: enough"

    run(main)


def test_lost_returns_after_the_works_have_ended(run):
    async def main():
        async with local_world(2) as (one, _):
            work, order = one.all_reduce(torch.ones(1)), []
            work.add_done_callback(lambda work: order.append("work"))

            async def wait():
                await one.lost()
                assert work.done()
                order.append("lost")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await turns()
                one.abort("enough")
            assert sorted(order) == ["lost", "work"]
            assert isinstance(work.exception(), CommAbortedError)

    run(main)


def test_lost_on_another_thread_is_refused(run, loop):
    async def main():
        async with local_world(1) as (comm,):
            raised = []

            async def elsewhere():
                with pytest.raises(RuntimeError, match=r"lost on 'world' .*thread") as caught:
                    await comm.lost()
                raised.append(caught)

            thread = threading.Thread(target=run_on, args=(loop, elsewhere))
            thread.start()
            await anyio.to_thread.run_sync(thread.join)
            assert raised

    run(main)


@pytest.mark.real
def test_lost_and_reconfigure_in_a_forked_child_are_refused(run):
    async def main():
        async with local_world(1) as (comm,):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                for call in (comm.lost, comm.reconfigure):
                    try:
                        call().send(None)
                    except BaseException as error:
                        os.write(write, f"{error!r}\n".encode())
                os._exit(0)
            await anyio.to_thread.run_sync(os.waitpid, child, 0)
            os.close(write)
            with os.fdopen(read) as said:
                lines = said.read().splitlines()
            assert [line[:54] for line in lines] == ["CommClosedError('the communicator was created in proce"] * 2

    run(main)


def test_lost_in_a_supervisor_task_cancels_its_siblings(run):
    """A task that awaits it beside other tasks ends them, whatever they wait for."""

    async def main():
        async with local_world(2) as world:

            async def supervised(comm):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anyio.sleep_forever)
                    error = await comm.lost()
                    tasks.cancel_scope.cancel()
                return error.message

            async def late():
                await turns()
                world[0].abort("enough")

            first, second, _ = await together(lambda: supervised(world[0]), lambda: supervised(world[1]), late)
            assert first == second == "aborted by rank 0: enough"
            successors = await ranks(world, lambda comm: comm.reconfigure())
            await ranks(successors, lambda comm: comm.barrier())
            await ranks(successors, lambda comm: comm.aclose())
        gc.collect()

    run(main)


def test_communicator_whose_peers_aborted_while_it_opened_is_lost(run, install):
    """Another rank may open first and abort; this rank, which posts nothing, learns of it all the same."""

    class Early(LocalTransport):
        @classmethod
        async def open(cls, rendezvous, options):
            self = await super().open(rendezvous, options)
            self.on_failure(CommAbortedError("aborted by rank 1: too early"))
            return self

    install(early=Early)

    async def main():
        async with aiocomms.new_comm("early") as comm:
            assert comm.aborted
            assert (await comm.lost()).message == "aborted by rank 1: too early"
            with pytest.raises(CommAbortedError, match="too early"):
                comm.barrier()

    run(main)


def test_closed_communicator_keeps_no_tensor_of_its_lanes(run, monkeypatch):
    # Otherwise a thread holds the works for a while.
    monkeypatch.setattr(dumps, "in_background", lambda task: task() or True)

    async def main():
        async with local_world(2) as (one, two):
            tensors = [torch.ones(2) for _ in range(3)]
            kept = [weakref.ref(tensor) for tensor in tensors]
            works = [one.lane("key").all_reduce(tensor) for tensor in tensors]
            two.abort("enough")
            for work in works:
                with pytest.raises(CommAbortedError):
                    await work
            await one.aclose()
            await two.aclose()
            del work, works, tensors
            gc.collect()
            assert [ref() for ref in kept] == [None] * 3

    run(main)
