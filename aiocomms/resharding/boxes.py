"""Boxes: parts of a tensor. The functions decide which source rank writes which box to which target rank.

A box is a range of indices in each dimension, like a chunk of ``torch.distributed.checkpoint``. All functions of
this module are pure, so every rank computes the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

SPLIT: Final = 4 << 20
"""The smallest part, in bytes, that each rank writes if several source ranks divide a box that they all hold."""


class Box(NamedTuple):
    """A part of a tensor: its offset and its size in each dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; 1 if the tensor has no dimensions."""
        return math.prod(self.sizes)

    def within(self, other: Box) -> Box:
        """Return this box with offsets relative to another box, which contains this box."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from a tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def along(self, dim: int, offset: int, size: int) -> Box:
        """Return a copy of this box with another range in one dimension."""
        return Box(replaced(self.offsets, dim, offset), replaced(self.sizes, dim, size))


def replaced(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    """Return a tuple with one of its values replaced."""
    return (*values[:place], value, *values[place + 1 :])


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if the intersection is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    sizes = tuple(end - at for at, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def rest(box: Box, taken: Box) -> Iterator[Box]:
    """Yield disjoint boxes that together cover all of ``box`` except ``taken``, which is a box within ``box``."""
    for dim, (at, size) in enumerate(zip(*box, strict=True)):
        begin, end = taken.offsets[dim], taken.offsets[dim] + taken.sizes[dim]
        if begin > at:
            yield box.along(dim, at, begin - at)
        if end < at + size:
            yield box.along(dim, end, at + size - end)
        box = box.along(dim, begin, end - begin)


def pieces(box: Box, most: int) -> list[Box]:
    """Cut a box into pieces of at most ``most`` elements each, along its first dimensions."""
    if box.numel <= most:
        return [box] if box.numel else []
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, most // (box.numel // box.sizes[dim]))
    begin, size = box.offsets[dim], box.sizes[dim]
    cuts = [box.along(dim, begin + at, min(rows, size - at)) for at in range(0, size, rows)]
    return [piece for cut in cuts for piece in pieces(cut, most)]


def runs(box: Box, shape: Sequence[int]) -> tuple[list[int], int]:
    """Return the runs of consecutive elements that form a part of a contiguous tensor.

    :param box: the part.
    :param shape: the shape of the tensor.
    :returns: the index of each run's first element, and the number of elements that every run has.
    """
    inner = len(shape)
    while inner and (inner == len(shape) or box.sizes[inner] == shape[inner]):
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = [sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))]
    for dim in range(inner):
        starts = [start + row * strides[dim] for start in starts for row in range(box.sizes[dim])]
    return starts, math.prod(box.sizes[inner:])


class Portion(NamedTuple):
    """A box that one source rank writes to one target rank."""

    source: int
    target: int
    box: Box


def shared(
    wanted: Iterable[tuple[int, Box]], held: Iterable[tuple[int, Box]], itemsize: int, load: list[int]
) -> tuple[list[Portion], list[tuple[int, Box]]]:
    """Decide which source rank writes which part of one tensor to which target rank.

    A target rank gets each element once.

    :param wanted: pairs of a target rank and a box that it needs.
    :param held: pairs of a source rank and a box that it holds. Several ranks may hold the same box.
    :param itemsize: the size of an element in bytes, in the target's dtype.
    :param load: the number of bytes that each source rank already has to write. This call adds the bytes of the new
        portions.
    :returns: the portions, and the boxes that a target rank needs but no source rank holds. Each such box is in a pair
        with its target rank.
    """
    holders: dict[Box, list[int]] = {}
    for source, box in held:
        holders.setdefault(box, []).append(source)
    portions: list[Portion] = []
    missing: list[tuple[int, Box]] = []
    for target, want in wanted:
        left = [want] if want.numel else []
        for box, sources in holders.items():
            common = [(it, intersection(it, box)) for it in left]
            left = [part for it, both in common for part in ([it] if both is None else rest(it, both))]
            for both in (both for _, both in common if both is not None):
                for part in pieces(both, _part_of(both, len(sources), itemsize)):
                    source = min(sources, key=load.__getitem__)
                    load[source] += part.numel * itemsize
                    portions.append(Portion(source, target, part))
        missing += [(target, box) for box in left]
    return portions, missing


def _part_of(box: Box, holders: int, itemsize: int) -> int:
    """Return the maximum number of elements that each holder of a box writes."""
    parts = min(holders, max(1, box.numel * itemsize // SPLIT))
    return -(-box.numel // parts)
