"""A short run of collectives and of a window on a GPU, for compute-sanitizer: ``python -m tests.gpu.short_run``."""

from __future__ import annotations

import asyncio

import torch

import aiocomms


async def collectives() -> None:
    """Run collectives between a producer stream and a consumer stream; only events order the streams."""
    async with aiocomms.new_comm("nccl", "cuda", timeout=60) as comm:
        producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
        results = []
        for turn in range(20):
            with torch.cuda.stream(producer):
                tensor = torch.full((10_000,), float(turn), device=comm.device)
                out = torch.empty(comm.size * 10_000, device=comm.device)
                work = comm.all_gather_single(out, tensor)
                reducing = comm.all_reduce(tensor)
            work.wait_stream(consumer)
            reducing.wait_stream(consumer)
            with torch.cuda.stream(consumer):
                results.append((turn, out.sum() + tensor.sum()))
            for used in (out, tensor):
                used.record_stream(consumer)  # the allocator then keeps the memory until the consumer has read it
            await work
            await reducing
        torch.cuda.synchronize()
        assert all(total.item() == 2 * 10_000 * turn for turn, total in results)


async def windows() -> None:
    """Put data into this rank's own window."""
    async with aiocomms.new_comm("ucx", "cuda", timeout=60) as comm:
        window = await comm.new_window(torch.zeros(1000, device=comm.device))
        await window.put(torch.ones(1000, device=comm.device), comm.rank)
        await window.flush()
        assert window.tensor.sum().item() == 1000
        await window.aclose()


if __name__ == "__main__":
    asyncio.run(collectives())
    asyncio.run(windows())
