"""Ranks as real processes, for the tests of what a transport does between processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import aiocomms
from aiocomms.communicator.communicator import Communicator
from aiocomms.diagnosis.live import PREFIX
from aiocomms.errors import CommAbortedError, PeerDiedError
from aiocomms.lowlevel import clock

LARGE = 60_013
"""Elements: more than travels with an agreement or in one slot of memory, and no multiple of any number of ranks."""
HANGS = 240.0
"""Seconds after which ranks hang, on however slow a machine; a deadline that nobody has given is later."""
SUITE_HANGS = 900.0
"""The same, of a process that runs a whole test suite."""
PATIENCE = 100.0
"""Seconds after which it is said what a rank waits for; not how long that may take."""
KILLED = "killed"
INTERRUPTED = "interrupted"

Body = Callable[..., Awaitable[Any]]
Before = Callable[[int], object]
Run = Callable[..., list[Any]]

_PORTS: list[socket.socket] = []
# time.sleep itself raises in a deterministic test; the kernel tells no thread when another one has ended
_sleep = time.sleep
_AFTER_A_FAILURE = 2.0
"""Seconds in which the ranks still end when one has raised."""
_PRELOAD = ["pytest", "aiocomms_c10d", "aiocomms_ucx", "aiocomms.communicator.opening"]


class Rank:
    """The knowledge of a body about its place."""

    simulated = False

    def __init__(self, transport: str, rank: int, size: int, folder: str) -> None:
        self.transport = transport
        self.rank = rank
        self.size = size
        self.folder = Path(folder)
        self._store: dist.Store | None = None

    def open(self, name: str = "world", ranks: Sequence[int] | None = None, **more: Any) -> Any:
        """``new_comm`` of all ranks, or of some."""
        ranks = range(self.size) if ranks is None else ranks
        more = {"store": self.store(), "rank": ranks.index(self.rank), "size": len(ranks), **more}
        return aiocomms.new_comm(self.transport, name=name, **more)

    def store(self) -> dist.Store:
        """The same one each time: torch removes the file with the last, also where another rank just opens it."""
        self._store = self._store or dist.FileStore(str(self.folder / "store"), self.size)
        return self._store

    def tell(self, note: str) -> None:
        (self.folder / note).touch()

    def told(self, note: str) -> None:
        """Wait for a note without letting the loop run."""
        ends = time.monotonic() + PATIENCE
        while not (self.folder / note).exists():
            assert time.monotonic() < ends, f"nobody told {note!r}"
            time.sleep(0.001)

    def give(self, name: str, what: bytes) -> None:
        """Leave something for the other ranks."""
        (self.folder / name).write_bytes(what)
        self.tell(f"{name} is there")

    def given(self, name: str) -> bytes:
        """Return what another rank has left, once it has; the loop does not run meanwhile."""
        self.told(f"{name} is there")
        return (self.folder / name).read_bytes()

    async def heard(self, note: str) -> None:
        """Wait for a note."""
        await asyncio.to_thread(self.told, note)

    async def heard_of(self, name: str) -> bytes:
        """Return what another rank has left, once it has; the loop runs meanwhile."""
        await self.heard(f"{name} is there")
        return (self.folder / name).read_bytes()

    def lose_store(self, pid: int) -> None:
        """Have the server of the store die, which is a process of its own."""
        os.kill(pid, signal.SIGKILL)

    async def all_told(self, note: str, *ranks: int) -> None:
        """Wait for some ranks' notes."""
        for rank in ranks:
            await asyncio.to_thread(self.told, f"{note} {rank}")

    async def die(self) -> None:
        """End without a word, and write down when."""
        self._die()

    def die_later(self, seconds: float) -> None:
        """Die after some seconds, wherever the program is by then."""
        threading.Timer(seconds, self._die).start()

    def _die(self) -> None:
        (self.folder / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def launch(self, port: int) -> None:
        """Set what a launcher sets that serves no store itself: rank 0 serves it at this port."""
        place = {"RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Have ``owner.name`` be another function, in this rank's process."""
        setattr(owner, name, function)

    def end(self, end: Callable[[], object]) -> None:
        """End in another way, and write down when."""
        (self.folder / "died").write_text(str(time.monotonic()))
        end()

    def stop(self, rank: int, after: float = 0.0, simulated: float = 20.0) -> None:
        """Have another rank stand still until it is to go on; it has said who it is by :meth:`say_who`.

        :param after: seconds until then.
        :param simulated: seconds after which it goes on by itself in a simulation.
        """
        pid = int((self.folder / f"pid {rank}").read_text())
        if after:
            threading.Timer(after, os.kill, (pid, signal.SIGSTOP)).start()
        else:
            os.kill(pid, signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        """Have it go on."""
        os.kill(int((self.folder / f"pid {rank}").read_text()), signal.SIGCONT)

    def say_who(self) -> None:
        """Let other ranks stop this one."""
        (self.folder / f"pid {self.rank}").write_text(str(os.getpid()))

    def since_death(self) -> float:
        """Seconds since another rank did so."""
        return time.monotonic() - float((self.folder / "died").read_text())


async def in_turn(place: Rank, *bodies: Body | tuple[Any, ...]) -> None:
    """Run several bodies in the same processes, one after the other; a failure names the body.

    Each has a folder of its own for its notes and its store. A body with arguments is a tuple.
    """
    for number, body in enumerate(bodies):
        run, *args = body if isinstance(body, tuple) else (body,)
        folder = place.folder / f"{number} {run.__name__}"
        folder.mkdir(exist_ok=True)
        try:
            await run(Rank(place.transport, place.rank, place.size, str(folder)), *args)
        except BaseException as error:
            error.add_note(f"in {run.__name__}{tuple(args)}")
            raise


def _main(body: Body, place: Rank, before: Before | None, args: tuple[Any, ...], pipe: Connection) -> None:
    try:
        os.environ.setdefault("AIOCOMMS_HEARTBEAT", "0")  # only a connection tells of a death, unless a test wants it
        if before is not None:
            before(place.rank)
        torch.set_num_threads(1)
        pipe.send((True, asyncio.run(body(place, *args))))
    except SystemExit:
        raise
    except KeyboardInterrupt:
        pipe.send((True, INTERRUPTED))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


@contextlib.contextmanager
def runner(transport: str, folder: Path) -> Iterator[Run]:
    """Gives ``run(size, body, *args)``, which runs ``await body(Rank, *args)`` in a process for each rank.

    It returns what they return, KILLED for one that was (or that ended without a word, as ``codes`` has it: its exit
    status), INTERRUPTED for one that ended by Ctrl-C, and raises where one raises or does not end. ``before(rank)`` is
    called in each process first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    running: list[Any] = []

    def run(
        size: int,
        body: Body,
        *args: Any,
        before: Before | None = None,
        codes: Mapping[int, int] = MappingProxyType({}),
    ) -> list[Any]:
        own = folder / f"{body.__name__}{len(running)}"
        own.mkdir()
        pipes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            place = Rank(transport, rank, size, str(own))
            process = context.Process(target=_main, args=(body, place, before, args, theirs))
            process.start()
            theirs.close()
            running.append(process)
            pipes.append(mine)
        results = _collect(pipes)
        for process in running[-size:]:
            process.join(PATIENCE)
        ended = [process.exitcode for process in running[-size:]]
        for rank, (result, code) in enumerate(zip(results, ended, strict=True)):
            wanted = codes.get(rank, -signal.SIGKILL) if result is KILLED else 0
            assert code == wanted, f"rank {rank} ended with {code}: {result}"
        return results

    try:
        yield run
    finally:
        for process in running:
            process.kill()
            process.join()
            process.close()


def _collect(pipes: list[Connection]) -> list[Any]:
    """Return each rank's result. Once one has failed the others have little time to say what they know of it."""
    results: dict[Connection, Any] = {}
    failures: dict[int, str] = {}
    ends = time.monotonic() + HANGS
    while len(results) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in results], max(0.0, ends - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            try:
                good, results[pipe] = pipe.recv()
            except (EOFError, ConnectionResetError):
                good, results[pipe] = True, KILLED
            if not good:
                failures[pipes.index(pipe)] = results[pipe]
                ends = min(ends, time.monotonic() + _AFTER_A_FAILURE)
    late = [rank for rank, pipe in enumerate(pipes) if pipe not in results]
    assert not failures, "".join(f"\nrank {rank}:\n{trace}" for rank, trace in failures.items())
    assert not late, f"ranks {late} hang"
    return [results[pipe] for pipe in pipes]


def free_port(host: str = "127.0.0.1") -> int:
    """A port at which nobody listens, and that the kernel gives to nobody else as long as this process lives.

    A socket is bound to it that never listens. Whoever is told the port can have it all the same, if it allows for
    addresses to be used again, as servers do; one that asks for any port does not get it, nor does a connection.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((host, 0))
    _PORTS.append(kept)
    return int(kept.getsockname()[1])


async def hear(place: Rank, note: str, *ranks: int) -> None:
    """Wait for some ranks' notes on the loop, without a thread."""
    ends = clock.now() + PATIENCE
    for rank in ranks:
        while not (place.folder / f"{note} {rank}").exists():
            assert clock.now() < ends, f"nobody told '{note} {rank}'"
            await asyncio.sleep(0.02 if place.simulated else 0.001)


async def together(place: Rank, comm: Communicator) -> None:
    """A barrier that all ranks have left, so that the death of one is no part of it."""
    await comm.barrier()
    place.tell(f"together {comm.rank}")
    await hear(place, "together", *range(comm.size))


async def death(ops: Awaitable[Any]) -> PeerDiedError:
    """The death that ends ops without end. The call that follows one that came off may already be refused for it."""
    try:
        await ops
    except PeerDiedError as error:
        return error
    except CommAbortedError as error:
        if isinstance(error.__cause__, PeerDiedError):
            return error.__cause__
        raise
    raise AssertionError("they came to an end")


def numbers(count: int, rank: int, turn: int = 0) -> Tensor:
    """Values that tell where they are from."""
    return torch.arange(count, dtype=torch.int64).mul_(7).add_(1000 * rank + turn)


def empty(count: int) -> Tensor:
    """Room for as many numbers."""
    return torch.zeros(count, dtype=torch.int64)


async def exchange(comm: Communicator, count: int) -> None:
    """Each kind of op, all under way at once."""
    rank, size = comm.rank, comm.size
    left, right = (rank - 1) % size, (rank + 1) % size
    mine = numbers(count, rank)
    everybody = [numbers(count, r) for r in range(size)]
    row = torch.cat(everybody)

    works = [
        (comm.recv(empty(count), left), everybody[left]),
        (comm.send(mine.clone(), right), mine),
        (comm.all_reduce(mine.clone()), sum(everybody)),
        (comm.reduce(mine.clone(), size - 1), sum(everybody) if rank == size - 1 else mine),
        (comm.broadcast(mine.clone(), 1), everybody[1]),
        (comm.all_gather_single(empty(size * count), mine), row),
        (comm.gather_single(empty(size * count) if rank == 0 else None, mine, 0), row if rank == 0 else None),
        (comm.reduce_scatter_single(empty(count), row.clone()), size * everybody[rank]),
        (comm.all_to_all_single(empty(size * count), mine.repeat(size)), row),
        (comm.scatter(empty(count), everybody if rank == 0 else None, 0), mine),
    ]
    await comm.barrier()
    window = await comm.new_window(empty(count))
    await window.put(mine, right)
    await window.signal(right)
    await window.wait_signal(left)
    for work, wanted in [*works, (window.get(empty(count), rank), everybody[left])]:
        got = await work
        if wanted is not None:
            assert torch.equal(got, wanted), work
    await window.aclose()


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started meanwhile, neither by Python nor by a library: the stack of each would be too large."""
    libc = ctypes.CDLL(None)
    before, impossible = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    for attributes in (before, impossible):
        assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_setstacksize(impossible, ctypes.c_size_t(2**47)) == 0
    assert libc.pthread_setattr_default_np(impossible) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(before) == 0


def held() -> tuple[list[str], list[str]]:
    """The threads of this process, and what its descriptors are of."""
    gc.collect()
    threads, links = [], []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            threads.append((task / "comm").read_text().strip())
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor is gone
            links.append(re.sub(r"\d+", "", str(link.readlink())))
    return sorted(threads), sorted(links)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo` of glibc: of all its arenas."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    ]


def allocated() -> int:
    """Bytes that this process has allocated and not freed; each of Python's own blocks counts as its largest, 512.

    What the kernel calls resident is another thing: a heap has holes, and shrinks when it likes, by a MiB at a time.
    """
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo  # the newer mallinfo2 is not in every glibc that torch runs on
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd) + 512 * sys.getallocatedblocks()


async def let_go(before: tuple[list[str], list[str]]) -> None:
    """No more descriptors and threads than there were, once those have gone which the kernel still ends."""
    ends = time.monotonic() + PATIENCE
    while any(more := _more_than(before)):
        assert time.monotonic() < ends, f"still held: {more}"
        await asyncio.sleep(0)
        _sleep(0.01)


def all_let_go(before: tuple[list[str], list[str]]) -> None:
    """The same where no loop runs, or may stand still.

    No test may want exactly as many: what earlier ones have left in threads, such as the workers that trio keeps for
    10 s, ends when it likes.
    """
    ends = time.monotonic() + PATIENCE
    while any(more := _more_than(before)):
        assert time.monotonic() < ends, f"still held: {more}"
        _sleep(0.01)


def _more_than(before: tuple[list[str], list[str]]) -> list[Counter[str]]:
    return [Counter(now) - Counter(then) for now, then in zip(held(), before, strict=True)]


def listening() -> tuple[list[str], list[str]]:
    """The addresses (hexadecimal, as the kernel shows them) and unix sockets at which this process listens.

    But for its live view, where nothing that anybody sends is read: it has tests of its own.
    """
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()))
    rows = [
        row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{table}").read_text().splitlines()
    ]
    addresses = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    rows = [row.split() for row in Path("/proc/self/net/unix").read_text().splitlines()]
    accepting = 0x10000  # __SO_ACCEPTCON
    paths = [row[-1] for row in rows[1:] if int(row[3], 16) & accepting and f"socket:[{row[6]}]" in inodes]
    return addresses, [path for path in paths if not path.startswith(f"@{PREFIX}/")]
