"""CUDA graphs on a real GPU: captured collectives are replayed, and awaits are refused during and after a capture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from gpus import CUDA, busy, on_a_gpu, share
from inside import transport_of
from processes import Rank, Run

import aiocomms
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CapturedWorkError

pytestmark = [pytest.mark.real, pytest.mark.search, on_a_gpu, pytest.mark.timeout(180)]

COUNT = 1024


@pytest.fixture
def transport() -> str:
    return "nccl"


@asynccontextmanager
async def alone() -> AsyncIterator[Communicator]:
    """Open a world of one rank that has already run both ops, so that no setup happens during a capture."""
    async with asyncio.timeout(60), aiocomms.new_comm("nccl", CUDA, timeout=60) as comm:
        await comm.all_reduce(torch.ones(COUNT, device=CUDA))
        await gathered(comm, torch.ones(COUNT, device=CUDA))
        yield comm


async def gathered(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Run an all-gather, which also moves data with one rank."""
    return await comm.all_gather_single(torch.empty(comm.size * tensor.numel(), device=CUDA), tensor)


async def done_on_the_gpu() -> None:
    """Wait for all work on the current stream, without blocking the loop."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    await asyncio.to_thread(event.synchronize)


class Captured:
    """A graph of ``after = 2 * gather(before + 1)``: a collective between two kernels."""

    def __init__(self, comm: Communicator, error_mode: str = "global") -> None:
        self.before = torch.zeros(COUNT, device=CUDA)
        self.middle = torch.zeros(comm.size * COUNT, device=CUDA)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode=error_mode):
            shifted = self.before + 1
            self.work = comm.all_gather_single(self.middle, shifted)
            self.work.wait_stream()
            self.after = self.middle * 2

    async def replay(self, value: float) -> torch.Tensor:
        self.before.fill_(value)
        self.graph.replay()
        await done_on_the_gpu()
        return self.after


@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
def test_a_replay_does_it_again(error_mode: str) -> None:
    """Each replay uses the present data, and the capture itself runs nothing."""

    async def main() -> None:
        async with alone() as comm:
            captured = Captured(comm, error_mode)
            assert captured.middle.eq(0).all()
            for value in (3.0, -7.0, 0.5):
                assert (await captured.replay(value)).eq(2 * (value + 1)).all()

    asyncio.run(main())


def test_eager_ops_follow_a_replay() -> None:
    """An op that is called after a replay gets the result of the replay."""

    async def main() -> None:
        async with alone() as comm:
            captured = Captured(comm)
            for value in (1.0, 2.0):
                captured.before.fill_(value)
                captured.graph.replay()
                assert (await gathered(comm, captured.after)).eq(2 * (value + 1)).all()

    asyncio.run(main())


def test_await_is_refused_within_a_capture_and_after_it() -> None:
    """An await would let other tasks run, whose kernels would be captured. It raises, and the capture continues."""

    async def main() -> None:
        async with alone() as comm:
            tensor, graph = torch.ones(COUNT, device=CUDA), torch.cuda.CUDAGraph()
            out = torch.empty_like(tensor)
            ran = False

            async def other() -> None:
                nonlocal ran
                ran = True

            with torch.cuda.graph(graph):
                task = asyncio.ensure_future(other())
                work = comm.all_gather_single(out, tensor)
                with pytest.raises(CapturedWorkError):
                    await work
                assert not ran
                work.wait_stream()
            with pytest.raises(CapturedWorkError):
                await work
            await task
            graph.replay()
            await done_on_the_gpu()
            assert out.eq(1).all()
            await comm.all_reduce(tensor)

    asyncio.run(main())


def test_pending_ops_are_left_alone_while_another_is_captured() -> None:
    """An event query by any thread would break a capture in global mode. The pending ops complete after the capture."""

    async def main() -> None:
        async with alone() as comm:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                busy(0.5)
                pending: list[Any] = [comm.all_reduce(torch.ones(COUNT, device=CUDA)) for _ in range(10)]
            await asyncio.sleep(0.05)  # the driver of these ops sleeps or polls by now
            captured = Captured(comm)
            for work in pending:
                await work
            assert (await captured.replay(4.0)).eq(10).all()

    asyncio.run(main())


def test_a_replay_writes_to_memory_of_the_graph_only() -> None:
    """A captured PREMUL_SUM has temporary memory, which no tensor gets while the graph lives."""
    count = 4 * 2**20  # the allocator rounds this size little, so a later tensor fits where the temporary one was

    async def main() -> None:
        async with alone() as comm:
            tensor, graph = torch.ones(count, device=CUDA), torch.cuda.CUDAGraph()
            await comm.all_reduce(tensor, aiocomms.ReduceOp.PREMUL_SUM(1.0))
            with torch.cuda.graph(graph):
                comm.all_reduce(tensor, aiocomms.ReduceOp.PREMUL_SUM(2.0)).wait_stream()
            await comm.barrier()  # the communicator drops what it kept for the capture
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            others = []
            for stream in (torch.cuda.current_stream(), transport_of(comm, "collectives")._comm_stream.stream):
                with torch.cuda.stream(stream):
                    others += [torch.full((count,), 5.0, device=CUDA) for _ in range(8)]
            torch.cuda.synchronize()
            for turn in (1, 2):
                graph.replay()
                await done_on_the_gpu()
                assert tensor.eq(2.0**turn).all()
            assert all(other.eq(5.0).all() for other in others)

    asyncio.run(main())


def test_many_graphs_come_and_go() -> None:
    """A deleted graph frees its memory, and the communicator still works."""

    async def main() -> None:
        async with alone() as comm:
            await Captured(comm).replay(1.0)
            torch.cuda.synchronize()
            held = []
            for _ in range(10):
                captured = Captured(comm)
                await captured.replay(1.0)
                del captured
                await gathered(comm, torch.ones(COUNT, device=CUDA))
                torch.cuda.synchronize()
                held.append(torch.cuda.memory_allocated())
            assert held[-1] <= held[2], held

    asyncio.run(main())


def test_a_capture_that_fails_leaves_the_communicator_usable() -> None:
    async def main() -> None:
        async with alone() as comm:

            def capture() -> None:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    comm.all_reduce(torch.ones(COUNT, device=CUDA)).wait_stream()
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                capture()
            assert (await gathered(comm, torch.ones(COUNT, device=CUDA))).eq(1).all()

    asyncio.run(main())


async def captured_by_all(place: Rank) -> list[float]:
    """Replay an all-reduce three times, with a barrier after each, and return the results."""
    async with asyncio.timeout(100), place.open(device=CUDA, timeout=60) as comm:
        tensor = torch.ones(COUNT, device=CUDA)
        await comm.all_reduce(tensor)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce(tensor).wait_stream()
        values = []
        for turn in range(3):
            tensor.fill_(float(comm.rank + turn))
            graph.replay()
            await comm.barrier()
            await done_on_the_gpu()
            values.append(tensor[0].item())
        return values


def test_two_ranks(ranks: Run) -> None:
    """Each replay by both ranks gives the sum of their present values."""
    for values in ranks(2, captured_by_all, before=share):
        assert values == [1.0, 3.0, 5.0]
