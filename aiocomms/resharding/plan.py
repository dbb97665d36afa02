"""The plan of a source: which source rank writes which parts to which target rank. All ranks compute the same plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from aiocomms.errors import ArgumentError
from aiocomms.resharding.boxes import Box, Portion, pieces, runs, shared
from aiocomms.resharding.chunks import box_of
from aiocomms.resharding.words import DTYPES, ChunkRecord, TargetRecord

BLOCK: Final = 4 << 20
"""The largest size in bytes of a block. A rank packs and writes each block as a whole."""
_NAMED: Final = 3
"""The largest number of tensors that an error lists."""


class Copy(NamedTuple):
    """A write of this rank, from a box of one of this rank's chunks into a box of a target rank's chunk."""

    target: int
    chunk: ChunkRecord
    """The target rank's chunk into which this rank writes."""
    there: Box
    """The box to write, with offsets within the target rank's chunk."""
    box: Box
    """The box to read, with offsets within this rank's chunk of the same tensor."""

    @property
    def nbytes(self) -> int:
        """The size of the box in bytes, in the target's dtype."""
        return self.box.numel * DTYPES[self.chunk.dtype].itemsize

    def runs(self) -> tuple[list[int], int]:
        """Return the byte offset of each run in the target rank's buffer, and the size of every run in bytes."""
        itemsize = DTYPES[self.chunk.dtype].itemsize
        starts, run = runs(self.there, self.chunk.sizes)
        return [self.chunk.place + start * itemsize for start in starts], run * itemsize


class MovePlan(NamedTuple):
    """The copies of one source rank, and figures that are the same on all ranks."""

    copies: list[Copy]
    """The copies, ordered so that the source ranks begin with different target ranks."""
    targets: tuple[int, ...]
    """The target ranks that this source rank writes to."""
    writers: tuple[tuple[int, ...], ...]
    """The source ranks that write to each target rank."""
    nbytes: tuple[int, ...]
    """The number of bytes that each source rank writes for one version."""


Owned = dict[str, list[tuple[int, ChunkRecord]]]
"""The chunks of each tensor, by the tensor's name. Each chunk is in a pair with the rank that holds the chunk."""


def planned(rank: int, source: Sequence[Sequence[ChunkRecord]], target: Sequence[TargetRecord]) -> MovePlan:
    """Return the plan of a source rank.

    :param rank: the source rank.
    :param source: the chunks of each source rank.
    :param target: the chunks of each target rank.
    :raises ArgumentError: the source lacks elements that the target needs, or a tensor's shape differs between ranks.
    """
    held, wanted = _by_name(source), _by_name([record.chunks for record in target])
    load = [0] * len(source)
    portions = {name: _portions(name, chunks, held.get(name, []), load) for name, chunks in wanted.items()}
    misfits = [misfit for _, misfit in portions.values() if misfit]
    if misfits:
        more = f"; and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else ""
        raise ArgumentError(f"tensors do not have what the target needs: {'; '.join(misfits[:_NAMED])}{more}")
    copies: list[Copy] = []
    writers: list[set[int]] = [set() for _ in target]
    for name, (parts, _) in portions.items():
        mine, theirs = (dict(chunks) for chunks in (held.get(name, []), wanted[name]))
        for part in parts:
            writers[part.target].add(part.source)
            if part.source == rank:
                copies += _copies(part, mine[rank], theirs[part.target])
    copies.sort(key=lambda copy: (copy.target - rank) % len(target))
    targets = tuple(to for to, sources in enumerate(writers) if rank in sources)
    return MovePlan(copies, targets, tuple(tuple(sorted(sources)) for sources in writers), tuple(load))


def _by_name(ranks: Sequence[Sequence[ChunkRecord]]) -> Owned:
    found: Owned = defaultdict(list)
    for rank, records in enumerate(ranks):
        for record in records:
            found[record.name].append((rank, record))
    return dict(found)


def _portions(
    name: str, wanted: list[tuple[int, ChunkRecord]], held: list[tuple[int, ChunkRecord]], load: list[int]
) -> tuple[list[Portion], str]:
    """Divide one tensor among the source ranks.

    :returns: the portions, and the reason why the tensor cannot be divided. The reason is empty if the tensor can be
        divided.
    """
    shape = wanted[0][1].shape
    if not held:
        return [], f"there is no {name!r}"
    for side, chunks in (("target", wanted), ("source", held)):
        for rank, record in chunks:
            if record.shape != shape:
                return [], f"{name!r} has shape {[*record.shape]} on {side} rank {rank}, wanted {[*shape]}"
    itemsize = DTYPES[wanted[0][1].dtype].itemsize
    portions, missing = shared(_boxes(wanted), _boxes(held), itemsize, load)
    if missing:
        box = missing[0][1]
        return [], f"no source rank has {[*box.sizes]} elements of {name!r} at {[*box.offsets]}"
    return portions, ""


def _boxes(chunks: list[tuple[int, ChunkRecord]]) -> list[tuple[int, Box]]:
    return [(rank, box_of(record)) for rank, record in chunks]


def _copies(part: Portion, mine: ChunkRecord, theirs: ChunkRecord) -> list[Copy]:
    """Cut a portion into blocks."""
    boxes = pieces(part.box, BLOCK // DTYPES[theirs.dtype].itemsize)
    return [Copy(part.target, theirs, box.within(box_of(theirs)), box.within(box_of(mine))) for box in boxes]
