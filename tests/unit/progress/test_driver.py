"""The driver: it polls transports, completes works, and sleeps in between."""

from __future__ import annotations

import asyncio
import os
import re
import select
import selectors
import subprocess
import sys
import threading
from collections import deque

import anyio
import pytest
import torch
import trio
from aiocomms_local import LocalTransport
from concurrency import LOOPS, in_threads, ranks, run_on, turns
from processes import HANGS, PATIENCE, all_let_go, held
from torch.distributed import HashStore

import aiocomms
from aiocomms.errors import CommAbortedError
from aiocomms.lowlevel import Inbox, Waker, run_in_thread
from aiocomms.progress import driver
from aiocomms.progress.driver import LoopDriver, Promise
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities

pytestmark = [pytest.mark.deterministic, pytest.mark.loops]

# --------------------------------------------------------------------------------------------- other tasks' turns


@pytest.mark.parametrize("transport", ["local", "ucx"])
@pytest.mark.parametrize("loop", LOOPS)
def test_tasks_whose_ops_end_within_their_calls_let_the_loop_have_its_turn(loop, transport, monkeypatch):
    """An await of a completed work does not suspend its task, but other tasks still get their turns."""
    monkeypatch.setattr(driver, "TURN", -1.0)  # The loop has waited long enough at any time.
    beats, over = 0, False

    async def beat():
        nonlocal beats
        while not over:
            beats += 1
            await anyio.lowlevel.checkpoint()

    async def main():
        nonlocal over
        async with local_world(2, transport) as comms, anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            await turns()
            before = beats
            for _ in range(1000):
                sent = comms[0].send(torch.ones(1), 1)
                await comms[1].recv(torch.ones(1), 0)
                await sent
            assert beats - before > 20
            over = True

    run_on(loop, main)


# ------------------------------------------------------------------------------------------------ sleeping


class CountingSelector(selectors.DefaultSelector):
    """A selector that counts how often an asyncio loop wakes up."""

    wakes = 0

    def select(self, timeout=None):
        type(self).wakes += 1
        return super().select(timeout)


class CountingInstrument(trio.abc.Instrument):
    """An instrument that counts how often a trio loop wakes up."""

    wakes = 0

    def before_io_wait(self, timeout):
        CountingSelector.wakes += 1


async def wakes_during(seconds):
    await turns()
    before = CountingSelector.wakes
    await anyio.sleep(seconds)
    return CountingSelector.wakes - before


def run_counting(loop, main):
    if loop == "trio":
        return trio.run(main, instruments=[CountingInstrument()])
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(CountingSelector())) as runner:
        return runner.run(main())


@pytest.mark.real
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_idle_communicator_never_wakes_the_loop(loop):
    async def main():
        async with local_world(3) as world:
            await ranks(world, lambda comm: comm.all_reduce(torch.ones(1)))
            assert await wakes_during(0.1) <= 3
            recv = world[0].recv(torch.zeros(1), 1, timeout=30)  # No message comes, and the deadline is far away.
            world[1].all_reduce(torch.zeros(1))
            assert await wakes_during(0.1) <= 3
            assert await recv.cancel()
            await ranks([world[0], world[2]], lambda comm: comm.all_reduce(torch.ones(1)))

    run_counting(loop, main)


# ----------------------------------------------------------------------------------------------------- waker


def test_waker_loses_no_wake_up():
    """A driver polls, clears the waker and empties its queue: it misses no item of threads that never pause."""
    waker, todo, count, threads = Waker(), deque(), 20_000, 4

    def hammer():
        for i in range(count):
            todo.append(i)
            waker.wake()

    workers = [threading.Thread(target=hammer) for _ in range(threads)]
    for worker in workers:
        worker.start()
    done, poller = 0, select.poll()
    poller.register(waker.fileno(), select.POLLIN)
    while done < count * threads:
        assert poller.poll(10_000), "it sleeps, and there is something to do"
        waker.clear()
        while todo:
            todo.popleft()
            done += 1
    for worker in workers:
        worker.join()
    waker.close()


def test_inbox_makes_every_call_in_the_order_of_its_thread():
    inbox, made, count, threads = Inbox(), [], 5_000, 4
    assert not inbox.drain()

    def hammer(thread):
        for i in range(count):
            inbox.put(made.append, (thread, i))

    workers = [threading.Thread(target=hammer, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    poller = select.poll()
    poller.register(inbox.fileno(), select.POLLIN)
    while len(made) < count * threads:
        poller.poll()  # A lost wake-up would make this poll wait for ever.
        inbox.drain()
    for worker in workers:
        worker.join()
    for thread in range(threads):
        assert [i for t, i in made if t == thread] == list(range(count))
    assert not inbox.drain()
    assert not readable(inbox)
    inbox.close()


def readable(waker):
    return bool(select.select([waker.fileno()], [], [], 0)[0])


def test_waker_is_readable_from_wake_to_clear():
    waker = Waker()
    assert not readable(waker)
    for _ in range(3):
        waker.wake()
        waker.wake()
        assert readable(waker)
        waker.clear()
        assert not readable(waker)
        waker.clear()
    waker.close()


def test_waker_ignores_wake_after_close():
    waker = Waker()
    fd = waker.fileno()
    assert not os.get_inheritable(fd)
    waker.close()
    waker.close()
    waker.wake()
    waker.clear()
    assert waker.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# --------------------------------------------------------------------------------------- threads with loops


@pytest.mark.parametrize("loops", [*([name] * 3 for name in LOOPS), list(LOOPS)], ids=[*LOOPS, "one of each"])
def test_ranks_on_loops_of_several_threads_exchange_messages(loops):
    store, size = HashStore(), len(loops)

    async def rank(r):
        async with aiocomms.new_comm("local", store=store, rank=r, size=size) as comm:
            after, before = (r + 1) % size, (r - 1) % size
            for i in range(100):
                send = comm.send(torch.tensor([r, i]), after, tag=i % 3)
                got = await comm.recv(torch.zeros(2, dtype=torch.int64), before, tag=i % 3)
                assert got.tolist() == [before, i]
                await send
                total = await comm.all_reduce(torch.tensor(r + i))
                assert total.item() == sum(range(size)) + size * i
            return await comm.all_gather_object({"rank": r})

    results = in_threads(*(lambda r=r: run_on(loops[r], rank, r) for r in range(size)))
    assert results == [[{"rank": r} for r in range(size)]] * size


def test_one_driver_serves_all_communicators_of_a_loop(run):
    async def main():
        async with local_world(2) as world, local_world(2, name="other") as others:
            assert {comm._core.driver for comm in (*world, *others)} == {LoopDriver.current()}

    run(main)


def test_calls_of_other_threads_run_on_the_loop_in_order(run):
    async def main():
        async with local_world(1) as (comm,):
            called, all_called = [], Promise(comm._core.driver)

            def call(i):
                called.append((i, threading.get_ident()))
                if i == 99:
                    all_called.set()

            def target():
                for i in range(100):
                    comm._core.driver.call_threadsafe(call, i)

            thread = threading.Thread(target=target)
            thread.start()
            await all_called
            thread.join()
            assert called == [(i, threading.get_ident()) for i in range(100)]

    run(main)


@pytest.mark.virtual_time
def test_promise_wakes_every_waiter(run):
    async def main():
        promise, gone_on = Promise(LoopDriver.current()), []

        async def wait(i):
            await promise
            gone_on.append(i)

        async with anyio.create_task_group() as tasks:
            for i in range(3):
                tasks.start_soon(wait, i)
            with anyio.move_on_after(0.001):
                await wait(3)
            assert gone_on == []
            promise.set()
        assert sorted(gone_on) == [0, 1, 2]
        await wait(4)

    run(main)


def test_loop_driver_without_a_running_loop_raises_runtime_error():
    with pytest.raises(RuntimeError, match=r"needs a running event loop .*: call it in a coroutine"):
        LoopDriver.current()


# ---------------------------------------------------------------------------------------- spinning and breaking


class Spinning(LocalTransport):
    """A transport that counts its polls, and wants seven of them before the driver sleeps."""

    capabilities = Capabilities(ops=LocalTransport.capabilities.ops, in_process=True, spin=7)

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = 0
        self.breaks = None
        self.answers = []

    def progress(self):
        self.asked += 1
        if self.breaks is not None:
            raise self.breaks
        return self.answers.pop()() if self.answers else super().progress()


def transport_of(comm):
    return comm._core.by_family["p2p"]


def test_spinning_transport_is_polled_for_its_turns_and_then_sleeps(run, install):
    install(spinning=Spinning)

    async def main():
        async with local_world(2, "spinning") as world:
            await turns(20)
            spinning = transport_of(world[0])
            assert spinning.asked == 0
            for _ in range(2):
                recv = world[0].recv(torch.zeros(1), 1)
                await turns(30)
                assert spinning.asked == 7
                spinning.asked = 0
                assert await recv.cancel()

    run(main)


@pytest.mark.timeout(PATIENCE)
def test_blocked_thread_asks_on_while_a_transport_makes_progress(run, install):
    install(spinning=Spinning)

    async def main():
        async with local_world(1, "spinning") as (comm,):
            recv = comm.recv(torch.zeros(1), 0)
            sends = lambda: bool(comm.send(torch.ones(1), 0))  # noqa: E731
            transport_of(comm).answers = [sends, *[lambda: True] * 20]  # pop() takes the last one first.
            assert recv.wait_blocking().item() == 1

    run(main)


def test_spinning_transport_is_woken_from_its_sleep(loop, install):
    install(spinning=Spinning)
    store, sent = HashStore(), threading.Event()

    async def rank(r):
        async with aiocomms.new_comm("spinning", store=store, rank=r, size=2) as comm:
            if r == 0:
                recv = comm.recv(torch.zeros(1), 1)
                await turns(30)
                assert transport_of(comm).asked == 7
                sent.set()
                assert (await recv).item() == 1
                await turns(30)
                assert transport_of(comm).asked <= 7 + 1 + 7  # One poll is for the descriptor, seven are new.
            else:
                assert await run_in_thread(lambda: sent.wait(PATIENCE))
                await comm.send(torch.ones(1), 0)
            await comm.barrier()

    in_threads(*(lambda r=r: run_on(loop, rank, r) for r in range(2)))


@pytest.mark.parametrize("when", ["polled", "parked"])
def test_transport_that_breaks_loses_only_its_communicator(run, loop, install, caplog, when):
    install(spinning=Spinning)

    async def main():
        reports = []
        if loop != "trio":
            asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["message"]))
        async with local_world(2, "spinning", name="broken") as world, local_world(2) as others:
            broken = transport_of(world[0])
            work = world[0].recv(torch.zeros(1), 1)
            if when == "parked":
                await turns(30)
            broken.breaks = ValueError("boom")
            broken._inbox.put(int)  # The descriptor stays readable, for no call drains it.
            message = "the transport Spinning is broken: progress() raised ValueError: boom"
            with pytest.raises(CommAbortedError, match=f"lost: {re.escape(message)}"):
                await work
            assert world[0].aborted
            assert world[1].aborted
            reports += [record.getMessage() for record in caplog.records]
            await turns(30)
            assert reports == [message]
            await ranks(others, lambda comm: comm.barrier())
            broken.breaks = None  # The close polls it once more.

    run(main)


# ------------------------------------------------------------------------------------------- loops come and go


@pytest.mark.fault(54, transport="local")
def test_fifty_successive_loops_leak_nothing(loop):
    async def main():
        async with local_world(2) as world:
            assert [t.item() for t in await ranks(world, lambda comm: comm.all_reduce(torch.tensor(1)))] == [2, 2]

    run_on(loop, main)
    before = held()
    for _ in range(50):
        run_on(loop, main)
    all_let_go(before)


def python(script, *args):
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", script, *args],
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip


@pytest.mark.real
@pytest.mark.fault(53, 56, transport="local")
def test_loop_with_pending_works_ends_without_hanging(loop):
    script = """
import sys, warnings
import anyio, torch
from torch.distributed import HashStore
import aiocomms
from aiocomms.errors import CommError

async def main():
    store, world = HashStore(), [None, None]

    async def open(rank):
        world[rank] = await aiocomms.new_comm("local", store=store, rank=rank, size=2)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open, 0)
        tasks.start_soon(open, 1)
    works = [comm.recv(torch.zeros(1), 1 - comm.rank) for comm in world]
    works += [world[0].all_reduce(torch.zeros(1)), world[0].send(torch.ones(1), 1, tag=3)]
    with anyio.move_on_after(0.01):
        await works[2]
    return world, works

name = sys.argv[1]
warnings.simplefilter("ignore", ResourceWarning)  # tests/unit/diagnosis/test_leak_guard.py
options = {"use_uvloop": True} if name == "uvloop" else {}
world, works = anyio.run(main, backend="trio" if name == "trio" else "asyncio", backend_options=options)
assert all(comm.closed for comm in world)
assert all(isinstance(error, CommError) for error in [work.exception() for work in works][:3])
world[0].abort("too late")
print("end")
"""
    result = python(script, loop)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


@pytest.mark.search
@pytest.mark.real
@pytest.mark.fault(57, transport="local")
def test_forked_child_is_refused_and_leaves_its_parent_usable():
    script = """
import asyncio, os, threading
import torch
from torch.distributed import HashStore
import aiocomms

store, sent = HashStore(), threading.Event()

async def rank(r):
    async with aiocomms.new_comm("local", store=store, rank=r, size=2) as comm:
        if r:
            await asyncio.to_thread(sent.wait)
            await comm.send(torch.ones(1), 0)
            await comm.barrier()
            return
        recv = comm.recv(torch.zeros(1), 1)
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            print("child", os.waitstatus_to_exitcode(status), flush=True)
            sent.set()
            assert (await recv).item() == 1
            await comm.barrier()
            return
        try:
            for call in (lambda: comm.send(torch.ones(1), 1), comm.barrier, lambda: comm.recv(torch.zeros(1), 1)):
                try:
                    call()
                    raise AssertionError
                except aiocomms.errors.CommClosedError as error:
                    assert f"the communicator was created in process {os.getppid()} and cannot be" in str(error)
            comm.abort("no")
            await comm.aclose()
            assert comm.closed

            async def alone():
                async with aiocomms.new_comm(name="mine") as mine:
                    assert (await mine.all_reduce(torch.ones(1))).item() == 1

            thread = threading.Thread(target=asyncio.run, args=(alone(),))
            thread.start()
            thread.join()
            os._exit(42)
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(1)

threads = [threading.Thread(target=asyncio.run, args=(rank(1),))]
threads[0].start()
asyncio.run(rank(0))
threads[0].join()
print("parent")
"""
    result = python("import warnings; warnings.simplefilter('ignore', DeprecationWarning)" + script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "child 42\nparent\n", "")


# ------------------------------------------------------------------------------------------- one descriptor for several


class Shared:
    """A transport that shares its descriptor with others: the one that is polled handles the events of all."""

    capabilities = Capabilities(ops=frozenset(), spin=3)

    def __init__(self, waker, asked):
        self.waker, self.asked = waker, asked
        self.breaks, self.failures = None, []

    def fileno(self):
        return self.waker.fileno()

    def progress(self):
        self.waker.clear()
        self.asked.append(self)
        if self.breaks is not None:
            raise self.breaks
        return False

    def on_failure(self, error):
        self.failures.append(error)


@pytest.fixture
def several():
    """Yield a function that returns several transports with one descriptor, and the list of those polled."""
    wakers = []

    def make(count=150):
        wakers.append(Waker())
        asked = []
        return [Shared(wakers[-1], asked) for _ in range(count)], asked

    yield make
    for waker in wakers:
        waker.close()


def test_transports_that_share_a_descriptor_are_polled_once(run, several):
    async def main():
        driver = LoopDriver.current()
        those, asked = several()
        for one in those:
            driver.attach(one)
        those[0].waker.wake()
        await turns(20)
        assert len(asked) == 1
        asked.clear()
        for one in those:
            driver.poll_soon(one)
        await turns(20)
        assert len(asked) == 3
        asked.clear()
        for one in those[:-1]:  # The last of them stays attached.
            driver.detach(one)
        those[0].waker.wake()
        driver.poll_soon(those[0])
        await turns(20)
        assert asked == [those[-1]]
        driver.detach(those[-1])
        those[0].waker.wake()
        await turns(20)
        assert len(asked) == 1

    run(main)


def test_failure_of_a_shared_descriptor_breaks_all_its_transports(run, loop, several, caplog):
    async def main():
        if loop != "trio":
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        driver = LoopDriver.current()
        those, asked = several(3)
        for one in those:
            driver.attach(one)
            one.breaks = ValueError("boom")
        those[0].waker.wake()
        await turns(20)
        assert len(asked) == 1
        for one in those:
            (failure,) = one.failures
            assert str(failure).endswith("the transport Shared is broken: progress() raised ValueError: boom")
        driver.poll_soon(those[0])
        await turns(20)
        assert len(asked) == 1

    run(main)
