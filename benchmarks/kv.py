"""Blocks of a KV cache, pushed from a prefiller to a decoder on one host: ours against UCXX, NIXL, Mooncake, ZeroMQ.

Rank 0 pushes the blocks of a request, which lie behind each other, into pages that lie in any order in the memory of
rank 1, and rank 1 goes on when all are there. A transfer has taken from the first call on rank 0 until rank 1 has its
blocks; both share the machine's clock. The next begins when rank 1 has said so, over a socket of its own that is the
same for all.

* ours: a ``put`` for each block into a window, and a ``signal``
* leases: pages that rank 1 leases, and hands over; rank 0 fills them by one operation, and gives them back
* UCXX: a ``send`` and a ``recv`` for each block, by its asyncio interface in polling mode
* NIXL: one prepared ``WRITE`` with a notification, both polled at every ``sleep(0)``
* Mooncake: one batch of writes over TCP, on a thread, whose end rank 0 tells rank 1 over a socket
* ZeroMQ: one message of many parts over ``ipc``, which rank 1 copies into the pages

Each contender's two processes are started anew in each round, in turn, so that the machine's drift hits all alike.
Beside the transfers a task on each loop sleeps for 1 ms over and over; by how much it wakes too late is the lateness,
which asyncio's own timers have up to 1 ms of. CPU time is that of both processes. Run it with
``python -m benchmarks.kv [--rounds N] [--only NAME]``; ``make bench`` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import random
import statistics
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import aiocomms
from benchmarks.processes import in_two_processes

KIB, MIB = 2**10, 2**20
BLOCKS = (16 * KIB, 64 * KIB, 512 * KIB, 4 * MIB)
COUNTS = (1, 16, 256)
CASES = [*((nbytes, count) for nbytes in BLOCKS[:3] for count in COUNTS), (4 * MIB, 1)]
POOL = 128 * MIB
MOVED, FEWEST, MOST = 512 * MIB, 8, 200
"""Bytes that the transfers of a case move, and how many these are."""


class Contender(Protocol):
    """One of two ranks: the first gives, the second takes."""

    async def open(self, rank: int, folder: str, pool: Tensor) -> None:
        """Meet the other rank; the pool is what this rank gives from or takes into."""

    async def give(self, nbytes: int, pages: list[int]) -> None:
        """Push the first blocks of the pool, one to each page."""

    async def take(self, nbytes: int, pages: list[int]) -> None:
        """Return when all of them are there."""

    async def aclose(self) -> None:
        """Part."""


class Ours:
    """A window, puts, and a signal."""

    async def open(self, rank: int, folder: str, pool: Tensor) -> None:
        self.pool = pool
        store = dist.FileStore(f"{folder}/ours", 2)  # type: ignore[no-untyped-call]
        self.comm = await aiocomms.new_comm("ucx", store=store, rank=rank, size=2)
        self.window = await self.comm.new_window(pool)

    async def give(self, nbytes: int, pages: list[int]) -> None:
        put, pool = self.window.put, self.pool
        works = [put(pool[i * nbytes : (i + 1) * nbytes], 1, page * nbytes) for i, page in enumerate(pages)]
        await self.window.signal(1)
        for work in works:
            await work

    async def take(self, nbytes: int, pages: list[int]) -> None:
        await self.window.wait_signal(0)

    async def aclose(self) -> None:
        await self.window.aclose()
        await self.comm.aclose()


class Leases:
    """Pages of rank 1 that are leased, and handed over to be filled in one operation."""

    async def open(self, rank: int, folder: str, pool: Tensor) -> None:
        self.memory, self.case = pool, (0, 0)
        self.others = contextlib.AsyncExitStack()
        self.endpoint = await aiocomms.open_endpoint("ucx")
        store = dist.FileStore(f"{folder}/leases", 2)  # type: ignore[no-untyped-call]
        if rank == 1:
            store.set("address", self.endpoint.address)
            self.peer = await self.endpoint.accept()
            self.pools = {nbytes: self.endpoint.new_pool(pool.view(-1, nbytes)) for nbytes in BLOCKS}
        else:
            self.peer = await self.endpoint.connect(await asyncio.to_thread(store.get, "address"))
            self.handed = self.endpoint.handed()

    async def give(self, nbytes: int, pages: list[int]) -> None:
        places = {page: place for place, page in enumerate(sorted(pages))}
        async with await anext(self.handed) as handed:
            chosen = handed.select([places[page] for page in pages])
            await chosen.write(self.memory[: nbytes * len(pages)].view(len(pages), nbytes))

    async def take(self, nbytes: int, pages: list[int]) -> None:
        if self.case != (nbytes, len(pages)):
            await self.leave_free(nbytes, pages)
        async with self.pools[nbytes].lease(len(pages)) as lease:
            await self.peer.hand_over(lease, write=True)

    async def leave_free(self, nbytes: int, pages: list[int]) -> None:
        """Lease all pages but these, as an engine has that runs for long."""
        self.case, free = (nbytes, len(pages)), contextlib.AsyncExitStack()
        await self.others.aclose()
        self.others = contextlib.AsyncExitStack()
        async with free:
            for page in range(POOL // nbytes):
                await (free if page in pages else self.others).enter_async_context(self.pools[nbytes].lease())

    async def aclose(self) -> None:
        await self.others.aclose()
        await self.endpoint.aclose()


class Ucxx:
    """A message for each block."""

    async def open(self, rank: int, folder: str, pool: Tensor) -> None:
        import ucxx

        self.pool = pool.numpy()
        self.listener: Any = None
        store = dist.FileStore(f"{folder}/ucxx", 2)  # type: ignore[no-untyped-call]
        ucxx.init(progress_mode="polling")
        if rank == 1:
            came: asyncio.Queue[Any] = asyncio.Queue()
            self.listener = ucxx.create_listener(came.put)
            store.set("port", str(self.listener.port))
            self.endpoint = await came.get()
        else:
            port = await asyncio.to_thread(store.get, "port")
            self.endpoint = await ucxx.create_endpoint("127.0.0.1", int(port))

    async def give(self, nbytes: int, pages: list[int]) -> None:
        blocks = (self.pool[i * nbytes : (i + 1) * nbytes] for i in range(len(pages)))
        await asyncio.gather(*map(self.endpoint.send, blocks))

    async def take(self, nbytes: int, pages: list[int]) -> None:
        blocks = (self.pool[page * nbytes : (page + 1) * nbytes] for page in pages)
        await asyncio.gather(*map(self.endpoint.recv, blocks))

    async def aclose(self) -> None:
        await self.endpoint.close()
        if self.listener is not None:
            self.listener.close()


class Nixl:
    """A prepared WRITE, and its notification."""

    async def open(self, rank: int, folder: str, pool: Tensor) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        self.pool = pool
        self.agent = nixl_agent(f"rank{rank}", nixl_agent_config(backends=["UCX"]))
        self.registered = self.agent.register_memory(pool)
        self.sides: dict[int, tuple[Any, Any]] = {}
        store = dist.FileStore(f"{folder}/nixl", 2)  # type: ignore[no-untyped-call]
        store.set(f"metadata{rank}", self.agent.get_agent_metadata())
        store.set(f"address{rank}", str(pool.data_ptr()))
        self.peer = self.agent.add_remote_agent(await asyncio.to_thread(store.get, f"metadata{1 - rank}"))
        self.far = int(await asyncio.to_thread(store.get, f"address{1 - rank}"))
        if rank == 0:
            for nbytes in BLOCKS:
                near, far = (
                    [(base + at, nbytes, 0) for at in range(0, POOL, nbytes)] for base in (pool.data_ptr(), self.far)
                )
                self.sides[nbytes] = (
                    self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", near, "DRAM"),
                    self.agent.prep_xfer_dlist(self.peer, far, "DRAM"),
                )

    async def give(self, nbytes: int, pages: list[int]) -> None:
        near, far = self.sides[nbytes]
        handle = self.agent.make_prepped_xfer("WRITE", near, list(range(len(pages))), far, pages, b"there")
        state = self.agent.transfer(handle)
        while state == "PROC":
            await asyncio.sleep(0)
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended as {state}")
        handle.release()

    async def take(self, nbytes: int, pages: list[int]) -> None:
        while not self.agent.get_new_notifs():  # noqa: ASYNC110 - NIXL has nothing to wait for
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        for near, far in self.sides.values():
            near.release()
            far.release()
        self.agent.deregister_memory(self.registered)


class Mooncake:
    """A batch of writes, which the process that has the memory does not hear of."""

    async def open(self, rank: int, folder: str, pool: Tensor) -> None:
        from mooncake.engine import TransferEngine

        self.pool, self.engine = pool, TransferEngine()
        codes = [
            self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
            self.engine.register_memory(pool.data_ptr(), pool.nbytes),
        ]
        if any(codes):
            raise RuntimeError(f"Mooncake's engine says {codes}")
        store = dist.FileStore(f"{folder}/mooncake", 2)  # type: ignore[no-untyped-call]
        if rank == 1:
            store.set("place", f"127.0.0.1:{self.engine.get_rpc_port()} {pool.data_ptr()}")
        else:
            self.target, base = (await asyncio.to_thread(store.get, "place")).decode().split()
            self.far = int(base)
        self.reader, self.writer = await signals(rank, f"{folder}/written")

    async def give(self, nbytes: int, pages: list[int]) -> None:
        near = [self.pool.data_ptr() + i * nbytes for i in range(len(pages))]
        far = [self.far + page * nbytes for page in pages]
        write = self.engine.batch_transfer_sync_write
        if await asyncio.to_thread(write, self.target, near, far, [nbytes] * len(pages)):
            raise RuntimeError("Mooncake's transfer has failed")
        self.writer.write(b"+")

    async def take(self, nbytes: int, pages: list[int]) -> None:
        await self.reader.readexactly(1)

    async def aclose(self) -> None:
        self.writer.close()
        self.engine.unregister_memory(self.pool.data_ptr())


class ZeroMq:
    """A message of many parts."""

    async def open(self, rank: int, folder: str, pool: Tensor) -> None:
        import zmq.asyncio

        self.pool = pool.numpy()
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PUSH if rank == 0 else zmq.PULL)
        (self.socket.connect if rank == 0 else self.socket.bind)(f"ipc://{folder}/zmq")

    async def give(self, nbytes: int, pages: list[int]) -> None:
        blocks = [self.pool[i * nbytes : (i + 1) * nbytes] for i in range(len(pages))]
        await self.socket.send_multipart(blocks, copy=False)

    async def take(self, nbytes: int, pages: list[int]) -> None:
        parts = await self.socket.recv_multipart(copy=False)
        for page, part in zip(pages, parts, strict=True):
            memoryview(self.pool[page * nbytes : (page + 1) * nbytes])[:] = part.buffer

    async def aclose(self) -> None:
        self.socket.close()
        self.context.term()


CONTENDERS: dict[str, tuple[type[Contender], str]] = {
    "aiocomms ucx": (Ours, "aiocomms_ucx"),
    "aiocomms leases": (Leases, "aiocomms_ucx"),
    "UCXX": (Ucxx, "ucxx"),
    "NIXL": (Nixl, "nixl_cu13._api"),
    "Mooncake": (Mooncake, "mooncake.engine"),
    "ZeroMQ": (ZeroMq, "zmq"),
}
"""The contenders by name: the class, and the module that it needs."""


class Lateness:
    """The lateness of a task that sleeps for 1 ms over and over, in seconds."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.samples.append(time.perf_counter() - due)

    async def stop(self) -> list[float]:
        """The samples."""
        self._task.cancel()
        await asyncio.wait([self._task])
        return self.samples


async def signals(rank: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A socket between the ranks on which one says that the blocks are there."""
    if rank == 0:
        came: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        await asyncio.start_unix_server(lambda *streams: came.put_nowait(streams), path)
        return await came.get()
    while True:
        try:
            return await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(0.01)


async def measure(rank: int, folder: str, name: str) -> list[dict[str, Any]]:
    """Measure for each case: when each transfer began or ended on this rank, CPU seconds, lateness."""
    pool = torch.randint(0, 256, (POOL,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
    first = torch.randint(0, 256, (POOL,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    contender = CONTENDERS[name][0]()
    reader, writer = await signals(rank, f"{folder}/signals")
    await contender.open(rank, folder, pool)
    results = []
    for nbytes, count in CASES:
        pages = random.Random(nbytes).sample(range(POOL // nbytes), count)
        transfers = max(FEWEST, min(MOST, MOVED // (nbytes * count)))
        stamps = []
        for number in range(transfers + 1):
            if number == 1:  # the first one is not timed: its result is looked at
                cpu, lateness = time.process_time(), Lateness()
            began = time.monotonic()
            if rank == 0:
                await contender.give(nbytes, pages)
                await reader.readexactly(1)
                stamps.append(began)
                continue
            await contender.take(nbytes, pages)
            stamps.append(time.monotonic())
            if number == 0:
                got = pool.view(-1, nbytes)[pages]
                assert torch.equal(got, first[: nbytes * count].view(count, nbytes)), f"{name} has moved something else"
                pool.zero_()
            writer.write(b"+")
        used = time.process_time() - cpu
        results.append({"stamps": stamps[1:], "cpu": used, "late": await lateness.stop()})
    writer.close()
    await contender.aclose()
    return results


def percentile(samples: list[float], of: float) -> float:
    """One of the samples: that below which so many lie."""
    return sorted(samples)[min(len(samples) - 1, int(of * len(samples)))]


def figures(given: dict[str, Any], taken: dict[str, Any], nbytes: int) -> dict[str, float]:
    """GB/s, seconds, CPU seconds per GB and lateness of one case in one round."""
    took = [end - began for began, end in zip(given["stamps"], taken["stamps"], strict=True)]
    gigabytes = nbytes * len(took) / 1e9
    return {
        "rate": nbytes / 1e9 / statistics.median(took),
        "median": statistics.median(took),
        "p99": percentile(took, 0.99),
        "cpu": (given["cpu"] + taken["cpu"]) / gigabytes,
        "late": max(percentile(rank["late"] or [0.0], 0.99) for rank in (given, taken)),
    }


def runs(name: str) -> bool:
    """Return whether a contender can be imported, and print why it cannot."""
    try:
        importlib.import_module(CONTENDERS[name][1])
    except ImportError as error:
        print(f"{name} is not measured: {error}")
        return False
    return True


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CONTENDERS, action="append")
    args = parser.parse_args()
    names = [name for name in args.only or CONTENDERS if runs(name)]
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            given, taken = in_two_processes(measure, name)
            cases = zip(given, taken, CASES, strict=True)
            rounds[name].append([figures(a, b, nbytes * count) for a, b, (nbytes, count) in cases])
    print(f"\nblocks pushed into pages of another process of this host, median of {args.rounds} rounds\n")
    print("| blocks | by | median | p99 | GB/s | CPU s / GB | lateness p99 |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for case, (nbytes, count) in enumerate(CASES):
        for name in names:
            row = {key: statistics.median(one[case][key] for one in rounds[name]) for key in rounds[name][0][case]}
            print(
                f"| {count} x {nbytes // KIB} KiB | {name} | {row['median'] * 1e6:,.0f} us "
                f"| {row['p99'] * 1e6:,.0f} us | {row['rate']:.2f} | {row['cpu']:.2f} | {row['late'] * 1e3:.2f} ms |"
            )


if __name__ == "__main__":
    main()
