"""The words by which the ranks of a source and of a target move a version.

Between the two sides they go by the connections of endpoints, within a side by a lane of its communicator. Each side's
rank 0 speaks for it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.lowlevel import ControlCodec
from aiocomms.ops import checks

DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in checks.DTYPES}
"""The dtypes, by the names by which ranks tell each other of them."""
LONGEST: Final = 64 << 20
"""Most bytes of a word: a layout names each chunk of each target rank."""


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True):
    """The description of a chunk that another rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor, in elements."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: int = 0
    """The byte at which the chunk begins in each buffer of a target rank."""

    def makes_sense(self) -> bool:
        """Return whether it is a part of a tensor that there can be."""
        lengths = {len(self.shape), len(self.offsets), len(self.sizes)}
        if self.dtype not in DTYPES or self.place < 0 or len(lengths) > 1:
            return False
        boxes = zip(self.offsets, self.sizes, self.shape, strict=True)
        return all(at >= 0 and 0 <= size <= whole - at for at, size, whole in boxes)


class TargetRecord(msgspec.Struct, frozen=True, array_like=True):
    """The description of a target rank."""

    address: bytes
    chunks: tuple[ChunkRecord, ...]


# ------------------------------------------------------------------------------------------- from a source to a target


class Inquire(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """Source rank 0 asks target rank 0 what the target holds. From then on it is this source that moves versions."""

    source: bytes
    """The number of the source, which no other one has."""


class Present(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """A source rank says to a target rank who it is."""

    source: bytes
    rank: int


class Propose(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Source rank 0 asks target rank 0 for buffers that a version may be written to."""

    call: int
    version: int
    writers: tuple[tuple[int, ...], ...]
    """The source ranks that write to each target rank."""


class Written(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """A source rank tells a target rank that all it writes of a version has arrived there."""

    move: int


class Withdraw(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Source rank 0 tells target rank 0 that it gives a version up."""

    call: int
    kind: str
    why: str


# ------------------------------------------------------------------------------------------- from a target to a source


class Inventory(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The answer to :class:`Inquire`."""

    version: int
    """The highest version that the target has had: that of the next one is higher."""
    ranks: tuple[TargetRecord, ...]


class Known(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The answer to :class:`Present`."""


class Admit(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """The buffers that a version may be written to; also from source rank 0 to the other source ranks."""

    call: int
    move: int
    """The number of the move, which no other one of the target has."""
    descriptors: tuple[bytes, ...]
    """The descriptor of the region to write to on each target rank."""


class Settled(msgspec.Struct, frozen=True, tag=8, array_like=True):
    """The end of a move; also from source rank 0 to the other source ranks."""

    call: int
    kind: str = ""
    """The kind of the reason for which the old version stays current; empty: the new one is current."""
    why: str = ""


# -------------------------------------------------------------------------------------------------- within the target


class Clear(msgspec.Struct, frozen=True, tag=9, array_like=True):
    """Target rank 0 asks a target rank for a buffer that nobody reads."""

    move: int
    source: bytes
    version: int
    keep: int | None
    """The version that is current; None: there is none."""
    steps: int
    """The number of steps that rank 0 has begun with the version before that; each rank begins as many."""
    writers: tuple[int, ...]


class Cleared(msgspec.Struct, frozen=True, tag=10, array_like=True):
    """The answer of a target rank."""

    move: int
    descriptor: bytes
    steps: int
    """The number of steps that this rank has begun with the version that it let go of last."""


class Whole(msgspec.Struct, frozen=True, tag=11, array_like=True):
    """A target rank has all of a version."""

    move: int


class Broken(msgspec.Struct, frozen=True, tag=12, array_like=True):
    """A target rank has lost a source rank that has not written all of a version."""

    move: int
    why: str


# -------------------------------------------------------------------------------------------------- within the source


class Enter(msgspec.Struct, frozen=True, tag=13, array_like=True):
    """A source rank has called ``move``."""

    call: int
    version: int


class Falter(msgspec.Struct, frozen=True, tag=14, array_like=True):
    """A source rank cannot go on with a move."""

    call: int
    kind: str
    why: str


Word = (
    Inquire | Present | Propose | Written | Withdraw | Inventory | Known | Admit | Settled | Clear | Cleared | Whole
    | Broken | Enter | Falter
)  # fmt: skip
WORDS: Final = ControlCodec[Word](Word, "a word about a version", limit=LONGEST)


def inventory(word: bytes, peer: int | None = None) -> Inventory:
    """Decode what a target, or a rank of a side, says that it holds.

    :raises ProtocolError: it makes no sense.
    """
    found = WORDS.decode(word, peer)
    if not isinstance(found, Inventory):
        raise WORDS.unreadable(f"it is {type(found).__name__}, wanted Inventory", peer)
    for record in (record for rank in found.ranks for record in rank.chunks):
        if not record.makes_sense():
            raise WORDS.unreadable(f"{record.name!r} is no part of a tensor", peer)
    return found
