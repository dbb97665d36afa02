"""A signal handler that raises anywhere in this library's code: an op may fail, but no task waits for ever."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
import torch
import trio
from concurrency import in_threads, turns

import aiocomms
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

OURS = str(Path(aiocomms.__file__).parent)
LATER = 1000.0
"""Seconds after which every deadline has passed."""


class Interrupted(Exception):  # noqa: N818 - The name follows KeyboardInterrupt.
    """The exception that the signal handler raises."""


class Interrupter:
    """A hook that raises at the nth point, from 1, where CPython runs signal handlers in this library's code.

    These points are the start of each function and the return of each C function. The end of a loop is a third kind of
    point, for which the interpreter has no hook.
    """

    def __init__(self, nth: int) -> None:
        self.left = nth

    @contextmanager
    def __call__(self) -> Iterator[None]:
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(OURS):
            self.left -= 1
            if not self.left:
                raise Interrupted


def completes(one: Communicator, two: Communicator) -> None:
    """Call the collective that the other rank waits for; its own outcome is the caller's."""
    two.all_reduce(torch.ones(3))


def aborts(one: Communicator, two: Communicator) -> None:
    two.abort("enough")


def lets_deadlines_pass(one: Communicator, two: Communicator) -> None:
    in_threads(lambda: watchdog_looks(one, two))


def watchdog_looks(*comms: Communicator) -> None:
    """Do what the watchdog thread does when the deadlines have passed."""
    for comm in comms:
        comm._core.in_flight.expire(time.monotonic() + LATER)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Dropped generators warn.
@pytest.mark.parametrize(
    "loop", ["asyncio", *(pytest.param(loop, marks=pytest.mark.search) for loop in ("uvloop", "trio"))]
)
@pytest.mark.parametrize("does", [completes, aborts, lets_deadlines_pass])
def test_interrupt_at_any_instruction_leaves_no_task_waiting(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, does: Callable[[Communicator, Communicator], None]
) -> None:
    monkeypatch.setattr("aiocomms.core.core.AGAIN", 0.0)

    async def main(nth: int) -> bool:
        interrupter, ended = Interrupter(nth), []

        async def waits(name: str, work: aiocomms.Work[Any]) -> None:
            with suppress(Interrupted, CommError):
                await work
            ended.append(name)

        with suppress(Interrupted, CommError):
            async with local_world(2) as (one, two), anyio.create_task_group() as tasks:
                tasks.start_soon(waits, "all_reduce", one.all_reduce(torch.ones(3)))
                tasks.start_soon(waits, "recv", one.recv(torch.zeros(3), 1))
                tasks.start_soon(waits, "the other's recv", two.recv(torch.zeros(3), 0, 7))
                await turns()
                with interrupter():
                    with suppress(Interrupted, CommError):
                        does(one, two)
                    await turns()
                while len(ended) < 3:
                    in_threads(lambda: watchdog_looks(one, two))
                    await turns(1)
        return interrupter.left <= 0

    def goes_on(nth: int) -> bool:
        try:
            return bool(run(main, nth))
        except trio.TrioInternalError:  # An exception in a callback ends the run, by trio's rule.
            return True

    nth = 1
    while goes_on(nth):
        nth += 1
    assert nth > 20, f"{does.__name__} was interrupted at {nth} points only"
