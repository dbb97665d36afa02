"""Registers and areas: the memory that the ranks of a live group share, and that outlives each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from torch import Tensor

LANES: Final = 256
"""The most lanes of a group."""
LONG: Final = 2**20
"""The number of bytes above which a copy would block the event loop for too long."""
LEFT: Final = 1
"""The value in the register of a rank's place after the rank's process has left."""
HEADER: Final = 4080
"""The most bytes of a contribution's header."""
NAME, COMING, FIRST, SECOND = range(4)
"""The registers of a lane: the hash of its name; the ranks that join again; the even rounds; the odd rounds."""
PER_LANE: Final = 4


class Shortcut(Protocol):
    """Native code for the common case of a lane's rounds.

    :class:`~aiocomms.live.rounds.Rounds` handles all other cases.

    A round's *word* is the value of its register after this rank has contributed to the round.
    """

    def arrive(self, number: int, header: bytes, parts: Sequence[tuple[int, int]], /) -> int:
        """Contribute to a round, and poll for some time until the round is decided.

        :param parts: the address and the number of bytes of each part.
        :returns: the round's word; 0 if nothing was done.
        """

    def all_reduce(self, number: int, tensor: object, op: object, /) -> Any:
        """Contribute one tensor as :meth:`arrive` does, for a known call, and reduce all contributions into the tensor.

        :returns: a :class:`~aiocomms.live.lane.Partial` if the reduction is done; the round's word if only the
            contribution is done; None if nothing was done.
        """

    def finish(self, word: int, tensor: object, op: object, /) -> bool:
        """Reduce the contributions into the tensor after the round is decided.

        :returns: False if that failed; the content of the tensor is then undefined.
        """

    def know(self, holders: dict[int, int], /) -> None:
        """Store the numbers of the ranks' processes."""

    def know_call(self, tensor: object, op: object, kind: str, factor: float, header: bytes, /) -> None:
        """Store the header of a call. This call is then a known call for :meth:`all_reduce`."""


class Registers(Protocol):
    """Registers and areas. A register changes by compare-and-swap; an area has bytes that only one rank writes.

    Operations are sequentially consistent across processes. A register has 63 bits and is initially 0. If a process
    dies, registers stay valid, but an area that the process was writing may have incomplete data.
    """

    async def load(self, register: int) -> int:
        """Return the value of a register.

        :raises CommError: the memory is gone.
        """

    async def swap(self, register: int, expected: int, desired: int) -> int:
        """Write ``desired`` to a register if it holds ``expected``; return the register's former value.

        :raises CommError: the memory is gone.
        """

    async def write(self, area: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Write to an area. A cancelled call ends when it no longer reads the parts.

        :param header: at most :data:`HEADER` bytes.
        :param parts: flat byte tensors, which are written one after the other.
        :raises CommError: the memory is gone.
        """

    async def written(self, areas: Sequence[int]) -> None:
        """Wait until no write to these areas reads its parts any more."""

    async def read(self, area: int) -> tuple[bytes, Tensor]:
        """Return the header of an area, and its data as a flat byte tensor, which may be a view of the area.

        :raises CommError: the memory is gone.
        """

    def shortcut(self, lane: int, rank: int, size: int, holder: int) -> Shortcut | None:
        """Return the native code for the rounds of a lane, or None."""

    async def changed(self, register: int, held: int, ends: float) -> bool:
        """Wait until a register may have changed, a rank has called :meth:`tell`, or a process has died.

        :param held: the last known value of the register.
        :param ends: the end of the wait, as a time of ``aiocomms.lowlevel.clock.now()``.
        :returns: False if ``ends`` has passed.
        """

    async def tell(self, register: int | None) -> None:
        """Wake all ranks that wait for ``register``. None: wake all ranks that wait for any register."""

    def alive(self, holder: int) -> bool:
        """Return whether a process may be alive.

        :param holder: the number of the process, from the register of a place.
        """

    def close(self) -> None:
        """Close this end: waiting tasks get a :class:`~aiocomms.errors.CommClosedError`. Idempotent."""


def register_of(lane: int, which: int) -> int:
    """Return the number of a register of a lane."""
    return lane * PER_LANE + which


def place_of(rank: int) -> int:
    """Return the number of the register of a rank's place.

    The register is initially 0. Later it holds the number of the rank's process, or :data:`LEFT`.
    """
    return LANES * PER_LANE + rank


def area_of(lane: int, number: int, rank: int, size: int) -> int:
    """Return the number of the area that a rank writes in a round."""
    return (lane * 2 + number % 2) * size + rank


async def set_bit(registers: Registers, register: int, bit: int, value: bool) -> None:
    """Set or clear a bit of a register."""
    held = await registers.load(register)
    while bool(held & bit) != value:
        found = await registers.swap(register, held, held ^ bit)
        if found == held:
            return
        held = found
