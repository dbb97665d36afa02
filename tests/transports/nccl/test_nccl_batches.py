"""Batches of collectives over nccl: one group of NCCL calls, one stream, one capture."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from aiocomms_nccl import collectives
from fake_cuda import FakeCuda, FakeStream, Gate
from fake_nccl import FakeNccl, FakeNcclTransport, world

from aiocomms import ReduceOp, Work
from aiocomms.cuda import recorded
from aiocomms.errors import MismatchError, UnsupportedOperation
from aiocomms.testing import local_world
from aiocomms.testing.faults import inject, mismatch

pytestmark = [pytest.mark.deterministic, pytest.mark.asyncio]


def groups() -> list[int]:
    library: FakeNccl = FakeNcclTransport.nccl_layer
    return library.groups


def reduces(comm: Any, tensors: list[torch.Tensor], op: ReduceOp = ReduceOp.SUM) -> Work[list[Any]]:
    batch = comm.batch()
    for tensor in tensors:
        batch.all_reduce(tensor, op)
    return batch.issue()


async def test_batch_is_one_group(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        given = [[torch.full((3,), float(comm.rank + n)) for n in range(4)] for comm in comms]
        before = len(groups())
        await asyncio.gather(*(reduces(comm, tensors) for comm, tensors in zip(comms, given, strict=True)))
        assert groups()[before:] == [4, 4]
        assert [tensor.tolist() for tensor in given[0]] == [[1.0 + 2 * n] * 3 for n in range(4)]


async def test_kernels_of_a_batch_surround_its_group(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        given = [[torch.full((3,), 2.0 + comm.rank) for _ in range(2)] for comm in comms]
        before = len(groups())
        halves = (reduces(comm, each, ReduceOp.PREMUL_SUM(0.5)) for comm, each in zip(comms, given, strict=True))
        await asyncio.gather(*halves)
        assert groups()[before:] == [2, 2]
        assert [tensor.tolist() for tensor in given[1]] == [[2.5] * 3] * 2


async def test_batch_with_a_part_that_nccl_lacks_consists_of_messages(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        given = [[torch.ones(3), torch.ones(3, dtype=torch.int16)] for _ in comms]
        before = len(groups())
        await asyncio.gather(*(reduces(comm, tensors) for comm, tensors in zip(comms, given, strict=True)))
        assert len(groups()) == before
        assert [tensor.tolist() for tensor in given[0]] == [[2.0] * 3, [2] * 3]


async def test_stream_waits_for_a_batch(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        gate, tensor = Gate(cuda.default), torch.ones(3)
        work = reduces(comm, [tensor, torch.ones(2)])
        work.wait_stream()
        assert not work.done()
        gate.open()
        assert (await work)[0] is tensor


async def test_batch_with_too_many_calls_is_refused(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_MOST_CALLS", 2)
    async with world(1) as (comm,):
        tensors = [torch.ones(1) for _ in range(3)]
        with pytest.raises(UnsupportedOperation, match="needs 3 calls of NCCL, wanted at most 2"):
            reduces(comm, tensors)
        await reduces(comm, tensors[:2])


async def test_captured_batch_is_replayed(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        tensors = [torch.ones(2), torch.ones(2)]
        with cuda.graph() as graph:
            work = reduces(comm, tensors, ReduceOp.PREMUL_SUM(3.0))
            work.wait_stream()
        for _ in range(2):
            stream = FakeStream(cuda.gpu)
            graph.replay(stream)
            await recorded(stream, cuda=cuda)
        assert [tensor.tolist() for tensor in tensors] == [[9.0, 9.0]] * 2


@pytest.mark.parametrize("count", [2, 100])
async def test_batch_that_differs_in_its_last_part_is_found(cuda: FakeCuda, count: int) -> None:
    async with local_world(2, "nccl_fake_debug") as comms:
        with inject(comms, mismatch(ranks=[1], op="batch", differs="size")):
            works = [reduces(comm, [torch.ones(3) for _ in range(count)]) for comm in comms]
        for found in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(found, MismatchError)
