"""Plans: every element goes once to each rank that wants it, from a rank that has it, for any two shardings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from aiocomms.errors import ArgumentError
from aiocomms.resharding.boxes import SPLIT, Box, intersection, pieces, rest, runs, shared
from aiocomms.resharding.chunks import Chunk, chunks_of, records_of, size_of
from aiocomms.resharding.plan import MovePlan, planned
from aiocomms.resharding.words import DTYPES, TargetRecord

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def mesh_shardings(draw: Any, shape: tuple[int, ...]) -> list[Box]:
    """Draw a mesh and placements of a DTensor; return the box of each rank."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    kinds = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
    placements = [draw(kinds) for _ in mesh]
    found = (
        _compute_local_shape_and_global_offset(shape, mesh, [*at], placements)
        for at in itertools.product(*map(range, mesh))
    )
    return [Box(tuple(offsets), tuple(sizes)) for sizes, offsets in found]


@st.composite
def slicings(draw: Any, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that cover a tensor, and may overlap; return the box of each rank."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        boxes += [box.along(dim, box.offsets[dim], at), box.along(dim, box.offsets[dim] + at, box.sizes[dim] - at)]
    extra = [draw(part_of(shape)) for _ in range(draw(st.integers(0, 1)))]
    return draw(st.permutations(boxes + extra))


@st.composite
def part_of(draw: Any, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(1, size - at)) for at, size in zip(offsets, shape, strict=True)))


def elements(box: Box) -> Iterator[tuple[int, ...]]:
    """Yield the index of each element of a box, one by one."""
    return itertools.product(*(range(at, at + size) for at, size in zip(*box, strict=True)))


@given(st.data())
def test_every_element_goes_once_to_each_rank_from_one_that_has_it(data: Any) -> None:
    shape = data.draw(SHAPES)
    held, wanted = (data.draw(st.one_of(mesh_shardings(shape), slicings(shape))) for _ in range(2))
    itemsize = data.draw(st.sampled_from([1, 4, SPLIT]))  # An element of the last size can be split between sources.
    load = [0] * len(held)
    portions, missing = shared(enumerate(wanted), enumerate(held), itemsize, load)
    assert not missing
    for target, want in enumerate(wanted):
        came = [(it, part.source) for part in portions if part.target == target for it in elements(part.box)]
        assert sorted(it for it, _ in came) == sorted(elements(want))
        assert all(it in set(elements(held[source])) for it, source in came)
    sent = [sum(part.box.numel * itemsize for part in portions if part.source == rank) for rank in range(len(held))]
    assert sent == load
    assert sum(load) == sum(box.numel for box in wanted) * itemsize


@given(st.data())
def test_what_no_rank_has_is_missing(data: Any) -> None:
    shape = data.draw(SHAPES)
    held, want = data.draw(st.lists(part_of(shape), max_size=3)), data.draw(part_of(shape))
    portions, missing = shared([(0, want)], enumerate(held), 1, [0] * len(held))
    absent = {*elements(want)} - {it for box in held for it in elements(box)}
    assert sorted(it for _, box in missing for it in elements(box)) == sorted(absent)
    assert sum(part.box.numel for part in portions) == want.numel - len(absent)


@given(st.data())
def test_boxes_do_what_sets_of_elements_do(data: Any) -> None:
    shape = data.draw(SHAPES)
    one, other = data.draw(part_of(shape)), data.draw(part_of(shape))
    both = intersection(one, other)
    common = {*elements(one)} & {*elements(other)}
    assert common == (set() if both is None else {*elements(both)})
    if both is not None:
        left = [it for box in rest(one, both) for it in elements(box)]
        assert sorted(left) == sorted({*elements(one)} - common)
    most = data.draw(st.integers(1, 10))
    cut = pieces(one, most)
    assert max(box.numel for box in cut) <= most
    assert sorted(it for box in cut for it in elements(box)) == sorted(elements(one))


@given(st.data())
def test_runs_are_as_long_as_they_can_be(data: Any) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(part_of(shape))
    places = torch.arange(math.prod(shape)).view(shape)[box.slices()].reshape(-1)
    starts, length = runs(box, shape)
    assert [start + i for start in starts for i in range(length)] == places.tolist()
    gaps = (places.diff() != 1).sum().item()
    assert len(starts) == gaps + 1 or any(size == 1 for size in box.sizes)


def moved(source: list[dict[str, Chunk]], target: list[dict[str, Chunk]]) -> list[dict[str, torch.Tensor]]:
    """Carry out the plans of all source ranks; return the tensors of each target rank."""
    held = [records_of(chunks) for chunks in source]
    wanted = [TargetRecord(b"", records_of(chunks)) for chunks in target]
    buffers = [torch.zeros(size_of(record.chunks), dtype=torch.uint8) for record in wanted]
    plans: list[MovePlan] = [planned(rank, held, wanted) for rank in range(len(source))]
    assert len({plan.writers for plan in plans}) == 1
    for rank, plan in enumerate(plans):
        assert sum(copy.nbytes for copy in plan.copies) == plan.nbytes[rank]
        assert {copy.target for copy in plan.copies} == {*plan.targets}
        for copy in plan.copies:
            part = source[rank][copy.chunk.name].tensor[copy.box.slices()]
            packed = part.to(DTYPES[copy.chunk.dtype]).contiguous().reshape(-1).view(torch.uint8)
            starts, run = copy.runs()
            for number, start in enumerate(starts):
                buffers[copy.target][start : start + run] = packed[number * run : (number + 1) * run]
    found = []
    for buffer, record in zip(buffers, wanted, strict=True):
        ends = [it.place + math.prod(it.sizes) * DTYPES[it.dtype].itemsize for it in record.chunks]
        parts = (buffer[it.place : end] for it, end in zip(record.chunks, ends, strict=True))
        tensors = zip(record.chunks, parts, strict=True)
        found.append({it.name: part.view(DTYPES[it.dtype]).view(it.sizes) for it, part in tensors})
    return found


@given(st.data())
def test_plans_move_every_tensor_of_both_sides(data: Any) -> None:
    wholes = {
        name: torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        for name, shape in data.draw(st.dictionaries(st.sampled_from("abc"), SHAPES, min_size=1)).items()
    }
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    sides: list[list[dict[str, Chunk]]] = []
    for empty in (False, True):
        boxes = {n: data.draw(st.one_of(mesh_shardings(t.shape), slicings(tuple(t.shape)))) for n, t in wholes.items()}
        ranks: list[dict[str, Chunk]] = [{} for _ in range(max(map(len, boxes.values())))]
        for name, parts in boxes.items():
            for rank, box in zip(ranks, parts, strict=False):
                part = wholes[name][box.slices()]
                part = torch.zeros_like(part, dtype=dtype) if empty else part
                rank[name] = Chunk(part, tuple(wholes[name].shape), box.offsets)
        sides.append(ranks)
    for rank, tensors in enumerate(moved(*sides)):
        for name, (_, _, offsets) in sides[1][rank].items():
            part = wholes[name][Box(offsets, tuple(tensors[name].shape)).slices()]
            assert tensors[name].equal(part.to(dtype))


def test_ranks_that_hold_the_same_share_the_work() -> None:
    whole = {"a": Chunk(torch.zeros(64, SPLIT // 16), (64, SPLIT // 16), (0, 0))}
    wanted = [TargetRecord(b"", records_of(whole))]
    plan = planned(0, [records_of(whole)] * 4, wanted)
    assert plan.nbytes == (4 * SPLIT,) * 4
    assert plan.writers == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({}, "there is no 'a'; there is no 'b'"),
        ({"a": torch.zeros(4), "b": torch.zeros(3)}, r"'b' has shape \[3\] on source rank 0, wanted \[4\]"),
        (
            {"a": torch.zeros(4), "b": Chunk(torch.zeros(3), (4,), (0,))},
            r"no source rank has \[1\] elements of 'b' at \[3\]",
        ),
    ],
)
def test_error_names_what_the_target_needs(held: dict[str, Any], message: str) -> None:
    wanted = [TargetRecord(b"", records_of(chunks_of({"a": torch.zeros(4), "b": torch.zeros(4)}, CPU)))]
    with pytest.raises(ArgumentError, match=f"^tensors do not have what the target needs: {message}$"):
        planned(0, [records_of(chunks_of(held, CPU))], wanted)


@pytest.mark.parametrize("other", [torch.zeros(4, 2), torch.zeros(32)])
def test_target_ranks_whose_whole_shapes_of_a_tensor_differ_are_refused(other: torch.Tensor) -> None:
    whole = {"w": torch.zeros(8, 4)}
    wanted = [TargetRecord(b"", records_of(chunks_of(chunks, CPU))) for chunks in (whole, {"w": other})]
    shape = re.escape(str([*other.shape]))
    with pytest.raises(ArgumentError, match=rf"'w' has shape {shape} on target rank 1, wanted \[8, 4\]$"):
        planned(0, [records_of(chunks_of(whole, CPU))], wanted)
