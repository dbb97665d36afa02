"""The agreement of a lane's ranks. For each *round* (one collective), the ranks agree which of them have contributed.

The ranks reach consensus by compare-and-swap on memory that stays valid when a rank dies (Herlihy, "Wait-free
synchronization", TOPLAS 1991). The register of a round contains the round's number, a decided bit, and a bit for each
rank that has contributed. A rank writes its contribution to an area, and then sets its own bit by compare-and-swap. If
the round need not wait for any other rank, the same swap also sets the decided bit. Once the decided bit is set, the
bits do not change, and all ranks read the same bits.

Rounds with even numbers and rounds with odd numbers have separate registers and areas. Round ``n`` reuses the register
and the areas of round ``n - 2``. Before any rank writes to an area, a swap writes the new round's number to the
register. A reader checks the number in the register after it has read the data. If the number is unchanged, the data is
valid, as with a seqlock.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from aiocomms.errors import CommClosedError, CommError, LeftBehindError
from aiocomms.live.registers import COMING, FIRST, HEADER, LEFT, Registers, area_of, place_of, register_of, set_bit
from aiocomms.ops.reductions import ReduceOp

MOST_RANKS: Final = 20
"""The largest number of ranks of a live group.

A round's register has one bit for each rank, 1 decided bit, and 42 bits for the round's number.
"""
_DECIDED: Final = 1 << MOST_RANKS
_HOLDER: Final = 8
"""The size, in bytes, of the number that precedes each header.

This number identifies the process that has written the header.
"""
MOST_HEADER: Final = HEADER - _HOLDER
"""The maximum size of a header without the process's number, in bytes."""
BEGIN: Final = 2
"""The number of the first round.

A new register contains 0. This value means that round 0 or 1 is decided, and that all ranks have contributed to it.
"""

T = TypeVar("T")
Use: TypeAlias = Callable[[dict[int, tuple[bytes, Tensor]]], Awaitable[T]]
"""The type of a function that makes a result from the header and the data of each rank's contribution."""


class Round(NamedTuple):
    """The state of a round, decoded from its register."""

    number: int
    decided: bool
    bits: int
    """The bits of the ranks that have contributed."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have contributed to the round, in ascending order."""
        return _ranks_of(self.bits)

    @property
    def word(self) -> int:
        """The value of the round's register."""
        return self.number * 2 * _DECIDED | self.decided * _DECIDED | self.bits


@functools.lru_cache
def _ranks_of(bits: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(MOST_RANKS) if bits >> rank & 1)


class NativeCall:
    """The arguments with which native code can make a call.

    :param kind: the name of the collective, as an interned string.
    :param given: the tensor, the list of tensors, or None for a barrier.
    :param op: the operator as the program passed it, or None.
    :param word: the result of :attr:`Rounds.call`, which is a :attr:`Round.word` or None.
    """

    __slots__ = ("abandoned", "given", "kind", "op", "word")

    def __init__(self, kind: str, given: object, op: ReduceOp | str | None, word: int | None) -> None:
        self.kind, self.given, self.op, self.word = kind, given, op, word
        self.abandoned = False
        """True after a cancellation of the call, because the program may then change the tensors."""

    @property
    def operator(self) -> ReduceOp:
        """The parsed operator, or SUM if the collective has none."""
        return ReduceOp.SUM if self.op is None else ReduceOp.parse(self.op)


def _no_call(kind: str, given: object, op: object, timeout: object) -> None:
    """Do nothing, in place of native code."""


class Rounds:
    """The methods by which one rank takes part in the rounds of one lane, one round after the other.

    :param lane: the lane's number.
    :param holder: the number of this process. The shared register of this rank contains this number.
    """

    def __init__(self, registers: Registers, lane: int, rank: int, size: int, holder: int) -> None:
        self._registers, self._lane, self._rank, self._size = registers, lane, rank, size
        self._bit, self._all, self._holder = 1 << rank, (1 << size) - 1, holder
        self._prefix = holder.to_bytes(_HOLDER, "little")
        """This process's number as bytes. This rank writes these bytes before each header."""
        self._coming = register_of(lane, COMING)
        self._shortcut = registers.shortcut(lane, rank, size, holder)
        self.call: Callable[[str, object, object, object], Any] = self._shortcut.call if self._shortcut else _no_call
        """Take part in the next round through native code. See :meth:`Shortcut.call`."""
        self._next: int | None = None
        """The number of this rank's next round; None if this rank's next call joins the round that is then open.

        While the native code is armed, the native code keeps the number, and this attribute is None.
        """
        self._was_in = False
        """True if it is certain that this rank contributed to its last round.

        If this rank contributed, the other ranks wait for this rank in the next round.
        """
        self._holders: dict[int, int] = {}
        """The number of the process that made each rank's last contribution."""

    def arm_native(self) -> None:
        """Let :attr:`call` take part in the next rounds, if the other ranks wait for this rank."""
        if self._shortcut is not None and self._was_in and self._next is not None:
            number, self._next, self._was_in = self._next, None, False
            self._shortcut.arm(number)

    def learn(self, native: NativeCall, header: bytes) -> None:
        """Store a call and its header, so that :attr:`call` can make the call. First check the call's tensors."""
        if self._shortcut is not None:
            how = native.operator
            self._shortcut.know_call(native.kind, native.given, native.op, how.kind, how.factor, self._prefix + header)

    async def take_part(
        self,
        header: bytes,
        parts: Sequence[Tensor],
        ends: float,
        use: Use[T],
        native: NativeCall,
        begun: Round | None = None,
    ) -> tuple[T, Round]:
        """Contribute to the next round, wait until it is decided, and use the contributions.

        The caller must not cancel this call before the contribution is complete. After such a cancellation, this rank's
        next call would match an earlier call of the other ranks.

        :param ends: the end of the wait for other ranks, as a time of ``aiocomms.lowlevel.clock.now()``.
        :param use: a function that makes the result from the contributions. If the contributions change before the
            function ends, the result is discarded.
        :param native: the call's arguments. If native code can reduce the contributions into the call's tensor, ``use``
            is not called.
        :param begun: the round to which :meth:`at_once` has contributed.
        :returns: the result, and the round.
        :raises LeftBehindError: the other ranks have completed this round and the next round. The next call of this
            rank joins the round that is then open.
        :raises CommClosedError: another process has replaced this process.
        """
        try:
            header = self._prefix + header
            round_ = await self._decided(header, parts, ends, begun)
            result = self._reduced(round_, native)
            if result is None:
                result = await self._used(round_, use)
        except LeftBehindError:
            self._next = None
            await self._announce(True)
            raise
        self._was_in = bool(round_.bits & self._bit)
        return result, round_

    def at_once(self, header: bytes, parts: Sequence[Tensor], word: int | None) -> Round | None:
        """Contribute to the next round through native code, and return the round's state.

        If the native code cannot contribute, return None.

        :param word: the result of :attr:`call`. If this is a :attr:`Round.word`, the contribution is made already.
        """
        if word is not None:
            round_ = self._round(0, word)
            self._next = round_.number + 1
            return round_
        self._disarm()
        places = [(part.data_ptr(), part.nbytes) for part in parts]
        number = self._next  # Not before the list exists: its allocation may run a finalizer that calls the lane.
        if self._was_in and number is not None and self._shortcut is not None:
            self._next, self._was_in = None, False  # A signal handler may raise as soon as the rank has contributed.
            held = self._shortcut.arrive(number, self._prefix + header, places)
            if held:
                self._next = number + 1
                return self._round(number, held)
            self._next, self._was_in = number, True
        return None

    def _disarm(self) -> None:
        """Take the number of the next round back from native code."""
        if self._shortcut is not None and (number := self._shortcut.disarm()):
            self._next, self._was_in = number, True

    def release_native(self) -> None:
        """Release the native code, which maps the group's memory. Later rounds run in Python."""
        self._disarm()
        self._shortcut, self.call = None, _no_call

    async def written(self) -> None:
        """Wait until this rank's pending writes no longer read the contributed tensors."""
        await self._registers.written([self._area(number, self._rank) for number in range(2)])

    async def _decided(self, header: bytes, parts: Sequence[Tensor], ends: float, begun: Round | None) -> Round:
        """Wait until the next round is decided, and return the round's state.

        If :meth:`at_once` has not contributed to the round, contribute first.
        """
        if begun is None:
            return await self._end_of(await self._come(header, parts, ends), ends)
        if not begun.decided:
            return await self._end_of(begun.number, ends)
        await self._registers.tell(self._register(begun.number))
        return begun

    def _reduced(self, round_: Round, native: NativeCall) -> Any:
        """Let native code reduce the contributions of an all_reduce into the call's tensor, and return this tensor.

        If the native code cannot reduce the contributions, return None.
        """
        if native.kind != "all_reduce" or native.abandoned or self._shortcut is None:
            return None
        return native.given if self._shortcut.finish(round_.word, native.given, native.op) else None

    async def _used(self, round_: Round, use: Use[T]) -> T:
        given, number = {}, round_.number
        for rank in round_.ranks:
            given[rank] = await self._registers.read(self._area(number, rank))
        holders = {rank: int.from_bytes(header[:_HOLDER], "little") for rank, (header, _) in given.items()}
        try:
            result = await use({rank: (header[_HOLDER:], data) for rank, (header, data) in given.items()})
        except CommError:
            await self._look(number)  # An overwritten contribution may cause any error.
            raise
        await self._look(number)
        self._holders |= holders
        if self._shortcut is not None:
            self._shortcut.know(holders)
        return result

    # ------------------------------------------------------------------------------------------ contributing to a round

    async def _come(self, header: bytes, parts: Sequence[Tensor], ends: float) -> int:
        """Contribute to the next round, and return the round's number.

        If this rank is late, the round may be decided without this rank's contribution.
        """
        if await self._registers.load(place_of(self._rank)) != self._holder:
            raise CommClosedError("another process has taken this rank's place in the group")
        if self._next is None:
            return await self._join(header, parts, ends)
        known, number = self._was_in, self._next
        if not known:
            await self._announce(True)
        if (await self._held(number - 1))[0].number == number - 1:  # A cancelled call did not wait for its round.
            await self._end_of(number - 1, ends)
        self._next, self._was_in = None, False  # A signal handler may raise as soon as the rank has contributed.
        arrived = await self._arrive(number, header, parts)
        self._next = number + 1
        if arrived and not known:
            await self._announce(False)
        return number

    async def _join(self, header: bytes, parts: Sequence[Tensor], ends: float) -> int:
        """Contribute to the first round that is still open. The other ranks wait for this rank in later rounds."""
        self._was_in = False
        while True:
            await self._announce(True)
            even, _ = await self._held(0)
            odd, _ = await self._held(1)
            open_ = max(even, odd)
            if open_.decided:
                await self._open(open_.number + 1)
            elif open_.bits & self._bit:  # The former process of this place has contributed to the round.
                await self._end_of(open_.number, ends)
            elif await self._arrive(open_.number, header, parts):
                await self._announce(False)
                self._next = open_.number + 1
                return open_.number

    async def _announce(self, comes: bool) -> None:
        """Set or clear the bit that makes the next round wait for this rank."""
        await set_bit(self._registers, self._coming, self._bit, comes)
        if comes:  # This rank's last call may have ended between its decision of a round and tell().
            await self._registers.tell(None)

    async def _open(self, number: int) -> None:
        """Write a round's number to the round's register, if the register contains a lower number.

        The previous round must be decided.
        """
        round_, held = await self._held(number)
        if round_.number < number:
            await self._registers.swap(self._register(number), held, number * 2 * _DECIDED)

    async def _arrive(self, number: int, header: bytes, parts: Sequence[Tensor]) -> bool:
        """Contribute to a round, and return True. Return False if the round was decided before the contribution."""
        await self._open(number)
        round_, held = await self._held(number)
        if round_.number == number and not round_.decided:
            await self._registers.write(self._area(number, self._rank), header, parts)
        while round_.number == number and not round_.decided:
            decides = not await self._awaits(round_._replace(bits=round_.bits | self._bit))
            if await self._change(number, held, held | self._bit | decides * _DECIDED):
                return True
            round_, held = await self._held(number)
        return False

    # ----------------------------------------------------------------------------------- waiting for the end of a round

    async def _end_of(self, number: int, ends: float) -> Round:
        """Wait until a round is decided, and return the round's state.

        Decide the round when it waits for no other rank, or when ``ends`` has passed.
        """
        while True:
            round_, held = await self._look(number)
            if round_.decided:
                return round_
            awaited = await self._awaits(round_)
            if awaited and await self._registers.changed(self._register(number), held, ends):
                continue
            if await self._change(number, held, held | _DECIDED):
                await self._forget(awaited)
                return round_._replace(decided=True)

    async def _awaits(self, round_: Round) -> int:
        """Return the bits of the ranks that a round still waits for.

        A round waits for the ranks of the previous round and for ranks that have announced that they rejoin. The round
        no longer waits for a rank that has contributed to it. The round also does not wait for a rank whose process has
        left the group, has died or has been replaced.
        """
        coming = await self._registers.load(self._coming)
        before, _ = await self._held(round_.number - 1)
        awaited = (before.bits | coming) & ~round_.bits & self._all
        for rank in range(self._size):
            bit = 1 << rank
            if awaited & bit:
                holder = await self._registers.load(place_of(rank))
                replaced = not coming & bit and holder != self._holders.get(rank, holder)
                if holder == LEFT or replaced or (holder and not self._registers.alive(holder)):
                    awaited &= ~bit
        return awaited

    async def _forget(self, late: int) -> None:
        """Clear the announcements of late ranks.

        Rounds do not wait for a late rank until the rank announces again that it rejoins.
        """
        for rank in range(self._size):
            if late >> rank & 1:
                await set_bit(self._registers, self._coming, 1 << rank, False)

    # ----------------------------------------------------------------------------------------------------- the register

    def _register(self, number: int) -> int:
        return register_of(self._lane, FIRST + number % 2)

    def _area(self, number: int, rank: int) -> int:
        return area_of(self._lane, number, rank, self._size)

    async def _held(self, number: int) -> tuple[Round, int]:
        """Return the round that the register of round ``number`` contains now, and the register's value."""
        held = await self._registers.load(self._register(number))
        return self._round(number, held), held

    def _round(self, number: int, held: int) -> Round:
        if not held:
            return Round(number % 2, True, self._all)
        return Round(held // (2 * _DECIDED), bool(held & _DECIDED), held & (_DECIDED - 1))

    async def _look(self, number: int) -> tuple[Round, int]:
        """Return the state of a round in which this rank takes part, and the value of the round's register.

        :raises LeftBehindError: a later round uses the register.
        """
        round_, held = await self._held(number)
        if round_.number != number:
            raise LeftBehindError(
                f"round {number - BEGIN} was decided, and its contributions are not kept: this rank was two rounds late"
            )
        return round_, held

    async def _change(self, number: int, held: int, desired: int) -> bool:
        register = self._register(number)
        if await self._registers.swap(register, held, desired) != held:
            return False
        if desired & _DECIDED:
            await self._registers.tell(register)
        return True
