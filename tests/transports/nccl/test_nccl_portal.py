"""Ops that other threads than the loop's call on the fake GPU: what they come after, and what waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from concurrency import turns
from fake_cuda import FakeCuda, FakeStream, Gate
from fake_nccl import world

from aiocomms.errors import CommAbortedError, UnsupportedOperation
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


async def in_thread(call: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(call)


async def reached(cuda: FakeCuda, stream: FakeStream) -> None:
    """Wait until a stream has done all that it has now."""
    event = cuda.event()
    event.record(stream)
    await asyncio.to_thread(event.synchronize)


def test_an_op_comes_after_what_its_threads_stream_has_at_the_call_and_not_after_what_comes_later(run, cuda):
    """The loop is held between the call and the post, while the thread's stream gets more to do."""

    async def main() -> None:
        async with world(2) as (one, two):
            mine, tensor, portal = FakeStream(cuda.gpu), torch.zeros(1), one.portal()
            before = Gate(mine)
            cuda.enqueue(mine, lambda: tensor.fill_(5))

            works: list[Any] = []

            def call() -> None:
                with cuda.on(mine):
                    works.append(portal.all_reduce(tensor))

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()  # the loop has not come round meanwhile
            (work,) = works
            later = Gate(mine)
            other = two.all_reduce(torch.ones(1))
            await turns()
            assert not work.done()
            before.open()
            assert (await other).item() == 6
            assert (await in_thread(work.wait)).item() == 6
            assert not later.is_open
            later.open()

    run(main)


def test_a_stream_waits_for_an_op_and_the_thread_that_asks_does_not(run, cuda):
    async def main() -> None:
        async with world(2) as (one, two):
            mine, tensor, seen = FakeStream(cuda.gpu), torch.ones(1), list[float]()
            busy = Gate(cuda.default)  # on which the other rank calls

            def call() -> Any:
                with cuda.on(mine):
                    work = one.portal().all_reduce(tensor)
                    work.wait_stream()
                    cuda.enqueue(mine, lambda: seen.append(tensor.item()))
                    return work, work.done()

            other = two.all_reduce(torch.ones(1))
            work, done = await in_thread(call)
            assert not done
            assert not seen
            busy.open()
            await other
            await reached(cuda, mine)
            assert seen == [2.0]
            await in_thread(work.wait)
            await in_thread(work.wait_stream)  # a work that is done leaves nothing to wait for

    run(main)


def test_what_is_made_of_messages_is_there_for_the_stream_of_who_has_waited(run, cuda):
    """Its last kernel runs behind its caller's place, on a stream that nobody else knows."""

    async def main() -> None:
        async with world(2) as (one, two):
            mine, tensor, seen = FakeStream(cuda.gpu), torch.ones(1, dtype=torch.int16), list[int]()

            def call() -> None:
                with cuda.on(mine):
                    work = one.portal().all_reduce(tensor)
                    with pytest.raises(UnsupportedOperation, match="wait_stream"):
                        work.wait_stream()
                    work.wait()
                    cuda.enqueue(mine, lambda: seen.append(int(tensor.item())))

            _, _ = await asyncio.gather(in_thread(call), two.all_reduce(torch.ones(1, dtype=torch.int16)))
            await reached(cuda, mine)
            assert seen == [2]

    run(main)


def test_a_stream_that_is_to_wait_for_a_lost_op_is_told_so(run, cuda):
    async def main() -> None:
        async with world(2) as (one, _two):
            work = await in_thread(lambda: one.portal().all_reduce(torch.ones(1)))
            one.abort("enough")
            with pytest.raises(CommAbortedError, match="enough"):
                await in_thread(work.wait_stream)

    run(main)


def test_an_item_of_a_stream_comes_after_what_its_threads_stream_has(run, cuda):
    async def main() -> None:
        async with world(2) as (one, two):
            mine, tensor = FakeStream(cuda.gpu), torch.zeros(1)
            near, far = await asyncio.gather(in_thread(lambda: one.portal().open_stream(1)), two.open_stream(0))
            gate = Gate(mine)
            cuda.enqueue(mine, lambda: tensor.fill_(3))

            def call() -> None:
                with cuda.on(mine):
                    near.send(tensor)

            sending = asyncio.ensure_future(in_thread(call))
            received = asyncio.ensure_future(far.receive())
            await turns(30)
            assert not received.done()
            gate.open()
            assert (await received).item() == 3
            await sending
            await in_thread(near.close)
            await far.aclose()

    run(main)


def test_on_a_cpu_there_is_no_stream_to_wait(run):
    async def main() -> None:
        async with local_world(2) as (one, _two):
            work = await in_thread(lambda: one.portal().recv(torch.ones(1), 1))
            with pytest.raises(UnsupportedOperation, match="await"):
                await in_thread(work.wait_stream)
            assert await in_thread(work.cancel)

    run(main)
