"""Boxes of a global tensor: which parts of one sharding another one needs, and from whom each of them comes.

A box is a range of indices in each dimension, as a chunk of ``torch.distributed.checkpoint`` is. All here are pure
functions of numbers, so every rank comes to the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

SPLIT: Final = 4 << 20
"""Bytes of a box from which on the ranks that hold it share it."""


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and how far it goes. Offsets and sizes are in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements; 1 of a tensor without dimensions."""
        return math.prod(self.sizes)

    def within(self, other: Box) -> Box:
        """Return this box as a part of one that it lies in."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects it from a tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def along(self, dim: int, offset: int, size: int) -> Box:
        """Return the same box with another range in one dimension."""
        return Box(replaced(self.offsets, dim, offset), replaced(self.sizes, dim, size))


def replaced(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    """Return a tuple with one of its values replaced."""
    return (*values[:place], value, *values[place + 1 :])


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common; None: nothing."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    sizes = tuple(end - at for at, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def rest(box: Box, taken: Box) -> Iterator[Box]:
    """Yield disjoint boxes that together are a box without a part of it."""
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
    """Return where a part of a contiguous tensor lies in memory: the first element of each run, and a run's length.

    :param box: the part.
    :param shape: the tensor's.
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
    """Decide which source rank writes which part of one tensor to which target rank: each element once to each.

    :param wanted: the target ranks, and the box that each of them wants.
    :param held: the source ranks, and the box that each of them has. Several may have the same one.
    :param itemsize: bytes of an element on its way.
    :param load: the bytes that each source rank writes so far; what it is given here is added.
    :returns: the portions, and what no source rank has.
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
    """Return how many elements of a box one of its holders writes, if they share it."""
    parts = min(holders, max(1, box.numel * itemsize // SPLIT))
    return -(-box.numel // parts)
