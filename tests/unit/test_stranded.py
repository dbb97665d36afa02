"""The watch over `local_world`: it ends the first wait on a loop on which nothing can happen, and on no other loop."""

from __future__ import annotations

import asyncio
import functools
import selectors
import signal
import socket
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from aiocomms.errors import CommTimeoutError
from aiocomms.testing import local_world, run_ranks, simulate, stranded
from aiocomms.testing.faults import drop, inject

pytestmark = pytest.mark.deterministic


@pytest.fixture(autouse=True)
def no_thread_of_an_earlier_test(monkeypatch):
    """Hide threads that ran before the test, such as those of a compiler."""
    frames, me = sys._current_frames, threading.get_ident()
    old = {ident for ident, frame in frames().items() if ident != me and not stranded._is_quiet(frame, None)}
    new = SimpleNamespace(
        modules=sys.modules, _current_frames=lambda: {i: frame for i, frame in frames().items() if i not in old}
    )
    monkeypatch.setattr(stranded, "sys", new)
    monkeypatch.setattr(stranded, "_thread", SimpleNamespace(_count=lambda: 0))


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next look of the watch when it is idle, at most 12 times."""

    def __init__(self):
        self.ahead, self.jumps = 0.0, 12
        super().__init__(JumpingSelector(self))

    def time(self):
        return super().time() + self.ahead


class JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._jumping = loop

    def select(self, timeout=None):
        jumps = bool(timeout and timeout <= stranded.PERIOD and self._jumping.jumps)
        found = super().select(0 if jumps else timeout)
        if jumps and not found:
            self._jumping.ahead += timeout
            self._jumping.jumps -= 1
        return found


def jumping(main):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main())


async def one_after_the_other(world):
    for comm in world:
        await comm.all_reduce(torch.ones(1))


def test_awaiting_rank_after_rank_is_told_at_once():
    async def main():
        async with local_world(3) as world:
            with pytest.raises(CommTimeoutError) as caught:
                await one_after_the_other(world)
            assert caught.value.message.startswith(
                "call on all ranks before you await: rank 0 of 'world' waits in all_reduce for ranks 1, 2, which have "
                "called nothing, and nothing else runs on this loop; write "
                "`await asyncio.gather(*[comm.all_reduce(...) for comm in world])` or `await run_ranks(world, fn)`: "
                "rank 0 is in it"
            )
            assert caught.value.late == (1, 2)
            assert all(comm.aborted for comm in world)

    jumping(main)


def test_a_lonely_receive_is_told_at_once_and_fails_alone():
    async def main():
        async with local_world(2) as world:
            with pytest.raises(CommTimeoutError) as caught:
                await world[0].recv(torch.ones(1), 1)
            assert caught.value.message.startswith(
                "call on all ranks before you await: rank 0 of 'world' waits in recv(src=1, tag=0) for rank 1, which "
                "has called nothing, and nothing else runs on this loop; write `await run_ranks(world, fn)`; "
                "nothing matched recv(src=1, tag=0); it was withdrawn"
            )
            await run_ranks(world, lambda comm: comm.barrier())

    jumping(main)


def test_ranks_that_wait_in_a_circle_are_told_at_once_without_advice():
    async def main():
        async with local_world(2) as world:

            async def each(comm):
                await (comm.recv(torch.ones(1), 0) if comm.rank else comm.all_reduce(torch.ones(1)))

            with pytest.raises(
                CommTimeoutError,
                match=r"\): rank 0 of 'world' waits in all_reduce for rank 1, and nothing else runs on this loop: "
                r"rank 0 is in it \(collective 1\), rank 1 has finished no collective and is in recv\(src=0, tag=0\)",
            ):
                await run_ranks(world, each)

    jumping(main)


def test_a_dropped_call_is_not_taken_for_one_that_was_not_made():
    async def main():
        async with local_world(2) as world:
            with inject(world, drop(ranks=[1], op="all_reduce")), pytest.raises(CommTimeoutError) as caught:
                await asyncio.gather(*[comm.all_reduce(torch.ones(1)) for comm in world])
            assert "before you await" not in str(caught.value)

    jumping(main)


def a_timer(stack):
    timer = asyncio.get_running_loop().call_later(20, print)
    stack.append(timer.cancel)


def a_task_that_sleeps(stack):
    stack.append(asyncio.ensure_future(asyncio.sleep(20)).cancel)


def a_descriptor(stack):
    loop = asyncio.get_running_loop()
    ends = socket.socketpair()
    loop.add_reader(ends[0], print)
    stack += [ends[1].close, ends[0].close, functools.partial(loop.remove_reader, ends[0])]


def a_thread(stack):
    stop = threading.Condition()

    def wait():
        with stop:
            stop.wait()

    def end():
        with stop:
            stop.notify()
        thread.join()

    thread = threading.Thread(target=wait)
    thread.start()
    stack.append(end)


def a_timer_thread(stack):
    timer = threading.Timer(600, print)
    timer.start()
    stack += [timer.join, timer.cancel]


def a_signal_handler(stack):
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, print)
    stack.append(functools.partial(loop.remove_signal_handler, signal.SIGUSR2))


def an_own_timeout(stack):
    return 25


@pytest.mark.parametrize(
    "reason",
    [a_timer, a_task_that_sleeps, a_descriptor, a_thread, a_timer_thread, a_signal_handler, an_own_timeout],
    ids=lambda reason: reason.__name__,
)
def test_a_wait_that_something_may_end_goes_on(monkeypatch, reason):
    """The other rank makes its call at the sixth look of the watch, which ends the wait at none of them."""
    looks = []
    look = stranded.StrandedWatch._look

    @functools.wraps(look)
    def counted(self):
        look(self)
        looks.append(self._found)
        if len(looks) == 6:
            self._world[1].all_reduce(torch.ones(1)).forget()

    monkeypatch.setattr(stranded.StrandedWatch, "_look", counted)

    async def main():
        stack = []
        async with local_world(2) as world:
            try:
                timeout = reason(stack)
                own = {} if timeout is None else {"timeout": timeout}
                assert (await world[0].all_reduce(torch.ones(1), **own)).item() == 2
            finally:
                while stack:
                    stack.pop()()

    jumping(main)
    assert looks == [None] * 6


def test_idle_threads_of_earlier_simulations_do_not_hide_the_wait():
    async def simulated():
        await asyncio.to_thread(list)

    simulate(simulated)
    idle = [thread.ident for thread in threading.enumerate() if thread.name == "aiocomms simulated thread"]
    frames = sys._current_frames()
    assert idle
    assert all(stranded._is_quiet(frames[ident], None) for ident in idle)


def test_a_timer_after_the_deadline_does_not_hide_the_wait():
    async def main():
        async with local_world(2) as world, asyncio.timeout(60):
            with pytest.raises(CommTimeoutError, match="call on all ranks before you await"):
                await world[0].barrier()

    jumping(main)


def test_the_watch_of_one_world_does_not_hide_the_wait_of_another():
    async def main():
        async with local_world(2, name="teacher"), local_world(2) as world:
            with pytest.raises(CommTimeoutError, match="call on all ranks before you await"):
                await world[0].barrier()

    jumping(main)


def test_a_closed_world_leaves_no_timer_behind():
    async def main():
        async with local_world(2) as world:
            await run_ranks(world, lambda comm: comm.barrier())
        return [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]

    assert jumping(main) == []
