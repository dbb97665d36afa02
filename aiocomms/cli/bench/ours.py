"""The calls of aiocomms that are measured, one for each operation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Protocol

from aiocomms.cli.bench.cases import ROOT, BenchCase
from aiocomms.cli.bench.operations import BURST
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.rma import Window

Call = Callable[[], Awaitable[Any]] | Callable[[], Any]
"""A function that runs one iteration of an operation.

The caller awaits the result, unless the contender's calls block.
"""


class Contender(Protocol):
    """A measured object: a communicator, or another library for comparison."""

    blocking: bool
    """True if the contender's calls block, so their results are not awaited."""

    async def enter(self) -> None:
        """Begin a turn, in which only this contender runs operations: wait until all ranks have called this method.

        The wait uses the contender's own barrier, and does not block the loop.
        """

    async def leave(self) -> None:
        """End a turn: wait until all ranks have called this method.

        After this wait, use no processor time until the next turn.
        """

    def bound(self, case: BenchCase) -> AbstractAsyncContextManager[Call | None]:
        """Prepare a case. The context's value is the call to measure, or None if this rank does not take part.

        :raises NotImplementedError: the contender lacks the operation.
        """


class Ours:
    """The contender that measures a communicator of aiocomms."""

    blocking = False

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    async def enter(self) -> None:
        """See :class:`Contender`."""
        await self._comm.barrier()

    leave = enter

    @asynccontextmanager
    async def bound(self, case: BenchCase) -> AsyncIterator[Call | None]:
        """See :class:`Contender`."""
        if case.moves in ("put", "put_signal", "get"):
            async with await self._comm.new_window(case.input if case.moves == "get" else case.output) as window:
                yield _one_sided(window, case)
        else:
            messages = {"send": _ping_pong, "send_burst": _burst}
            message = messages.get(case.moves)
            yield _collective(self._comm, case) if message is None else partial(message, self._comm, case)


def _collective(comm: Communicator, case: BenchCase) -> Call:
    into, out, inputs, outputs = case.input, case.output, case.inputs, case.outputs
    rows = [len(into) // case.size] * case.size
    calls: dict[str, Call] = {
        "all_reduce": partial(comm.all_reduce, out),
        "reduce": partial(comm.reduce, out, ROOT),
        "broadcast": partial(comm.broadcast, out, ROOT),
        "all_gather": partial(comm.all_gather, outputs, into),
        "all_gather_v": partial(comm.all_gather_v, outputs, into),
        "all_gather_single": partial(comm.all_gather_single, out, into),
        "reduce_scatter": partial(comm.reduce_scatter, out, inputs),
        "reduce_scatter_v": partial(comm.reduce_scatter_v, out, inputs),
        "reduce_scatter_single": partial(comm.reduce_scatter_single, out, into),
        "all_to_all": partial(comm.all_to_all, outputs, inputs),
        "all_to_all_single": partial(comm.all_to_all_single, out, into),
        "all_to_all_v_single": partial(comm.all_to_all_v_single, out, into, rows, rows),
        "scatter": partial(comm.scatter, out, inputs, ROOT),
        "gather": partial(comm.gather, outputs, into, ROOT),
        "gather_single": partial(comm.gather_single, out, into, ROOT),
        "barrier": comm.barrier,
    }
    return calls[case.op]


async def _ping_pong(comm: Communicator, case: BenchCase) -> None:
    if case.rank == 0:
        await comm.send(case.input, 1)
        await comm.recv(case.output, 1)
    else:
        await comm.recv(case.output, 0)
        await comm.send(case.input, 0)


async def _burst(comm: Communicator, case: BenchCase) -> None:
    if case.rank == 0:
        works = [comm.send(case.input, 1) for _ in range(BURST)]
    else:
        works = [comm.recv(case.output, 0) for _ in range(BURST)]
    for work in works:
        await work


def _one_sided(window: Window, case: BenchCase) -> Call | None:
    other = 1 - case.rank

    async def put() -> None:
        await window.put(case.input, other)
        await window.flush(other)  # OSU's osu_put_latency also flushes.

    async def ping_pong() -> None:
        if case.rank == 0:
            await window.put_signal(case.input, other)
            await window.wait_signal(other)
        else:
            await window.wait_signal(other)
            await window.put_signal(case.input, other)

    if case.moves == "put_signal":
        return ping_pong
    if case.rank == 1:
        return None
    return put if case.moves == "put" else partial(window.get, case.output, other)
