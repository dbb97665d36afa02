"""The memory that the places of a live group share, and that outlives each of them: registers and areas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from torch import Tensor

LANES: Final = 256
"""Lanes of a group."""
LONG: Final = 2**20
"""Bytes whose copies take the loop's thread too long."""
LEFT: Final = 1
"""The value of the register of a place whose process has left."""
NAME, COMING, FIRST, SECOND = range(4)
"""The registers of a lane: the number of its name; the places that come back; the rounds of even and odd numbers."""
PER_LANE: Final = 4


class Shortcut(Protocol):
    """Native code for the rounds of a lane, where nothing of what :class:`~aiocomms.live.rounds.Rounds` is for happens.

    A round's word is what its register holds, with this rank's contribution in it.
    """

    def arrive(self, number: int, header: bytes, parts: Sequence[tuple[int, int]], /) -> int:
        """Contribute to a round, and look for some time whether it is decided.

        :param parts: addresses, and bytes there.
        :returns: the round's word; 0: nothing was done.
        """

    def all_reduce(self, number: int, tensor: object, op: object, /) -> Any:
        """Do the same with a tensor, in a call that is known, and reduce what all have contributed into the tensor.

        :returns: a :class:`~aiocomms.live.lane.Partial`; a number: the round's word, and no more was done; None:
            nothing was done.
        """

    def finish(self, word: int, tensor: object, op: object, /) -> bool:
        """Do the rest, once the round is decided.

        :returns: False: it was not done, and the tensor may hold anything.
        """

    def know(self, holders: dict[int, int], /) -> None:
        """Take in who holds the ranks' places."""

    def know_call(self, tensor: object, op: object, kind: str, factor: float, header: bytes, /) -> None:
        """Take in the header of a call."""


class Registers(Protocol):
    """Registers that are changed by compare-and-swap, and areas of bytes, each written by one place.

    Operations of all processes have one order, which is each process's own order, too. A register has 63 bits, and is 0
    at first. A process that dies at any moment leaves the registers whole; the area that it writes may be torn.
    """

    async def load(self, register: int) -> int:
        """Return what a register holds.

        :raises CommError: the memory is gone.
        """

    async def swap(self, register: int, expected: int, desired: int) -> int:
        """Write to a register if it holds ``expected``; return what it held.

        :raises CommError: the memory is gone.
        """

    async def write(self, area: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Write to an area.

        :param parts: flat tensors of bytes, which stand one behind the other.
        :raises CommError: the memory is gone.
        """

    async def read(self, area: int) -> tuple[bytes, Tensor]:
        """Return what stands in an area: the header, and a flat tensor of the bytes behind it, perhaps not a copy.

        :raises CommError: the memory is gone.
        """

    def shortcut(self, lane: int, rank: int, size: int, holder: int) -> Shortcut | None:
        """Return the native code for the rounds of a lane; None: there is none."""

    async def changed(self, register: int, held: int, ends: float) -> bool:
        """Wait until a register may hold something else, somebody has called :meth:`tell`, or a process has died.

        :param ends: until when.
        :returns: False: it is too late.
        """

    async def tell(self, register: int | None) -> None:
        """Have all that wait for a register look again; None: all that wait for any."""

    def alive(self, holder: int) -> bool:
        """Return whether the process may live that has a place: the number which stands in the place's register."""

    def close(self) -> None:
        """Use it no more: whoever waits gets a :class:`~aiocomms.errors.CommClosedError`. Idempotent."""


def register_of(lane: int, which: int) -> int:
    """Return the number of a register of a lane."""
    return lane * PER_LANE + which


def place_of(rank: int) -> int:
    """Return the number of the register that says which process has a place: 0 before the first, or :data:`LEFT`."""
    return LANES * PER_LANE + rank


def area_of(lane: int, number: int, rank: int, size: int) -> int:
    """Return the number of the area to which a rank writes in a round."""
    return (lane * 2 + number % 2) * size + rank


async def set_bit(registers: Registers, register: int, bit: int, value: bool) -> None:
    """Set or clear a bit of a register."""
    held = await registers.load(register)
    while bool(held & bit) != value:
        found = await registers.swap(register, held, held ^ bit)
        if found == held:
            return
        held = found
