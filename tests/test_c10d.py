"""The c10d transport: what is particular to it, between real processes. What all transports share is in the suite."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import aiocomms
from aiocomms import ReduceOp, checks, reductions
from aiocomms.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommError, MismatchError, PeerDiedError

LARGE = 60_013
"""Elements: more than travels with the agreement, and no multiple of any number of ranks."""
KILLED = "killed"

Body = Callable[..., Awaitable[Any]]


class Rank:
    """What a body knows of its place."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank = rank
        self.size = size
        self.folder = Path(folder)

    def open(self, name: str = "world", **more: Any) -> Any:
        store = dist.FileStore(str(self.folder / "store"), self.size)
        return aiocomms.new_comm("c10d", store=store, rank=self.rank, size=self.size, name=name, timeout=20, **more)

    def tell(self, note: str) -> None:
        (self.folder / note).touch()

    def told(self, note: str) -> None:
        """Wait for a note without letting the loop run."""
        ends = time.monotonic() + 10
        while not (self.folder / note).exists():
            assert time.monotonic() < ends, f"nobody told {note!r}"
            time.sleep(0.001)

    async def all_told(self, note: str, *ranks: int) -> None:
        """Wait for some ranks' notes."""
        for rank in ranks:
            await asyncio.to_thread(self.told, f"{note} {rank}")


def _main(body: Body, rank: int, size: int, folder: str, args: tuple[Any, ...], pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        pipe.send((True, asyncio.run(body(Rank(rank, size, folder), *args))))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """Run ``await body(Rank, *args)`` in a process for each rank and return what they return."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aiocomms_c10d", "aiocomms.rendezvous", "aiocomms.communicator"])
    running: list[Any] = []

    def run(size: int, body: Body, *args: Any, seconds: float = 20) -> list[Any]:
        folder = tmp_path / f"{body.__name__}{len(running)}"
        folder.mkdir()
        pipes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_main, args=(body, rank, size, str(folder), args, theirs))
            process.start()
            theirs.close()
            running.append(process)
            pipes.append(mine)
        results = _collect(pipes, seconds)
        for process in running[-size:]:
            process.join(5)
        codes = [process.exitcode for process in running[-size:]]
        for rank, (result, code) in enumerate(zip(results, codes, strict=True)):
            assert code == (-signal.SIGKILL if result is KILLED else 0), f"rank {rank} ended with {code}: {result}"
        return results

    yield run
    for process in running:
        process.kill()
        process.join()
        process.close()


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    ends = time.monotonic() + seconds
    while len(results) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in results], max(0.0, ends - time.monotonic()))
        assert ready, f"ranks {[rank for rank, pipe in enumerate(pipes) if pipe not in results]} hang"
        for pipe in ready:
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = True, KILLED
            assert good, f"rank {pipes.index(pipe)}:\n{value}"
            results[pipe] = value
    return [results[pipe] for pipe in pipes]


def numbers(count: int, rank: int, turn: int = 0) -> Tensor:
    """Values that tell where they are from."""
    return torch.arange(count, dtype=torch.int64).mul_(7).add_(1000 * rank + turn)


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


def test_more_messages_than_the_receiver_keeps(ranks: Callable[..., list[Any]]) -> None:
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


def test_a_busy_loop_does_not_hold_up_the_others(ranks: Callable[..., list[Any]]) -> None:
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


def test_every_reduction_of_large_tensors(ranks: Callable[..., list[Any]]) -> None:
    """Whether gloo does them or not."""
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


def test_nan_is_not_lost(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, lose_no_nan)


async def mix(place: Rank, turns: int) -> None:
    """Small ones, gloo's own and those of two steps, all under way at once on all ranks."""
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
    """How many elements one rank gives another."""
    return (src + 2 * dst + turn) % 4 * (30_000 if turn % 2 else 5)


def uneven(comm: Communicator, turn: int) -> Any:
    gives = [wide(comm.rank, dst, turn) for dst in range(comm.size)]
    gets = [wide(src, comm.rank, turn) for src in range(comm.size)]
    given = torch.cat([numbers(n, comm.rank, turn) for n in gives])
    return comm.all_to_all_v_single(torch.zeros(sum(gets), dtype=torch.int64), given, gets, gives)


def test_many_kinds_at_once(ranks: Callable[..., list[Any]]) -> None:
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


def test_splits_that_disagree_are_told_to_all(ranks: Callable[..., list[Any]]) -> None:
    messages = ranks(3, split_unlike)
    assert set(messages) == {messages[0]}
    assert "rank 0 sends 20 bytes to rank 1, which wants 16" in messages[0]


async def beat(place: Rank) -> tuple[float, float]:
    """How late a task that runs every millisecond is, at most, while 64 MiB are reduced; and how long that takes."""
    async with place.open() as comm:
        tensor = torch.ones(16 * 2**20)
        await comm.all_reduce(tensor.clone())
        await comm.barrier()
        worst, last = 0.0, time.perf_counter()
        began = last
        work = comm.all_reduce(tensor)
        while not work.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            worst, last = max(worst, now - last - 0.001), now
        await work
        return worst, last - began


def test_the_loop_stays_free(ranks: Callable[..., list[Any]]) -> None:
    lateness, took = zip(*ranks(2, beat), strict=True)
    print(f"worst lateness {max(lateness) * 1e3:.1f} ms during {max(took) * 1e3:.0f} ms")
    assert max(lateness) < 0.5


# ---------------------------------------------------------------------------------------------------------- the end


LOSING: dict[str, Callable[[Communicator, int], Any]] = {
    "recv": lambda comm, victim: comm.recv(torch.zeros(8), victim),
    "send": lambda comm, victim: comm.send(torch.zeros(LARGE), victim),
    "small": lambda comm, victim: comm.all_reduce(torch.zeros(8)),
    "large": lambda comm, victim: comm.all_reduce(torch.zeros(2**20)),
    "composed": lambda comm, victim: comm.all_reduce(torch.zeros(2**20, dtype=torch.float16)),
    "broadcast": lambda comm, victim: comm.broadcast(torch.zeros(2**20), victim),
}


def die(place: Rank) -> None:
    (place.folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


async def lose_a_rank(place: Rank, what: str, victim: int) -> tuple[float, str]:
    comm = await place.open()
    await comm.barrier()

    async def go_on() -> None:
        while True:
            await LOSING[what](comm, victim)

    if place.rank == victim:
        threading.Timer(0.05, die, (place,)).start()  # in the midst of it; every moment is good
        await (asyncio.sleep(10) if what in ("recv", "send") else go_on())
    with pytest.raises(PeerDiedError) as caught:
        await go_on()
    took = time.monotonic() - float((place.folder / "died").read_text())
    assert caught.value.peer == victim, caught.value
    with pytest.raises(CommAbortedError):
        comm.barrier()
    await comm.aclose()
    return took, str(caught.value)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what", LOSING)
def test_a_rank_that_dies(ranks: Callable[..., list[Any]], what: str, victim: int) -> None:
    results = ranks(3, lose_a_rank, what, victim)
    assert results.pop(victim) is KILLED
    for took, message in results:
        assert took < 1.05, took
        assert f"rank {victim} is gone" in message


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


def test_peers_learn_why(ranks: Callable[..., list[Any]]) -> None:
    assert set(ranks(3, abort_amid)) == {"aborted by rank 0: enough"}


async def leave_at_once(place: Rank) -> None:
    """The last thing that a rank sends arrives, though it closes and ends at once."""
    counts = [5, LARGE, 7, 1000]
    async with place.open() as comm:
        if place.rank == 0:
            works = [comm.send(numbers(count, 0, i), 1, i) for i, count in enumerate(counts)]
            del works
        else:
            await asyncio.sleep(0.05)
            for i, count in enumerate(counts):
                got = await comm.recv(torch.zeros(count, dtype=torch.int64), 0, i)
                assert torch.equal(got, numbers(count, 0, i))


def test_a_close_cuts_nothing_off(ranks: Callable[..., list[Any]]) -> None:
    for _ in range(3):
        ranks(2, leave_at_once)


def held() -> tuple[list[str], int]:
    """The threads and descriptors of this process."""
    gc.collect()
    threads = sorted((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    return threads, len(list(Path("/proc/self/fd").iterdir()))


async def open_and_close(place: Rank) -> None:
    before = None
    for turn in range(4):
        comm = await place.open(f"turn {turn}")
        await comm.all_reduce(torch.zeros(3))
        await comm.all_reduce(torch.zeros(LARGE))
        await comm.all_reduce(torch.zeros(LARGE, dtype=torch.float16))
        if turn == 2:
            comm.abort("for a change")
        await comm.aclose()
        del comm
        if before is None:
            before = held()  # the first one loads what stays
    assert held() == before


def test_nothing_is_left(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, open_and_close)


JUST_END = """
import asyncio, sys
import torch
from test_c10d import LARGE, Rank

async def main():
    global comm, work
    comm = await Rank(int(sys.argv[1]), 2, sys.argv[2]).open()
    await comm.all_reduce(torch.zeros(LARGE))
    work = comm.recv(torch.zeros(LARGE), 1 - comm.rank)

asyncio.run(main())
"""


def test_an_end_without_a_close(tmp_path: Path) -> None:
    """An interpreter that ends with a communicator open ends in the ordinary way."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", JUST_END]
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)]
    try:
        assert [process.wait(30) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


async def fork(place: Rank) -> None:
    """A child that ends in the ordinary way leaves its parent's connections alone."""
    async with place.open() as comm:
        await comm.barrier()
        child = os.fork()
        if not child:
            with pytest.raises(CommError):
                comm.barrier()
            os._exit(end_of_interpreter())
        assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
        await comm.all_reduce(torch.zeros(LARGE))


def end_of_interpreter() -> int:
    import atexit

    atexit._run_exitfuncs()
    return 0


def test_a_forked_child(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, fork)


# --------------------------------------------------------------------------------------------------- adopted groups


def group_of(place: Rank) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.FileStore(str(place.folder / "group"), place.size)
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


async def adopt(place: Rank) -> None:
    rank, size = place.rank, place.size
    group = await asyncio.to_thread(group_of, place)
    async with await aiocomms.from_process_group(group, timeout=20) as comm:
        assert (comm.rank, comm.size) == (rank, size)
        for dtype in (torch.int64, torch.int16):
            for count in (3, LARGE):
                total = await comm.all_reduce(numbers(count, rank).to(dtype))
                assert torch.equal(total, sum(numbers(count, r) for r in range(size)).to(dtype))
        right, left = (rank + 1) % size, (rank - 1) % size
        sent = comm.send(numbers(LARGE, rank), right)
        assert torch.equal(await comm.recv(torch.zeros(LARGE, dtype=torch.int64), left), numbers(LARGE, left))
        await sent
        other = await aiocomms.from_process_group(group, name="other", timeout=20)
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
                lost = await aiocomms.from_process_group(group, name="lost", timeout=20)
                await lost.barrier()
                place.tell(f"met {rank}")
                await place.all_told("met", *range(size))
                lost.abort("it stays its owner's")
                await lost.aclose()


def test_an_adopted_group(ranks: Callable[..., list[Any]]) -> None:
    ranks(3, adopt)


def test_no_rank_listens_on_every_interface(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, listeners) == [[], []]


async def listeners(place: Rank) -> list[str]:
    async with place.open():
        return listening()


def listening() -> list[str]:
    """This process's listening sockets that others than this host can reach."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    assert mine
    return [address for address in mine if not address.startswith("0100007F:")]
