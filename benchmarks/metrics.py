"""Costs to an op of being measured or traced, by who does it.

Run it with ``make bench`` or ``python -m benchmarks.metrics [--json FILE]``. An all_reduce of 8 bytes, awaited one
after the other: in a world of one, where nothing but the core and the transport's own work is timed, and between two
processes, both of which are measured. In each round all subjects run in turn, and what is printed is the median over
the rounds of the time of each, and of its difference from that round's "off": times drift from minute to minute.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import prometheus_client
import torch
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

import aiocomms
from aiocomms.communicator.communicator import Communicator
from aiocomms.integrations import otel, profiler, prometheus
from benchmarks.processes import in_two_processes

ROUNDS = 100
BATCH = 100
WARM = 20

Begin = Callable[[Communicator], tuple[Any, AbstractContextManager[Any]]]


def subjects() -> dict[str, Begin]:
    """Return how each is begun: what has a ``remove()``, and what the ops run within."""
    registry = prometheus_client.CollectorRegistry()
    traced, untraced = (
        TracerProvider(sampler=ParentBased(sampler), shutdown_on_exit=False) for sampler in (ALWAYS_ON, ALWAYS_OFF)
    )

    def tracing(comm: Communicator, provider: TracerProvider) -> tuple[Any, AbstractContextManager[Any]]:
        return otel.trace_ops(comm, provider), provider.get_tracer("benchmark").start_as_current_span("request")

    return {
        "off": lambda comm: (None, nullcontext()),
        "an empty post-hook": lambda comm: (comm.register_post_hook(lambda work: None), nullcontext()),
        "an empty pre-hook": lambda comm: (comm.register_pre_hook(lambda op, seq: None), nullcontext()),
        "prometheus": lambda comm: (prometheus.instrument(comm, registry), nullcontext()),
        "torch's profiler, off": lambda comm: (profiler.record_ops(comm), nullcontext()),
        "otel spans, no request": lambda comm: (otel.trace_ops(comm, traced), nullcontext()),
        "otel spans, not sampled": lambda comm: tracing(comm, untraced),
        "otel spans, sampled": lambda comm: tracing(comm, traced),
    }


async def race(comm: Communicator) -> dict[str, list[float]]:
    """Seconds per op of each subject, in each round."""
    tensor, took = torch.ones(2), {name: list[float]() for name in subjects()}
    begins = subjects()
    gc.disable()
    for _ in range(ROUNDS):
        for name, begin in begins.items():
            await comm.barrier()
            handle, within = begin(comm)
            with within:
                for _ in range(WARM):
                    await comm.all_reduce(tensor)
                start = time.perf_counter()
                for _ in range(BATCH):
                    await comm.all_reduce(tensor)
                took[name].append((time.perf_counter() - start) / BATCH)
            if handle is not None:
                handle.remove()
        gc.collect()
    gc.enable()
    return took


async def alone(transport: str) -> dict[str, list[float]]:
    """A world of one."""
    async with aiocomms.new_comm(transport, rank=0, size=1) as comm:
        return await race(comm)


async def run_rank(rank: int, folder: str, transport: str) -> dict[str, list[float]]:
    """One of two processes."""
    store = dist.FileStore(f"{folder}/store", 2)
    async with aiocomms.new_comm(transport, store=store, rank=rank, size=2) as comm:
        return await race(comm)


def summary(took: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians in µs."""
    found = {}
    for name, samples in took.items():
        more = [mine - off for mine, off in zip(samples, took["off"], strict=True)]
        found[name] = {"us": statistics.median(samples) * 1e6, "more_us": statistics.median(more) * 1e6}
    return found


def main() -> None:
    """Print a table, and write the numbers as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    file = parser.parse_args().json
    torch.set_num_threads(1)
    results = {f"{name}, a world of one": summary(asyncio.run(alone(name))) for name in ("local", "ucx")}
    results["ucx, two processes"] = summary(in_two_processes(run_rank, "ucx")[0])
    for where, rows in results.items():
        print(f"{where}: all_reduce of 8 bytes")
        for name, row in rows.items():
            print(
                f"  {name:<24} {row['us']:7.2f} µs  {row['more_us']:+7.2f} µs  {row['us'] / rows['off']['us']:5.2f} x"
            )
    if file is not None:
        file.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
