"""The ucx transport across hosts: between network namespaces, where that can be made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiocomms_ucx.shared_engine import _open_engines
from aiocomms_ucx.transport import UcxTransport
from concurrency import until
from hosts import Enter, address, hosts, kernel_address
from processes import KILLED, LARGE, Rank, Run, death, empty, exchange, listening, numbers, together
from test_processes import abort_amid, leave_at_once, mix
from torch import Tensor

import aiocomms
from aiocomms import ReduceOp
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommTimeoutError,
    MismatchError,
    PeerDiedError,
    UnsupportedOperation,
)

pytestmark = [pytest.mark.real, pytest.mark.search]

ROUTE = {"MASTER_ADDR": address(0)}
"""The variable that shows the way to the other ranks: the file in which they meet says nothing of it."""


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture(scope="module")
def names() -> Iterator[list[str]]:
    """Three hosts."""
    with hosts(3) as made:
        yield made


async def everything(place: Rank, layout: str) -> None:
    """Run, as under a launcher, every kind of op in each of its sizes, over the parent and a child."""
    variables = {"RANK": f"{place.rank}", "WORLD_SIZE": f"{place.size}", **ROUTE, "MASTER_PORT": "29511"}
    os.environ.update(variables)
    async with aiocomms.new_comm("ucx") as comm:
        assert (comm.rank, comm.size) == (place.rank, place.size)
        for count in (3, LARGE, 2**20):
            await exchange(comm, count)
        child = await comm.split(range(place.size)[::-1])
        assert child is not None
        await exchange(child, LARGE)
        await child.aclose()
        await reduce_some(comm)
        await use_window(comm, layout)
        addresses, paths = listening()
        port = f":{29511:04X}"
        assert not paths
        assert not any(set(it.partition(":")[0]) == {"0"} for it in addresses), addresses
        assert not [it for it in addresses if it.endswith(port)], "the store listens though all are there"


async def reduce_some(comm: Communicator) -> None:
    """Reductions that are not sums of whole numbers."""
    rank, size = comm.rank, comm.size
    for count in (5, LARGE, 1_200_007):  # the last one in pieces
        for dtype in (torch.bfloat16, torch.float64, torch.complex64):
            ones = torch.full((count,), rank + 1, dtype=dtype)
            assert (await comm.all_reduce(ones.clone()) == size * (size + 1) // 2).all()
            wanted = torch.full((count,), (size + 1) / 2).to(dtype)
            assert torch.equal(await comm.all_reduce(ones.clone(), ReduceOp.AVG), wanted)
        least = torch.full((count,), -rank, dtype=torch.int8)
        assert (await comm.all_reduce(least, ReduceOp.MIN) == 1 - size).all()


async def use_window(comm: Communicator, layout: str) -> None:
    """Each rank's part, used by all of them at once."""
    rank, size = comm.rank, comm.size
    window = await comm.new_window(empty(size * LARGE))
    for dst in range(size):
        work = window.put(numbers(LARGE, rank, dst), dst, offset=rank * LARGE)
        await window.signal(dst)
        await work
    for src in range(size):
        await window.wait_signal(src)
        assert torch.equal(window.tensor[src * LARGE : (src + 1) * LARGE], numbers(LARGE, src, rank))
        assert torch.equal(await window.get(empty(LARGE), src, offset=rank * LARGE), numbers(LARGE, rank, src))
    for other in range(size):
        if layout[other] == layout[rank]:
            assert window.mapped(other)
            mapped = await window.map_remote_tensor(other)
            assert torch.equal(mapped[rank * LARGE : (rank + 1) * LARGE], numbers(LARGE, rank, other))
        else:
            assert not window.mapped(other)
            with pytest.raises(UnsupportedOperation, match=f"rank {other} is on another host"):
                await window.map_remote_tensor(other)
    await window.aclose()


@pytest.mark.parametrize("layout", ["01", "0011", "0110", "012", "00101"])
def test_all_ops_between_hosts_are_right(ranks: Run, names: list[str], layout: str) -> None:
    ranks(len(layout), everything, layout, before=Enter(names, layout))


async def contend(place: Rank, turns: int) -> list[int]:
    """All ranks add to the same elements at once, whether these are on their host or not; nobody sees a value twice."""
    rank, size = place.rank, place.size
    async with place.open() as comm:
        window = await comm.new_window(empty(2))
        await comm.barrier()
        taken = [await window.fetch_add(turn % size, 0, 1) * size + turn % size for turn in range(turns)]
        won = await window.compare_swap(0, 1, 0, rank + 1) == 0
        assert int(await comm.all_reduce(torch.tensor([int(won)]))) == 1
        assert window.tensor[0] == size * len(range(rank, turns, size))
        await window.aclose()
        return taken


@pytest.mark.parametrize("layout", ["01", "0011"])
def test_contending_atomics_between_hosts_lose_no_update(ranks: Run, names: list[str], layout: str) -> None:
    size, turns = len(layout), 40
    taken = [number for rank in ranks(size, contend, turns, before=Enter(names, layout, **ROUTE)) for number in rank]
    assert sorted(taken) == list(range(size * turns))


def test_mixed_ops_abort_and_close_between_hosts_behave_as_on_one_host(ranks: Run, names: list[str]) -> None:
    ranks(3, mix, 6, before=Enter(names, "010", **ROUTE))
    assert set(ranks(3, abort_amid, before=Enter(names, "010", **ROUTE))) == {"aborted by rank 0: enough"}
    ranks(2, leave_at_once, before=Enter(names, "01", **ROUTE))


async def post_at_once(place: Rank, seed: int, turns: int) -> None:
    """Rank 0 calls ops on the same bytes, and awaits none before it has called all; their order can be seen."""
    chance, size = random.Random(seed), 2**19
    async with place.open() as comm:
        window = await comm.new_window(empty(size))
        model = empty(size)  # a copy of rank 1's part
        await comm.barrier()
        for turn in range(turns):
            cell = chance.randrange(size)
            works: list[tuple[Any, Any]] = []
            for number, kind in enumerate(chance.choices(["put", "get", "fetch_add"], k=6)):
                count = int(2 ** chance.uniform(0, 19))
                offset = chance.randint(max(0, cell - count + 1), min(cell, size - count))
                there = model[offset : offset + count]
                given = numbers(count, number, turn)
                if place.rank == 0 and kind == "put":
                    works.append((window.put(given, 1, offset), given.clone()))
                elif place.rank == 0 and kind == "get":
                    works.append((window.get(empty(count), 1, offset), there.clone()))
                elif place.rank == 0:
                    works.append((window.fetch_add(1, cell, 5), model[cell].clone()))
                if kind == "put":
                    there.copy_(given)
                model[cell] += 5 * (kind == "fetch_add")
            if place.rank == 0:
                await window.signal(1)
                for work, wanted in works:
                    assert torch.equal(torch.as_tensor(await work), wanted), (seed, turn, work)
                await window.wait_signal(1)
            else:
                await window.wait_signal(0)
                assert torch.equal(window.tensor, model), (seed, turn)
                await window.signal(0)
        await window.aclose()


def test_one_sided_ops_take_effect_in_call_order(ranks: Run, names: list[str]) -> None:
    ranks(2, post_at_once, random.randrange(2**32), 15, before=Enter(names, "01", **ROUTE))


# --------------------------------------------------------------------------------------------------- the interface


async def connections(place: Rank) -> set[str]:
    """The addresses of this host that this process uses."""
    async with place.open() as comm:
        await exchange(comm, LARGE)
        return connected()


def connected() -> set[str]:
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()))
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()]
    return {row[1].partition(":")[0] for row in rows if f"socket:[{row[9]}]" in inodes}


@pytest.mark.parametrize("network", ["net0", "net1"])
def test_the_chosen_interface_is_used(ranks: Run, names: list[str], network: str) -> None:
    """Whatever the way to the master is."""
    used = ranks(3, connections, before=Enter(names, "012", AIOCOMMS_IFACE=network, **ROUTE))
    assert used == [{kernel_address(host, network)} for host in range(3)]


async def open_in_vain(place: Rank) -> str:
    with pytest.raises(ArgumentError) as caught:
        await place.open()
    return caught.value.message


def test_unknown_interface_is_refused_with_the_list(ranks: Run, names: list[str]) -> None:
    for message in ranks(2, open_in_vain, before=Enter(names, "01", AIOCOMMS_IFACE="nonesuch")):
        assert "AIOCOMMS_IFACE is 'nonesuch'" in message
        assert "net0, net1" in message


# ----------------------------------------------------------------------------------------------------------- faults


LOSING: dict[str, Callable[[Communicator, Any, int], Any]] = {
    "recv": lambda comm, window, victim: comm.recv(torch.zeros(8), victim),
    "send": lambda comm, window, victim: comm.send(torch.zeros(2**24), victim),
    "all_reduce": lambda comm, window, victim: comm.all_reduce(torch.zeros(2**22)),
    "put": lambda comm, window, victim: window.put(torch.zeros(2**22), victim),
    "wait_signal": lambda comm, window, victim: window.wait_signal(victim),
}


async def lose_a_rank(place: Rank, what: str, victim: int) -> None:
    comm = await place.open()
    window = await comm.new_window(torch.zeros(2**22))
    pending = [comm.recv(torch.zeros(3), other, 9) for other in range(place.size) if other != place.rank]
    await together(place, comm)

    async def go_on() -> None:
        while True:
            await LOSING[what](comm, window, victim)

    if place.rank == victim:
        place.die_later(0.05)
        await (go_on() if what == "all_reduce" else pending[0])
    error = await death(go_on())
    assert error.peer == victim, error
    for work in pending:
        with pytest.raises(PeerDiedError) as died:
            await work
        assert died.value.peer == victim, died.value
    await comm.aclose()


@pytest.mark.fault(1, transport="ucx")
@pytest.mark.parametrize("what", LOSING)
def test_death_is_noticed_on_its_host_and_on_another(ranks: Run, names: list[str], what: str) -> None:
    """Seen by a rank of its host and by one of another."""
    assert ranks(3, lose_a_rank, what, 1, before=Enter(names, "011", **ROUTE)) == [None, KILLED, None]


GIVING: dict[str, Callable[[Communicator, Tensor], Any]] = {
    "send": lambda comm, tensor: comm.recv(tensor, 0) if comm.rank else comm.send(tensor, 1),
    "broadcast": lambda comm, tensor: comm.broadcast(tensor, 0),
    "scatter": lambda comm, tensor: comm.scatter(tensor, None if comm.rank else [tensor, tensor], 0),
    "gather": lambda comm, tensor: (
        comm.gather([tensor, torch.zeros_like(tensor)], tensor.clone(), 1)
        if comm.rank
        else comm.gather(None, tensor, 1)
    ),
    "put": lambda comm, tensor: put_and_signal(comm, tensor),
}
"""The ops whose data comes from rank 0 to rank 1."""
WINDOWS: list[Any] = []


def put_and_signal(comm: Communicator, tensor: Tensor) -> Any:
    (window,) = WINDOWS
    if comm.rank:
        return window.wait_signal(0)
    window.put(tensor, 1)
    return window.signal(1)


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    """Stop a process, which does nothing meanwhile."""
    os.kill(process, signal.SIGSTOP)
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    yield
    os.kill(process, signal.SIGCONT)


async def change_of_mind(place: Rank, what: str, count: int) -> str:
    """Rank 0 aborts what it has begun, and writes over its tensor; rank 1 hears of that after all has come."""
    comm = await place.open()
    other = await comm.split([0, 1])  # over the same connection
    assert other is not None
    tensor = torch.zeros(count) if place.rank else torch.ones(count)
    if what == "put":
        WINDOWS.append(await comm.new_window(tensor if place.rank else torch.zeros(count)))
    held: list[Callable[[], None]] = []
    if place.rank == 0:
        tell = UcxTransport._tell  # only the control messages between ranks are late
        hold = lambda self, *words: held.append(lambda: tell(self, *words))  # noqa: E731
        UcxTransport._tell = hold  # type: ignore[method-assign]
        await place.all_told("waits", 1)
        with stopped(int((place.folder / "pid").read_text())):
            filler = other.send(torch.zeros(2**20), 1)  # UCX finds the connection full
            work = GIVING[what](comm, tensor)
            comm.abort("on second thoughts")
            with contextlib.suppress(CommAbortedError):
                await work
            tensor.fill_(2)
        place.tell("changed 0")
    else:
        (place.folder / "pid").write_text(str(os.getpid()))
        place.tell("waits 1")
        await place.all_told("changed", 0)
        work = GIVING[what](comm, tensor)
        filler = other.recv(torch.zeros(2**20), 0)
    await filler
    await other.broadcast(torch.zeros(2**24), 0)  # behind what was given
    await other.barrier()
    for word in held:
        word()
    try:
        await work
        return "right" if (tensor == 1).all() else f"wrong: {tensor}"
    except CommAbortedError:
        return "aborted"
    finally:
        await other.aclose()
        await comm.aclose()


@pytest.mark.parametrize("count", [2, 2**14, 2**18, 2**24])
@pytest.mark.parametrize("what", GIVING)
def test_buffer_overwritten_after_an_abort_is_not_received(ranks: Run, names: list[str], what: str, count: int) -> None:
    """UCX reads it later, for the other host does not listen for a while."""
    outcomes = ranks(2, change_of_mind, what, count, before=Enter(names, "01", **ROUTE))
    assert outcomes[1] in {"aborted", "right"}, outcomes


async def reach_one_that_has_stopped(place: Rank) -> None:
    """The event loop goes on, the deadline ends all ops, and what they held is released."""
    comm = await place.open()
    other = await comm.split([0, 1])  # over the same connection
    assert other is not None
    window = await comm.new_window(torch.zeros(2**20, dtype=torch.int32))
    await comm.barrier()
    if place.rank == 1:
        (place.folder / "pid").write_text(str(os.getpid()))
        place.tell("waits 1")
        await place.all_told("lost", 0)
    else:
        await place.all_told("waits", 1)
        (shared,) = _open_engines
        with stopped(int((place.folder / "pid").read_text())):
            first = window.put(torch.ones(2**20, dtype=torch.int32), 1)
            ops = {
                "put": window.put(torch.ones(8, dtype=torch.int32), 1),
                "signal": window.signal(1),
                "fetch_add": window.fetch_add(1, 0, 1),
                "large put": window.put(torch.ones(2**20, dtype=torch.int32), 1),
                "flush": window.flush(1),
                "get": window.get(torch.zeros(2**20, dtype=torch.int32), 1, timeout=0.5),
            }
            with pytest.raises(CommTimeoutError, match="rank 1"):
                await ops.pop("get")  # by the event loop, which would be waiting in `post`
            for what, work in ops.items():
                with pytest.raises(CommTimeoutError):
                    assert await work is None, what
            with contextlib.suppress(CommTimeoutError):
                await first  # the send times out, except where the connection took all of it
            await until(lambda: len(shared.pending) <= 1)  # UCX has been given the first only
        place.tell("lost 0")
    await other.barrier()
    if place.rank == 0:
        await until(lambda: not shared.pending)
    again = await other.new_window(empty(LARGE))
    await again.put(numbers(LARGE, place.rank), 1 - place.rank)
    await again.signal(1 - place.rank)
    await again.wait_signal(1 - place.rank)
    assert torch.equal(again.tensor, numbers(LARGE, 1 - place.rank))
    await comm.aclose()
    await other.aclose()


async def close_and_go_on(place: Rank) -> None:
    """Two windows are closed and nobody awaits that, while the puts of rank 0 alone are still on their way."""
    comm = await place.open()
    windows = [await comm.new_window(torch.zeros(2**20, dtype=torch.int32)) for _ in range(2)]
    await comm.barrier()

    async def close_all() -> list[asyncio.Task[Any]]:
        async def reduce(count: int) -> Tensor:
            return await comm.all_reduce(numbers(count, comm.rank))

        calls = [windows[0].aclose(), reduce(8), windows[1].aclose(), comm.new_window(empty(4)), reduce(LARGE)]
        works = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)  # each is called, and none is awaited
        return works

    if place.rank == 1:
        (place.folder / "pid").write_text(str(os.getpid()))
        place.tell("waits 1")
        await place.all_told("closing", 0)
        works = await close_all()
    else:
        await place.all_told("waits", 1)
        with stopped(int((place.folder / "pid").read_text())):
            puts = [window.put(torch.ones(2**20, dtype=torch.int32), 1) for window in windows for _ in range(4)]
            works = await close_all()
            assert not any(work.done() for work in (*puts[3:], *works))
        place.tell("closing 0")
        for put in puts:
            await put
    _, small, _, again, large = [await work for work in works]
    assert torch.equal(small, numbers(8, 0) + numbers(8, 1))
    assert torch.equal(large, numbers(LARGE, 0) + numbers(LARGE, 1))
    await again.put(numbers(4, place.rank), 1 - place.rank)
    await again.signal(1 - place.rank)
    await again.wait_signal(1 - place.rank)
    assert torch.equal(again.tensor, numbers(4, 1 - place.rank))
    await comm.aclose()


def test_window_close_keeps_its_place_among_the_collectives(ranks: Run, names: list[str]) -> None:
    ranks(2, close_and_go_on, before=Enter(names, "01", **ROUTE))


async def close_what_ucx_has_in_hand(place: Rank) -> None:
    """A communicator is given up and closed while the other host does not listen; the one it was split from goes on."""
    comm = await place.open()
    child = await comm.split([0, 1])
    assert child is not None
    if place.rank == 1:
        (place.folder / "pid").write_text(str(os.getpid()))
        place.tell("waits 1")
        await place.all_told("closed", 0)
    else:
        await place.all_told("waits", 1)
        (shared,) = _open_engines
        with stopped(int((place.folder / "pid").read_text())):
            works = [child.all_reduce(torch.ones(2**20)), child.send(torch.ones(2**20), 1), child.barrier()]
            child.abort("on second thoughts")
            for work in works:
                with pytest.raises(CommAbortedError):
                    await work
            await child.aclose()
            assert shared.pending, "the wire has nothing of it"
        place.tell("closed 0")
        await until(lambda: not shared.pending)  # nor does anything hold the tensors
    await comm.barrier()
    await child.aclose()
    await comm.aclose()


def test_aborted_ops_are_released_while_the_family_goes_on(ranks: Run, names: list[str]) -> None:
    ranks(2, close_what_ucx_has_in_hand, before=Enter(names, "01", **ROUTE))


def test_one_sided_ops_on_a_stopped_rank_end_at_their_deadline(ranks: Run, names: list[str]) -> None:
    ranks(2, reach_one_that_has_stopped, before=Enter(names, "01", **ROUTE))


async def disagree(place: Rank, odd: int) -> str:
    async with place.open() as comm:
        await comm.all_reduce(torch.ones(3))
        place.tell(f"reduced {place.rank}")
        await place.all_told("reduced", *range(place.size))  # the result may otherwise be lost with the next one
        with pytest.raises((MismatchError, CommAbortedError)) as caught:
            await (comm.barrier() if place.rank == odd else comm.all_reduce(torch.ones(LARGE)))
        error: BaseException | None = caught.value
        if isinstance(error, CommAbortedError):
            error = error.__cause__  # the others have disagreed before this rank called
        assert isinstance(error, MismatchError), repr(error)
        return error.message


@pytest.mark.fault(23, transport="ucx")
@pytest.mark.parametrize("odd", [0, 3])
def test_ranks_that_disagree_between_hosts_name_both_calls(ranks: Run, names: list[str], odd: int) -> None:
    for message in ranks(4, disagree, odd, before=Enter(names, "0011", **ROUTE)):
        assert "barrier()" in message
        assert "all_reduce(" in message
