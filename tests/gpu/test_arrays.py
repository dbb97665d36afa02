"""CuPy arrays on a real GPU: collectives use them in place, after the work on CuPy's stream, and return them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from gpus import CUDA, on_a_gpu

import aiocomms
from aiocomms import functional
from aiocomms.errors import ArgumentError

cupy: Any = pytest.importorskip("cupy", reason="CuPy is not installed: pip install aiocomms[nccl]")
pytestmark = [pytest.mark.real, pytest.mark.search, on_a_gpu, pytest.mark.asyncio, pytest.mark.timeout(180)]

COUNT = 1 << 20


@pytest.mark.parametrize("transport", ["nccl", "ucx"])
async def test_an_array_is_gathered_in_place(transport: str) -> None:
    """An all-gather also moves data with one rank, and leaves its output array at its address."""
    async with asyncio.timeout(60), aiocomms.new_comm(transport, CUDA, timeout=60) as comm:
        mine, whole = cupy.arange(COUNT, dtype=cupy.float32), cupy.zeros(COUNT, cupy.float32)
        place = whole.data.ptr
        assert await comm.all_gather_single(whole, mine) is whole
        assert whole.data.ptr == place
        assert bool((whole == mine).all())
        assert await comm.all_reduce(whole) is whole
        assert isinstance(await functional.all_reduce(whole, group=comm), cupy.ndarray)
        with pytest.raises(ArgumentError, match=r"tensor is a float32\[\d+\] cupy\.ndarray which runs backwards"):
            comm.all_reduce(whole[::-1])


async def test_an_operation_comes_after_what_is_on_cupys_stream() -> None:
    async with asyncio.timeout(60), aiocomms.new_comm("nccl", CUDA, timeout=60) as comm:
        mine, whole = cupy.zeros(COUNT, cupy.float32), cupy.zeros(COUNT, cupy.float32)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(200_000_000)  # a tenth of a second at least
            mine.fill(7)
            await comm.all_gather_single(whole, mine)
        assert bool((whole == 7).all())
