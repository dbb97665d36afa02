"""Signals of windows, which tell a waiting rank that puts have arrived."""

from __future__ import annotations

import anyio
import pytest
import torch

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommClosedError, CommTimeoutError, WorkCancelledError
from aiocomms.testing.conformance.case import Case, ranks, window


@pytest.mark.memory
@ranks(2, 3, more=(7,))
@pytest.mark.parametrize("count", [0, 1, 1031, 40_009])
async def test_wait_signal_returns_after_the_put_data_is_visible(comm: Communicator, case: Case, count: int) -> None:
    slot, win = await window(comm, case, torch.int32, count)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(3):
        mine = case.bits(torch.int32, (count,), comm.rank, turn).to(comm.device, copy=True)
        await win.put(mine, right)
        mine.fill_(-1)  # the put is done, so its source may be used again
        await win.signal(right)
        await win.wait_signal(left)
        slot.expect(case.bits(torch.int32, (count,), left, turn))
        await comm.barrier()
    await win.aclose()


@pytest.mark.memory
@ranks(1, 2, more=(3,))
@pytest.mark.parametrize("count", [0, 1, 1031, 400_009])
async def test_put_signal_arrives_behind_its_data_and_counts_once(comm: Communicator, case: Case, count: int) -> None:
    """The signal of a put arrives after the data of this put and of earlier puts, and counts as one signal."""
    slot, win = await window(comm, case, torch.int32, count + 2)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(3):
        mine = case.bits(torch.int32, (count + 2,), comm.rank, turn).to(comm.device, copy=True)
        first, last = mine[:2], mine[2:].clone()
        win.put(first, right)
        work = win.put_signal(last, right, 2)
        assert await work is last
        last.fill_(-1)  # its source may be used again
        await win.wait_signal(left)
        slot.expect(case.bits(torch.int32, (count + 2,), left, turn))
        await comm.barrier()
    await win.signal(right)
    await win.wait_signal(left)
    waiting = win.wait_signal(left)  # no call has signalled twice
    await case.meet("waiting")
    assert not waiting.done()
    await case.meet("looked")
    win.put_signal(torch.empty(0, dtype=torch.int32, device=comm.device), right, count + 2)
    await waiting
    await win.aclose()


@pytest.mark.memory
@ranks(1, 3, more=(2,))
async def test_each_wait_signal_takes_one_signal_of_its_rank(comm: Communicator, case: Case) -> None:
    """A signal may arrive before or after the call of the wait.

    Each wait takes one signal of the rank that the wait names.
    """
    _, win = await window(comm, case, torch.int32, 1)
    everyone = range(comm.size)
    for dst in everyone:
        for _ in range(comm.rank + 1):
            win.signal(dst)
    await win.flush()
    for src in everyone:
        for _ in range(src + 1):
            await win.wait_signal(src)
    await case.meet("all taken")
    waiting = [win.wait_signal(src) for src in everyone]
    assert not any(work.done() for work in waiting)
    await case.meet("waiting")
    for dst in everyone:
        await win.signal(dst)
    for work in waiting:
        await work
    await win.aclose()


@pytest.mark.loops
@pytest.mark.memory
@pytest.mark.clock
@ranks(2)
async def test_cancelled_or_late_wait_signal_is_withdrawn(comm: Communicator, case: Case) -> None:
    """A call of ``cancel``, a cancellation of the waiting task, and the deadline each withdraw a wait for a signal.

    A signal that arrives after the withdrawal ends the next wait.
    """
    _, win = await window(comm, case, torch.int32, 1)
    if comm.rank == 0:
        await case.told("withdrawn", 1)
        await win.signal(1)
    else:
        work = win.wait_signal(0)
        assert await work.cancel()
        with pytest.raises(WorkCancelledError):
            await work
        with anyio.move_on_after(0):
            await win.wait_signal(0)
        with pytest.raises(CommTimeoutError):
            await win.wait_signal(0, timeout=0.05)
        case.tell("withdrawn")
        await win.wait_signal(0)
    await win.aclose()
    assert not comm.aborted


@ranks(2)
async def test_window_close_withdraws_pending_wait_signal(comm: Communicator, case: Case) -> None:
    _, win = await window(comm, case, torch.int32, 1)
    work = win.wait_signal(1 - comm.rank, timeout=None)
    await win.aclose()
    with pytest.raises(CommClosedError, match="the window was closed on this rank"):
        await work
    assert not await work.cancel()
    await comm.barrier()


@ranks(2)
async def test_abort_fails_pending_wait_signal(comm: Communicator, case: Case) -> None:
    _, win = await window(comm, case, torch.int32, 1)
    work = win.wait_signal(1 - comm.rank)
    await case.meet("waiting")
    if comm.rank == 0:
        comm.abort("for the test")
    with pytest.raises(CommAbortedError, match="for the test"):
        await work
    with pytest.raises(CommAbortedError):
        win.signal(0)
