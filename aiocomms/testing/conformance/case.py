"""What a check is given beside its communicator, and what becomes of it."""

from __future__ import annotations

import functools
import time
import unittest
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import anyio
import torch
from torch import Tensor
from torch.distributed import Store

from aiocomms import ReduceOp, new_comm, ops
from aiocomms.bootstrap.registry import find
from aiocomms.communicator import Communicator
from aiocomms.errors import UnsupportedOperation
from aiocomms.testing.conformance import data
from aiocomms.transport import Capabilities, Transport

ALL_SIZES = (1, 2, 3, 4, 7)
"""One rank, two, an odd number, a power of two, and a prime that is none."""

F = TypeVar("F", bound=Callable[..., Any])


def ranks(*sizes: int) -> Callable[[F], F]:
    """Say on how many ranks a check runs: once on each of these numbers."""

    def mark(check: F) -> F:
        check.ranks = sizes  # type: ignore[attr-defined]
        return check

    return mark


class Place(NamedTuple):
    """Where checks run."""

    transport: str | dict[str, str]
    device: str
    loop: str
    """``"asyncio"``, ``"uvloop"`` or ``"trio"``."""
    size: int
    processes: bool
    """Whether each rank is a process; otherwise all are tasks of one loop."""
    deadline: float
    """Seconds that a check may take."""

    def __str__(self) -> str:
        name = self.transport if isinstance(self.transport, str) else "+".join(self.transport.values())
        return f"{name}-{self.loop}-{self.size}"


class Span(NamedTuple):
    """When this rank called and left an operation that nobody may leave before everybody has called it."""

    what: str
    called: float
    left: float


class Outcome(NamedTuple):
    """What became of a check on one rank."""

    status: str
    """``"passed"``, ``"skipped"``, ``"failed"``, or ``"stopped"`` because another rank failed or time was up."""
    text: str = ""
    usable: bool = True
    """Whether the communicator may serve the next check."""
    agreed: tuple[tuple[str, object], ...] = ()
    """What all ranks must have said alike."""
    spans: tuple[Span, ...] = ()


class Board:
    """What the ranks of one check tell each other, beside the transport that is tested."""

    def __init__(self, publish: Callable[[int, str], None] = lambda rank, note: None) -> None:
        self._events: dict[tuple[int, str], anyio.Event] = {}
        self._publish = publish

    def tell(self, rank: int, note: str) -> None:
        """Say something to every rank."""
        self.hear(rank, note)
        self._publish(rank, note)

    def hear(self, rank: int, note: str) -> None:
        """A rank has said something."""
        self._event(rank, note).set()

    async def told(self, rank: int, note: str) -> None:
        """Wait for a rank's word."""
        await self._event(rank, note).wait()

    def _event(self, rank: int, note: str) -> anyio.Event:
        return self._events.setdefault((rank, note), anyio.Event())


class Case:
    """One rank's part of one check.

    A check is a coroutine function that every rank runs: ``async def test_x(comm: Communicator, case: Case)``. It
    fails by raising, and may say by :meth:`agree` and :meth:`synchronised` what is compared between the ranks.
    """

    def __init__(self, comm: Communicator, place: Place, board: Board, store: Store, name: str, seed: int) -> None:
        self.comm = comm
        self.place = place
        self.rank = comm.rank
        self.size = comm.size
        self.name = name
        """Tells checks apart, and the same check with other arguments."""
        self.seed = seed
        """The same on all ranks."""
        self.agreed: list[tuple[str, object]] = []
        self.spans: list[Span] = []
        self.reports: list[str] = []
        """What was reported to the loop: errors with nowhere else to go. A check that causes one clears the list."""
        self.opened: list[Communicator] = []
        self._board = board
        self._store = store

    # ------------------------------------------------------------------------------------------------- tensors

    def bits(self, dtype: torch.dtype, shape: tuple[int, ...], *key: object) -> Tensor:
        """Random bits; the same for the same arguments on every rank. Not to be changed."""
        return data.bits(self.seed, dtype, shape, self.name, *key)

    def numbers(self, dtype: torch.dtype, shape: tuple[int, ...], *key: object) -> Tensor:
        """Random numbers; the same for the same arguments on every rank. Not to be changed."""
        return data.numbers(self.seed, dtype, shape, self.name, *key)

    def full(self, content: Tensor) -> data.Slot:
        """A tensor on the communicator's device that holds ``content``."""
        return data.Slot(content, content.dtype, content.shape, self.comm.device)

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> data.Slot:
        """A tensor on the communicator's device that is to be written."""
        return data.Slot(None, dtype, shape, self.comm.device)

    # ---------------------------------------------------------------------------------------- order and agreement

    def tell(self, note: str) -> None:
        """Say something to every rank, beside the transport that is tested."""
        self._board.tell(self.rank, note)

    def tell_blocking(self, note: str) -> None:
        """Say something to who waits for it by :meth:`wait_blocking`."""
        self._store.set(f"{self.name}/{note}", "")

    def wait_blocking(self, note: str) -> None:
        """Wait for a word of :meth:`tell_blocking` without letting the loop run."""
        self._store.wait([f"{self.name}/{note}"])

    async def told(self, note: str, *by: int) -> None:
        """Wait for the word of some ranks; of all others where none are named."""
        for rank in by or [r for r in range(self.size) if r != self.rank]:
            await self._board.told(rank, note)

    async def meet(self, note: str) -> None:
        """Wait until every rank has come here."""
        self.tell(note)
        await self.told(note)

    def agree(self, what: str, value: object) -> None:
        """Say something that all ranks must say alike, in this order; of a tensor, its content."""
        self.agreed.append((what, data.checksum(value) if isinstance(value, Tensor) else value))

    def synchronised(self, what: str, called: float) -> None:
        """Say that an operation is done here which nobody may leave before everybody has called it.

        :param called: ``time.monotonic()`` before the call; one clock for all ranks of a machine.
        """
        self.spans.append(Span(what, called, time.monotonic()))

    # ------------------------------------------------------------------------------------------ what there is

    def need(self, family: str) -> None:
        """Skip the check where no transport carries a family of operations."""
        if family not in self.comm.transports:
            raise unittest.SkipTest(f"{self.place.transport} does not carry {family!r}")

    def need_any_order(self) -> None:
        """Skip the check where a message that waits holds up those behind it."""
        self.need("p2p")
        if self.capabilities("p2p").fifo:
            raise unittest.SkipTest(f"{self.place.transport} completes operations in the order posted only")

    def atomics(self) -> bool:
        """Whether windows here have atomics, which those in a GPU's memory need not have."""
        return "rma" not in self.comm.transports or ops.FetchAdd in self.capabilities("rma").ops

    def need_atomics(self) -> None:
        """Skip the check where windows have no atomics."""
        if not self.atomics():
            raise unittest.SkipTest(f"{self.place.transport} has no atomics on windows of this device")

    def need_processes(self) -> None:
        """Skip the check where the ranks share one loop."""
        if not self.place.processes:
            raise unittest.SkipTest("the ranks share one loop")

    def carrier(self, family: str) -> type[Transport]:
        """The transport that carries a family of operations."""
        found = find(self.comm.transports[family], self.comm.device)
        assert not isinstance(found, str), found
        return found

    def capabilities(self, family: str) -> Capabilities:
        """What the transport that carries a family of operations can do, on this device."""
        return self.comm._core.by_family[cast("ops.Family", family)].capabilities

    def rounds_each_step(self, dtype: torch.dtype) -> bool:
        """Whether sums of a dtype are rounded after each rank's contribution."""
        carried = "collectives" in self.comm.transports  # else they are made of messages
        return carried and dtype in self.capabilities("collectives").rounds_each_step

    def reduced(self, op: ReduceOp, tensors: Sequence[Tensor]) -> data.Expected:
        """What a reduction of one tensor per rank must give."""
        return data.reduced(op, tensors, self.rounds_each_step(tensors[0].dtype))

    def native(self, op: type[ops.Op]) -> bool:
        """Whether the transport does an operation itself, and the core does not express it in others."""
        return op.family in self.comm.transports and op in self.capabilities(op.family).ops

    async def open(self, name: str, timeout: float | None = None) -> Communicator:
        """Open another communicator over the same ranks. Collective."""
        comm = await new_comm(
            self.place.transport, self.place.device, store=self._store, rank=self.rank, size=self.size, name=name,
            timeout=timeout or self.place.deadline,
        )  # fmt: skip
        self.opened.append(comm)
        return comm


def refusable(dtype: torch.dtype, error: UnsupportedOperation) -> None:
    """A transport may refuse dtypes, before anything is sent; but not the plainest."""
    if dtype in (torch.float32, torch.uint8):
        raise error


@functools.cache
def reductions() -> tuple[ReduceOp, ...]:
    """Every reduction operator."""
    plain = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
    return (*(getattr(ReduceOp, name) for name in plain), ReduceOp.PREMUL_SUM(0.75))
