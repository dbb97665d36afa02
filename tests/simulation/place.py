"""The place of a step of a program: one rank's communicator, what the step draws, and what it compares."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar

import torch
from ledger import Entry, Ledger, stamp
from torch import Tensor

from aiocomms.errors import CommError, WorkCancelledError
from aiocomms.lowlevel import clock

T = TypeVar("T")
EXPLAINING = 0.5
"""Seconds that an error may take to say why, behind its deadline."""
DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.int16, torch.uint8, torch.float16)
_ROOM = {torch.uint8: 61, torch.int16: 997, torch.float16: 31}
"""The number of values of a narrow dtype, so that four of them can be summed."""


class BrokenPromiseError(AssertionError):
    """Raised where a history shows what the library promises not to happen."""


@dataclass
class Place:
    """One rank's part of a step.

    :param comm: the communicator, or a lane of it.
    :param draw: draws the same on every rank.
    :param number: tells the step from all others.
    :param patience: the deadline of its operations, in seconds.
    :param slack: the seconds by which this process may be late by itself, since it stands still or is slow.
    """

    comm: Any
    rank: int
    size: int
    draw: Random
    number: int
    patience: float
    slack: float
    ledger: Ledger
    members: dict[str, int]
    """This process's rank on each communicator."""
    seed: str = ""
    key: Any = None
    tags: int = 0
    """The number whose tags a part uses: in lanes, those of the step, for they mix nowhere."""
    calm: bool = True
    """True if no fault strikes this history."""

    def numbers(self, count: int, dtype: torch.dtype, *whose: int) -> Tensor:
        """Return the values that a rank, or a message, has in this step."""
        base = self.number * 131
        for one in whose:
            base = base * 31 + one * 17 + 5
        values = torch.arange(count, dtype=torch.int64).add_(base % 997)
        return (values if dtype in (torch.int64, torch.float64) else values % _ROOM.get(dtype, 30011)).to(dtype)

    def count(self) -> int:
        """Draw a number of elements."""
        return self.draw.choice((0, 1, 2, 3, 5, 8, 8, 16, 33) if self.draw.random() < 0.95 else (9000, 20001))

    def dtype(self) -> torch.dtype:
        """Draw a dtype."""
        return self.draw.choice(DTYPES)

    def someone(self) -> int:
        """Draw a rank."""
        return self.draw.randrange(self.size)

    def tag(self, index: int = 0) -> int:
        """Return a tag of the step's own."""
        return (self.tags or self.number) * 64 + (index << 24)

    def way(self, *what: Any) -> tuple[Any, ...]:
        """Return the way of a message of this step."""
        return (self.comm.name, self.key, self.number, *what)

    def come(self) -> None:
        """Note that this rank has come to this step."""
        self.ledger.come.add((self.way(), self.rank))

    def all_have_come(self) -> None:
        """Look whether all ranks have come to this step."""
        missing = [r for r in range(self.size) if (self.way(), r) not in self.ledger.come]
        self.same(missing, [], "ranks that have not come to a barrier")

    def sends(self, send: Any, tensor: Tensor, dst: int, *what: Any) -> Any:
        """Send a message that carries its number in the ledger; return the work.

        :param send: is given the tensor, and returns the work.
        :param what: tells it from the step's other messages to that rank.
        """
        with self.giving(tensor, dst, *what) as entry:
            work = send(tensor)
            work.add_done_callback(entry.ended)
            return work

    @contextlib.contextmanager
    def giving(self, tensor: Tensor, dst: int, *what: Any) -> Iterator[Entry]:
        """Enter a message into the ledger, which is sent by the block."""
        entry = self.ledger.enter(self.comm.name, dst, self.way(dst, *what))
        stamp(tensor, entry.number)
        try:
            yield entry
        except BaseException as error:
            entry.end = type(error).__name__
            raise

    def takes(self, work: Any, buffer: Tensor, *what: Any) -> Any:
        """Enter into the ledger what a receive gets, when it gets that; return the work."""
        work.add_done_callback(lambda work: self.got(buffer, *what) if work.error is None else None)
        return work

    def got(self, tensor: Tensor, *what: Any) -> None:
        """Enter a message into the ledger that this rank has received."""
        self.ledger.receive(tensor, self.way(self.rank, *what))

    def sent(self, tensor: Tensor, *what: Any) -> Tensor:
        """Write into a tensor the number of the message that this rank should have received; return it."""
        self.ledger.stamp_as(tensor, self.way(self.rank, *what))
        return tensor

    async def end(self, work: Awaitable[T], seconds: float | None = None) -> T:
        """Await something, which has to end by its deadline. If it fails, its tensors are the program's to spoil."""
        with self.timely(self.patience if seconds is None else seconds, getattr(work, "op", work)):
            try:
                return await work
            except CommError as error:
                if not isinstance(error, WorkCancelledError):  # Its buffer is looked at.
                    spoil(work)
                raise

    async def all_end(self, works: Sequence[Awaitable[T]]) -> list[T]:
        """Await the ends of some works that have begun together; raise the first error when all have ended."""
        found: list[T] = []
        errors: list[Exception] = []
        for work in works:
            try:
                found.append(await self.end(work))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    @contextlib.contextmanager
    def timely(self, seconds: float, what: object) -> Iterator[None]:
        """Have a block end by a deadline, and the time that an explanation may take."""
        began = clock.now()
        try:
            yield
        finally:
            took = clock.now() - began
            if took > (seconds + EXPLAINING) * 1.001 + self.slack:
                raise BrokenPromiseError(f"{what} took {took:.3f} s on rank {self.rank}, with {seconds} s of deadline")

    def same(self, got: Any, wanted: Any, what: str) -> None:
        """Compare what an operation has given with what it should have."""
        if isinstance(wanted, Tensor):
            equal = got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted)
        elif isinstance(wanted, list | tuple) and any(isinstance(one, Tensor) for one in wanted):
            if len(got) != len(wanted):
                raise BrokenPromiseError(f"{what} on rank {self.rank} of {self.size}: {len(got)} for {len(wanted)}")
            for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
                self.same(one, other, f"{what}[{index}]")
            return
        else:
            equal = got == wanted
        if not equal:
            raise BrokenPromiseError(
                f"wrong data of {what} on rank {self.rank} of {self.size}: {short(got)}, wanted {short(wanted)}"
            )

    def part(self, comm: Any, index: int, key: Any) -> Place:
        """Return the place of a part of this step, on another view of the communicator.

        :param index: below 8, another one for each part.
        :param key: the lane of which it is.
        """
        draw = Random(f"{self.seed} {index}")
        number = self.number * 8 + index + 1
        return replace(
            self, comm=comm, rank=comm.rank, size=comm.size, draw=draw, number=number, key=key,
            tags=0 if key is None else self.number,
        )  # fmt: skip


def spoil(work: Any) -> None:
    """Write into the tensors of an operation that has ended. Nobody may take that for data."""
    op = getattr(work, "op", None)
    if op is not None:
        for _, tensor in [*op.reads(), *op.writes()]:
            tensor.fill_(77)


def short(value: Any) -> str:
    """Return a value as text of bearable length."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.flatten()[:8].tolist()}{' ...' if value.numel() > 8 else ''} {tuple(value.shape)}"
    return repr(value)[:200]
