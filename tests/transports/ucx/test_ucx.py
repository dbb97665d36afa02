"""The ucx transport: what is particular to it, between real processes. See also `test_processes.py`."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from concurrency import in_threads
from inside import transport_of
from processes import HANGS, LARGE, PATIENCE, Rank, Run, empty, exchange, in_turn, listening, numbers

import aiocomms
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommError
from aiocomms.testing import local_world

pytestmark = pytest.mark.real

MEGA = 2**20
LITTLE = 0.01
"""A share of a CPU. A thread that looks on, or looks again every few milliseconds, takes more."""

Measured = TypeVar("Measured")


@pytest.fixture
def transport() -> str:
    return "ucx"


def shared_engine_of(comm: Communicator) -> Any:
    """Return the state that the transport keeps for a communicator and those split from it."""
    return transport_of(comm).shared


# --------------------------------------------------------------------------------------------------------- progress


async def compute_meanwhile(place: Rank, count: int) -> None:
    """Rank 0 posts and computes without a pause until the others are done: were they to wait for its loop, all hang."""
    async with place.open() as comm:
        for turn in range(5):
            tensor = torch.ones(count)
            await comm.barrier()
            if place.rank == 0:
                work = comm.all_reduce(tensor)
                place.tell(f"posted {turn}")
                compute_until(place, *(f"reduced {turn} {rank}" for rank in range(1, place.size)))
                await work
            else:
                place.told(f"posted {turn}")
                await comm.all_reduce(tensor)
                place.tell(f"reduced {turn} {place.rank}")
            assert (tensor == place.size).all()


def compute_until(place: Rank, *notes: str) -> None:
    """Compute, in Python alone, until there are some notes; at least 200 ms, and with no pause to the end."""
    began, total = time.monotonic(), 0
    while time.monotonic() < began + 0.2 or not all((place.folder / note).exists() for note in notes):
        total += sum(range(1000))
        assert time.monotonic() < began + PATIENCE, "the others wait for this rank's loop"


@pytest.mark.fault(14, transport="ucx")
@pytest.mark.parametrize(("size", "count"), [(2, 2), (2, LARGE), (2, 2 * MEGA), (3, LARGE)])
def test_computing_rank_does_not_delay_the_others(ranks: Run, size: int, count: int) -> None:
    ranks(size, compute_meanwhile, count)


def wake_ups() -> dict[str, int]:
    """Return the number of times that each thread of this process has gone to sleep by itself."""
    counts = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            rows = dict(row.split(":", 1) for row in (task / "status").read_text().splitlines())
            counts[f"{rows['Name'].strip()} {task.name}"] = int(rows["voluntary_ctxt_switches"])
    return counts


async def rest(place: Rank) -> tuple[dict[str, int], dict[str, float]]:
    """The wake-ups in a second without anything under way, and the share of a CPU that works take which wait.

    Both of the first second of rest: somebody may look on until then, for longer where the machine is busy.
    """
    async with place.open() as comm:
        await comm.all_reduce(torch.ones(MEGA))
        await comm.send(torch.ones(4), 1 - place.rank)
        await comm.recv(torch.ones(4), 1 - place.rank)
        woken = await first_rest(woken_in_a_second, sleeps)
        shares = {}
        recv = comm.recv(torch.ones(4), 1 - place.rank)
        shares["recv"] = await share()
        window = await comm.new_window(torch.zeros(8))
        waiting = window.wait_signal(1 - place.rank)
        shares["wait_signal"] = await share()
        if place.rank == 0:
            reduced = comm.all_reduce(torch.ones(MEGA))
            shares["all_reduce"] = await share()
            place.tell("now")
            await reduced
        else:
            await asyncio.to_thread(place.told, "now")
            await comm.all_reduce(torch.ones(MEGA))
        await asyncio.gather(comm.send(torch.ones(4), 1 - place.rank), window.signal(1 - place.rank), recv, waiting)
        await window.aclose()
    return woken, shares


async def woken_in_a_second() -> dict[str, int]:
    before = wake_ups()
    await asyncio.sleep(1)
    return {name: more for name, count in wake_ups().items() if (more := count - before.get(name, 0))}


def sleeps(woken: dict[str, int]) -> bool:
    """Return whether all threads sleep, except the one that has looked, whose own sleep ends."""
    return len(woken) <= 1 and sum(woken.values()) <= 2 and all(name.startswith("python") for name in woken)


async def share() -> float:
    return await first_rest(cpu_of_a_second, lambda share: share < LITTLE)


async def cpu_of_a_second() -> float:
    before = time.process_time()
    await asyncio.sleep(1)
    return time.process_time() - before


async def first_rest(measure: Callable[[], Awaitable[Measured]], rests: Callable[[Measured], bool]) -> Measured:
    """The first that is a rest; the last one if none is for long."""
    ends = time.monotonic() + PATIENCE
    while not rests(found := await measure()) and time.monotonic() < ends:
        pass
    return found


def test_idle_communicator_uses_little_cpu(ranks: Run) -> None:
    for woken, shares in ranks(2, rest):
        assert sleeps(woken), woken
        assert all(share < LITTLE for share in shares.values()), shares


# ------------------------------------------------------------------------------------------- whose memory it is


async def reuse_what_is_sent(place: Rank) -> None:
    """The receiver asks only after the sender has forgotten the tensor, and has used its memory again if it can."""
    count = MEGA  # 8 MiB: too long to be copied away
    async with place.open() as comm:
        await comm.barrier()
        if place.rank == 0:
            wanted = numbers(count, 0)
            task = asyncio.create_task(wait_for(comm.send(wanted, 1)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del wanted, task
            gc.collect()
            garbage = [torch.full((count,), -1, dtype=torch.int64) for _ in range(4)]
            place.tell("reused")
            assert [int(tensor.sum()) for tensor in garbage] == [-count] * 4
        else:
            await asyncio.to_thread(place.told, "reused")
            assert torch.equal(await comm.recv(empty(count), 0), numbers(count, 0))


async def wait_for(work: Any) -> Any:
    return await work


async def reuse_what_is_received(place: Rank) -> None:
    """A receive that has its message is cancelled and forgotten; what takes its memory's place stays as it is."""
    count = 8 * MEGA  # 64 MiB: under way for a while
    async with place.open() as comm:
        await comm.barrier()
        if place.rank == 0:
            sent = comm.send(numbers(count, 0), 1)
            await comm.send(torch.tensor([os.getpid()]), 1, tag=1)
            await comm.send(numbers(3, 0), 1)
            await sent
            place.tell("sent")
        else:
            sender = int(await comm.recv(empty(1), 0, tag=1))  # the first one's announcement is here
            os.kill(sender, signal.SIGSTOP)  # the sender copies, so nothing arrives until it goes on
            work = comm.recv(empty(count), 0)
            assert not work.done()
            task = asyncio.create_task(wait_for(work))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del work, task
            gc.collect()
            canaries = [torch.full((count,), -1, dtype=torch.int64) for _ in range(4)]
            os.kill(sender, signal.SIGCONT)
            await asyncio.to_thread(place.told, "sent")
            assert [int(tensor.sum()) for tensor in canaries] == [-count] * 4
            # The message counts as received.
            assert torch.equal(await comm.recv(empty(3), 0), numbers(3, 0))


def without_cma(rank: int) -> None:
    os.environ["UCX_TLS"] = "^sysv,tcp,cma"


@pytest.mark.fault(38, transport="ucx")
def test_cancelled_and_dropped_recv_writes_no_freed_memory(ranks: Run) -> None:
    """Cancel without the kernel's help, with which UCX copies a whole message at once and leaves nothing to cancel."""
    ranks(2, reuse_what_is_received, before=without_cma)


# ------------------------------------------------------------------------------------------------------ families


async def mix_families(place: Rank) -> None:
    """A parent and its children, of which two are alike: their messages and collectives stay apart."""
    rank, size = place.rank, place.size
    comm = await place.open()
    twin, reverse = await comm.split(range(size), "twin"), await comm.split([2, 1, 0], "reverse")
    alone = await comm.split([rank])
    comms = [comm, twin, reverse]
    assert len({id(shared_engine_of(it)) for it in (*comms, alone)}) == 1
    received, sent = [], []
    for count in (3, LARGE):
        for i, it in enumerate(comms):
            received.append((it.recv(empty(count), (it.rank - 1) % size, 5), numbers(count, (it.rank - 1) % size, i)))
        for i, it in reversed(list(enumerate(comms))):
            sent.append(it.send(numbers(count, it.rank, i), (it.rank + 1) % size, 5))
    reduced = [it.all_reduce(torch.full((LARGE,), float(i))) for i, it in enumerate(comms)]
    for work, wanted in received:
        assert torch.equal(await work, wanted), work
    for i, work in enumerate(reduced):
        assert (await work == i * size).all()
    for work in sent:
        await work
    await close_in_some_order([*comms, alone])


@pytest.mark.deterministic
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("op", ["send", "recv", "all_reduce"])
@pytest.mark.parametrize(("pure", "steps"), [("1", ("follow", "follow_collective")), ("0", ("look_after",))])
def test_post_interrupted_by_a_signal_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], op: str, pure: str, steps: tuple[str, ...]
) -> None:
    """Interrupt a post whose op the engine has: it keeps its memory, and the engine's other communicators go on."""

    async def main() -> None:
        async with local_world(2, "ucx") as (one, two):
            others = await asyncio.gather(one.split([0, 1]), two.split([0, 1]))
            transport, tensor = transport_of(one), numbers(LARGE, 0)
            with pytest.MonkeyPatch.context() as patch:
                for name in steps:
                    patch.setattr(type(transport), name, interrupt)
                calls = {"send": (tensor, 1), "recv": (tensor, 1), "all_reduce": (tensor,)}
                with pytest.raises(kind if kind is KeyboardInterrupt else CommError, match="a signal"):
                    getattr(one, op)(*calls.pop(op))
            kept = weakref.ref(tensor)
            del tensor, calls
            gc.collect()
            assert kept() is not None, "the engine may write to it"
            if kind is KeyboardInterrupt:  # nothing is lost, and the op takes place
                got = torch.zeros(LARGE, dtype=torch.int64)
                await (two.recv(got, 0) if op == "send" else two.send(got, 0) if op == "recv" else two.all_reduce(got))
                assert op == "recv" or torch.equal(got, numbers(LARGE, 0))
            for _ in range(3):
                totals = await asyncio.gather(*(other.all_reduce(torch.ones(1)) for other in others))
                assert [float(total) for total in totals] == [2, 2]
            await asyncio.gather(*(other.aclose() for other in others))

    def interrupt(*_: object, **__: object) -> None:
        raise kind("a signal")

    monkeypatch.setenv("AIOCOMMS_PURE", pure)
    asyncio.run(main())


async def close_in_some_order(comms: list[Communicator]) -> None:
    """The parent first; the engine goes with the last one."""
    shared = shared_engine_of(comms[0])
    parent, twin, reverse, alone = comms
    await parent.aclose()
    await alone.aclose()
    for it in (twin, reverse):
        assert (await it.all_reduce(torch.ones(LARGE)) == it.size).all()
    child = await twin.split(range(twin.size))
    await twin.aclose()
    assert (await child.all_reduce(torch.ones(3)) == child.size).all()
    assert not any(shared_engine_of(it) is not shared for it in (child, reverse))
    await (reverse if child.rank else child).aclose()  # in another order on another rank
    assert shared.transports
    await (child if child.rank else reverse).aclose()
    assert not shared.transports


def in_a_loop(store: dist.Store, rank: int, size: int) -> None:
    """One rank, in a thread and loop of its own."""

    async def everything() -> None:
        async with aiocomms.new_comm("ucx", store=store, rank=rank, size=size) as comm:
            for count in (3, LARGE, MEGA):
                await exchange(comm, count)
            child = await comm.split([rank])
            assert torch.equal(await child.all_reduce(torch.ones(3)), torch.ones(3))
            await child.aclose()

    asyncio.run(everything())


@pytest.mark.deterministic
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_threads_of_one_process_communicate(size: int) -> None:
    store = dist.HashStore()
    in_threads(*(lambda rank=rank: in_a_loop(store, rank, size) for rank in range(size)))


# --------------------------------------------------------------------------------------------------- the machine


async def listen(place: Rank) -> None:
    """The ranks of one host do not listen once open: they have met by then."""
    async with place.open() as comm:
        await comm.all_reduce(torch.ones(LARGE))
        assert listening() == ([], [])


def test_ranks_of_one_host_do_not_listen_once_open_and_families_share_an_engine(ranks: Run) -> None:
    ranks(3, in_turn, listen, mix_families)


async def best(place: Rank) -> None:
    """Choose ucx by default on CPUs."""
    place.transport = "auto"
    async with place.open() as comm:
        await comm.all_reduce(torch.ones(3))
        assert comm.transports == {"p2p": "ucx", "collectives": "ucx", "rma": "ucx"}


@pytest.mark.fault(39, transport="ucx")
def test_auto_chooses_ucx_whose_cancelled_and_dropped_send_delivers_its_data(ranks: Run) -> None:
    ranks(2, in_turn, best, reuse_what_is_sent)


WITHOUT = """
import asyncio, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "libucx":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import torch
import torch.distributed as dist
import aiocomms
from aiocomms.bootstrap import registry

print(registry.available(torch.device("cpu"))["ucx"])

async def main():
    for transport in ("c10d", "auto"):
        store = dist.HashStore()
        opening = [aiocomms.new_comm(transport, store=store, rank=rank, size=2) for rank in range(2)]
        comms = await asyncio.gather(*map(open_one, opening))
        print(comms[0].transports["collectives"])
        reduced = await asyncio.gather(*(comm.all_reduce(torch.ones(3)) for comm in comms))
        assert all((tensor == 2).all() for tensor in reduced)
        await asyncio.gather(*(comm.aclose() for comm in comms))
    try:
        await aiocomms.new_comm("ucx", store=store, rank=0, size=2)
    except aiocomms.errors.UnsupportedOperation as error:
        print(error)

async def open_one(opening):
    return await opening

asyncio.run(main())
"""


def test_import_without_ucx_says_what_to_install() -> None:
    """A line says what to install, and the rest works."""
    done = subprocess.run(
        [sys.executable, "-Werror", "-c", WITHOUT], capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert done.returncode == 0, done.stderr
    why, *chosen, message = done.stdout.split("\n", 3)
    assert "pip install libucx-cu13" in why
    assert chosen == ["c10d", "c10d"]
    assert "transport 'ucx' is not available: ImportError: UCX itself is missing" in message


def test_stubs_match_the_native_modules(tmp_path: Path) -> None:
    """Each `.pyi` is what nanobind makes of its module, but for its layout."""
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed")
    folder = Path(__file__).parents[3] / "transports" / "ucx"
    kept = {"aiocomms_ucx._engine": folder / "aiocomms_ucx" / "_engine.pyi"}
    kept["aiocomms_launcher"] = folder / "aiocomms_launcher.pyi"
    for module, path in kept.items():
        made = tmp_path / path.name
        command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", module, "-o", str(made)]
        subprocess.run(command, check=True, timeout=HANGS)
        assert ast.dump(ast.parse(made.read_text())) == ast.dump(ast.parse(path.read_text())), module


# ----------------------------------------------------------------------------------------------------- coming and going


@pytest.mark.deterministic
def test_communicator_that_never_opened_sends_no_farewell() -> None:
    """The communicator has no names of the others, and must not be taken for the one it was to be split from."""
    from aiocomms_ucx import wire
    from aiocomms_ucx.transport import UcxTransport

    async def main() -> None:
        async with local_world(2, "ucx") as (mine, theirs):
            here: Any = transport_of(mine)
            there: Any = transport_of(theirs)
            work = theirs.all_reduce(torch.ones(3))
            orphan = UcxTransport(here.shared, here.ranks)
            await orphan.aclose()
            # A message behind the farewell, which no rank writes that works as it should.
            here._tell(1, wire.Dispute(here._numbers[1], 99, "what comes behind the farewell"))
            while 99 not in there._disputes:  # noqa: ASYNC110 - another engine's thread says it
                await asyncio.sleep(0)
            assert not work.done()
            await mine.all_reduce(torch.ones(3))
            assert (await work).tolist() == [2, 2, 2]

    asyncio.run(main())
