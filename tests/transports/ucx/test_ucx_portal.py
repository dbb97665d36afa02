"""Plain calls of other threads: these post them themselves, and by the other door the loop does."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from concurrency import run_on, turns
from processes import HANGS

import aiocomms
from aiocomms import ops
from aiocomms.communicator.portal.works import BlockingWork
from aiocomms.errors import CommAbortedError, CommClosedError, CommTimeoutError, LaneAbortedError
from aiocomms.progress.inflight import StartedWork
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

engine = pytest.importorskip("aiocomms_ucx._engine", reason="needs the ucx transport", exc_type=ImportError)


@pytest.fixture(params=["native", "pure"], autouse=True)
def which(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The door of the communicators of one test."""
    monkeypatch.setenv("AIOCOMMS_PURE", str(int(request.param == "pure")))
    return str(request.param)


@pytest.fixture
def native(which: str) -> None:
    if which == "pure":
        pytest.skip("what is posted elsewhere only")


@pytest.fixture
def by_the_loop() -> None:
    """Nothing that a test calls is posted by its own thread."""


@pytest.fixture(autouse=True)
def posts(which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Note of each call whether its own thread has posted it; where there are shortcuts, some of a test's calls are."""
    posts: list[bool] = []
    post: Callable[[Any], bool] = BlockingWork._posted

    def counted(work: Any) -> bool:
        posts.append(post(work))
        return posts[-1]

    monkeypatch.setattr(BlockingWork, "_posted", counted)
    yield posts
    assert any(posts) == (which == "native" and "by_the_loop" not in request.fixturenames)


async def in_thread(call: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(call)


def here(call: Callable[[], Any]) -> Any:
    """Return the result of another thread's call, while the loop stands still."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(call()), daemon=True)
    thread.start()
    thread.join(HANGS)
    assert outcome, "the thread hangs, or its call has raised"
    return outcome[0]


def plain(on: Any) -> list[Any]:
    """Every op that may be posted elsewhere, on both of two ranks."""
    peer = 1 - on.rank
    works = [
        on.all_reduce(torch.ones(2)),
        on.barrier(),
        on.broadcast(torch.ones(2), 1),
        on.all_gather_single(torch.ones(4), torch.ones(2)),
        on.reduce_scatter_single(torch.ones(2), torch.ones(4)),
        on.all_to_all_single(torch.ones(4), torch.ones(4)),
    ]
    if isinstance(on, aiocomms.Portal):
        works += [on.send(torch.ones(2), peer, 5), on.recv(torch.zeros(2), peer, 5)]
    return works


async def begin(lanes: list[Any]) -> None:
    """Their first call, by which the loop hears of them."""
    for work in [await in_thread(lane.barrier) for lane in lanes]:
        await in_thread(work.wait)


def items(comm: aiocomms.Communicator) -> list[Any]:
    return comm._core.recorder.snapshot("for the test").items()


def test_plain_portal_calls_start_without_the_loop(which: str) -> None:
    """The loop stands still while both ranks' threads call, and what can be done within the call is."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            first = here(lambda: plain(comms[0].portal()))
            begun = which == "native"
            assert comms[0]._core.ledger.issued == (len(first) if begun else 0)
            assert [item.state for item in items(comms[0])] == ["pending"] * (len(first) - 2) * begun + (
                ["done", "pending"] if begun else []
            )
            second = here(lambda: plain(comms[1].portal()))
            assert comms[1]._core.ledger.issued == (len(second) if begun else 0)
            assert second[0].done() == begun, "the other rank's part was there"
            for work in first + second:
                await in_thread(work.wait)
            assert first[0].wait().tolist() == [2.0, 2.0]
            for comm, works in zip(comms, (first, second), strict=True):
                assert [item.seq for item in items(comm)] == list(range(len(works)))
                assert {item.state for item in items(comm)} == {"done"}
                assert [item.collective for item in items(comm)][:5] == [1, 2, 3, 4, 5]

    run_on("asyncio", main)


def test_plain_portal_calls_of_a_lane_start_without_the_loop(which: str) -> None:
    """The first one goes by the loop, which then hears of the lane's end elsewhere."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            lanes = [comm.portal().lane("one") for comm in comms]
            await begin(lanes)
            before = comms[0]._core.ledger.issued
            first = here(lambda: plain(lanes[0]))
            assert comms[0]._core.ledger.issued - before == (len(first) if which == "native" else 0)

            def within() -> list[Any]:
                with lanes[1]:
                    return [work for work in plain(comms[1].portal()) if work.op.family == "collectives"]

            second = here(within)
            for work in first + second:
                await in_thread(work.wait)
            assert {item.lane for item in items(comms[0])} == {"one"}
            assert len(comms[0]._core.transports[0].lanes.pending) == 0  # type: ignore[attr-defined]
            comms[1].abort("its messages have no match")

    run_on("asyncio", main)


def test_plain_call_does_not_overtake_an_earlier_call_by_the_loop(by_the_loop: None) -> None:
    """A call that the loop is to start, and behind it a plain one, which must not overtake it."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal = comms[0].portal()

            def call() -> list[Any]:
                return [portal.all_reduce(torch.ones(2), hints={}), portal.barrier(), portal.broadcast_object(7, 0)]

            works = here(call)
            assert comms[0]._core.ledger.issued == 0
            theirs = [comms[1].all_reduce(torch.ones(2)), comms[1].barrier(), comms[1].broadcast_object(None, 0)]
            for work in works:
                await in_thread(work.wait)
            assert [await work for work in theirs][2] == 7
            assert [item.name for item in items(comms[0])] == ["all_reduce", "barrier", "broadcast_object"]
            assert [work._work.seq for work in works] == [0, 1, 2]

    run_on("asyncio", main)


def test_plain_call_does_not_overtake_a_call_in_its_pre_hook(native: None, by_the_loop: None) -> None:
    """The loop's call has its number, and waits in its pre-hook while a thread calls the next one."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal, later = comms[0].portal(), []

            def amid(op: ops.Op, seq: int) -> None:
                hook.remove()
                later.append(here(portal.barrier))

            hook = comms[0].register_pre_hook(amid)
            first = comms[0].all_reduce(torch.ones(2))
            theirs = [comms[1].all_reduce(torch.ones(2)), comms[1].barrier()]
            await in_thread(later[0].wait)
            assert [first.seq, later[0]._work.seq] == [0, 1]
            for work in (first, *theirs):
                await work

    run_on("asyncio", main)


def test_hooks_of_portal_calls_run_on_the_loops_thread() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            heard: list[tuple[int, str]] = []
            note = lambda op, *_: heard.append((threading.get_ident(), op.name))  # noqa: E731
            hook = comms[0].register_pre_hook(note)
            works = [await in_thread(comm.portal().barrier) for comm in comms]
            for work in works:
                await in_thread(work.wait)
            hook.remove()
            pending = await in_thread(comms[0].portal().barrier)
            comms[0].register_post_hook(lambda work: heard.append((threading.get_ident(), "after")))
            await in_thread(lambda: comms[1].portal().barrier().wait())
            assert (await in_thread(lambda: [pending.wait(), len(heard)]))[1] == 2
            assert heard == [(threading.get_ident(), "barrier"), (threading.get_ident(), "after")]

    run_on("asyncio", main)


def test_abort_fails_pending_portal_calls() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal = comms[0].portal()
            works = [await in_thread(call) for call in (portal.barrier, lambda: portal.recv(torch.zeros(1), 1))]
            comms[1].abort("for the test")
            for work in works:
                with pytest.raises(CommAbortedError, match="for the test"):
                    await in_thread(work.wait)
            with pytest.raises(CommAbortedError, match="for the test"):
                await in_thread(portal.barrier)
            assert not comms[0]._core.in_flight

    run_on("asyncio", main)


def test_lane_abort_fails_its_pending_portal_call() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            lanes = [comm.portal().lane("given up") for comm in comms]
            await begin(lanes)
            pending = await in_thread(lanes[0].barrier)
            lanes[1].abort("no more")
            with pytest.raises(LaneAbortedError, match="no more"):
                await in_thread(pending.wait)
            with pytest.raises(LaneAbortedError, match="no more"):
                await in_thread(lambda: lanes[0].barrier().wait())
            for work in [await in_thread(comm.portal().barrier) for comm in comms]:
                await in_thread(work.wait)

    run_on("asyncio", main)


def test_close_waits_for_a_portal_collective_and_withdraws_a_recv() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal, tensor = comms[0].portal(), torch.ones(2)
            reduced = await in_thread(lambda: portal.all_reduce(tensor))
            receive = await in_thread(lambda: portal.recv(torch.zeros(1), 1))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(comms[0].aclose)
                await turns()
                assert await in_thread(lambda: comms[1].portal().all_reduce(torch.ones(2)).wait(HANGS)) is not None
            assert (await in_thread(reduced.wait)).tolist() == [2.0, 2.0]
            with pytest.raises(CommClosedError):
                await in_thread(receive.wait)
            with pytest.raises(CommClosedError):
                await in_thread(portal.barrier)

    run_on("asyncio", main)


def test_close_waits_for_a_call_that_is_being_posted(native: None) -> None:
    """The call is not in flight yet, so nothing else would wait for it."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            core, amid, go = comms[0]._core, threading.Event(), threading.Event()
            keep = core.keep_elsewhere

            def slow(*args: Any) -> None:
                amid.set()
                assert go.wait(HANGS)
                keep(*args)

            core.keep_elsewhere = slow  # type: ignore[method-assign]
            outcome: list[Any] = []
            thread = threading.Thread(target=lambda: outcome.append(comms[0].portal().all_reduce(torch.ones(2)).wait()))
            thread.start()
            assert await in_thread(lambda: amid.wait(HANGS))
            assert core.shortcuts.elsewhere(None) == 1
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(comms[0].aclose)
                await turns(100)
                assert not core.in_flight
                go.set()
                await comms[1].all_reduce(torch.ones(2))
            await in_thread(lambda: thread.join(HANGS))
            assert outcome[0].tolist() == [2.0, 2.0]

    run_on("asyncio", main)


def test_late_portal_recv_fails_alone_and_late_collective_aborts(which: str) -> None:
    """A receive fails alone; a collective takes the communicator with it."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal = comms[0].portal()
            portal.set_timeout(0.02)
            with pytest.raises(CommTimeoutError, match="nothing matched"):
                await in_thread(lambda: portal.recv(torch.zeros(1), 1).wait())
            assert not portal.aborted
            with pytest.raises(CommTimeoutError, match="waiting for rank 1"):
                await in_thread(lambda: portal.barrier().wait())
            assert portal.aborted

    run_on("asyncio", main)


def test_cancelled_portal_recv_leaves_its_message_for_the_next() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal, untouched = comms[0].portal(), torch.zeros(1)
            work = await in_thread(lambda: portal.recv(untouched, 1))
            assert await in_thread(work.cancel)
            next_one = await in_thread(lambda: portal.recv(torch.zeros(1), 1))
            await comms[1].send(torch.ones(1), 0)
            assert (await in_thread(next_one.wait)).item() == 1
            assert untouched.item() == 0

    run_on("asyncio", main)


def test_portal_collectives_that_disagree_raise_mismatch_error(which: str) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            works = [
                await in_thread(comms[0].portal().barrier),
                await in_thread(lambda: comms[1].portal().all_reduce(torch.ones(1))),
            ]
            for work in works:
                with pytest.raises(aiocomms.errors.MismatchError, match=r"barrier.*all_reduce|all_reduce.*barrier"):
                    await in_thread(work.wait)

    run_on("asyncio", main)


def test_loop_and_threads_share_sequence_numbers_and_recorder() -> None:
    """Each has a lane; all share the numbers, and the recorder knows every op."""
    rounds, callers = 60, 4

    async def main() -> None:
        async with local_world(2, "ucx") as comms:

            def call(comm: aiocomms.Communicator, key: int) -> None:
                choice, lane = random.Random(key), comm.portal().lane(key)
                for i in range(rounds):
                    count = choice.choice([1, 2, 700, 20_000])
                    if choice.random() < 0.2:
                        assert lane.broadcast_object((key, i), 0).wait(HANGS) == (key, i)
                    got = lane.all_reduce(torch.full((count,), float(comm.rank + i))).wait(HANGS)
                    assert got.tolist() == [2.0 * i + 1] * count

            async def loops(comm: aiocomms.Communicator) -> None:
                for i in range(rounds):
                    got = await comm.all_reduce(torch.full((3,), float(comm.rank + i)))
                    assert got.tolist() == [2.0 * i + 1] * 3
                    tag = comm.send(torch.tensor([i]), 1 - comm.rank)
                    assert (await comm.recv(torch.zeros(1, dtype=torch.int64), 1 - comm.rank)).item() == i
                    await tag

            async with anyio.create_task_group() as tasks:
                for comm in comms:
                    tasks.start_soon(loops, comm)
                    for key in range(callers):
                        tasks.start_soon(in_thread, lambda comm=comm, key=key: call(comm, key))
            for comm in comms:
                core = comm._core
                await turns()
                assert not core.in_flight
                assert core.ledger.calls == rounds
                assert core.ledger.issued == core.ledger.laned + 3 * rounds
                found = items(comm)
                assert [item.seq for item in found] == list(range(core.ledger.issued - len(found), core.ledger.issued))
                assert {item.state for item in found} == {"done"}
                pending = comm._core.transports[0].shared.pending.values()  # type: ignore[attr-defined]
                assert not [work for _, work, *_ in pending if isinstance(work, StartedWork)]

    run_on("asyncio", main)


def test_threads_that_share_collectives_get_one_number_each(native: None) -> None:
    """The order of the callers is open; each number is one collective's, and all are done."""
    count, callers = 200, 3

    async def main() -> None:
        async with aiocomms.new_comm("ucx") as comm:

            def call() -> None:
                for _ in range(count):
                    assert comm.portal().all_reduce(torch.ones(2)).wait(HANGS).tolist() == [1.0, 1.0]

            async with anyio.create_task_group() as tasks:
                for _ in range(callers):
                    tasks.start_soon(in_thread, call)
                for _ in range(count):
                    await comm.all_reduce(torch.ones(2))
                    await anyio.lowlevel.checkpoint()
            core = comm._core
            assert core.ledger.issued == core.ledger.calls == count * (callers + 1)
            assert core.transports[0].call_count.value == core.ledger.calls  # type: ignore[attr-defined]
            known = [item for item in items(comm) if item.collective is not None]
            assert [item.collective for item in known] == [item.seq + 1 for item in known]
            # A thread may note the end of its op so late that the call has gone from the ring, and its number with it.
            assert len(items(comm)) - len(known) <= callers
            assert not core.transports[0]._collectives  # type: ignore[attr-defined]

    run_on("asyncio", main)


def test_window_close_precedes_later_portal_collectives() -> None:
    """Its place among the collectives is that of its call, also where it has to wait for it."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:

            def body(comm: aiocomms.Communicator) -> None:
                portal = comm.portal()
                for i in range(20):
                    with portal.new_window(torch.zeros(4)) as window:
                        window.put(torch.ones(2), 1 - comm.rank)
                        assert portal.all_reduce(torch.ones(1) * i).wait(HANGS).item() == 2 * i
                    assert portal.all_reduce(torch.ones(1)).wait(HANGS).item() == 2

            async with anyio.create_task_group() as tasks:
                for comm in comms:
                    tasks.start_soon(in_thread, lambda comm=comm: body(comm))

    run_on("asyncio", main)


def test_portal_collective_waits_behind_a_closing_window(native: None, posts: list[bool]) -> None:
    """No thread posts either while the calls that have waited are posted."""

    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal, windows = comms[0].portal(), comms[0]._core.transports[0]._windows  # type: ignore[attr-defined]
            works, hand_over = [here(portal.barrier)], windows._transport.hand_over
            windows._hold_collectives()  # its one-sided operations seem not to have ended
            works += [here(portal.barrier), here(portal.barrier)]
            await turns()
            assert [work._work for work in works[1:]] == list(windows.behind)

            def slow(*args: Any) -> None:
                works.append(here(portal.barrier))
                hand_over(*args)

            windows._transport.hand_over = slow
            windows._post_behind()
            assert posts == [True, False, False, False, False]
            for _ in works:
                await comms[1].barrier()
            for work in works:
                await in_thread(work.wait)

    run_on("asyncio", main)


@pytest.mark.real
def test_forked_child_is_refused_and_the_parent_goes_on() -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            portal = comms[0].portal()
            pending = await in_thread(portal.barrier)

            def fork() -> int:
                child = os.fork()
                if child == 0:
                    try:
                        portal.barrier()
                    except CommClosedError:
                        os._exit(7)
                    os._exit(1)
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

            assert await in_thread(fork) == 7
            await comms[1].barrier()
            await in_thread(pending.wait)

    run_on("asyncio", main)


NOT_PLAIN: dict[str, Callable[[Any], Any]] = {
    "deadline": lambda on: on.all_reduce(torch.ones(2), timeout=HANGS),
    "hints": lambda on: on.all_reduce(torch.ones(2), hints={}),
    "tensor of another class": lambda on: on.all_reduce(torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    "factor": lambda on: on.all_reduce(torch.ones(2), aiocomms.ReduceOp.PREMUL_SUM(2.0)),
    "object": lambda on: on.broadcast_object(7, 0),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_portal_call_that_is_not_plain_goes_by_the_loop(what: str, by_the_loop: None) -> None:
    async def main() -> None:
        async with local_world(2, "ucx") as comms:
            work = here(lambda: NOT_PLAIN[what](comms[0].portal()))
            assert comms[0]._core.ledger.issued == 0
            theirs = NOT_PLAIN[what](comms[1])
            await in_thread(work.wait)
            await theirs

    run_on("asyncio", main)
