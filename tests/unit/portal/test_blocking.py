"""Synchronous programs, as processes: their end, Ctrl-C, forks, and what they leave behind."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio.lowlevel
import pytest
import torch
from processes import HANGS
from torch.distributed import HashStore

import aiocomms
from aiocomms import blocking
from aiocomms.bootstrap.registry import close_transports
from aiocomms.core import core
from aiocomms.errors import ArgumentError, CommAbortedError, CommClosedError, CommError, CommTimeoutError

pytestmark = pytest.mark.deterministic

NAME = "aiocomms blocking"


def loops() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


def test_blocking_new_comm_has_the_arguments_of_new_comm():
    ours, theirs = inspect.signature(blocking.new_comm), inspect.signature(aiocomms.new_comm)
    assert list(ours.parameters) == list(theirs.parameters)
    assert "Form a communicator" in blocking.new_comm.__doc__


def test_blocking_communicators_share_a_loop_thread_that_ends_with_the_last():
    with blocking.new_comm("local") as comm:
        assert comm.all_reduce(torch.ones(2)).wait().tolist() == [1.0, 1.0]
        assert loops() == [NAME]
        half = comm.split([0], "half")
        assert half.barrier().wait() is None
        assert loops() == [NAME], "a communicator that was split off shares the loop"
    assert comm.closed
    assert half.barrier().wait() is None, "it is another communicator"
    half.close()
    half.close()
    assert loops() == []
    with pytest.raises(CommClosedError):
        comm.barrier()


def test_blocking_new_comm_with_wrong_arguments_starts_no_thread():
    with pytest.raises(ArgumentError, match="store is missing"):
        blocking.new_comm("local", rank=0, size=2)
    assert loops() == []


def test_blocking_new_comm_without_a_descriptor_raises_comm_error(monkeypatch):
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    with pytest.raises(CommError, match=r"no event loop can be opened: .*Too many open files"):
        blocking.new_comm("local")
    assert loops() == []


@pytest.mark.real
def test_blocking_new_comm_that_times_out_leaves_no_thread():
    with pytest.raises(CommTimeoutError):
        blocking.new_comm("local", store=HashStore(), rank=0, size=2, timeout=0.1)
    assert loops() == []


def test_exception_in_the_with_block_aborts():
    store = HashStore()
    caught: list[BaseException] = []

    def other() -> None:
        with pytest.raises(CommAbortedError) as error, blocking.new_comm("local", store=store, rank=1, size=2) as comm:
            comm.recv(torch.zeros(1), 0).wait()
        caught.append(error.value)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(KeyError), blocking.new_comm("local", store=store, rank=0, size=2):
        raise KeyError("lost")
    thread.join(HANGS)
    assert "KeyError: 'lost'" in caught[0].message
    assert loops() == []


def test_close_within_a_hook_raises_runtime_error():
    errors: list[Exception] = []

    def close(work: object) -> None:
        try:
            comm.close()
        except RuntimeError as error:
            errors.append(error)

    with blocking.new_comm("local") as comm:
        comm.register_post_hook(close)
        comm.barrier().wait()
    assert "close on 'world' was called on the loop's own thread" in str(errors[0])


def test_close_during_the_close_of_another_communicator_does_not_hang():
    """A finalizer or a signal handler may close one at any moment."""
    comm = blocking.new_comm("local")
    half = comm.split([0])

    def close_within() -> None:
        with comm._use.thread._lock:  # The close of the other holds it.
            half.close()

    thread = threading.Thread(target=close_within, daemon=True)
    thread.start()
    thread.join(HANGS)
    assert not thread.is_alive()
    comm.close()


def test_window_and_lane_can_be_closed_again_after_the_communicator():
    with blocking.new_comm("local") as comm:
        window, late, lane = comm.new_window(torch.zeros(1)), comm.new_window(torch.zeros(1)), comm.lane("a")
        for opened in (window, lane):
            opened.close()
    for opened in (window, lane):
        assert opened.close() is None
    window.__exit__(None, None, None)  # The `with` statement makes this call.
    with pytest.raises(CommClosedError, match="closed on this rank"):
        late.close()
    with pytest.raises(KeyError), late:
        raise KeyError("the error of the block")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_split_of_a_communicator_that_is_closed_meanwhile_raises_comm_closed_error(monkeypatch):
    comm = blocking.new_comm("local")
    run = comm._run

    def closed_meanwhile(*args: object) -> object:
        child = run(*args)
        comm.close()
        return child

    monkeypatch.setattr(comm, "_run", closed_meanwhile)
    with pytest.raises(CommClosedError, match="closed on this rank"):
        comm.split([0])


def test_concurrent_close_waits_until_all_is_released(monkeypatch):
    """A second close returns after the first has ended the transports; another communicator on the loop still works."""
    begun, second = threading.Event(), threading.Event()
    released: list[str] = []
    with blocking.new_comm("local") as comm:
        half = comm.split([0])
        elsewhere = comm._door.elsewhere

        async def release(transports: object) -> None:
            begun.set()
            while not second.is_set():
                await anyio.lowlevel.checkpoint()
            await close_transports(transports)
            released.append("transports")

        def second_has_come(what: str) -> None:
            if begun.is_set():
                second.set()
            elsewhere(what)

        def close_too() -> None:
            try:
                comm.close()
                assert released == ["transports"]
            finally:
                second.set()

        with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
            patch.setattr(core, "close_transports", release)
            patch.setattr(comm._door, "elsewhere", second_has_come)
            closing = pool.submit(comm.close)
            assert begun.wait(HANGS)
            assert pool.submit(close_too).result() is closing.result() is None
        assert half.barrier().wait() is None
        half.close()
    assert loops() == []


def run(program: str, status: int = 0, *, signals: int = 0) -> str:
    """Run a program, send it SIGINT at each line "now" that it prints first, and return the rest of its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=-1, stderr=-1, text=True, env=os.environ | {"AIOCOMMS_HEARTBEAT": "0"}
    )
    try:
        for _ in range(signals):
            assert process.stdout.readline() == "now\n"
            process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=HANGS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, (process.returncode, out, error)
    return out + error


HEAD = """
import os, signal, sys, threading, torch
from torch.distributed import HashStore
from aiocomms import blocking
from aiocomms.communicator.portal import pending
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had its background jobs ignore it
store = HashStore()
def pair():
    comms = [None, None]
    def form(rank):
        comms[rank] = blocking.new_comm("local", store=store, rank=rank, size=2)
    thread = threading.Thread(target=form, args=(1,))
    thread.start()
    form(0)
    thread.join()
    return comms
def end_child(*calls):  # makes calls in a forked child, prints how each of them ends, and ends the child
    for call in calls:
        try:
            call()
            print("returned", flush=True)
        except Exception as error:
            print(type(error).__name__, "after a fork" in str(error), flush=True)
    os._exit(0)
started = pending.Pending._block
def waiting():  # says so when the main thread waits, and not before
    def _block(self, patience):
        if threading.current_thread() is threading.main_thread():
            sys.stdout.write("now" + chr(10))  # in one piece, for other threads may write, too
            sys.stdout.flush()
        return started(self, patience)
    pending.Pending._block = _block
"""


@pytest.mark.real
def test_ctrl_c_during_a_wait_withdraws_the_recv():
    program = """
one, two = pair()
waiting()
try:
    one.recv(torch.zeros(1), 1).wait()
except KeyboardInterrupt:
    pass
pending.Pending._block = started
two.send(torch.ones(1), 0)
tensor = torch.zeros(1)
one.recv(tensor, 1).wait()
assert tensor.item() == 1
one.close(); two.close()
assert threading.enumerate() == [threading.main_thread()]
print("fine")
"""
    assert run(HEAD + program, signals=1) == "fine\n"


@pytest.mark.real
def test_ctrl_c_in_a_with_block_aborts_and_ends_the_program():
    program = """
one, two = pair()
waiting()
def other():
    try:
        two.recv(torch.zeros(1), 0).wait()
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__} {'KeyboardInterrupt' in str(error)}" + chr(10))
    two.close()
thread = threading.Thread(target=other)
thread.start()
try:
    with one:
        one.barrier().wait()
finally:
    thread.join()
    print(threading.enumerate() == [threading.main_thread()])
"""
    printed = run(HEAD + program, status=-signal.SIGINT, signals=1)
    assert "CommAbortedError True\nTrue\n" in printed.replace("now\n", "")
    assert printed.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.real
def test_ctrl_c_while_forming_leaves_no_thread():
    """SIGINT on another thread ends the wait of new_comm, also as the wait begins, and no thread remains."""
    program = """
def stack(frame):
    return [] if frame is None else [frame.f_code.co_name, *stack(frame.f_back)]
def interrupt():
    while (names := stack(sys._current_frames()[threading.main_thread().ident]))[0] != "wait" or "open" not in names:
        pass
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    blocking.new_comm("local", store=store, rank=0, size=2)
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate() if "blocking" == thread.name.split()[-1]])
"""
    assert run(HEAD + program) == "[]\n"


@pytest.mark.real
@pytest.mark.parametrize("how", ["", "sys.exit(3)", "raise SystemExit(3)"])
def test_program_exits_silently_with_open_communicators_and_waiting_threads(how):
    """The program exits with its status, prints nothing, and does not hang."""
    program = f"""
one, two = pair()
work = one.recv(torch.zeros(1), 1)
for ask in (work.wait, lambda: two.open_stream(0), lambda: one.barrier().wait()):
    threading.Thread(target=ask, daemon=True).start()
{how}
"""
    assert run(HEAD + program, status=3 if how else 0) == ""


@pytest.mark.real
def test_forked_child_of_a_blocking_communicator_is_refused():
    program = """
one, two = pair()
work = one.recv(torch.zeros(1), 1)
child = os.fork()
if not child:
    end_child(work.wait, work.cancel, one.barrier, lambda: one.split([0]), two.close, one.close)
os.waitpid(child, 0)
two.send(torch.ones(1), 0)
assert work.wait().item() == 1
one.close(); two.close()
"""
    assert run(HEAD + program).split("\n") == [
        "CommClosedError True", "returned", "CommClosedError True", "CommClosedError True", "returned", "returned", "",
    ]  # fmt: skip


@pytest.mark.real
@pytest.mark.search
def test_child_that_is_forked_on_the_loops_thread_is_refused():
    program = """
import asyncio
from aiocomms.testing import local_world
async def main():
    async with local_world(1) as (comm,):
        portal = comm.portal()
        window = await asyncio.to_thread(portal.new_window, torch.zeros(1))
        work = await asyncio.to_thread(portal.recv, torch.zeros(1), 0)
        child = os.fork()
        if not child:
            split, lost = lambda: portal.split([0]), lambda: portal.lost(timeout=1)
            end_child(work.wait, split, lost, window.close, portal.close)
        os.waitpid(child, 0)
        await asyncio.to_thread(window.close)
asyncio.run(main())
"""
    assert run(HEAD + program) == 4 * "CommClosedError True\n" + "returned\n"


@pytest.mark.real
def test_unclosed_blocking_communicator_warns_with_its_origin():
    """The warning says where it was opened, and what to write instead."""
    program = """
import warnings
warnings.simplefilter("always", ResourceWarning)
comm = blocking.new_comm("local")
"""
    printed = run(HEAD + program)
    line = (HEAD + program).splitlines().index('comm = blocking.new_comm("local")') + 1
    assert f"unclosed <Communicator 'world' rank 0 of 1 on cpu>, opened at <string>:{line}" in printed, printed
    assert "use `with`, or call its close()" in printed
