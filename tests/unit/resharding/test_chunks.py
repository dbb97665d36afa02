"""Chunks of DTensors and in messages: valid ones are accepted, and others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.resharding.chunks import chunks_of, records_of, unchanged
from aiocomms.resharding.words import WORDS, ChunkRecord, Inventory, Known, TargetRecord, inventory

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")
Make = Callable[..., DTensor]


@pytest.fixture
def dtensor() -> Iterator[Make]:
    """Yield ``dtensor(rank, mesh, placements, local, shape)``: it makes a DTensor of a rank in a fake group."""

    def make(
        rank: int, mesh: tuple[int, ...], placements: list[Placement], local: torch.Tensor, shape: tuple[int, ...]
    ) -> DTensor:
        size = int(torch.tensor(mesh).prod())
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, init_device_mesh("cpu", mesh), placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "mesh", "placements", "sizes", "offsets"),
    [
        (1, (2,), [Shard(0)], (4, 6), (4, 0)),
        (1, (2,), [Shard(1)], (8, 3), (0, 3)),
        (1, (2,), [Replicate()], (8, 6), (0, 0)),
        (3, (2, 2), [Shard(0), Shard(1)], (4, 3), (4, 3)),
        (2, (2, 2), [Shard(0), Shard(0)], (2, 6), (4, 0)),
        (2, (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (2, 6), (2, 0)),
        (2, (3,), [Shard(0)], (2, 6), (6, 0)),
    ],
)
def test_chunk_of_a_dtensor_is_where_its_placements_say(
    dtensor: Make, rank: int, mesh: tuple[int, ...], placements: list[Placement], sizes: Any, offsets: Any
) -> None:
    local = torch.zeros(sizes)
    chunk = chunks_of({"w": dtensor(rank, mesh, placements, local, (8, 6))}, CPU)["w"]
    assert (tuple(chunk.tensor.shape), chunk.shape, chunk.offsets) == (sizes, (8, 6), offsets)
    assert chunk.tensor.data_ptr() == local.data_ptr()


@pytest.mark.parametrize(
    ("placements", "sizes", "message"),
    [
        ([Partial(), Shard(0)], (4, 6), "has placements .*, wanted none that is Partial: redistribute it"),
        ([_StridedShard(0, split_factor=4), Replicate()], (4, 6), "whose shards are not contiguous"),
        ([Shard(0), Replicate()], (3, 6), r"has a local tensor of shape \[3, 6\], wanted \[4, 6\]"),
    ],
)
def test_dtensor_without_a_chunk_is_refused(
    dtensor: Make, placements: list[Placement], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"^tensors\['w'\] .*{message}"):
        chunks_of({"w": dtensor(0, (2, 2), placements, torch.zeros(sizes), (8, 6))}, CPU)


def test_parameter_and_view_are_taken_as_they_are() -> None:
    weight, whole = torch.nn.Parameter(torch.zeros(2, 3)), torch.zeros(4, 4)
    chunks = chunks_of({"weight": weight, "column": whole[:, 1], "number": torch.tensor(1.0)}, CPU)
    assert [(it.shape, it.offsets) for it in chunks.values()] == [((2, 3), (0, 0)), ((4,), (0,)), ((), ())]
    assert not chunks["weight"].tensor.requires_grad
    assert chunks["column"].tensor.stride() == (4,)


@pytest.mark.parametrize("nbytes", [0, 15])
def test_tensor_without_all_its_memory_is_refused(nbytes: int) -> None:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(nbytes)
    message = r"^tensors\['w'\].tensor \(float32\[4\]\) has no memory: its storage was freed or resized$"
    with pytest.raises(ArgumentError, match=message):
        chunks_of({"w": tensor}, CPU)


def test_views_up_to_the_end_of_their_storage_have_memory() -> None:
    whole = torch.zeros(4, 6)
    views = {"end": whole[3:, 4:], "column": whole[:, 5], "none": whole[4:], "repeated": whole[3, 5].expand(7, 2)}
    assert chunks_of(views, CPU).keys() == views.keys()


def test_tensors_are_taken_with_their_present_memory_unless_they_have_become_others() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    records = records_of(chunks_of({"w": weight}, CPU))
    weight.data = torch.ones(2, 3)
    assert unchanged({"w": weight}, CPU, records)["w"].tensor.equal(torch.ones(2, 3))
    for other, found in ((torch.ones(3, 2), r"float32\[3, 2\]"), (torch.ones(2, 3).half(), r"float16\[2, 3\]")):
        weight.data = other
        with pytest.raises(ArgumentError, match=rf"^tensors\['w'\] is {found}, wanted float32\[2, 3\] as before$"):
            unchanged({"w": weight}, CPU, records)


@pytest.mark.parametrize(
    "record",
    [
        ChunkRecord("w", "float17", (4,), (0,), (4,)),
        ChunkRecord("w", "int8", (4,), (1,), (4,)),
        ChunkRecord("w", "int8", (4,), (-1,), (4,)),
        ChunkRecord("w", "int8", (4,), (0,), (-1,)),
        ChunkRecord("w", "int8", (4, 4), (0,), (4,)),
        ChunkRecord("w", "int8", (4,), (0,), (4,), -1),
    ],
)
def test_word_of_a_chunk_that_there_cannot_be_is_refused(record: ChunkRecord) -> None:
    word = WORDS.encode(Inventory(0, (TargetRecord(b"", (record,)),)))
    with pytest.raises(ProtocolError, match="'w' is no part of a tensor"):
        inventory(word)


def test_another_word_is_no_inventory() -> None:
    with pytest.raises(ProtocolError, match="it is Known, wanted Inventory"):
        inventory(WORDS.encode(Known()))
