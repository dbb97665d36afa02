"""The cost of waiting: an idle communicator and pending operations cause no timer, no polling and no wake-up."""

from __future__ import annotations

import resource
import time

import anyio
import pytest
import torch

from aiocomms.communicator.communicator import Communicator
from aiocomms.testing.conformance.case import Case, ranks

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.loops, pytest.mark.memory, pytest.mark.clock]

WINDOW = 0.05
"""The time in seconds during which wake-ups are counted."""

ALLOWED = 2
"""The wake-ups of the loop's thread that are allowed within ``WINDOW``: one by a timer, and one by other processes."""


async def wakeups() -> tuple[int, float]:
    """Count how often the loop's thread goes to sleep while its only task sleeps.

    Also measure the thread's processor time in seconds. Return the smallest values of several intervals, because in a
    virtual machine the kernel may also count time in which the host runs another machine.
    """
    counts, ran = [], []
    for _ in range(6):
        before, began = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.thread_time()
        await anyio.sleep(WINDOW)
        ran.append(time.thread_time() - began)
        counts.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
        if min(counts) <= ALLOWED and min(ran) < WINDOW / 2:
            break
    return min(counts), min(ran)


async def expect_silence(case: Case, note: str) -> None:
    """Check that the event loop does not wake up while the tasks only wait.

    All ranks call this function at the same time, because all ranks may run on one thread.
    """
    await case.meet(f"before {note}")
    if case.rank == 0 or case.place.processes:
        count, ran = await wakeups()
        assert count <= ALLOWED, f"{note}: the loop woke up {count} times in {WINDOW} s"
        assert ran < WINDOW / 2, f"{note}: the loop's thread ran for {ran} s of {WINDOW} s"
    await case.meet(f"after {note}")


@ranks(1, 2, more=(3,))
async def test_communicator_without_pending_ops_never_wakes_the_loop(comm: Communicator, case: Case) -> None:
    await expect_silence(case, "when just opened")
    await comm.barrier()
    await comm.all_reduce(torch.ones(4, device=comm.device))
    await expect_silence(case, "after some operations")


@ranks(2, more=(3,))
async def test_pending_recv_never_wakes_the_loop(comm: Communicator, case: Case) -> None:
    case.need("p2p")
    tensor = torch.zeros(3, device=comm.device)
    if comm.rank == 0:
        works = [comm.recv(tensor, 1), comm.recv_object(1)]
        await expect_silence(case, "with receives that wait")
        for work in works:
            assert await work.cancel()
    else:
        await expect_silence(case, "with receives that wait")
    await comm.barrier()
    await expect_silence(case, "when they are withdrawn")


@ranks(2, more=(3,))
async def test_pending_collective_never_wakes_the_loop(comm: Communicator, case: Case) -> None:
    work = comm.barrier() if comm.rank == 0 else None
    await expect_silence(case, "with a collective that waits")
    await (work or comm.barrier())


@ranks(2)
async def test_pending_stream_receive_never_wakes_the_loop(comm: Communicator, case: Case) -> None:
    case.need_any_order()
    stream = await comm.open_stream(1 - comm.rank)
    await expect_silence(case, "with an open stream")
    await stream.aclose()
