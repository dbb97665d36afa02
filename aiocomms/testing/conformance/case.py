"""The class ``Case``, and records of the place and the outcome of a check.

A check is a test function. Its arguments are a communicator and a ``Case``.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
import unittest
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

import anyio
import torch
from torch import Tensor
from torch.distributed import Store

from aiocomms import ReduceOp, Window, new_comm, ops
from aiocomms.bootstrap.registry import find
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import UnsupportedOperation
from aiocomms.testing.conformance import data
from aiocomms.transport import Capabilities, Transport

DIES: Final = "dies"
"""The note that a rank sends to the other ranks before the rank kills itself."""

F = TypeVar("F", bound=Callable[..., Any])


def ranks(*sizes: int, more: tuple[int, ...] = ()) -> Callable[[F], F]:
    """Mark a check with the numbers of ranks on which it runs. The check runs once for each number.

    A check names only numbers of ranks that can change its result. One rank has no peer, and two ranks have one peer
    each. With three ranks, one rank may take no part in a message or an error of the other two ranks. Four is a power
    of two. Seven is odd, and not a power of two. Four and seven ranks matter only for the schedules of collectives, so
    all other checks pass these numbers in ``more``.

    :param more: the numbers of ranks on which the check runs with ``--full`` only.
    """

    def mark(check: F) -> F:
        check.ranks = (sizes, more)  # type: ignore[attr-defined]
        return check

    return mark


class Place(NamedTuple):
    """The place where checks run: the transport, the device, the event loop, the number of ranks and the deadline."""

    name: str
    """The name of the transport. The name ends in ``@processes`` if each rank must be a process."""
    transport: str | dict[str, str]
    device: str
    loop: str
    """``"asyncio"``, ``"uvloop"`` or ``"trio"``."""
    size: int
    processes: bool
    """True if each rank is a process; otherwise all ranks are tasks of one loop."""
    deadline: float
    """The time that a check may take, in seconds."""

    def __str__(self) -> str:
        return f"{self.name}-{self.loop}-{self.size}"


class Span(NamedTuple):
    """The times at which this rank called an operation, and at which the operation ended on this rank.

    No rank may leave the operation before all ranks have called it.
    """

    what: str
    called: float
    left: float


class Outcome(NamedTuple):
    """The outcome of a check on one rank."""

    status: str
    """``"passed"``, ``"skipped"``, ``"failed"`` or ``"stopped"``.

    ``"stopped"`` means that another rank failed, or that the deadline passed.
    """
    text: str = ""
    usable: bool = True
    """True if the next check may use the same communicator."""
    agreed: tuple[tuple[str, object], ...] = ()
    """The names and values that must be equal on all ranks."""
    spans: tuple[Span, ...] = ()


class CaseBoard:
    """The notes that the ranks of one check send each other. The tested transport does not carry these notes."""

    def __init__(self, publish: Callable[[int, str], None] = lambda rank, note: None) -> None:
        self._events: dict[tuple[int, str], anyio.Event] = {}
        self._publish = publish

    def tell(self, rank: int, note: str) -> None:
        """Send a note from ``rank`` to every rank."""
        self.hear(rank, note)
        self._publish(rank, note)

    def hear(self, rank: int, note: str) -> None:
        """Record that a note from ``rank`` has arrived."""
        self._event(rank, note).set()

    async def told(self, rank: int, note: str) -> None:
        """Wait for a note from ``rank``."""
        await self._event(rank, note).wait()

    def _event(self, rank: int, note: str) -> anyio.Event:
        return self._events.setdefault((rank, note), anyio.Event())


class Case:
    """One rank's part of one check.

    A check is a coroutine function that every rank runs: ``async def test_x(comm: Communicator, case: Case)``. The
    check fails if it raises an error. A check passes values to :meth:`agree` and :meth:`synchronised`. The suite
    compares these values between the ranks.
    """

    def __init__(self, comm: Communicator, place: Place, board: CaseBoard, store: Store, name: str, seed: int) -> None:
        self.comm = comm
        self.place = place
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.name = name
        """The name of the check with its arguments."""
        self.seed = seed
        """The seed of the random data, which is the same on all ranks."""
        self.agreed: list[tuple[str, object]] = []
        self.spans: list[Span] = []
        self.reports: list[str] = []
        """The errors that were reported to the loop. A check that causes an error on purpose clears the list."""
        self.opened: list[Communicator] = []
        self._board = board
        self._store = store

    # ------------------------------------------------------------------------------------------------- tensors

    def bits(self, dtype: torch.dtype, shape: tuple[int, ...], *key: object) -> Tensor:
        """Return random bits. Equal arguments give equal bits on every rank. Do not change the tensor."""
        return data.bits(self.seed, dtype, shape, self.name, *key)

    def numbers(self, dtype: torch.dtype, shape: tuple[int, ...], *key: object) -> Tensor:
        """Return random numbers. Equal arguments give equal numbers on every rank. Do not change the tensor."""
        return data.numbers(self.seed, dtype, shape, self.name, *key)

    def full(self, content: Tensor) -> data.Slot:
        """Make a tensor on the communicator's device that holds ``content``."""
        return data.Slot(content, content.dtype, content.shape, self.comm.device)

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> data.Slot:
        """Make a tensor that an operation can write, on the communicator's device."""
        return data.Slot(None, dtype, shape, self.comm.device)

    # ---------------------------------------------------------------------------------------- order and agreement

    def tell(self, note: str) -> None:
        """Send a note to every rank. The tested transport does not carry the note."""
        self._board.tell(self.rank, note)

    def tell_blocking(self, note: str) -> None:
        """Post a note for ranks that wait for it in :meth:`wait_blocking`."""
        self._store.set(f"{self.name}/{note}", "")

    def wait_blocking(self, note: str) -> None:
        """Wait for a note that another rank posts with :meth:`tell_blocking`. The loop does not run during the wait."""
        self._store.wait([f"{self.name}/{note}"])

    async def told(self, note: str, *by: int) -> None:
        """Wait for a note from each rank in ``by``. If ``by`` is empty, wait for a note from all other ranks."""
        for rank in by or [r for r in range(self.size) if r != self.rank]:
            await self._board.told(rank, note)

    async def meet(self, note: str) -> None:
        """Wait until every rank has called this method with the same note."""
        self.tell(note)
        await self.told(note)

    def agree(self, what: str, value: object) -> None:
        """Report a value, or the content of a tensor, to the suite.

        All ranks must report equal values in the same order.
        """
        self.agreed.append((what, data.checksum(value) if isinstance(value, Tensor) else value))

    def synchronised(self, what: str, called: float) -> None:
        """Record that an operation has ended on this rank.

        Use this method only for operations that no rank may leave before all ranks have called them.

        :param called: ``time.monotonic()`` before the call. All ranks of a machine share this clock.
        """
        self.spans.append(Span(what, called, time.monotonic()))

    def die(self) -> NoReturn:
        """Kill the process of this rank. The check then passes on this rank. See :meth:`need_processes`."""
        self.need_processes()
        self.tell(DIES)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("the process has survived SIGKILL")

    # ------------------------------------------------------------------------------- capabilities of the transport

    def need(self, family: str) -> None:
        """Skip the check if no transport of the communicator implements the operations of ``family``."""
        if family not in self.comm.transports:
            raise unittest.SkipTest(f"{self.place.transport} does not carry {family!r}")

    def need_any_order(self) -> None:
        """Skip the check if the transport completes operations only in the order of their calls."""
        self.need("p2p")
        if self.capabilities("p2p").fifo:
            raise unittest.SkipTest(f"{self.place.transport} completes operations in the order posted only")

    def need_arrivals(self) -> None:
        """Skip the check if the transport cannot probe for messages."""
        self.need_any_order()
        if not self.capabilities("p2p").ops >= ops.ARRIVALS:
            raise unittest.SkipTest(f"{self.place.transport} carries no probes")

    def atomics(self) -> bool:
        """Return whether windows have atomics on this device. Windows in GPU memory may have no atomics."""
        return "rma" not in self.comm.transports or ops.FetchAdd in self.capabilities("rma").ops

    def need_atomics(self) -> None:
        """Skip the check if windows have no atomics."""
        if not self.atomics():
            raise unittest.SkipTest(f"{self.place.transport} has no atomics on windows of this device")

    def need_processes(self) -> None:
        """Skip the check if the ranks share one loop."""
        if not self.place.processes:
            raise unittest.SkipTest("the ranks share one loop")

    def carrier(self, family: str) -> type[Transport]:
        """Return the class of the transport that implements the operations of ``family``."""
        found = find(self.comm.transports[family], self.comm.device)
        assert not isinstance(found, str), found
        return found

    def capabilities(self, family: str) -> Capabilities:
        """Return what the transport for the operations of ``family`` can do on this device."""
        return self.comm._core.by_family[cast("ops.Family", family)].capabilities

    def rounds_each_step(self, dtype: torch.dtype) -> bool:
        """Return whether sums of a dtype are rounded after each rank's contribution."""
        carried = "collectives" in self.comm.transports  # otherwise the core reduces by messages
        return carried and dtype in self.capabilities("collectives").rounds_each_step

    def reduced(self, op: ReduceOp, tensors: Sequence[Tensor]) -> data.ExpectedResult:
        """Compute the expected result of a reduction of one tensor per rank."""
        return data.reduced(op, tensors, self.rounds_each_step(tensors[0].dtype))

    def native(self, op: type[ops.Op]) -> bool:
        """Return True if the transport itself implements an operation.

        Otherwise the core builds the operation from messages.
        """
        return op.family in self.comm.transports and op in self.capabilities(op.family).ops

    async def open(self, name: str, timeout: float | None = None) -> Communicator:
        """Open a second communicator with all ranks of this check. All ranks call this method.

        The check must close the communicator.
        """
        comm = await new_comm(
            self.place.transport, self.place.device, store=self._store, rank=self.rank, size=self.size, name=name,
            # This timeout is later than the deadline of the check, whose report says where each rank was.
            timeout=timeout or 2 * self.place.deadline,
        )  # fmt: skip
        self.opened.append(comm)
        return comm


async def all_blocked() -> None:
    """Wait until every other task of the loop is suspended.

    On asyncio, this function checks the tasks itself, because ``anyio.wait_all_tasks_blocked`` checks them only every
    0.1 s.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        await anyio.wait_all_tasks_blocked()
        return
    me: Any = asyncio.current_task()
    waiters: list[asyncio.Future[Any] | None] = [None]
    while any(waiter is None or waiter.done() for waiter in waiters):
        await asyncio.sleep(0)
        waiters = [getattr(task, "_fut_waiter", None) for task in asyncio.all_tasks(loop) - {me}]


async def wait_for(awaitable: Awaitable[object], scope: anyio.CancelScope, outcome: list[object]) -> None:
    """Await an object within ``scope``, and append the result to ``outcome``."""
    with scope:
        outcome.append(await awaitable)


async def cancel_await(awaitable: Awaitable[object]) -> None:
    """Start a task that awaits an object, and cancel the task as soon as the task is suspended."""
    scope, outcome = anyio.CancelScope(), list[object]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for, awaitable, scope, outcome)
        await all_blocked()
        scope.cancel()
    assert scope.cancelled_caught and not outcome


def refusable(dtype: torch.dtype, error: UnsupportedOperation) -> None:
    """Raise ``error`` if every transport must support the dtype. Otherwise ignore ``error``."""
    if dtype in (torch.float32, torch.uint8):
        raise error


@functools.cache
def reductions() -> tuple[ReduceOp, ...]:
    """Return every reduction operator."""
    plain = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
    return (*(getattr(ReduceOp, name) for name in plain), ReduceOp.PREMUL_SUM(0.75))


async def window(comm: Communicator, case: Case, dtype: torch.dtype, count: int) -> tuple[data.Slot, Window]:
    """Open a window. This rank's part of the window is a new tensor of ``count`` zeros."""
    if not {"rma", "p2p"} & set(comm.transports):
        raise unittest.SkipTest("no transport carries one-sided operations, nor messages to express them in")
    slot = case.full(torch.zeros(count, dtype=dtype))
    return slot, await comm.new_window(slot.tensor)
