"""The simulation itself: its promises, what it refuses, and the errors of a history that fails."""

from __future__ import annotations

import asyncio
import calendar
import concurrent.futures
import contextvars
import gc
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import pytest
import torch
from anyio._backends._asyncio import _task_states
from processes import HANGS

import aiocomms
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    PeerDiedError,
    SimulationError,
)
from aiocomms.lowlevel import clock
from aiocomms.testing import Faults, explore, here, simulate

pytestmark = pytest.mark.deterministic

ALL = Faults(deaths=1, restarts=True, pauses=1, slow=1, cuts=1, partitions=1)


async def sums():
    """Sum a few tensors; return the error if there is one."""
    try:
        async with aiocomms.new_comm(timeout=10) as comm:
            for _ in range(5):
                t = await comm.all_reduce(torch.ones(2))
                assert t.tolist() == [comm.size] * 2
            return comm.rank
    except CommError as error:
        return type(error).__name__


def notes(caught):
    return "\n".join(caught.value.__notes__)


def line_of(text):
    """Return where in this file a line stands, as errors name it."""
    numbers = [i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}")]
    assert len(numbers) == 1
    return f"{__file__}:{numbers[0]}, in "


# ------------------------------------------------------------------------------------------------------- the seed


def test_same_seed_gives_the_same_history():
    for seed in range(5):
        one, two = (simulate(sums, 3, seed=seed, faults=ALL) for _ in range(2))
        assert one == two


def test_other_seed_gives_another_history():
    assert len({tuple(simulate(sums, 3, seed=seed).trace) for seed in range(5)}) == 5


@pytest.mark.search
@pytest.mark.real
def test_same_seed_gives_the_same_history_in_other_processes():
    script = (
        "import hashlib, test_simulating as t\n"
        "found = [t.simulate(t.sums, 3, seed=seed, faults=t.ALL) for seed in range(20)]\n"
        "print(hashlib.sha256(repr(found).encode()).hexdigest())\n"
    )
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    told = {
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{script}"],
            env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, text=True, timeout=HANGS, check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(told) == 1


def test_seed_decides_what_a_program_draws():
    async def program():
        return torch.rand(1).item()

    assert simulate(program, seed=1).results == simulate(program, seed=1).results
    assert simulate(program, seed=1).results != simulate(program, seed=2).results


# ----------------------------------------------------------------------------------------------------------- time


def test_virtual_time_passes_without_real_time():
    async def program():
        begins = asyncio.get_running_loop().time()
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time() - begins

    history = simulate(program)
    assert history.results == [pytest.approx(3600, rel=1e-3)] * 2
    assert history.seconds == pytest.approx(3600, rel=1e-3)


READS = {
    "time": lambda: time.time(),
    "time_ns": lambda: time.time_ns() / 1e9,
    "clock_gettime": lambda: time.clock_gettime(time.CLOCK_REALTIME),
    "clock_gettime_ns": lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1e9,
    "localtime": lambda: time.mktime(time.localtime()),
    "gmtime": lambda: calendar.timegm(time.gmtime()),
    "ctime": lambda: time.mktime(time.strptime(time.ctime())),
    "asctime": lambda: time.mktime(time.strptime(time.asctime())),
    "strftime": lambda: time.mktime(time.strptime(time.strftime("%Y-%m-%d %H:%M:%S"), "%Y-%m-%d %H:%M:%S")),
}


@pytest.mark.parametrize("name", READS)
def test_module_time_reads_virtual_time(name):
    async def program():
        begins = READS[name]()
        await asyncio.sleep(3600)
        return READS[name]() - begins

    before = getattr(time, name)
    assert simulate(program, ranks=1).results == [pytest.approx(3600, abs=1.5)]
    assert getattr(time, name) is before


def test_time_of_the_processor_is_real():
    async def program():
        begins = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        await asyncio.sleep(3600)
        return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) - begins

    assert 0 < simulate(program, ranks=1).results[0] < HANGS


def test_times_that_a_program_names_are_converted_as_ever():
    async def program():
        return time.gmtime(0), time.localtime(0), time.ctime(0), time.strftime("%Y", time.gmtime(0))

    expected = time.gmtime(0), time.localtime(0), time.ctime(0), "1970"
    assert simulate(program, ranks=1).results == [expected]


def test_clocks_of_ranks_differ():
    async def program():
        return asyncio.get_running_loop().time()

    one, two = simulate(program).results
    assert abs(one - two) > 1


def test_history_longer_than_asked_is_an_error_with_the_waiting_lines():
    async def program():
        await asyncio.sleep(3600)  # the long sleep

    with pytest.raises(SimulationError, match=r"the history takes longer than 60 s:") as caught:
        simulate(program, longest=60)
    assert f"rank 0: task 'main' waits at {line_of('the long sleep')}" in str(caught.value)


def test_deadlock_without_a_deadline_is_told_although_ranks_look_for_signs_of_life():
    async def program():
        async with aiocomms.new_comm() as comm:
            asyncio.get_running_loop().call_later(3000, print).cancel()
            await comm.recv(torch.zeros(1), 1 - comm.rank, timeout=None)  # the receive

    with pytest.raises(SimulationError, match="nothing will happen any more") as caught:
        simulate(program)
    for rank in range(2):
        assert f"rank {rank}: task 'main' waits at {line_of('the receive')}" in str(caught.value)


@pytest.mark.parametrize("what", ["timer", "thread", "deadline", "pause"])
def test_ranks_that_wait_for_what_comes_in_an_hour_are_no_deadlock(what):
    async def program():
        async with aiocomms.new_comm(hints={"heartbeat": 0 if what == "pause" else 5}) as comm:
            if comm.rank == 0:
                return int(await comm.recv(torch.zeros(1), 1, timeout=None))
            if what == "timer":
                await asyncio.sleep(3600)
            elif what == "thread":
                await asyncio.to_thread(clock.sleep, 3600)
            elif what == "deadline":
                with pytest.raises(CommTimeoutError):
                    await comm.recv(torch.zeros(1), 0, timeout=3600)
            else:
                here().world.pause(1, 3600)
                await asyncio.sleep(0.1)
            await comm.send(torch.ones(1), 0)
            return 1

    assert simulate(program, longest=4000).results == [1, 1]


def test_deadlock_is_told_at_once_with_the_waiting_lines():
    async def program():
        async with aiocomms.new_comm() as comm:
            if comm.rank == 1:
                await comm.barrier()
                await asyncio.Future()  # the future
            await comm.barrier()
            await asyncio.Event().wait()  # the wait

    with pytest.raises(SimulationError) as caught:
        simulate(program)
    assert f"task 'main' waits at {line_of('the future')}" in str(caught.value)
    assert f"task 'main' waits at {line_of('the wait')}" in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_callbacks_of_a_thread_run_in_the_order_of_its_calls(seed):
    async def program():
        loop, got = asyncio.get_running_loop(), []
        here().world.slow(0, 0.05)

        def work():
            for i in range(5):
                loop.call_soon_threadsafe(got.append, i)

        await asyncio.to_thread(work)
        await asyncio.sleep(1)
        return got

    assert simulate(program, ranks=1, seed=seed).results == [[0, 1, 2, 3, 4]]


# --------------------------------------------------------------------------------------------------------- faults


def test_dead_rank_runs_no_finally():
    ran = []

    async def program():
        try:
            if here().rank == 1:
                here().world.kill(1)
            await asyncio.sleep(10)
        finally:
            ran.append((here().rank, here().world.time > 1))

    assert simulate(program).results == [None, None]
    assert (0, True) in ran
    assert (1, True) not in ran[: ran.index((0, True))]


async def _in_its_task(kill):
    kill()


async def _in_a_callback(kill):
    asyncio.get_running_loop().call_soon(kill)
    await asyncio.sleep(1)


async def _in_a_thread(kill):
    await asyncio.to_thread(kill)


@pytest.mark.parametrize("kills_itself", [_in_its_task, _in_a_callback, _in_a_thread])
def test_rank_that_kills_itself_runs_no_further_code_in_the_history(kills_itself):
    ran = []

    def kill():
        here().world.kill(1)
        ran.append("code after the kill")

    async def program():
        if here().rank == 0:
            await asyncio.sleep(1)
            ran.append("the other rank")
            return
        try:
            await kills_itself(kill)
        finally:
            ran.append("finally")

    assert simulate(program).results == [None, None]
    assert ran == ["the other rank", "finally"]


@pytest.mark.parametrize("killer", [0, 1])
def test_finally_block_of_a_dead_rank_may_start_tasks(killer):
    async def program():
        await asyncio.sleep(here().rank == killer)
        try:
            if here().rank == killer:
                here().world.kill(1)
            await asyncio.sleep(5)
        finally:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asyncio.sleep, 1)

    assert simulate(program).results == [None, None]
    gc.collect()  # A coroutine that was never awaited would give a warning.


def test_rank_that_kills_itself_does_not_catch_the_error_of_another():
    caught = []

    async def program():
        await asyncio.sleep(here().rank)
        if here().rank == 1:
            raise ValueError("wrong")
        try:
            here().world.kill(0)
        except Exception as error:
            caught.append(error)

    with pytest.raises(ValueError, match="wrong"):
        simulate(program)
    assert caught == []


def test_ranks_after_the_kill_of_a_rank_by_itself_have_states_of_their_own():
    variable = contextvars.ContextVar("variable", default="")

    async def program():
        if here().rank == 0 and not here().restarts:
            variable.set("of the dead rank")
            with torch.inference_mode():
                here().world.kill(0, 1.0)
        await asyncio.sleep(2)
        task = asyncio.current_task()
        return variable.get(), torch.is_inference_mode_enabled(), torch.is_grad_enabled(), task.get_name()

    assert simulate(program).results == [("", False, True, "main")] * 2


def test_fault_of_the_seed_kills_a_rank_whose_code_ran_last():
    async def program():
        await asyncio.sleep(1)
        here().world.at(2.0, None, here().world.kill, 0)
        await asyncio.sleep(5)
        return "ended"

    assert simulate(program, ranks=1).results == [None]


@pytest.mark.parametrize(
    ("fault", "given", "wrong"),
    [
        ("kill", (2,), "rank is 2, wanted a rank from 0 to 1"),
        ("kill", (0, -1), "restart is -1, wanted seconds"),
        ("pause", (True, 1), "rank is True, wanted a rank from 0 to 1"),
        ("pause", (0, -5.0), "seconds is -5.0, wanted seconds"),
        ("slow", (-1, 1), "rank is -1, wanted a rank from 0 to 1"),
        ("slow", (0, "x"), "seconds is 'x'"),
        ("cut", (0, 5), "other is 5, wanted a rank from 0 to 1"),
        ("cut", (1, 1), "one and other are 1, wanted two ranks"),
        ("part", (9, 0, 1), "source is 9, wanted a rank from 0 to 1"),
        ("part", (0, 1, float("inf")), "seconds is inf, wanted seconds"),
    ],
)
def test_fault_with_wrong_arguments_is_refused_by_name(fault, given, wrong):
    async def program():
        with pytest.raises(ArgumentError, match=f"^{re.escape(wrong)}"):
            getattr(here().world, fault)(*given)

    simulate(program)


def test_death_is_an_error_of_the_others():
    async def program():
        async with aiocomms.new_comm() as comm:
            if comm.rank == 1:
                here().world.kill(1)
            with pytest.raises(PeerDiedError) as caught:
                await comm.barrier()
            return caught.value.peer

    assert simulate(program, 3).results == [1, None, 1]


def test_restarted_rank_knows_it():
    async def program():
        if here().rank == 1 and not here().restarts:
            here().world.kill(1, restart=2.0)
        await asyncio.sleep(5)
        return here().restarts

    history = simulate(program)
    assert history.results == [0, 1]
    assert history.seconds == pytest.approx(7, rel=1e-2)
    assert [line.partition(" ")[2] for line in history.trace if line.startswith("7")] == ["rank 1 (restart 1): ends"]


@pytest.mark.parametrize(("seconds", "error"), [(1.0, None), (15.0, PeerDiedError)])
def test_pause_longer_than_the_heartbeat_is_a_death(seconds, error):
    async def program():
        try:
            async with aiocomms.new_comm() as comm:
                if comm.rank == 1:
                    here().world.pause(1, seconds)
                await comm.barrier()
                return None
        except CommError as raised:
            return type(raised)

    assert simulate(program, 2).results[0] is error


def test_partition_holds_messages_up():
    async def program():
        async with aiocomms.new_comm() as comm:
            begins = here().world.time
            if comm.rank == 0:
                here().world.part(0, 1, 2.0)
            await comm.barrier()
            return here().world.time - begins

    assert min(simulate(program, 2).results) > 1.5


@pytest.mark.parametrize(("fault", "whom"), [("pause", (1,)), ("part", (0, 1))])
def test_shorter_fault_does_not_end_a_longer_one_of_its_kind(fault, whom):
    async def program():
        async with aiocomms.new_comm() as comm:
            begins = here().world.time
            if comm.rank == 0:
                for seconds in (2.0, 0.5):
                    getattr(here().world, fault)(*whom, seconds)
            await comm.barrier()
            return here().world.time - begins

    assert simulate(program, 2).results[0] > 1.5


def test_partition_that_begins_before_another_ends_holds_the_same_messages_up():
    async def program():
        world = here().world
        async with aiocomms.new_comm(timeout=60) as comm:
            await comm.barrier()
            await asyncio.sleep(1.0 - world.time)
            if comm.rank == 0:
                world.part(0, 1, 3.0)
                comm.send(torch.ones(1), 1)
                await asyncio.sleep(2.0)
                world.part(0, 1, 2.5)
            else:
                await comm.recv(torch.ones(1), 0)
            return world.time

    assert simulate(program).results[1] == pytest.approx(5.5, abs=0.1)


@pytest.mark.parametrize(("seconds", "noticed"), [(3.0, 4.0), (20.0, 6.5)])
def test_death_behind_a_partition_is_noticed_at_its_end_or_by_the_keepalive(seconds, noticed):
    async def program():
        world = here().world
        async with aiocomms.new_comm(timeout=60, hints={"heartbeat": 0}) as comm:
            await comm.barrier()
            await asyncio.sleep(1.0 - world.time)
            if comm.rank == 1:
                world.part(1, 0, seconds)
                await asyncio.sleep(0.5)
                world.kill(1)
            await comm.lost()
            return world.time

    assert simulate(program).results[0] == pytest.approx(noticed, abs=0.1)


def test_partition_holds_the_refusal_of_a_call_up():
    async def program():
        world, done = here().world, asyncio.Event()
        if here().rank == 1:
            world.disk["address"] = world.network.listen(print)
            world.part(1, 0, 3.0)
            return None
        await asyncio.sleep(1.0)
        world.network.connect(world.disk["address"], b"", lambda welcome: done.set())
        await done.wait()
        return world.time

    assert simulate(program).results[0] == pytest.approx(3.0, abs=0.1)


def test_cut_loses_the_communicator():
    async def program():
        try:
            async with aiocomms.new_comm() as comm:
                await comm.barrier()
                if comm.rank == 0:
                    here().world.cut(0, 1)
                await comm.barrier()
        except CommError as error:
            return type(error)

    results = simulate(program, 3).results
    assert PeerDiedError in results
    assert set(results) <= {PeerDiedError, CommAbortedError}


def test_lost_store_lets_no_communicator_form():
    async def program():
        here().world.lose_store()
        with pytest.raises(CommError, match="store"):
            await aiocomms.new_comm(timeout=10)

    simulate(program)


def test_faults_of_a_seed_are_told_in_words():
    told = "\n".join(simulate(sums, 3, seed=1, faults=Faults(1, True, 1, 1, 1, 1, 1)).faults)
    for words in (r"rank \d dies, and starts anew", "stands still for", "becomes slow", "are cut", "does not reach"):
        assert re.search(words, told)
    assert "the store dies" in told


# ------------------------------------------------------------------------------------------------------- shrinking


async def breaks_by_deaths():
    async with aiocomms.new_comm(timeout=10) as comm:
        for _ in range(20):
            await comm.barrier()


async def breaks_by_long_pauses():
    """Fail if something takes longer than two seconds."""
    begins = here().world.time
    await asyncio.sleep(0.01)
    assert here().world.time - begins < 2


def test_shrinking_leaves_the_least_faults():
    with pytest.raises(PeerDiedError) as caught:
        explore(breaks_by_deaths, 3, seeds=20, faults=Faults(deaths=1, pauses=2, slow=1))
    told = [note for note in caught.value.__notes__ if note.startswith("fault: ")]
    assert len(told) == 1


def test_shrinking_halves_durations():
    with pytest.raises(AssertionError) as caught:
        explore(breaks_by_long_pauses, faults=Faults(pauses=2, within=0.01))
    told = re.findall(r"stands still for (\S+) s", notes(caught))
    assert len(told) == 1
    assert 1.9 < float(told[0]) < 4


def test_shrinking_keeps_the_type_of_the_error():
    class OtherError(RuntimeError):
        """The error of a shorter pause."""

    async def program():
        world = here().world
        begins = world.time
        await asyncio.sleep(0.01)
        late = world.time - begins - 0.01
        if late > 0.005:
            raise RuntimeError("data lost") if late > 0.5 else OtherError("late")

    faults, shrunk = Faults(pauses=1, within=0.01), 0
    for seed in range(20):
        try:
            simulate(program, seed=seed, faults=faults)
        except RuntimeError as error:
            if type(error) is RuntimeError:
                with pytest.raises(RuntimeError, match="data lost") as caught:
                    explore(program, seeds=[seed], faults=faults)
                shrunk += "~" in notes(caught)
    assert shrunk


def test_seed_of_a_shrunk_history_repeats_it():
    with pytest.raises(AssertionError) as caught:
        explore(breaks_by_long_pauses, faults=Faults(pauses=2, within=0.01))
    seed = re.search(r"the seed of this history is '(\S+)'", notes(caught))[1]
    assert "~" in seed
    with pytest.raises(AssertionError) as again:
        simulate(breaks_by_long_pauses, seed=seed, faults=Faults(pauses=2, within=0.01))
    assert notes(again) == notes(caught)


def test_note_of_a_failed_history_names_the_arguments_that_repeat_it():
    with pytest.raises(PeerDiedError) as caught:
        explore(breaks_by_deaths, 3, seeds=20, faults=Faults(deaths=1, slow=1), latency=(1e-4, 1e-3))
    seed, given = re.search(r"the seed of this history is '(\S+)', with (.*)", notes(caught)).groups()
    assert given == "ranks=3, faults=Faults(deaths=1, slow=1), latency=(0.0001, 0.001)"
    with pytest.raises(PeerDiedError) as again:
        simulate(breaks_by_deaths, seed=seed, ranks=3, faults=Faults(deaths=1, slow=1), latency=(0.0001, 0.001))
    assert notes(again) == notes(caught)


def test_seeds_that_find_nothing_are_counted():
    assert explore(sums, seeds=3) == 3
    assert explore(sums, seeds=[7, 9]) == 2


# ------------------------------------------------------------------------------------- errors of a program


def test_error_of_a_rank_is_raised_with_the_rank():
    async def program():
        if here().rank == 1:
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        simulate(program, seed=7)
    assert re.search(r"it was raised on rank 1 of 2 ranks, after \S+ s of the simulation", notes(caught))
    assert "the seed of this history is '7'" in notes(caught)


def test_exit_of_a_rank_ends_that_rank_alone():
    async def program():
        if here().rank == 0:
            sys.exit(0)
        await asyncio.sleep(1)
        return "ran on"

    assert simulate(program).results == [None, "ran on"]


def test_exit_in_another_task_cancels_the_program_of_the_rank():
    ended = []

    async def program():
        async def leave():
            sys.exit()

        task = asyncio.create_task(leave())
        try:
            await asyncio.sleep(1)
        finally:
            ended.append((here().rank, here().world.time < 1, task.done()))

    assert simulate(program).results == [None, None]
    assert sorted(ended) == [(0, True, True), (1, True, True)]


def test_exit_of_a_rank_does_not_hide_the_failure_of_another():
    async def program():
        await asyncio.sleep(1 + here().rank)
        if here().rank == 0:
            sys.exit(0)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        explore(program, seeds=1)


@pytest.mark.parametrize("status", [3, "no file"])
def test_exit_with_an_error_status_fails_the_history(status):
    async def program():
        sys.exit(status)

    with pytest.raises(SimulationError, match=re.escape(f"rank 0 has called sys.exit({status!r})")) as caught:
        simulate(program, ranks=1)
    assert isinstance(caught.value.__cause__, SystemExit)


def test_error_of_a_forgotten_task_fails_the_history():
    kept = []

    async def program():
        async def forgotten():
            raise ValueError("wrong")

        kept.append(asyncio.create_task(forgotten(), name="forgotten one"))
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="wrong") as caught:
        simulate(program)
    assert "nothing has caught it: Task exception was never retrieved, of task 'forgotten one'" in notes(caught)


@pytest.mark.parametrize("fails", [False, True])
def test_error_of_a_failed_task_is_told_if_the_history_fails_otherwise(fails):
    kept = []

    async def program():
        async def worker():
            raise ValueError("the real cause")

        if here().rank == 0:
            kept.append(asyncio.create_task(worker(), name="worker"))
        elif fails:
            await asyncio.sleep(1)
            raise AssertionError("nothing came")
        await asyncio.Event().wait()

    with pytest.raises((SimulationError, AssertionError)) as caught:
        simulate(program)
    told = "nothing has caught an error of rank 0, ValueError('the real cause'): Task exception was never retrieved, "
    assert f"{told}of task 'worker'" in caught.value.__notes__


def test_error_of_an_exception_handler_fails_the_history():
    async def program():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: 1 / 0)
        loop.call_soon(lambda: [].pop())
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError) as caught:
        simulate(program)
    assert "nothing has caught it: it was raised by the loop's exception handler" in notes(caught)


def test_error_of_a_task_that_is_cancelled_at_the_end_fails_the_history():
    async def program():
        async def stubborn():
            try:
                await asyncio.sleep(100)
            finally:
                raise ValueError("wrong")

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(1)
        assert not task.done()

    with pytest.raises(ValueError, match="wrong"):
        simulate(program)


def test_communicator_that_is_left_open_fails_the_history():
    async def program():
        comm = await aiocomms.new_comm()
        await comm.barrier()
        if comm.rank == 0:
            await comm.aclose()

    with pytest.raises(SimulationError, match="rank 1 has left 'world' open"):
        simulate(program)


def test_message_that_nothing_matches_fails_the_history():
    async def program():
        async with aiocomms.new_comm() as comm:
            if comm.rank == 0:
                comm.send(torch.ones(1), 1, tag=7)

    with pytest.raises(CommAbortedError, match=r"send #0 .* closed by rank 1, which this op needs"):
        simulate(program)


# --------------------------------------------------------------------------------------------------------- refusals


async def starts_a_thread():
    threading.Thread(target=print).start()  # starts_a_thread


async def connects():
    with socket.socket() as one:
        one.connect(("127.0.0.1", 9))  # connects


async def blocks_the_loop():
    time.sleep(0.001)  # noqa: ASYNC251  # blocks_the_loop


async def runs_a_program():
    subprocess.run(["true"], check=True)  # noqa: ASYNC221  # runs_a_program


async def sends_a_signal():
    os.kill(os.getpid(), 0)  # sends_a_signal


async def serves():
    await asyncio.start_server(print, "127.0.0.1", 0)  # serves


async def meets_in_a_file():
    store = torch.distributed.FileStore("/dev/null", 2)
    await aiocomms.new_comm(store=store, rank=here().rank, size=2)  # meets_in_a_file


async def waits_on_the_loop():
    comm = await aiocomms.new_comm()
    comm.portal().barrier().wait()  # waits_on_the_loop


async def handles_a_signal():
    signal.signal(signal.SIGUSR1, print)  # handles_a_signal


async def waits_for_an_event():
    threading.Event().wait(3600)  # waits_for_an_event


async def waits_for_a_queue():
    queue.Queue().get()  # waits_for_a_queue


async def waits_for_a_future():
    concurrent.futures.Future().result(timeout=3600)  # waits_for_a_future


@pytest.mark.parametrize(
    "program",
    [
        *(starts_a_thread, connects, blocks_the_loop, runs_a_program, sends_a_signal, serves, meets_in_a_file),
        *(handles_a_signal, waits_for_an_event, waits_for_a_queue, waits_for_a_future),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_its_line(program):
    with pytest.raises(SimulationError, match="cannot be simulated") as caught:
        simulate(program)
    assert str(caught.value).endswith(f"{line_of(program.__name__)}{program.__name__}")


def test_blocking_wait_on_the_loop_is_refused():
    with pytest.raises(Exception, match=r"loop") as caught:
        simulate(waits_on_the_loop)
    assert isinstance(caught.value, (RuntimeError, CommError))


def test_blocking_wait_in_a_thread_is_refused():
    async def program():
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(asyncio.sleep(1), loop).result(3600))

    with pytest.raises(SimulationError, match="a blocking wait cannot be simulated"):
        simulate(program)


def test_calls_that_do_not_block_are_not_refused():
    async def program():
        event = threading.Event()
        polled = event.wait(0), event.wait(timeout=0)
        event.set()
        return *polled, event.wait()

    assert simulate(program, ranks=1).results == [(False, False, True)]


def test_signal_that_a_rank_ignores_is_not_ignored_outside_the_simulation():
    async def program():
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return signal.signal(signal.SIGUSR1, before) is before

    before = signal.signal(signal.SIGUSR1, print)
    try:
        assert simulate(program, ranks=1).results == [True]
        assert signal.getsignal(signal.SIGUSR1) is print
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_waits_and_signal_handlers_are_those_of_python_after_a_simulation():
    calls = threading.Condition.wait, signal.signal, time.sleep
    with pytest.raises(SimulationError):
        simulate(waits_for_an_event)
    assert (threading.Condition.wait, signal.signal, time.sleep) == calls


def test_real_threads_run_after_a_simulation():
    simulate(sums)
    thread = threading.Thread(target=time.sleep, args=(0,))
    thread.start()
    thread.join()


WRONG = {
    "program is 3, wanted an async function without arguments": {"program": 3},
    "program returned 3, wanted an awaitable: write 'async def'": {"program": lambda: 3},
    "ranks is 0, wanted at least 1 rank as an int": {"ranks": 0},
    "ranks is '2', wanted at least 1 rank as an int": {"ranks": "2"},
    "seed is 'x', wanted an int, or a text such as '7/0,2'": {"seed": "x"},
    "seed is 1.5, wanted an int, or a text such as '7/0,2'": {"seed": 1.5},
    "seed names fault 0, wanted numbers below 0, as many faults there are: pass the same faults= as the history that "
    "has failed": {"seed": "7/0"},
    "seed is '0/0~99999', wanted an int, or a text such as '7/0,2'": {"seed": "0/0~99999"},
    "seed is '0/0~-1', wanted an int, or a text such as '7/0,2'": {"seed": "0/0~-1"},
    "latency is (inf, inf), wanted the least and the most seconds, above 0": {"latency": (float("inf"),) * 2},
    "latency is (2, 1), wanted the least and the most seconds, above 0": {"latency": (2, 1)},
    "latency is (0, 1), wanted the least and the most seconds, above 0": {"latency": (0, 1)},
    "latency is 1, wanted the least and the most seconds, above 0": {"latency": 1},
    "longest is 0, wanted seconds above 0": {"longest": 0},
    "faults is 3, wanted Faults(deaths=1) or the like, or None": {"faults": 3},
    "faults has cuts or partitions, wanted none where there is only 1 rank": {"ranks": 1, "faults": Faults(cuts=1)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_argument_is_refused_by_name(message):
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        simulate(**{"program": sums, **WRONG[message]})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "given", [{"deaths": -1}, {"cuts": 1.5}, {"restarts": 1}, {"within": 0}, {"within": "1"}, {"within": float("inf")}]
)
def test_wrong_number_of_faults_is_refused_by_name(given):
    with pytest.raises(ArgumentError, match=rf"^{next(iter(given))} is .*, wanted "):
        Faults(**given)


@pytest.mark.parametrize("seeds", [0, "7", True, 2.5])
def test_wrong_seeds_are_refused_by_name(seeds):
    with pytest.raises(ArgumentError, match=r"^seeds is .*, wanted how many"):
        explore(sums, seeds=seeds)


@pytest.mark.parametrize("seeds", [[], iter(())])
def test_seeds_without_a_seed_are_refused(seeds):
    with pytest.raises(ArgumentError, match=r"^seeds has no seed, wanted at least one"):
        explore(sums, seeds=seeds)


def test_simulation_within_a_simulation_is_refused():
    async def program():
        simulate(sums)

    with pytest.raises(SimulationError, match="a simulation runs already"):
        simulate(program)


def test_history_frees_tasks_that_a_dead_rank_would_have_started():
    async def cleaned():
        try:
            await asyncio.sleep(60)
        finally:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asyncio.sleep, 60)

    async def program():
        if here().rank == 1:
            await cleaned()
        await asyncio.sleep(1)
        here().world.kill(1)

    gc.collect()
    before = len(_task_states)
    simulate(program, ranks=2)
    gc.collect()
    assert len(_task_states) == before


def test_loop_of_the_caller_runs_on_after_a_simulation():
    async def main():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        simulate(sums)
        assert asyncio.get_running_loop() is loop
        assert asyncio.current_task() is task
        await asyncio.sleep(0)

    asyncio.run(main())


def test_place_outside_a_simulation_is_refused():
    with pytest.raises(SimulationError, match="no simulation runs"):
        here()


def test_disk_survives_the_restart_of_a_rank_but_not_the_history():
    async def program():
        disk = here().world.disk
        if here().restarts == 0:
            assert not disk
            disk["written"] = True
            here().world.kill(0, restart=1.0)
            await asyncio.sleep(10)
        return disk

    for seed in range(2):
        assert simulate(program, ranks=1, seed=seed).results == [{"written": True}]
