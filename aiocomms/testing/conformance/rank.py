"""One rank of a world.

The rank opens a communicator, runs checks on this communicator, and returns the outcomes of the checks.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
import unittest
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
from torch.distributed import Store

from aiocomms import new_comm
from aiocomms.communicator.communicator import Communicator
from aiocomms.testing.conformance.case import Case, CaseBoard, Outcome, Place

TURNS = 100
"""The number of event loop iterations after a check. All works of the check should end within these iterations."""
LOOKS = 1000
"""The number of times that the rank looks for pending works after :data:`TURNS` iterations, once per millisecond."""

Check = Callable[..., Awaitable[None]]


class Request(NamedTuple):
    """The request to run a check."""

    check: Check
    arguments: dict[str, Any]
    """The arguments of the check besides ``comm`` and ``case``."""
    name: str
    """The name of the check with its arguments."""
    seed: int


class Reports(logging.Handler):
    """The errors that are reported to the loop because no caller could handle them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def install(self) -> None:
        """Collect errors from the running asyncio loop, and from the log. On trio, errors go to the log."""
        logging.getLogger("aiocomms").addHandler(self)
        loop = _asyncio_loop()
        if loop is not None:
            loop.set_exception_handler(self._hear)

    def remove(self) -> None:
        """Stop collecting from the log."""
        logging.getLogger("aiocomms").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the text of one log record."""
        error = record.exc_info[1] if record.exc_info else None
        self._add(record.getMessage(), error)

    def _hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._add(context["message"], context.get("exception"))

    def take(self) -> str:
        """Return the reports so far, and clear the list of reports."""
        text = "".join(f"reported to the loop: {text}" for text in self.texts)
        self.texts.clear()
        return text

    def _add(self, message: str, error: BaseException | None) -> None:
        self.texts.append(message + "\n" + "".join(traceback.format_exception(error) if error else []))


class Rank:
    """One rank of a world."""

    def __init__(self, place: Place, rank: int, store: Store, board: CaseBoard, reports: Reports) -> None:
        self._place = place
        self._rank = rank
        self._store = store
        self._board = board
        self._reports = reports
        self._scope = anyio.CancelScope()
        self._waiting = ""
        self._case: Case | None = None
        self.comm: Communicator | None = None
        """The communicator of this rank. Successive checks use the same communicator until a check fails."""

    def prepare(self, store: Store, board: CaseBoard) -> None:
        """Store the objects that the next check uses, and create the check's cancel scope."""
        self._store, self._board = store, board
        self._scope = anyio.CancelScope()
        self._waiting = ""

    async def run(self, request: Request) -> Outcome:
        """Run a check, and verify that the check leaves nothing behind."""
        try:
            with self._scope:
                return await self._run(request)
        except BaseException as error:  # the failure of a check must not end the rank
            return Outcome("failed", self._waiting + _trace(error), usable=False)
        return Outcome("stopped", self._waiting, usable=False)

    async def _run(self, request: Request) -> Outcome:
        try:
            case = await self._begin(request)
            await request.check(case.comm, case, **request.arguments)
            await _settled(case)
        except unittest.SkipTest as skip:
            return Outcome("skipped", str(skip), usable=self._usable())
        except BaseException as error:
            if self._scope.cancel_called:
                self._waiting += "it was waiting here:\n" + _trace(error)
            elif isinstance(error, anyio.get_cancelled_exc_class()):
                return Outcome("failed", "a cancellation came out that was not requested\n" + _trace(error), False)
            raise
        return Outcome("passed", "", self._usable(), tuple(case.agreed), tuple(case.spans))

    def stop(self) -> None:
        """Cancel a check that does not end by itself."""
        works = [work for comm in self._comms() for work in pending(comm)]
        self._waiting = "".join(f"{work}\n" for work in works)
        self._scope.cancel()

    async def close(self) -> None:
        """Close all communicators. The rank's communicators may be in any state."""
        comms = self._comms()
        self.comm = self._case = None
        for comm in comms:
            if not self._settled(comm):
                comm.abort("its check has failed")
            await comm.aclose()

    def _comms(self) -> list[Communicator]:
        return [*(self._case.opened if self._case else []), *([self.comm] if self.comm else [])]

    async def _begin(self, request: Request) -> Case:
        place = self._place
        if self.comm is None:
            self.comm = await new_comm(
                place.transport, place.device, store=self._store, rank=self._rank, size=place.size,
                timeout=0.8 * place.deadline,
            )  # fmt: skip
        self._case = case = Case(self.comm, place, self._board, self._store, request.name, request.seed)
        case.reports = self._reports.texts
        return case

    def _usable(self) -> bool:
        return self.comm is not None and not self.comm.closed and not self.comm.aborted

    def _settled(self, comm: Communicator) -> bool:
        return comm.closed or comm.aborted or not pending(comm)


def pending(comm: Communicator) -> list[str]:
    """Return the representations of the works that are pending on a communicator."""
    return [repr(work) for work in comm._core.in_flight]


async def _settled(case: Case) -> None:
    """Verify that a check leaves no work pending and no communicator open."""
    for look in range(TURNS + LOOKS):  # this polls because pending works have no common event
        if not (left := [work for comm in (case.comm, *case.opened) for work in pending(comm)]):
            break
        await anyio.sleep(0.001 if look >= TURNS else 0)
    assert not left, f"the check has ended and left under way: {', '.join(left)}"
    unclosed = [comm for comm in case.opened if not comm.closed]
    assert not unclosed, f"the check has left open: {unclosed}"


def other_tasks() -> set[str]:
    """Return the representations of the asyncio tasks of this loop, except the current task."""
    if _asyncio_loop() is None:
        return set()
    return {repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}}


def with_leftovers(outcomes: list[Outcome], tasks: set[str], reported: str) -> list[Outcome]:
    """Mark a check as failed if it has left tasks behind, or has caused errors that were reported to the loop."""
    text = (f"the check has left tasks behind: {tasks}\n" if tasks else "") + reported
    if not text:
        return outcomes
    return [
        Outcome("failed" if outcome.status == "passed" else outcome.status, outcome.text + text, usable=False)
        for outcome in outcomes
    ]


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None  # The loop is trio's.


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _skip_frame(error)))


def _skip_frame(error: BaseException) -> Any:
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace
