"""Defects that simulated histories have found, each in the least program that shows it."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest
import torch
from aiocomms_net import NetTransport
from aiocomms_net.transport import _SideChannel

import aiocomms
from aiocomms.core.core import CLOSE_GRACE
from aiocomms.core.lifecycle import failure_of
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, PeerDiedError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation import Faults, explore, here, simulate
from aiocomms.testing.simulation.loop import SimulatedTask

pytestmark = pytest.mark.deterministic


def test_what_a_program_writes_after_an_abort_is_no_message() -> None:
    async def program() -> None:
        async with aiocomms.new_comm() as comm:
            tensor = torch.full((3,), comm.rank)
            try:
                if comm.rank == 0:
                    work = comm.send(tensor, 1)
                    comm.abort("it has second thoughts")
                    await work
                else:
                    assert (await comm.recv(tensor, 0)).tolist() == [0, 0, 0]
            except CommError:
                tensor.fill_(77)

    explore(program, seeds=5)


def test_rank_that_is_excluded_tells_the_others_of_its_death() -> None:
    failure = failure_of(PeerDiedError("rank 1 is gone", peer=1), 0.0, rank=1)
    assert isinstance(failure.error, CommAbortedError)
    assert "excluded" in failure.error.message
    told = failure.for_peers(rank=1)
    assert isinstance(told, PeerDiedError)
    assert (told.peer, told.message) == (1, "rank 1 is gone")


def test_error_of_a_split_names_ranks_of_the_communicator_that_is_split() -> None:
    async def program() -> CommError | None:
        async with contextlib.AsyncExitStack() as stack:
            comm = await stack.enter_async_context(aiocomms.new_comm(timeout=2))
            await comm.barrier()
            if comm.rank == 1:
                for way in ((1, 2), (2, 1)):
                    here().world.at(here().world.time + 0.006, None, here().world.part, *way, 3.0)
            try:
                child = await comm.split([2, 1] if comm.rank else [])
            except CommError as error:
                return error
            if child is not None:
                await stack.enter_async_context(child)
        return None

    found = [error for seed in range(10) for error in simulate(program, 3, seed=seed).results if error is not None]
    assert {error.comm for error in found} == {"world"}
    late = [error for error in found if isinstance(error, CommTimeoutError)]
    assert {(error.rank, error.late) for error in late if error.late} == {(1, (2,)), (2, (1,))}


def test_call_of_nobody_is_refused_and_what_is_sent_is_lost() -> None:
    async def program() -> tuple[list[object], list[bool]]:
        heard: list[object] = []
        answers: list[bool] = []
        conduit = here().world.network.connect(b"nowhere", 0, answers.append)
        conduit.send(("a frame",))
        await asyncio.sleep(1)
        conduit.hear(heard.append, lambda closed: None)
        return heard, answers

    assert simulate(program, 1).results == [([], [False])]


def test_messages_of_anybody_are_received() -> None:
    async def program() -> object:
        async with aiocomms.new_comm() as comm:
            if comm.rank:
                await comm.send(torch.tensor([comm.rank]), 0)
                return None
            probed = await comm.probe()
            first = await comm.recv_message(probed.src)
            return {probed.src: int(first.tensor), **{it.src: int(it.tensor) for it in [await comm.recv_message()]}}

    assert simulate(program, 3).results[0] == {1: 1, 2: 2}


def test_histories_leave_no_garbage() -> None:
    async def program() -> None:
        async with aiocomms.new_comm() as comm:
            await comm.barrier()

    def tasks() -> int:
        simulate(program, 2)
        return sum(isinstance(it, SimulatedTask) for it in gc.get_objects())

    before = tasks()
    assert [tasks() for _ in range(3)] == [before] * 3


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", ["stream", "send"])
def test_ranks_that_close_at_once_do_not_wait_for_each_other(ranks, what) -> None:
    """None of them receives what they have sent around: the ends of streams, or messages."""

    async def program() -> tuple[float, bool]:
        comm = await aiocomms.new_comm()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        work = comm.send(torch.ones(3), right) if what == "send" else None
        if what == "stream":
            ends = [comm.open_stream(right, name=str(comm.rank)), comm.open_stream(left, name=str(left))]
            for stream in await asyncio.gather(*ends):
                await stream.aclose()
        await comm.barrier()
        began, lost = clock.now(), comm.aborted
        await comm.aclose()
        if work is not None:
            with pytest.raises(CommAbortedError, match=f"closed by rank {right}"):
                await work
        return clock.now() - began, lost or comm.aborted

    for seed in range(8):
        results = simulate(program, ranks, seed=seed).results
        assert all(took < CLOSE_GRACE / 10 and not lost for took, lost in results), results


def test_rank_that_closes_waits_for_what_another_one_receives_late() -> None:
    async def program() -> None:
        async with aiocomms.new_comm() as comm:
            tensor = torch.full((3,), comm.rank)
            if comm.rank == 0:
                comm.send(tensor, 1)
            elif comm.rank == 1:
                comm.send(tensor, 2)
                await asyncio.sleep(1)
                assert (await comm.recv(tensor.clone(), 0)).tolist() == [0, 0, 0]
            else:
                await asyncio.sleep(2)
                assert (await comm.recv(tensor, 1)).tolist() == [1, 1, 1]

    explore(program, 3, seeds=8)


def test_rank_that_cannot_form_what_others_have_holds_nobody_up() -> None:
    """Rank 1 calls ranks that have formed it, and so listen no more; they give it up, and all meet again."""

    async def program() -> tuple[float, str]:
        comm, longest, out = await aiocomms.new_comm(timeout=5), 0.0, ""
        try:
            for _ in range(40):
                try:
                    await comm.all_reduce(torch.ones(4))
                    await asyncio.sleep(0.1)
                except CommError:
                    began = clock.now()
                    try:
                        comm = await comm.reconfigure(timeout=60)
                    finally:
                        longest = max(longest, clock.now() - began)
        except CommAbortedError as error:
            out = error.message
        finally:
            await comm.aclose()
        return longest, out

    faults = Faults(pauses=1, partitions=1, cuts=2, slow=1, within=1.5)
    results = simulate(program, 3, seed=62, faults=faults).results
    assert not any("the others have formed" in out for _, out in results)
    assert max(longest for longest, _ in results) < 2


def test_error_names_the_ranks_whose_place_nobody_takes() -> None:
    async def program() -> str:
        comm = await aiocomms.new_comm(timeout=5)
        if comm.rank == 1:
            here().world.kill(1)
        with pytest.raises(CommError):
            await comm.barrier()
        with pytest.raises(CommTimeoutError) as caught:
            await comm.reconfigure(size=3, timeout=5)
        await comm.aclose()
        assert caught.value.late == (1,)
        return str(caught.value)

    results = simulate(program, 3).results
    assert all("within 5 s: no process joined as the free ranks [1]" in results[rank] for rank in (0, 2)), results


@pytest.mark.parametrize(
    ("uses", "why"),
    [(False, "rank 1 had closed the communicator"), (True, "closed by rank 1, which this op needs")],
    ids=["not lost", "lost"],
)
def test_reconfigure_without_a_newcomer_names_the_rank_that_closed(uses: bool, why: str) -> None:
    async def program() -> str:
        comm = await aiocomms.new_comm(timeout=5)
        await comm.barrier()
        if comm.rank == 1:
            await comm.aclose()
            return why
        await asyncio.sleep(1)
        if uses:
            with pytest.raises(CommError):
                await comm.barrier()
        with pytest.raises(CommTimeoutError) as caught:
            await comm.reconfigure(size=3, timeout=5)
        await comm.aclose()
        return str(caught.value)

    results = simulate(program, 3).results
    assert all(f"no process joined as the free ranks [1] ({why})" in results[rank] for rank in (0, 2)), results


@pytest.mark.parametrize("connected", [True, False], ids=["connections", "no connections"])
def test_newcomers_that_come_before_the_survivors_meet_are_admitted_at_once(
    connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its claim tells that the second rank has died: the transport has no connections, or they never end."""
    if connected:
        monkeypatch.setattr(_SideChannel, "gone", lambda self, rank: False)
    else:
        monkeypatch.setattr(NetTransport, "side_channel", lambda self: None)

    async def program() -> float:
        comm = await aiocomms.new_comm(timeout=20, join=here().restarts > 0)
        began = clock.now()
        if here().restarts == 0:
            if comm.rank > 0:
                here().world.kill(comm.rank, 0.1)
            with pytest.raises(CommError):
                await comm.barrier()
            await asyncio.sleep(1)
            began = clock.now()
            comm = await comm.reconfigure(size=3, timeout=20)
        await comm.barrier()
        await comm.aclose()
        return clock.now() - began

    assert max(simulate(program, 3).results) < 1


def test_ranks_do_not_wait_for_a_rank_that_has_closed_the_lost_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport may not tell that a rank closes a lost communicator."""
    monkeypatch.setattr(_SideChannel, "gone", lambda self, rank: False)

    async def program() -> float:
        comm = await aiocomms.new_comm()
        if comm.rank == 1:
            comm.abort("a bug")
            await comm.aclose()
            return 0.0
        with pytest.raises(CommAbortedError):
            await comm.barrier()
        await asyncio.sleep(1)
        began = clock.now()
        comm = await comm.reconfigure(timeout=20)
        await comm.aclose()
        return clock.now() - began

    assert max(simulate(program, 3).results) < 1
