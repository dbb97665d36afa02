"""The duties of every transport between processes. Duties that need no real processes are in the conformance suite."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import HANGS, KILLED, LARGE, Rank, Run, death, held, in_turn, let_go, numbers, together
from simulated import NET, PROCESSES
from torch import Tensor

from aiocomms import ReduceOp, Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.rma import Window
from aiocomms.errors import CommAbortedError, CommClosedError, MismatchError, PeerDiedError
from aiocomms.ops import checks, reductions

pytestmark = pytest.mark.real


@pytest.fixture(params=[NET, "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


# --------------------------------------------------------------------------------------------------------- messages


async def flood(place: Rank) -> None:
    """More than the receiver keeps, before it asks for anything, and then all of it in another order."""
    async with place.open() as comm:
        sizes = [3, 400, 4001, 20_003]
        if place.rank == 0:
            works = [comm.send(numbers(sizes[i % 4], 0, i), 1, i % 4 - 2) for i in range(400)]
            await comm.barrier()
            for work in works:
                await work
        else:
            await comm.barrier()
            for tag in (1, -1, 0, -2):
                for i in range(400):
                    if i % 4 - 2 == tag:
                        got = await comm.recv(torch.zeros(sizes[i % 4], dtype=torch.int64), 0, tag)
                        assert torch.equal(got, numbers(sizes[i % 4], 0, i))


def test_flood_of_unexpected_messages_arrives(ranks: Run) -> None:
    ranks(2, flood)


async def busy_receiver(place: Rank, count: int) -> None:
    async with place.open() as comm:
        await comm.barrier()
        if place.rank == 0:
            work = comm.recv(torch.zeros(count, dtype=torch.int64), 1)
            place.tell("posted")
            place.told("sent")  # the loop does not run meanwhile
            assert torch.equal(await work, numbers(count, 1))
        else:
            place.told("posted")
            await comm.send(numbers(count, 1), 0)
            place.tell("sent")


async def busy_reducer(place: Rank, dtype: torch.dtype, count: int) -> None:
    async with place.open() as comm:
        await comm.barrier()
        tensor = torch.ones(count, dtype=dtype)
        work = comm.all_reduce(tensor)
        if place.rank == 0:
            place.told("reduced 1")
            place.told("reduced 2")
        await work
        place.tell(f"reduced {place.rank}")
        assert (tensor == 3).all()


@PROCESSES
def test_busy_loop_of_one_rank_does_not_delay_the_others(ranks: Run) -> None:
    ranks(2, busy_receiver, LARGE)
    for dtype in (torch.float32, torch.float16):
        ranks(3, busy_reducer, dtype, LARGE)


# ------------------------------------------------------------------------------------------------------ collectives


def values(dtype: torch.dtype, count: int, rank: int) -> Tensor:
    """Random values whose products and sums are exact, or overflow alike however they are grouped."""
    made = torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(rank))
    if dtype.is_complex:
        return torch.complex(made.float(), made.roll(1).float()).to(dtype)
    return made.to(dtype)


async def reduce_everything(place: Rank) -> None:
    rank, size = place.rank, place.size
    kinds = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
    operators = [getattr(ReduceOp, kind.upper()) for kind in kinds] + [ReduceOp.PREMUL_SUM(0.5)]
    async with place.open() as comm:
        for dtype in sorted(checks.DTYPES, key=str):
            mine = [values(dtype, LARGE if dtype.itemsize > 1 else 2 * LARGE, r) for r in range(size)]
            for op in (op for op in operators if op.supports(dtype)):
                wanted = torch.empty_like(mine[0])
                reductions.reduce(op, mine, wanted)
                # All three at once: they must not mix.
                works = [comm.all_reduce(mine[rank].clone(), op), comm.reduce(mine[rank].clone(), size - 1, op)]
                chunk = torch.empty(mine[0].numel() // size, dtype=dtype)
                given = mine[rank][: size * chunk.numel()].clone()
                works.append(comm.reduce_scatter_single(chunk, given, op))
                whole, rooted, chunk = [await work for work in works]
                assert torch.equal(whole, wanted), (dtype, str(op))
                assert torch.equal(rooted, wanted if rank == size - 1 else mine[rank]), (dtype, str(op))
                part = slice(rank * chunk.numel(), (rank + 1) * chunk.numel())
                assert torch.equal(chunk, wanted[part]), (dtype, str(op))


@PROCESSES
@pytest.mark.search
def test_reductions_of_large_tensors_are_right(ranks: Run) -> None:
    """Reduce, whether the library below does it or not."""
    ranks(3, reduce_everything)


async def lose_no_nan(place: Rank) -> None:
    async with place.open() as comm:
        for count in (3, LARGE):
            for op in (ReduceOp.MIN, ReduceOp.MAX):
                tensor = torch.ones(count)
                tensor[place.rank] = float("nan")
                await comm.all_reduce(tensor, op)
                assert tensor[: place.size].isnan().all()
                assert (tensor[place.size :] == 1).all()


@PROCESSES
@pytest.mark.search
def test_reductions_propagate_nan(ranks: Run) -> None:
    ranks(2, lose_no_nan)


async def mix(place: Rank, turns: int) -> None:
    """Small ones, large ones and those of several steps, all under way at once on all ranks."""
    rank, size = place.rank, place.size
    async with place.open() as comm:
        everything: list[tuple[Any, Tensor]] = []
        for turn in range(turns):
            count = (2, LARGE)[turn % 2] + turn
            total = sum(numbers(count, r, turn) for r in range(size))
            everything += [
                (comm.all_reduce(numbers(count, rank, turn)), total),
                (comm.all_reduce(numbers(count, rank, turn).to(torch.int16)), total.to(torch.int16)),
                (comm.broadcast(numbers(count, rank, turn), turn % size), numbers(count, turn % size, turn)),
                (
                    comm.all_gather_single(torch.zeros(size * count, dtype=torch.int64), numbers(count, rank, turn)),
                    torch.cat([numbers(count, r, turn) for r in range(size)]),
                ),
                (uneven(comm, turn), torch.cat([numbers(wide(r, rank, turn), r, turn) for r in range(size)])),
            ]
            if turn % 3 == rank:
                await asyncio.sleep(0)
        for work, wanted in everything:
            assert torch.equal(await work, wanted)


def wide(src: int, dst: int, turn: int) -> int:
    """Return the number of elements that one rank gives another."""
    return (src + 2 * dst + turn) % 4 * (30_000 if turn % 2 else 5)


def uneven(comm: Communicator, turn: int) -> Any:
    gives = [wide(comm.rank, dst, turn) for dst in range(comm.size)]
    gets = [wide(src, comm.rank, turn) for src in range(comm.size)]
    given = torch.cat([numbers(n, comm.rank, turn) for n in gives])
    return comm.all_to_all_v_single(torch.zeros(sum(gets), dtype=torch.int64), given, gets, gives)


@PROCESSES
@pytest.mark.search
def test_concurrent_ops_of_all_kinds_are_right(ranks: Run) -> None:
    ranks(3, mix, 10)


async def split_unlike(place: Rank) -> str:
    """Rank 0 gives rank 1 more than that wants; rank 2 has no part in it, and must not wait for them."""
    rank = place.rank
    async with place.open() as comm:
        gives, gets = [4, 4, 4], [4, 4, 4]
        if rank == 0:
            gives = [4, 5, 3]
        work = comm.all_to_all_v_single(torch.zeros(12), torch.zeros(12), gets, gives)
        with pytest.raises(MismatchError) as caught:
            await work
        return caught.value.message


@PROCESSES
@pytest.mark.search
@pytest.mark.fault(29)
def test_collective_with_split_sizes_that_differ_is_reported_on_all_ranks(ranks: Run) -> None:
    for message in ranks(3, split_unlike):
        assert re.search("rank 0 sends (20 bytes to rank 1|12 bytes to rank 2), which wants 16", message), message


async def longest_turn(place: Rank) -> tuple[float, float]:
    """Return the most CPU time of a turn of the loop while 128 MiB are reduced, and the time to copy them once.

    The CPU's time and not the clock's, which runs on while others have the core; and the least of five rounds, for
    a virtual machine's kernel may count what its host takes away. What waits takes none: so rank 1 comes when
    rank 0 has had turns.
    """
    async with place.open() as comm:
        tensor, copy = torch.ones(32 * 2**20), torch.empty(32 * 2**20)
        copies, turns = [], []
        for turn in range(5):
            copies.append(cpu_of(lambda: copy.copy_(tensor)))
            if place.rank == 1:
                await place.all_told(f"{turn} goes on", 0)
            works: list[Work[Tensor]] = []
            longest = cpu_of(lambda works=works: works.append(comm.all_reduce(tensor)))
            for _ in range(100):
                await asyncio.sleep(0)
            place.tell(f"{turn} goes on {place.rank}")
            while not works[0].done():
                began = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - began)
            await works[0]
            turns.append(longest)
        return min(turns), min(copies)


def cpu_of(call: Callable[[], object]) -> float:
    """Return the CPU time that a call takes in this thread, in seconds."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


@PROCESSES
def test_large_transfer_leaves_the_loop_responsive(ranks: Run) -> None:
    """A transport that moves all of it in one turn of the loop takes longer than a copy for that."""
    for turn, copy in ranks(2, longest_turn):
        print(f"{turn * 1e3:.2f} ms at most, and a copy takes {copy * 1e3:.2f}")
        assert turn < copy * 3 / 4


# ---------------------------------------------------------------------------------------------------------- the end


LOSING: dict[str, Callable[[Communicator, int], Any]] = {
    "recv": lambda comm, victim: comm.recv(torch.zeros(8), victim),
    "send": lambda comm, victim: comm.send(torch.zeros(LARGE), victim),
    "small": lambda comm, victim: comm.all_reduce(torch.zeros(8)),
    "large": lambda comm, victim: comm.all_reduce(torch.zeros(2**20)),
    "composed": lambda comm, victim: comm.all_reduce(torch.zeros(2**20, dtype=torch.float16)),
    "broadcast": lambda comm, victim: comm.broadcast(torch.zeros(2**20), victim),
}
ALONE = ("recv", "send")
"""The ops in which the victim has no part."""


async def lose_a_rank(place: Rank, what: str, victim: int) -> str:
    comm = await place.open()
    await together(place, comm)

    async def go_on() -> None:
        while True:
            await LOSING[what](comm, victim)

    if place.rank == victim:
        place.die_later(0.05)  # in the midst of it; every moment is good
        await (asyncio.sleep(10) if what in ALONE else go_on())
    error = await death(go_on())
    assert error.peer == victim, error
    with pytest.raises(CommAbortedError):
        comm.barrier()
    await comm.aclose()
    return error.message


@pytest.mark.fault(1)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what", LOSING)
@PROCESSES
def test_dead_rank_is_named_in_the_error(ranks: Run, what: str, victim: int) -> None:
    results = ranks(3, lose_a_rank, what, victim)
    assert results.pop(victim) is KILLED
    for message in results:
        assert f"rank {victim} " in message


async def lose_the_owner_of_a_window(place: Rank, what: str, victim: int) -> None:
    comm = await place.open()
    window = await comm.new_window(torch.zeros(LARGE))
    waiting = window.wait_signal(victim)
    await together(place, comm)
    if place.rank == victim:
        place.die_later(0.05)
        await asyncio.sleep(10)
    if what == "put":
        error = await death(put_for_ever(window, victim))
        assert error.peer == victim, error
    with pytest.raises(PeerDiedError) as caught:
        await waiting
    assert caught.value.peer == victim, caught.value
    await comm.aclose()


async def put_for_ever(window: Window, dst: int) -> None:
    """Put without end, which may never let the loop run."""
    while True:
        await window.put(torch.ones(LARGE), dst)


@pytest.mark.fault(5)
@pytest.mark.parametrize("what", ["put", "wait_signal"])
def test_death_of_a_window_owner_fails_its_accesses(ranks: Run, what: str) -> None:
    assert ranks(3, lose_the_owner_of_a_window, what, 1) == [None, KILLED, None]


async def die_amid_a_close(place: Rank) -> None:
    comm = await place.open()
    await comm.barrier()
    if place.rank == 1:
        await place.all_told("closing", 0)
        await place.die()
    work = comm.all_reduce(torch.ones(3))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(comm.aclose())
        await asyncio.sleep(0)  # the close has begun
        assert comm.closed
        place.tell("closing 0")
        with pytest.raises(PeerDiedError) as caught:
            await work
    assert caught.value.peer == 1, caught.value


@pytest.mark.fault(74)
def test_death_during_close_is_the_reason_of_pending_works(ranks: Run) -> None:
    """The death is heard: the work says who has died, and not that this rank has closed."""
    assert ranks(2, die_amid_a_close) == [None, KILLED]


async def abort_amid(place: Rank) -> str:
    comm = await place.open()
    works = [comm.recv(torch.zeros(LARGE), (place.rank + 1) % place.size) for _ in range(3)]
    if place.rank == 0:
        await place.all_told("posted", 1, 2)
        comm.abort("enough")
    else:
        works += [comm.all_reduce(torch.zeros(2**20)), comm.all_reduce(torch.zeros(3))]
        place.tell(f"posted {place.rank}")
    messages = set()
    for work in works:
        with pytest.raises(CommAbortedError) as caught:
            await work
        messages.add(caught.value.message)
    await comm.aclose()
    assert len(messages) == 1
    return messages.pop()


def test_abort_reason_reaches_every_peer(ranks: Run) -> None:
    assert set(ranks(3, abort_amid)) == {"aborted by rank 0: enough"}


async def leave_at_once(place: Rank) -> None:
    """The last thing that a rank sends arrives, though it closes and ends at once."""
    counts = [5, LARGE, 7, 1000, 2**20]
    async with place.open() as comm:
        if place.rank == 0:
            works = [comm.send(numbers(count, 0, i), 1, i) for i, count in enumerate(counts)]
            del works
        else:
            await asyncio.sleep(0.05)
            for i, count in enumerate(counts):
                got = await comm.recv(torch.zeros(count, dtype=torch.int64), 0, i)
                assert torch.equal(got, numbers(count, 0, i))


def test_close_delivers_all_data_sent_before(ranks: Run) -> None:
    for _ in range(3):
        ranks(2, leave_at_once)


async def send_and_leave(place: Rank) -> None:
    """The receiver's loop does not come round before the sender has closed."""
    async with place.open() as comm:
        stream = await comm.open_stream(1 - place.rank)
        if place.rank == 0:
            for i in range(5):
                await stream.send(torch.full((2,), i))
            await stream.send_eof()
            await comm.aclose()
            place.tell("left")
        else:
            if place.simulated:
                place.stop(1, simulated=1.0)
                await place.heard("left")
            else:
                place.told("left")
            assert [int(tensor[0]) async for tensor in stream] == list(range(5))


def test_stream_items_sent_before_close_are_received(ranks: Run) -> None:
    ranks(2, send_and_leave)


async def split_twice(place: Rank) -> None:
    """Rank 0 begins both splits before one of them goes on; rank 1 begins the second when the first has met."""
    async with place.open() as comm:
        met = asyncio.Event()
        comm.register_post_hook(lambda *_: met.set())
        if place.rank == 1:
            await place.all_told("began", 0)
        first = asyncio.ensure_future(comm.split([0, 1], "first"))
        if place.rank == 1:
            await met.wait()
            await asyncio.sleep(0)
        second = asyncio.ensure_future(comm.split([0, 1], "second"))
        if place.rank == 0:
            await asyncio.sleep(0)
            place.tell("began 0")
        for child in await asyncio.gather(first, second):
            await child.barrier()
            await child.aclose()


@PROCESSES
@pytest.mark.search
def test_concurrent_splits_form_two_communicators(ranks: Run) -> None:
    ranks(2, split_twice)


async def open_and_close(place: Rank) -> None:
    before = None
    for turn in range(4):
        comm = await place.open(f"turn {turn}")
        await comm.all_reduce(torch.zeros(3))
        await comm.all_reduce(torch.zeros(LARGE))
        await comm.all_reduce(torch.zeros(LARGE, dtype=torch.float16))
        if turn == 2:
            await together(place, comm)
            comm.abort("for a change")
        await comm.aclose()
        del comm
        if before is None:
            before = held()  # the first one loads what stays
    await let_go(before)


JUST_END = """
import asyncio, contextlib, sys
import torch
from aiocomms.errors import CommError
from processes import LARGE, Rank

async def main():
    global comm, work
    comm = await Rank(sys.argv[1], int(sys.argv[2]), 2, sys.argv[3]).open()
    await comm.all_reduce(torch.zeros(LARGE))
    with contextlib.suppress(CommError):  # the other may have ended by now
        work = comm.recv(torch.zeros(LARGE), 1 - comm.rank)

asyncio.run(main())
"""


@pytest.mark.search
@pytest.mark.fault(56)
@PROCESSES
def test_interpreter_exit_without_close_ends_normally(tmp_path: Path, transport: str) -> None:
    """An interpreter that ends with a communicator open ends in the ordinary way."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    command = [sys.executable, "-c", JUST_END, transport]
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)]
    try:
        assert [process.wait(HANGS) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def fork(place: Rank) -> None:
    """A child that ends in the ordinary way leaves its parent's connections alone."""
    async with place.open() as comm:
        await comm.barrier()
        child = os.fork()
        if not child:
            with pytest.raises(
                CommClosedError, match=f"created in process {os.getppid()} and cannot be used after a fork"
            ):
                comm.barrier()
            os._exit(end_of_interpreter())
        assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
        await comm.all_reduce(torch.zeros(LARGE))


def end_of_interpreter() -> int:
    import atexit

    atexit._run_exitfuncs()
    return 0


@pytest.mark.fault(57, 60)
@PROCESSES
def test_repeated_open_and_close_leaks_nothing_and_a_forked_child_is_refused(ranks: Run) -> None:
    """The child leaves its parent usable."""
    ranks(2, in_turn, open_and_close, fork)
