"""Endpoints: an awaited put and get of 4 KiB and 1 MiB, against NIXL's WRITE and READ; and what a connection costs.

Two processes, each bound to a core where there are two. Rank 1 owns the memory, and does nothing but run its loop; rank
0 puts and gets, one after the other. NIXL's transfers are prepared before, and polled at every ``sleep(0)``. Both are
asked in turn, round by round. Run it with ``python -m benchmarks.endpoints [--rounds N]``; ``make bench`` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiocomms
from aiocomms.cli.bench.machine import bind
from aiocomms.errors import CommClosedError
from benchmarks.processes import Call, in_two_processes, timed

SIZES = (4 * 2**10, 2**20)
COUNTS = {SIZES[0]: 500, SIZES[1]: 100}
CONNECTIONS = 20


class Nixl:
    """Prepared transfers between the first bytes of two buffers."""

    def __init__(self, rank: int, store: Any, memory: torch.Tensor) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"rank{rank}", nixl_agent_config(backends=["UCX"]))
        self.memory, self.registered = memory, self.agent.register_memory(memory)
        store.set(f"metadata{rank}", self.agent.get_agent_metadata())
        store.set(f"address{rank}", str(memory.data_ptr()))
        self.peer = self.agent.add_remote_agent(store.get(f"metadata{1 - rank}"))
        self.far = int(store.get(f"address{1 - rank}"))

    def calls(self, nbytes: int) -> dict[str, Call]:
        near = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", [(self.memory.data_ptr(), nbytes, 0)], "DRAM")
        far = self.agent.prep_xfer_dlist(self.peer, [(self.far, nbytes, 0)], "DRAM")
        handles = {kind: self.agent.make_prepped_xfer(kind, near, [0], far, [0], b"") for kind in ("WRITE", "READ")}

        async def run(handle: Any) -> None:
            state = self.agent.transfer(handle)
            while state == "PROC":
                await asyncio.sleep(0)
                state = self.agent.check_xfer_state(handle)
            assert state == "DONE", state

        return {"put": lambda: run(handles["WRITE"]), "get": lambda: run(handles["READ"])}


async def measure(rank: int, folder: str, rounds: int) -> dict[str, Any]:
    """Seconds of each call, by what it is and whose; what connections cost."""
    bind(rank, 2)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[no-untyped-call]
    memory = torch.zeros(max(SIZES), dtype=torch.uint8)
    nixl = Nixl(rank, store, torch.zeros_like(memory)) if importlib.util.find_spec("nixl_cu13") else None
    async with aiocomms.open_endpoint("ucx") as here:
        if rank == 1:
            store.set("descriptor", here.register(memory).descriptor)
            store.set("address", here.address)
            peer = await here.accept()
            await peer.wait_signal()
            await come_and_go(here)
            return {}
        address, descriptor = [await asyncio.to_thread(store.get, key) for key in ("address", "descriptor")]
        began = time.perf_counter()
        peer = await here.connect(address)
        connected = time.perf_counter()
        remote = await peer.attach(descriptor)
        found: dict[Any, Any] = {"connect": connected - began, "attach": time.perf_counter() - connected}
        for _ in range(rounds):
            for nbytes in SIZES:
                mine = memory[:nbytes]
                ours: dict[str, Call] = {
                    "put": lambda mine=mine: peer.put(mine, descriptor),  # type: ignore[misc]
                    "get": lambda mine=mine: peer.get(mine, descriptor),  # type: ignore[misc]
                    "put, attached": lambda mine=mine: remote.put(mine),  # type: ignore[misc]
                }
                theirs = nixl.calls(nbytes) if nixl is not None else {}
                for whose, calls in (("aiocomms ucx", ours), ("NIXL", theirs)):
                    for what, call in calls.items():
                        found.setdefault((what, nbytes, whose), []).extend(await timed(call, COUNTS[nbytes]))
        await peer.signal()
        found["connections"] = await connections(address)
        return found


def held() -> tuple[int, int, int]:
    """This process's bytes of memory, descriptors and threads."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208 - two numbers


async def come_and_go(here: aiocomms.Endpoint) -> None:
    """Let the other one connect as often as it wants to, and then go."""
    for peer in [await here.accept() for _ in range(CONNECTIONS)]:
        with contextlib.suppress(CommClosedError):
            await peer.lost()


async def connections(address: bytes) -> tuple[float, ...]:
    """Return what each of several connections holds on this side, and the seconds that it takes to form."""
    before, began = held(), time.perf_counter()
    ends = []
    for _ in range(CONNECTIONS):
        end = await aiocomms.open_endpoint("ucx")
        await end.connect(address)
        ends.append(end)
    seconds, after = time.perf_counter() - began, held()
    for end in ends:
        await end.aclose()
    return (seconds / CONNECTIONS, *((b - a) / CONNECTIONS for a, b in zip(before, after, strict=True)))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = in_two_processes(measure, args.rounds)[0]
    print(f"torch {torch.__version__}, 2 processes, {args.rounds} rounds in turn, load before {load:.2f}")
    print("| awaited, 2 processes | | median | mean | p99 | times ours |\n|---|---|---:|---:|---:|---:|")
    for key, each in found.items():
        if isinstance(key, tuple):
            what, nbytes, whose = key
            ours = statistics.median(found[what, nbytes, "aiocomms ucx"])
            median, p99 = statistics.median(each), sorted(each)[int(0.99 * len(each))]
            print(
                f"| {what} of {nbytes // 1024} KiB | {whose} | {median * 1e6:.1f} µs | "
                f"{statistics.mean(each) * 1e6:.1f} µs | {p99 * 1e6:.1f} µs | {median / ours:.2f} |"
            )
    seconds, memory, descriptors, threads = found["connections"]
    print(
        f"first connection {found['connect'] * 1e3:.0f} ms, attaching {found['attach'] * 1e3:.2f} ms; then each "
        f"endpoint with one connection {seconds * 1e3:.0f} ms, {memory / 2**20:.1f} MiB, "
        f"{descriptors:.0f} descriptors, {threads:.0f} threads"
    )


if __name__ == "__main__":
    main()
