"""Windows where a program does what is rare: it overlaps their parts, cancels their calls, or moves their tensors."""

from __future__ import annotations

import anyio
import pytest
import torch
from concurrency import ranks, together, turns

from aiocomms.errors import ArgumentError, CommAbortedError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic
EITHER = pytest.mark.parametrize("transport", ["local", "c10d"])
"""A transport with windows, and one whose windows are made of messages."""


async def opened(world, count=8):
    return await ranks(world, lambda comm: comm.new_window(torch.arange(float(count))))


@EITHER
@pytest.mark.parametrize(
    ("call", "content"),
    [
        (lambda window: window.put(window.tensor[:4], 0, 2), [0, 1, 0, 1, 2, 3, 6, 7]),
        (lambda window: window.put(window.tensor[2:6], 0, 0), [2, 3, 4, 5, 4, 5, 6, 7]),
        (lambda window: window.put(window.tensor, 0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (lambda window: window.get(window.tensor[2:6], 0, 0), [0, 1, 0, 1, 2, 3, 6, 7]),
    ],
    ids=["put up", "put down", "put in place", "get"],
)
def test_put_or_get_between_overlapping_parts_moves_the_former_content(run, transport, call, content):
    async def main():
        async with local_world(2, transport) as world:
            windows = await opened(world)
            await call(windows[0])
            assert windows[0].tensor.tolist() == content
            await together(*(window.aclose for window in windows))

    run(main)


@EITHER
def test_second_close_waits_for_the_end_of_the_first(run, transport):
    async def main():
        async with local_world(2, transport) as world:
            windows, over = await opened(world), []
            with anyio.move_on_after(0):
                await windows[0].aclose()

            async def close():
                await windows[0].aclose()
                over.append(True)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(close)
                await turns()
                assert windows[0].closed
                assert not over
                await windows[1].put(torch.ones(1), 0)
                await windows[1].aclose()
            assert windows[0].tensor[0] == 1
            await windows[0].aclose()

    run(main)


@EITHER
def test_refused_close_leaves_the_window_open(run, transport):
    async def main():
        async with local_world(2, transport) as world:
            windows = await opened(world)
            wait = windows[0].wait_signal(1)
            with pytest.raises(ArgumentError, match=r"^close_window on .*: timeout is -1"):
                await windows[0].aclose(timeout=-1)

            def refuse(op, seq):
                raise ValueError("not now")

            hook = world[0].register_pre_hook(refuse)
            with pytest.raises(ValueError, match="not now"):
                await windows[0].aclose()
            hook.remove()
            await windows[1].signal(0)
            await wait
            await windows[1].put(torch.ones(1), 0)
            await together(*(window.aclose for window in windows))
            assert windows[0].closed
            assert windows[0].tensor[0] == 1

    run(main)


@EITHER
def test_cancelled_new_window_loses_the_communicator_at_once(run, transport):
    async def main():
        async with local_world(2, transport) as (one, two):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.new_window, torch.zeros(2))
                await turns()
                tasks.cancel_scope.cancel()
            for comm in (one, two):
                assert "new_window was cancelled" in str(await comm.lost())
            with pytest.raises(CommAbortedError, match="new_window was cancelled"):
                await two.new_window(torch.zeros(2))

    run(main)


@EITHER
def test_window_stays_on_the_memory_that_it_was_opened_with(run, transport):
    async def main():
        async with local_world(2, transport) as world:
            windows = await opened(world)
            tensor = windows[0].tensor
            memory = tensor.detach()
            tensor.data = torch.zeros(2, dtype=torch.int64)
            for window in windows:
                await window.put(torch.full((2,), 9.0), 0, 6)
                await window.flush()
            assert memory.tolist() == [0, 1, 2, 3, 4, 5, 9, 9]
            assert torch.equal(await windows[0].map_remote_tensor(0), memory)
            await together(*(window.aclose for window in windows))

    run(main)


def test_count_that_no_transport_can_carry_is_refused_without_runs(run):
    async def main():
        async with local_world(2) as world:
            windows = await opened(world)
            for move in (windows[0].put_v, windows[0].get_v):
                await move(torch.zeros(2), 1, [], [], 2**63 - 1)
                with pytest.raises(ArgumentError, match=r"count is 9223372036854775808, wanted .*2\*\*63 - 1"):
                    move(torch.zeros(2), 1, [], [], 2**63)
            await together(*(window.aclose for window in windows))

    run(main)
