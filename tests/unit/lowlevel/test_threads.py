"""Blocking calls off the loop: their results, their awaiters, and what an abandoned call leaves."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter

import anyio
import pytest
from concurrency import turns
from processes import HANGS, all_let_go, held

from aiocomms.errors import CommError
from aiocomms.lowlevel import run_in_thread, threads

pytestmark = pytest.mark.deterministic

NAME = "aiocomms blocking call"


@pytest.fixture
def left_behind():
    """Return a function that lists the threads of this test; earlier tests may have left some, too."""
    earlier = set(threading.enumerate())
    return lambda: [it for it in threading.enumerate() if it.name == NAME and it not in earlier]


def test_run_in_thread_uses_another_thread_and_leaves_none(run, left_behind):
    async def main():
        assert await run_in_thread(threading.get_ident) != threading.get_ident()
        assert left_behind() == []

    run(main)


def test_run_in_thread_raises_what_the_call_raises(run):
    async def main():
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(lambda: 1 / 0)
        with pytest.raises(KeyboardInterrupt):
            await run_in_thread(raises_interrupt)

    def raises_interrupt():
        raise KeyboardInterrupt

    run(main)


def test_error_of_a_call_is_no_cancellation_of_the_task(run):
    async def main():
        for kind in (anyio.get_cancelled_exc_class(), StopIteration):
            with pytest.raises(RuntimeError, match=f"a call in a thread raised {kind.__name__}") as one:
                await run_in_thread(functools.partial(raises, kind.__new__(kind)))
            assert type(one.value.__cause__) is kind

    def raises(error):
        raise error

    run(main)


def test_run_in_thread_frees_arguments_of_a_failed_call_without_gc(run):
    class Held:
        """A stand-in for a store's connection."""

    def fail(held):
        raise LookupError

    async def main():
        held = Held()
        there = weakref.ref(held)
        with contextlib.suppress(LookupError):
            await run_in_thread(functools.partial(fail, held))
        del held
        assert there() is None

    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


def test_run_in_thread_runs_ten_calls_concurrently(run):
    async def main():
        together, results = threading.Barrier(10), []

        async def one(i):
            await run_in_thread(together.wait)
            results.append(await run_in_thread(lambda: i))

        async with anyio.create_task_group() as tasks:
            for i in range(10):
                tasks.start_soon(one, i)
        assert sorted(results) == list(range(10))

    run(main)


def test_cancelled_run_in_thread_leaves_the_thread_and_no_descriptor(run, left_behind):
    async def main():
        begun, release = threading.Event(), threading.Event()
        await run_in_thread(int)  # The loop opens a descriptor for its first reader.
        before = Counter(held()[1])
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_in_thread, lambda: begun.set() or release.wait())
                while not begun.is_set():
                    await turns()
                scope.cancel()
        assert scope.cancelled_caught
        (thread,) = left_behind()
        assert thread.daemon
        assert not Counter(held()[1]) - before
        # Another file may have the number of its descriptor by now, and the thread must not write to it.
        theirs = os.eventfd(0, os.EFD_NONBLOCK)
        release.set()
        thread.join(HANGS)
        assert not thread.is_alive()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(theirs)
        os.close(theirs)

    run(main)


def test_run_in_thread_in_a_cancelled_scope_starts_the_call(run):
    """The call may release a resource, so it must run."""

    async def main():
        called = threading.Event()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await run_in_thread(called.set)
        assert called.wait(HANGS)

    run(main)


@pytest.mark.parametrize("missing", ["threads", "descriptors"])
def test_run_in_thread_without_threads_or_descriptors_fails_without_leaks(run, monkeypatch, missing):
    def fails(*_):
        raise RuntimeError("can't start new thread") if missing == "threads" else OSError(24, "Too many open files")

    if missing == "threads":
        monkeypatch.setattr(threading.Thread, "start", fails)
    else:
        monkeypatch.setattr(threads, "Waker", fails)

    async def main():
        before = held()
        with pytest.raises(CommError, match=r"no thread can be started: .*(new thread|open files)"):
            await run_in_thread(threading.get_ident)
        assert await run_in_thread(threading.get_ident, anyhow=True) == threading.get_ident()
        all_let_go(before)

    run(main)


def test_call_in_thread_returns_before_the_thread_runs(monkeypatch):
    """The caller does not wait until a processor runs the new thread."""
    waiting, calls = [], []
    monkeypatch.setattr(threads._thread, "start_new_thread", lambda run, args: waiting.append(run))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: waiting.append(None))
    threads.call_in_thread(lambda: calls.append("made"), calls.append)
    (run,) = waiting
    assert calls == []
    run()
    assert calls == ["made", None]


@pytest.mark.real
def test_interpreter_exit_waits_for_an_abandoned_call():
    """The wait is short. Before Python 3.14 a daemon thread that came back too late ended the process by SIGABRT."""
    program = """
import anyio, atexit, threading
from torch.distributed import HashStore
from aiocomms.lowlevel import run_in_thread, threads
threads._AT_END = 100.0  # a busy machine takes longer than the second that a program has
store, here, given_up = HashStore(), threading.Event(), threading.Event()
def call():
    here.set()
    given_up.wait()
    for i in range(200):  # as one that asks a store now and then
        store.set("key", str(i))
    print("came back", flush=True)
async def main():
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_in_thread, call)
            while not here.is_set():
                await anyio.sleep(0)
            scope.cancel()
anyio.run(main)
atexit.register(given_up.set)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "came back\n", "")
