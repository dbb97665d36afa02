"""Registers and areas, which are the shared memory of a live group. The memory stays valid when a rank dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from torch import Tensor

LANES: Final = 256
"""The largest number of lanes of a group."""
LONG: Final = 2**20
"""The number of bytes above which a copy would block the event loop for too long."""
LEFT: Final = 1
"""The value in a rank's register after the rank's process has left the group."""
HEADER: Final = 4080
"""The maximum size of a contribution's header, in bytes."""
NAME, COMING, FIRST, SECOND = range(4)
"""The registers of a lane.

``NAME`` contains the hash of the lane's name. ``COMING`` contains a bit for each rank that rejoins the lane. ``FIRST``
contains the state of the last round with an even number. ``SECOND`` contains the state of the last round with an odd
number.
"""
PER_LANE: Final = 4


class Shortcut(Protocol):
    """Native code for the common case of a lane's rounds.

    :class:`~aiocomms.live.rounds.Rounds` handles all other cases.

    A round's *word* is the value of the round's register after this rank has contributed to the round.
    """

    def arrive(self, number: int, header: bytes, parts: Sequence[tuple[int, int]], /) -> int:
        """Contribute to a round, and poll for some time until the round is decided.

        :param parts: the address and the number of bytes of each part.
        :returns: the round's word; 0 if the native code could not contribute.
        """

    def arm(self, number: int, /) -> None:
        """Let :meth:`call` take part in the round with this number, and then in the following rounds."""

    def disarm(self) -> int:
        """Undo :meth:`arm`. Return the number of the rank's next round; 0 if the code was not armed."""

    def call(self, kind: str, given: object, op: object, timeout: object, /) -> Any:
        """Contribute tensors to the rank's next round, as :meth:`arrive` does, and make the result of the collective.

        The native code can make only a call that :meth:`know_call` has stored, and only if all ranks make this call.

        :param kind: the name of the collective, as an interned string.
        :param given: the tensor, the list of tensors, or None for a barrier.
        :param op: the operator as the program passed it, or None.
        :param timeout: the timeout as the program passed it.
        :returns: a :class:`~aiocomms.live.lane.Partial` if the native code has contributed and made the result. The
            round's word if the native code has contributed, but has made no result; then the code is disarmed. None if
            the native code has not contributed.
        """

    def finish(self, word: int, tensor: object, op: object, /) -> bool:
        """Reduce the contributions into the tensor after the round is decided.

        :returns: True if the reduction succeeded. If it failed, the content of the tensor is undefined.
        """

    def know(self, holders: dict[int, int], /) -> None:
        """Tell the native code the number of each rank's process."""

    def know_call(self, kind: str, given: object, op: object, operator: str, factor: float, header: bytes, /) -> None:
        """Store the header of a call, so that :meth:`call` can make this call.

        :param operator: the kind of the parsed operator.
        :param factor: the factor of the parsed operator.
        """


class Registers(Protocol):
    """Registers and areas. A register changes by compare-and-swap. An area contains bytes that only one rank writes.

    Operations are sequentially consistent across processes. A register has 63 bits and is initially 0. If a process
    dies, the registers stay valid, but an area into which the process was writing may contain incomplete data.
    """

    async def load(self, register: int) -> int:
        """Return the value of a register.

        :raises CommError: the memory no longer exists or was closed.
        """

    async def swap(self, register: int, expected: int, desired: int) -> int:
        """Write ``desired`` to a register if the register contains ``expected``. Return the register's former value.

        :raises CommError: the memory no longer exists or was closed.
        """

    async def write(self, area: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """Write a header and data to an area. A cancelled call ends only when it no longer reads the parts.

        :param header: at most :data:`HEADER` bytes.
        :param parts: flat byte tensors, which are written one after the other.
        :raises CommError: the memory no longer exists or was closed.
        """

    async def written(self, areas: Sequence[int]) -> None:
        """Wait until all pending writes to the given areas no longer read their source tensors."""

    async def read(self, area: int) -> tuple[bytes, Tensor]:
        """Return an area's header, and the area's data as a flat byte tensor. The tensor may be a view of the area.

        :raises CommError: the memory no longer exists or was closed.
        """

    def shortcut(self, lane: int, rank: int, size: int, holder: int) -> Shortcut | None:
        """Return the native code for the rounds of a lane, or None if these registers have no native code."""

    async def changed(self, register: int, held: int, ends: float) -> bool:
        """Wait for a change of a register, a call of :meth:`tell` by a rank, or the death of a process.

        The wait may also end without one of these events.

        :param held: the last known value of the register.
        :param ends: the end of the wait, as a time of ``aiocomms.lowlevel.clock.now()``.
        :returns: False if ``ends`` has passed.
        """

    async def tell(self, register: int | None) -> None:
        """Wake all ranks that wait for ``register``. None: wake all ranks that wait for any register."""

    def alive(self, holder: int) -> bool:
        """Return whether a process may be alive.

        :param holder: the number of the process, which a rank's register contains.
        """

    def close(self) -> None:
        """Close these registers on this rank. Idempotent.

        Waiting tasks get a :class:`~aiocomms.errors.CommClosedError`.
        """


def register_of(lane: int, which: int) -> int:
    """Return the number of one of a lane's registers."""
    return lane * PER_LANE + which


def place_of(rank: int) -> int:
    """Return the number of a rank's register, which shows the process that has the rank.

    The register is initially 0. Later the register contains the number of the rank's process, or :data:`LEFT`.
    """
    return LANES * PER_LANE + rank


def area_of(lane: int, number: int, rank: int, size: int) -> int:
    """Return the number of the area into which a rank writes its contribution to a round."""
    return (lane * 2 + number % 2) * size + rank


async def set_bit(registers: Registers, register: int, bit: int, value: bool) -> None:
    """Set or clear a bit of a register."""
    held = await registers.load(register)
    while bool(held & bit) != value:
        found = await registers.swap(register, held, held ^ bit)
        if found == held:
            return
        held = found
