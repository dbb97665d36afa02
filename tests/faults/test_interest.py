"""Each way of losing interest in a receive or wait, as the table of docs/cancellation.md has it: case 78.

The table says what becomes of the op; a case here does what its row says. Afterwards two messages tell the outcomes
apart: the first one goes to the next receive, or the lost op takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import trio
from concurrency import run_on, turns

from aiocomms import Work
from aiocomms.blocking import BlockingWindow, BlockingWork
from aiocomms.errors import CommTimeoutError, WorkCancelledError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

PAGE = Path(__file__).parents[2] / "docs" / "cancellation.md"
TRANSPORTS = ("local", "c10d", "ucx")

Post = Callable[..., Work[Any]]
Case = Callable[[Post], Awaitable[object]]


def table() -> dict[str, str]:
    """Return the outcome of each way, from the page."""
    text = PAGE.read_text().split("| event |", 1)[-1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| ([^-].*?) \| (\w[\w ]*\w)[.:;,|]? ?.*\|$", text, re.MULTILINE))


async def ended(task: asyncio.Future[Any]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.done()


async def consume(work: Work[Any]) -> None:
    await work


# ------------------------------------------------------------------------------------------------------- each row


async def cancelled_while_it_awaits(post: Post) -> None:
    task = asyncio.create_task(consume(post()))
    await turns()
    task.cancel()
    await ended(task)


async def wait_for_nothing(post: Post) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post(), 0)


async def wait_for_a_while(post: Post) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post(), 0.01)


async def wait_for_wait(post: Post) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post().wait(), 0)


async def asyncio_timeout(post: Post) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await post()


async def gather_in_its_own_turn(post: Post) -> None:
    both = asyncio.gather(post(), asyncio.sleep(0))
    both.cancel()
    await ended(both)


async def task_before_its_first_step(post: Post) -> None:
    task = asyncio.create_task(post())
    task.cancel()
    await asyncio.sleep(0)
    assert task.done()
    await ended(task)


async def task_group(post: Post) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(post())
            raise KeyError
    except* KeyError:
        pass


async def closed_by_a_task_group(post: Post) -> None:
    post().close()


async def eager(post: Post) -> None:
    if sys.version_info < (3, 12):
        pytest.skip("Python 3.12 brings it")
    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    try:
        task = asyncio.create_task(post())
        task.cancel()
        await ended(task)
    finally:
        loop.set_task_factory(None)


async def scope(post: Post, move_on_after: Callable[[float], Any]) -> None:
    with move_on_after(0) as scope:
        await post()
    assert scope.cancelled_caught


async def nursery(post: Post, make: Callable[[], Any]) -> None:
    async with make() as tasks:
        tasks.start_soon(consume, post())
        tasks.cancel_scope.cancel()


async def cancel(post: Post) -> None:
    assert await post().cancel()


async def deadline(post: Post) -> None:
    with pytest.raises(CommTimeoutError):
        await post(timeout=0.01)


async def calls_it_itself(post: Post) -> None:
    async def receive() -> None:
        await post()

    task = asyncio.create_task(receive())
    task.cancel()
    await ended(task)


async def handed_to_a_coroutine(post: Post) -> None:
    task = asyncio.create_task(consume(post()))
    task.cancel()
    await ended(task)


async def another_awaiter(post: Post) -> object:
    work = post()
    tasks = [asyncio.create_task(consume(work)) for _ in range(2)]
    await turns()
    tasks[0].cancel()
    await ended(tasks[0])
    return tasks[1]


async def shield(post: Post) -> None:
    outer = asyncio.shield(post())
    outer.cancel()
    await ended(outer)


async def wait_blocking(post: Post) -> None:
    with pytest.raises(TimeoutError):
        post().wait_blocking(timeout=0)


async def wait_in_a_thread(post: Post) -> None:
    def wait() -> Any:
        work = post(portal=True)
        with pytest.raises(TimeoutError):
            work.wait(0)
        return work

    work = await asyncio.to_thread(wait)
    while work._work is None:  # The loop has not started the op yet.
        await turns()


async def interrupted_in_a_thread(post: Post) -> None:
    """Raise in the waiting thread what Ctrl-C raises in the main thread."""
    works: list[Any] = []
    threads: list[int] = []

    def wait() -> None:
        threads.append(threading.get_ident())
        works.append(post(portal=True))
        with pytest.raises(KeyboardInterrupt):
            works[0].wait()

    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    while not works or not works[0]._bells:
        await turns()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads[0]), ctypes.py_object(KeyboardInterrupt))
    await waiting


async def dropped(post: Post) -> None:
    post()
    gc.collect()


ASYNCIO: dict[str, Case] = {
    "a task that awaits it is cancelled": cancelled_while_it_awaits,
    "`asyncio.wait_for(work, 0)`": wait_for_nothing,
    "`asyncio.wait_for(work, seconds)`": wait_for_a_while,
    "`asyncio.wait_for(work.wait(), 0)`": wait_for_wait,
    "`asyncio.timeout(0)` around `await work`": asyncio_timeout,
    "`asyncio.gather(work, …)`, cancelled in the same turn of the loop": gather_in_its_own_turn,
    "`asyncio.create_task(work)`, cancelled before its first step": task_before_its_first_step,
    "`TaskGroup.create_task(work)`, and the group's body raises at once": task_group,
    "`TaskGroup.create_task(work)` of a finished group (Python 3.13)": closed_by_a_task_group,
    "`asyncio.eager_task_factory` (Python 3.12), and the task is cancelled at once": eager,
    "a task that would call the operation, cancelled before its first step": calls_it_itself,
    "a task whose coroutine has the work as an argument, cancelled before its first step": handed_to_a_coroutine,
    "`asyncio.shield(work)` is cancelled": shield,
    "one of two tasks that await it is cancelled": another_awaiter,
    "`await work.cancel()`": cancel,
    "its deadline (`timeout=`) passes": deadline,
    "`work.wait_blocking(timeout=0)`": wait_blocking,
    "`wait(0)` of a portal's work": wait_in_a_thread,
    "Ctrl-C ends the `wait()` of a portal's work, and no other thread waits for it": interrupted_in_a_thread,
    "no task awaits it, and the program deletes it": dropped,
}
EITHER: dict[str, tuple[Case, Case]] = {  # The first case is for asyncio by anyio, the second for trio.
    "`anyio.move_on_after(0)` or `trio.move_on_after(0)` around `await work`": (
        partial(scope, move_on_after=anyio.move_on_after),
        partial(scope, move_on_after=trio.move_on_after),
    ),
    "a task group of anyio or nursery of trio, cancelled before its task's first step": (
        partial(nursery, make=anyio.create_task_group),
        partial(nursery, make=trio.open_nursery),
    ),
}
CASES = (
    *(("asyncio", way, case) for way, case in ASYNCIO.items()),
    *(("asyncio", way, case) for way, (case, _) in EITHER.items()),
    *(("trio", way, case) for way, (_, case) in EITHER.items()),
    *(
        ("trio", way, ASYNCIO[way])
        for way in ("`await work.cancel()`", "no task awaits it, and the program deletes it")
    ),
)


# ----------------------------------------------------------------------------------------------------------- oracle


class Messages:
    """One kind of message from rank 0 to rank 1, whose content is the number 1, and then 2."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._lost = torch.zeros(1)
        self._next = [torch.zeros(1), torch.zeros(1)]

    def post(self, portal: bool = False, **more: Any) -> Any:
        """Return the op in which interest is lost."""
        return (self._comm.portal() if portal else self._comm).recv(self._lost, 0, **more)

    def send(self, peer: Any, number: int) -> Work[Any]:
        return peer.send(torch.full((1,), float(number)), 1)

    def receive(self, number: int) -> Work[Any]:
        return self._comm.recv(self._next[number], 0)

    def check(self, result: Any, number: int) -> None:
        assert result.item() == number

    def check_lost(self, number: int) -> None:
        assert self._lost.item() == number


class Objects(Messages):
    def post(self, portal: bool = False, **more: Any) -> Any:
        return (self._comm.portal() if portal else self._comm).recv_object(0, **more)

    def send(self, peer: Any, number: int) -> Work[Any]:
        return peer.send_object(number, 1)

    def receive(self, number: int) -> Work[Any]:
        return self._comm.recv_object(0)

    def check(self, result: Any, number: int) -> None:
        assert result == number

    def check_lost(self, number: int) -> None:
        """Check nothing: no variable has the object."""


class Signals(Objects):
    """Signals, which are all alike: only their number tells the outcomes apart."""

    def __init__(self, comm: Any, windows: list[Any]) -> None:
        super().__init__(comm)
        self._windows = windows

    def post(self, portal: bool = False, **more: Any) -> Any:
        window = self._windows[1]
        return (BlockingWindow(self._comm.portal(), window) if portal else window).wait_signal(0, **more)

    def send(self, peer: Any, number: int) -> Work[Any]:
        return self._windows[0].signal(1)

    def receive(self, number: int) -> Work[Any]:
        return self._windows[1].wait_signal(0)

    def check(self, result: Any, number: int) -> None:
        assert result is None


async def lose(peer: Any, comm: Any, messages: Messages, case: Case, outcome: str) -> None:
    """Lose interest in an op, and check which op gets which message."""
    before, posted = comm._core.ledger.issued, list[Any]()

    def post(**more: Any) -> Any:
        work = messages.post(**more)
        if outcome == "withdrawn":
            posted.append(work)  # The outcome is the same if the program keeps the work.
        return work

    kept = await case(post)
    assert (comm._core.ledger.issued == before) == (outcome == "not called")
    first, second = messages.receive(0), messages.receive(1)
    for number in (1, 2):
        await messages.send(peer, number)
    if outcome == "goes on":
        messages.check(await first, 2)
        messages.check_lost(1)
        assert await second.cancel()
    else:
        messages.check(await first, 1)
        messages.check(await second, 2)
        messages.check_lost(0)
        for work in posted:
            error = work._outcome() if isinstance(work, BlockingWork) else work.exception()
            assert isinstance(error, (WorkCancelledError, CommTimeoutError))
    del kept


@pytest.mark.search
@pytest.mark.real
@pytest.mark.fault(78)
@pytest.mark.parametrize(("loop", "way", "case"), CASES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abandoned_work_is_withdrawn_or_completes_as_documented(
    transport: str, loop: str, way: str, case: Case
) -> None:
    outcome = table()[way]

    async def main() -> None:
        async with local_world(2, transport) as (peer, comm):
            windows: list[Any] = [None, None]

            async def open_window(rank: int) -> None:
                windows[rank] = await (peer, comm)[rank].new_window(torch.zeros(1))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(open_window, 0)
                tasks.start_soon(open_window, 1)
            for messages in (Messages(comm), Objects(comm), Signals(comm, windows)):
                await lose(peer, comm, messages, case, outcome)

    run_on(loop, main)


def test_documented_table_has_a_row_for_each_case() -> None:
    rows = table()
    assert set(rows) == {way for _, way, _ in CASES}
    assert set(rows.values()) == {"withdrawn", "goes on", "not called"}
