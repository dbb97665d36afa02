"""Messages that the ranks of a source and of a target exchange to move a version.

Messages between the sides use the connections of endpoints. Messages within a side use a lane of the side's
communicator. Rank 0 of each side represents the side.
"""

from __future__ import annotations

from typing import Final

import msgspec

from aiocomms.lowlevel import ControlCodec
from aiocomms.ops import checks

DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in checks.DTYPES}
"""The dtypes, by their names in messages."""
LONGEST: Final = 64 << 20
"""The largest size of a message in bytes.

An inventory can be large, because it describes each chunk of each target rank.
"""


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True):
    """The description of a chunk that another rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor, in elements."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: int = 0
    """The byte offset of the chunk in each buffer of a target rank."""

    def makes_sense(self) -> bool:
        """Return whether the record is consistent: the dtype is known, and the box lies within the tensor."""
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
    """A request of source rank 0 to target rank 0 for the target's inventory.

    After the request, only this source moves versions.
    """

    source: bytes
    """The unique number of the source."""


class Present(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """A message in which a source rank introduces itself to a target rank."""

    source: bytes
    rank: int


class Propose(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """A request of source rank 0 to target rank 0 to provide buffers for a version."""

    call: int
    version: int
    writers: tuple[tuple[int, ...], ...]
    """The source ranks that write to each target rank."""


class Written(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """A notice of a source rank to a target rank: all writes of the source rank for a version have arrived."""

    move: int


class Withdraw(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """A notice of source rank 0 to target rank 0 that the source gives up the move of a version."""

    call: int
    kind: str
    why: str


# ------------------------------------------------------------------------------------------- from a target to a source


class Inventory(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The answer to :class:`Inquire`: the version of the target, and a description of each target rank."""

    version: int
    """The highest version that the target has had; the next version must be higher."""
    ranks: tuple[TargetRecord, ...]


class Known(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The answer to :class:`Present`: the target rank knows the source rank now."""


class Admit(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """A message with the descriptors of the target's buffers. Source rank 0 forwards it to all source ranks."""

    call: int
    move: int
    """The number of the move, which is unique at the target."""
    descriptors: tuple[bytes, ...]
    """The descriptor of each target rank's buffer."""


class Settled(msgspec.Struct, frozen=True, tag=8, array_like=True):
    """A message that says that a move has ended. Source rank 0 forwards the message to all source ranks."""

    call: int
    kind: str = ""
    """The kind of the failure, if the old version stays current; empty if the new version is current."""
    why: str = ""


# -------------------------------------------------------------------------------------------------- within the target


class Clear(msgspec.Struct, frozen=True, tag=9, array_like=True):
    """A request of target rank 0 to a target rank for a buffer that is not in use."""

    move: int
    source: bytes
    version: int
    keep: int | None
    """The current version, which the target ranks keep; None if no version is current."""
    steps: int
    """The number of steps that rank 0 has begun with the previous version.

    Each rank begins the same number of steps with that version.
    """
    writers: tuple[int, ...]


class Cleared(msgspec.Struct, frozen=True, tag=10, array_like=True):
    """The answer to :class:`Clear`: a target rank offers a buffer to target rank 0."""

    move: int
    descriptor: bytes
    steps: int
    """The number of steps that the sender has begun with the version that the sender dropped last."""


class Whole(msgspec.Struct, frozen=True, tag=11, array_like=True):
    """The notice by which a target rank reports that a whole version has arrived."""

    move: int


class Broken(msgspec.Struct, frozen=True, tag=12, array_like=True):
    """A notice of a target rank that a version cannot arrive completely, for example because a source rank is lost."""

    move: int
    why: str


# -------------------------------------------------------------------------------------------------- within the source


class Enter(msgspec.Struct, frozen=True, tag=13, array_like=True):
    """A notice of a source rank that this source rank has called ``move``."""

    call: int
    version: int


class Falter(msgspec.Struct, frozen=True, tag=14, array_like=True):
    """A notice of a source rank that this source rank cannot continue a move."""

    call: int
    kind: str
    why: str


# ------------------------------------------------------------------------------------------------- within either side


class RankClosed(msgspec.Struct, frozen=True, tag=15, array_like=True):
    """The last message of a rank to another rank of its side, which says that the sender is closed."""


Word = (
    Inquire | Present | Propose | Written | Withdraw | Inventory | Known | Admit | Settled | Clear | Cleared | Whole
    | Broken | Enter | Falter | RankClosed
)  # fmt: skip
WORDS: Final = ControlCodec[Word](Word, "a word about a version", limit=LONGEST)


def inventory(word: bytes, peer: int | None = None) -> Inventory:
    """Decode the inventory of a target or of a rank.

    :raises ProtocolError: the message is malformed or is no inventory.
    """
    found = WORDS.decode(word, peer)
    if not isinstance(found, Inventory):
        raise WORDS.unreadable(f"it is {type(found).__name__}, wanted Inventory", peer)
    for record in (record for rank in found.ranks for record in rank.chunks):
        if not record.makes_sense():
            raise WORDS.unreadable(f"{record.name!r} is no part of a tensor", peer)
    return found
