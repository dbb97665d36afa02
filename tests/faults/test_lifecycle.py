"""Loops, interpreters and exhausted resources: the cases 17, 46, 48, 49 and 53 to 63 of the catalogue."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import fcntl
import gc
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiocomms_c10d import control as c10d_control
from aiocomms_ucx import bringup as ucx_bringup
from oracle import FULL, left_after_meeting, named, oracle, settled
from oracle import holdings as holds
from processes import (
    HANGS,
    INTERRUPTED,
    LARGE,
    PATIENCE,
    Rank,
    Run,
    empty,
    exchange,
    hear,
    in_turn,
    no_threads,
    numbers,
)
from simulated import IN_BOTH, NET, PROCESSES

from aiocomms.core import core
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError
from aiocomms.lowlevel import clock
from aiocomms.testing import local_world

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
LOOPS = 200 if FULL else 12
Notice = Callable[[list[float]], None]


@pytest.fixture(params=[NET, "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


# ----------------------------------------------------------------------------- 17: a straggler after the others' end


async def come_late(place: Rank) -> float:
    """Call a collective after the others have given up: it fails before its deadline, and matches nothing."""
    async with oracle(place):
        comm = await place.open()
        await comm.barrier()
        if place.rank != 1:
            with pytest.raises((CommTimeoutError, CommAbortedError)) as caught:
                await comm.all_reduce(numbers(LARGE, place.rank), timeout=0.2)
            named(caught.value, comm)
            place.tell(f"gave up {place.rank}")
            await hear(place, "late", 1)
            await comm.aclose()
            return 0.0
        await hear(place, "gave up", 0, 2)
        began = clock.now()
        mine = numbers(LARGE, 1)
        with pytest.raises(CommAbortedError):
            await comm.all_reduce(mine)
        took = clock.now() - began
        assert torch.equal(mine, numbers(LARGE, 1)), "it matched something"
        place.tell("late 1")
        await comm.aclose()
        return took


@pytest.mark.fault(17)
def test_op_of_a_straggler_fails_after_the_others_timed_out(ranks: Run, notice: Notice) -> None:
    notice(ranks(3, come_late))


# ------------------------------------------------------------------------------------------------ 46 and 48: ends


async def interrupt(place: Rank) -> float:
    """Press Ctrl-C on one rank while it awaits. Its grace never ends, so a close that waits for that would hang."""
    if place.rank == 1:
        core.CLOSE_GRACE = math.inf
        try:
            async with place.open() as comm:
                await comm.barrier()
                threading.Timer(0.05, place.end, [lambda: os.kill(os.getpid(), signal.SIGINT)]).start()
                await comm.recv(empty(3), 0)
        finally:
            assert comm.closed
    comm = await place.open()
    await comm.barrier()
    with pytest.raises(CommAbortedError) as caught:
        await comm.all_reduce(numbers(9, place.rank))
    took = place.since_death()
    named(caught.value, comm)
    assert "rank 1" in caught.value.message
    await comm.aclose()
    return took


def heed_interrupts(rank: int) -> None:
    """Install the default handler of SIGINT: the background processes of a shell and their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@PROCESSES
@pytest.mark.fault(46)
def test_keyboard_interrupt_of_a_rank_is_noticed_in_time(ranks: Run, notice: Notice) -> None:
    first, interrupted, last = ranks(3, interrupt, before=heed_interrupts)
    assert interrupted == INTERRUPTED
    notice([first, last])


async def abort_a_thousand(place: Rank, how: str) -> float:
    """Abort twice, from a thread, a signal handler or a task, with a thousand receives pending."""
    async with oracle(place):
        comm = await place.open()
        works = [comm.recv(empty(3), (place.rank + 1) % place.size, tag) for tag in range(1000)]
        await comm.barrier()
        if place.rank == 0:
            await hear(place, "ready", 1)

            def abort(*_: object) -> None:
                place.end(lambda: comm.abort("enough"))
                comm.abort("more than enough")

            if how == "thread":
                threading.Thread(target=abort).start()
            elif how == "task" or place.simulated:
                asyncio.get_running_loop().call_soon(abort)
            else:
                signal.signal(signal.SIGUSR2, abort)
                os.kill(os.getpid(), signal.SIGUSR2)
        else:
            place.tell("ready 1")
        for work in works:
            with pytest.raises(CommAbortedError, match="aborted by rank 0: enough") as caught:
                await work
        took = place.since_death()
        named(caught.value, comm, [0])
        del work, works, caught
        await comm.aclose()
        return took


@IN_BOTH
@pytest.mark.fault(48)
@pytest.mark.parametrize("how", ["thread", "signal", "task"] if FULL else ["signal"])
def test_abort_ends_a_thousand_pending_works_in_time(ranks: Run, notice: Notice, how: str) -> None:
    notice(ranks(2, abort_a_thousand, how))


# ------------------------------------------------------------------------------------------------ 49: the tensor


async def resize(place: Rank, count: int) -> None:
    """Free the storage of a receive's tensor before the message comes: this is an error, and no crash."""
    async with oracle(place):
        comm = await place.open()
        await comm.barrier()
        if place.rank == 0:
            await hear(place, "resized", 1)
            await comm.send(numbers(count, 0), 1)
        else:
            tensor = empty(count)
            work = comm.recv(tensor, 0)
            tensor.untyped_storage().resize_(0)
            place.tell("resized 1")
            with pytest.raises(CommError):
                await work
        await comm.aclose()


async def swap_tensors(place: Rank) -> None:
    """Call ``set_`` on a receive's tensor and drop the last reference: the op keeps the storage that it was given."""
    async with oracle(place):
        comm = await place.open()
        await comm.barrier()
        for count in (20, 2**20):
            if place.rank == 0:
                await hear(place, f"set {count}", 1)
                await comm.send(numbers(count, 0), 1)
            else:
                tensor, other = empty(count), empty(count)
                kept = tensor.detach()
                work = comm.recv(tensor, 0)
                tensor.set_(other)
                del tensor
                gc.collect()
                place.tell(f"set {count} 1")
                await work
                assert torch.equal(kept, numbers(count, 0))
                assert not other.any()
        await comm.aclose()


@pytest.mark.fault(49)
def test_tensor_set_during_an_op_keeps_its_memory(ranks: Run) -> None:
    ranks(2, swap_tensors)


# ------------------------------------------------------------------------------------------------- 53, 54: loops


async def come_and_go(place: Rank, closes: bool) -> None:
    """Run loop after loop. Each may end with pending works and an open communicator; the next one still works."""

    works: list[Any] = []

    async def use(turn: int, old: Any) -> Any:
        if old is not None:
            with pytest.raises((CommError, RuntimeError)):
                await old.recv(empty(3), 1 - place.rank)
        assert all(isinstance(work.exception(), CommError) for work in works)
        comm = await place.open(f"turn {turn}")
        assert (await comm.all_reduce(torch.ones(3)) == 2).all()
        if not closes:
            works[:] = [comm.recv(empty(3), 1 - place.rank)]
            await comm.barrier()
        else:
            await comm.aclose()
        return comm

    def loops() -> None:
        before, old = [0, 0], None
        for turn in range(LOOPS):
            old = asyncio.run(use(turn, old))
            if turn == 3:
                before = counted()
        old = None
        ends = time.monotonic() + PATIENCE
        while any(now > then for now, then in zip(counted(), before, strict=True)):
            assert time.monotonic() < ends, (counted(), before)
            time.sleep(0.01)

    ended = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: loop.call_soon_threadsafe(ended.set_result, failed(loops))).start()
    failures = await ended
    assert not failures, failures


def counted() -> list[int]:
    """Return the numbers of threads and descriptors."""
    gc.collect()
    return [threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))]


def failed(call: Callable[[], None]) -> list[BaseException]:
    try:
        call()
    except BaseException as error:
        return [error]
    return []


@pytest.mark.search
@PROCESSES
@pytest.mark.fault(54)
@pytest.mark.filterwarnings("ignore")
def test_successive_loops_leak_nothing(ranks: Run) -> None:
    ranks(2, come_and_go, True)


@PROCESSES
@pytest.mark.fault(53)
@pytest.mark.filterwarnings("ignore")
def test_successive_loops_with_pending_works_leak_nothing(ranks: Run) -> None:
    ranks(2, come_and_go, False)


# --------------------------------------------------------------------------------------- 56: the interpreter's end

ENDS = {
    "an exception": "raise ValueError('of this test')",
    "exit in a thread": "import _thread, threading; threading.Thread(target=sys.exit).start(); sys.exit(4)",
}
END = """
import asyncio, sys, time
import torch
from pathlib import Path
from processes import Rank
from aiocomms.errors import CommError

place = Rank(sys.argv[1], int(sys.argv[2]), 2, sys.argv[3])

async def main():
    global comm, work
    comm = await place.open()
    await comm.barrier()
    try:
        work = comm.recv(torch.zeros(3), 1 - comm.rank)
        if comm.rank == 1:
            return
        await work
    except CommError as error:
        print(type(error).__name__, place.since_death())
    await comm.aclose()

loop = asyncio.new_event_loop()  # which never ends: asyncio.run() would close what is open
loop.run_until_complete(main())
if place.rank == 1:
    (place.folder / "died").write_text(str(time.monotonic()))
    exec(sys.argv[4])
"""


@PROCESSES
@pytest.mark.fault(56)
@pytest.mark.parametrize("how", ENDS if FULL else ["an exception"])
def test_interpreter_exit_with_an_open_communicator_is_noticed_in_time(
    tmp_path: Path, transport: str, notice: Notice, how: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), "AIOCOMMS_HEARTBEAT": "0"}
    warnings = ["-W", "error::RuntimeWarning", "-W", "always::ResourceWarning"]
    command = [sys.executable, *warnings, "-c", END, transport]
    both = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), ENDS[how]], env=environment, stdout=-1, stderr=-1, text=True
        )
        for rank in range(2)
    ]
    try:
        (told, errors), (_, said) = (process.communicate(timeout=HANGS) for process in both)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [0, 4 if "thread" in how else 1], (errors, said)
    assert not re.search("destroyed|never retrieved|Fatal", errors + said), errors + said
    assert re.search("ResourceWarning: unclosed <Communicator 'world' rank 1 of 2 on cpu>, opened at", said), said
    name, took = told.split()
    assert name in ("PeerDiedError", "CommAbortedError")
    notice([float(took)])


# ---------------------------------------------------------------------------------------- 58, 59: what is held


def inheritable() -> int:
    """Return the number of descriptors that a program would inherit if its start closed none."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += not fcntl.fcntl(int(path.name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    return count


async def exec_a_child(place: Rank, close: bool) -> None:
    """Start a program: it has none of the communicator's descriptors."""
    before = inheritable()
    async with place.open() as comm:
        await exchange(comm, LARGE)
        if close:  # By default subprocess closes descriptors.
            command = ["/bin/ls", "-l", "/proc/self/fd"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: ASYNC221
            assert not re.findall("socket:|eventpoll|eventfd|memfd|/dev/shm", done.stdout), done.stdout
        else:
            assert inheritable() == before
        await comm.barrier()


@pytest.mark.search
@PROCESSES
@pytest.mark.fault(58)
def test_exec_of_a_child_inherits_no_descriptor(ranks: Run) -> None:
    ranks(2, exec_a_child, True)


@contextlib.contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """Leave room for so many descriptors; free numbers below those in use are taken first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    fill: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + descriptors, hard))
        with contextlib.suppress(OSError):
            while True:
                fill.append(os.dup(0))
        for _ in range(descriptors):
            os.close(fill.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for it in fill:
            os.close(it)


@contextlib.contextmanager
def no_shared_memory(room: int) -> Iterator[None]:
    """Limit files to so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LIMITS = {"descriptors": room_for, "shared memory": no_shared_memory}


async def run_out(place: Rank, what: str, room: int) -> None:
    """Form while rank 1 has no descriptors or shared memory: a failure leaks nothing, and then forming works."""
    async with oracle(place):
        poor, before = None, holds()
        place.store()  # This creates the file.
        limited = LIMITS[what](room) if place.rank == 1 else contextlib.nullcontext()
        with limited, contextlib.suppress(CommError, OSError, RuntimeError):
            poor = await place.open("poor", timeout=1)
        if poor is not None:
            assert what == "descriptors", "there was no room"
            assert room > 4, "more was opened than there was room for"
            await poor.aclose()
            poor = None
        gc.collect()
        await settled(before)
        async with place.open("rich") as comm:
            await comm.all_reduce(torch.ones(LARGE))


@PROCESSES
@pytest.mark.fault(59)
@pytest.mark.parametrize("room", [2, 4, 6, 8, 10] if FULL else [4])
def test_exhausted_descriptors_raise_comm_error_and_leak_nothing(
    request: pytest.FixtureRequest, ranks: Run, transport: str, room: int
) -> None:
    if transport == "c10d" and room > 4:  # below, gloo has no listener yet
        why = "gloo may end a process that cannot accept a connection: see what is known to fail"
        request.applymarker(pytest.mark.xfail(reason=why, strict=False))
    ranks(2, run_out, "descriptors", room)


@pytest.mark.fault(59)
@pytest.mark.parametrize("transport", ["ucx"])
def test_exhausted_shared_memory_raises_comm_error_and_leaks_nothing(ranks: Run) -> None:
    ranks(2, run_out, "shared memory", 4096)


async def run_out_of_threads(place: Rank) -> None:
    """Forbid new threads: a communicator does not open, and says why; an open one works, aborts and closes."""
    async with oracle(place):
        early, spare = await place.open("early"), await place.open("spare")
        await early.barrier()
        before = holds()
        if place.rank == 1:
            with no_threads(), pytest.raises(CommError, match="thread") as caught:
                await place.open("poor")
            del caught
        else:
            with pytest.raises(CommError):
                await place.open("poor", timeout=1)
        gc.collect()
        await settled(before)
        with no_threads() if place.rank == 1 else contextlib.nullcontext():
            await exchange(early, 5)
            spare.abort("enough")
            await spare.aclose()
            await early.aclose()
        async with place.open("rich") as comm:
            await exchange(comm, LARGE)


LAST_STEPS = {"c10d": (c10d_control.ControlConnection, "start"), "ucx": (ucx_bringup, "_cookies")}
"""The last call of each transport before it starts its own first thread."""


async def run_out_at_last(place: Rank) -> None:
    """Forbid new threads just before the transport's own one: forming fails, and all is rolled back."""
    async with oracle(place):
        before = holds()
        with contextlib.ExitStack() as stack:
            if place.rank == 1:
                where, what = LAST_STEPS[place.transport]
                step = getattr(where, what)

                def run_out(*args: Any) -> Any:
                    stack.enter_context(no_threads())
                    return step(*args)

                stack.callback(setattr, where, what, step)
                setattr(where, what, run_out)
            # On UCX nobody tells rank 0.
            with left_after_meeting(place, 4), pytest.raises(CommError) as caught:
                async with place.open("poor") as comm:
                    await comm.barrier()
        assert place.rank == 0 or "thread" in caught.value.message, caught.value
        del caught
        gc.collect()
        await settled(before)
        async with place.open("rich") as comm:
            await exchange(comm, LARGE)


@PROCESSES
@pytest.mark.fault(58, 59)
def test_no_descriptor_is_inherited_and_ranks_without_threads_fail_to_open_and_leak_nothing(ranks: Run) -> None:
    ranks(2, in_turn, (exec_a_child, False), run_out_of_threads, run_out_at_last)


async def run_out_amid(place: Rank) -> None:
    """Forbid new threads before the first large collective, for which c10d needs one."""
    async with oracle(place):
        comm = await place.open()
        await comm.barrier()
        with no_threads() if place.rank == 1 else contextlib.nullcontext(), pytest.raises(CommError) as caught:
            await comm.all_reduce(numbers(LARGE, place.rank))
        assert "thread" in caught.value.message, caught.value
        await comm.aclose()
        del comm, caught


@pytest.mark.fault(49, 59, 77)
@pytest.mark.parametrize("transport", ["c10d"])
def test_op_on_a_resized_storage_or_without_a_thread_is_an_error(ranks: Run) -> None:
    """The engine of ucx has its only thread from the beginning.

    On ucx torch refuses to resize a tensor that an op uses: tests/transports/ucx/test_ucx_kept.py.
    """
    counts = [(resize, count) for count in ([20, 2**22] if FULL else [20])]
    ranks(2, in_turn, *counts, run_out_amid)


# ------------------------------------------------------------------------------------- 61 to 63: clocks, GC, callbacks


def wall_clocks(path: Path) -> Iterator[str]:
    """Yield the places where a source reads a clock that somebody may set."""
    if path.suffix != ".py":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"system_clock|CLOCK_REALTIME|gettimeofday", line):
                yield f"{path.relative_to(ROOT)}:{number}"
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "clock.wall"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.deterministic
@pytest.mark.fault(61)
def test_wall_clock_is_used_only_in_files_and_credentials() -> None:
    """The exceptions are texts and spans for people, and expiry times, which other hosts read."""
    sources = [*(ROOT / "aiocomms").rglob("*.py"), *(ROOT / "transports").rglob("*.py")]
    sources += [path for path in (ROOT / "transports").rglob("*.?pp") if "build" not in path.parts]
    found = [where for path in sources for where in wall_clocks(path)]
    assert {where.partition(":")[0] for where in found} <= {
        "aiocomms/lowlevel/clock.py",
        "aiocomms/diagnosis/recorder.py",
        "aiocomms/diagnosis/root_cause.py",
        "aiocomms/endpoints/credentials.py",
        "aiocomms/integrations/otel.py",
    }, found


@pytest.mark.deterministic
@pytest.mark.fault(61)
def test_deadlines_ignore_jumps_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by hours while deadlines run: one of an hour does not pass, and one of a moment does."""

    async def main() -> None:
        async with local_world(2) as (left, _):
            work = left.recv(torch.zeros(1), 1, timeout=3600)
            for hours in (5, -5):
                soon = left.recv(torch.zeros(1), 1, timeout=0.05)
                for module, name in ((time, "time"), (clock, "wall")):
                    monkeypatch.setattr(module, name, lambda hours=hours: 3600.0 * hours)
                with pytest.raises(CommTimeoutError):
                    await soon
                assert not work.done()
            assert await work.cancel()

    asyncio.run(main())


async def collect_all_the_time(place: Rank) -> None:
    async with place.open() as comm:
        old = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            for turn in range(2):
                await exchange(comm, (5, LARGE)[turn])
        finally:
            gc.set_threshold(*old)
        await comm.barrier()


@PROCESSES
@pytest.mark.search
@pytest.mark.fault(62)
def test_ops_survive_constant_garbage_collection(ranks: Run) -> None:
    ranks(2, collect_all_the_time)


async def close_in_a_callback(place: Rank) -> None:
    """Start ops and raise in one callback, and close the communicator in another one."""
    async with oracle(place):
        comm = await place.open()
        closing: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()
        heard: list[Any] = []
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        loop.set_exception_handler(lambda loop, context: heard.append(context["exception"]))

        def again(work: Any) -> None:
            follow = comm.all_reduce(numbers(LARGE, place.rank))
            follow.add_done_callback(lambda _: closing.set_result(loop.create_task(comm.aclose())))
            raise ValueError("of this test")

        first = comm.barrier()
        first.add_done_callback(again)
        await first
        await (await closing)
        assert comm.closed
        assert [str(error) for error in heard] == ["of this test"]
        loop.set_exception_handler(handler)


@pytest.mark.fault(63)
def test_done_callback_may_start_ops_raise_and_close(ranks: Run) -> None:
    ranks(2, close_in_a_callback)


SUBINTERPRETER = """
import _xxsubinterpreters as interpreters
it = interpreters.create()
try:
    interpreters.run_string(it, "import aiocomms; aiocomms.__version__; print('works')")
except interpreters.RunFailedError as error:
    assert "ImportError" in str(error), error
    print("refuses")
"""


@pytest.mark.fault(62)
def test_import_in_a_subinterpreter_works_or_is_refused() -> None:
    if sys.version_info >= (3, 13):
        pytest.skip("_xxsubinterpreters has another name from Python 3.13 on")
    done = subprocess.run([sys.executable, "-c", SUBINTERPRETER], capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("works", "refuses"), done.stderr
