"""The rendezvous: the arguments of new_comm, the launcher's environment, and absent ranks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib.metadata import entry_points
from types import SimpleNamespace

import anyio.lowlevel
import pytest
import torch
from aiocomms_local import LocalTransport
from concurrency import new_store, ranks, together
from processes import HANGS, PATIENCE, all_let_go, free_port, held
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import aiocomms
from aiocomms.bootstrap import forming, launchers
from aiocomms.bootstrap.generations import Arrival
from aiocomms.communicator import formation
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommAbortedError,
    CommClosedError,
    CommTimeoutError,
    StoreLostError,
)
from aiocomms.lowlevel.auth import Seal
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_", "PMI_", "PMIX_", "SLURM_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in os.environ:
        if name.startswith((*LAUNCHERS, "TORCHELASTIC_")):
            monkeypatch.delenv(name)


def serve():
    """Serve a store until the last reference to it is gone."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(port):
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


async def opened(**place):
    """Open a communicator; a coroutine function for calls that take one."""
    return await aiocomms.new_comm("local", **place)


async def meet(size, store, **place):
    return await together(*(lambda r=r: opened(store=store, rank=r, size=size, **place) for r in range(size)))


async def part(comms):
    await ranks(comms, lambda comm: comm.aclose())


# ---------------------------------------------------------------------------------------------------- arguments


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("place", "complaints"),
    [
        ({"rank": 0}, ["size is missing", "store is missing"]),
        ({"size": 2}, ["rank is missing", "store is missing"]),
        ({"store": HashStore()}, ["rank is missing", "size is missing"]),
        ({"rank": 0, "size": 2}, ["store is missing"]),
        ({"rank": 2, "size": 2, "store": HashStore()}, ["rank is 2, wanted 0 <= rank < size = 2"]),
        ({"rank": -1, "size": 2, "store": HashStore()}, ["rank is -1, wanted 0 <= rank < size = 2"]),
        ({"rank": 0, "size": 0, "store": HashStore()}, ["size is 0, wanted at least 1"]),
        ({"rank": True, "size": 2, "store": HashStore()}, ["rank is True, wanted an int"]),
        ({"rank": "0", "size": 2.0}, ["rank is '0', wanted an int", "size is 2.0, wanted an int", "store is missing"]),
        ({"rank": 0, "size": 2, "store": "tcp://host:1"}, ["store is a str, wanted a torch.distributed.Store"]),
        ({"rank": 5, "size": "x", "store": 3}, ["size is 'x', wanted an int", "store is a int"]),
        ({"rank": -1, "size": 1}, ["rank is -1, wanted 0 <= rank < size = 1"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_one_error_lists_every_wrong_argument_of_rank_size_and_store(place, complaints):
    with pytest.raises(ArgumentError, match="rank, size and store belong together: ") as caught:
        aiocomms.new_comm(**place)
    said = caught.value.message.partition(": ")[2].split("; ")
    assert len(said) == len(complaints)
    for complaint in complaints:
        assert any(text.startswith(complaint) for text in said), complaint


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "gpu"}, ArgumentError, "device is 'gpu', wanted a torch.device or its name"),
        ({"device": 3.5}, ArgumentTypeError, r"device is 3.5 \(float\), wanted a torch.device or its name$"),
        ({"hints": {"heartbeat": -2}}, ArgumentError, 'heartbeat" is -2, wanted seconds: .*; or 0, for never$'),
        ({"name": ""}, ArgumentError, "name has 0 characters, wanted 1 to 200"),
        ({"name": "x" * 201}, ArgumentError, "name has 201 characters"),
        ({"name": 3}, ArgumentTypeError, r"name is 3 \(int\), wanted a str"),
        ({"name": "\ud800"}, ArgumentError, r"name is '\\ud800', wanted a str that UTF-8 can encode"),
        ({"timeout": 0}, ArgumentError, "timeout is 0, wanted seconds"),
        ({"timeout": "1"}, ArgumentTypeError, "timeout is '1' .*wanted seconds"),
        ({"hints": 3}, ArgumentTypeError, r"hints is 3 \(int\), wanted a mapping"),
        ({"hints": [1]}, ArgumentTypeError, r"hints is \[1\] \(list\), wanted a mapping"),
    ],
    ids=str,
)
def test_wrong_arguments_of_new_comm_raise_before_any_await(arguments, error, message):
    with pytest.raises(error, match=message):
        aiocomms.new_comm(**arguments)


def test_unknown_keyword_of_new_comm_raises_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'world_size'"):
        aiocomms.new_comm(world_size=2)


# ------------------------------------------------------------------------------------------------------- meeting


@pytest.mark.parametrize("place", [{}, {"rank": 0, "size": 1}, {"rank": 0, "size": 1, "store": HashStore()}], ids=list)
def test_communicator_of_one_rank_opens_and_closes(run, place):
    async def main():
        async with aiocomms.new_comm(**place) as comm:
            assert (comm.rank, comm.size, comm.name, comm.device) == (0, 1, "world", torch.device("cpu"))
            assert (await comm.all_reduce(torch.ones(2))).tolist() == [1, 1]
            assert not comm.closed
        assert comm.closed
        comm = await aiocomms.new_comm(**place)
        await comm.aclose()

    run(main)


def stores(tmp_path):
    server = serve()
    yield "hash", HashStore()
    yield "file", FileStore(str(tmp_path / "store"), -1)
    yield "tcp", server
    yield "prefix", PrefixStore("mine", PrefixStore("again", server))


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_ranks_meet_on_any_store(run, tmp_path, kind):
    store = dict(stores(tmp_path))[kind]

    async def main():
        comms = await meet(3, store)
        assert [comm.rank for comm in comms] == [0, 1, 2]
        results = await ranks(comms, lambda comm: comm.all_reduce(torch.tensor(comm.rank)))
        assert [r.item() for r in results] == [3, 3, 3]
        await part(comms)

    run(main)


@pytest.mark.fault(34)
def test_communicators_of_several_names_share_a_store(run):
    store = HashStore()

    async def main():
        a, b = await together(lambda: meet(2, store, name="a"), lambda: meet(2, store, name="b"))
        a[0].send(torch.tensor(1), 1)
        b[0].send(torch.tensor(2), 1)
        assert (await b[1].recv(torch.tensor(0), 0)).item() == 2
        assert (await a[1].recv(torch.tensor(0), 0)).item() == 1
        await part([*a, *b])

    run(main)


@pytest.mark.fault(34)
def test_one_name_can_meet_repeatedly_on_one_store(run):
    store = HashStore()

    async def main():
        for _ in range(5):
            await part(await meet(2, store))
        first, second = await meet(2, store), await meet(2, store)
        assert [t.item() for t in await ranks(second, lambda comm: comm.all_reduce(torch.tensor(1)))] == [2, 2]
        assert [t.item() for t in await ranks(first, lambda comm: comm.all_reduce(torch.tensor(1)))] == [2, 2]
        await part([*first, *second])

    run(main)


def test_context_manager_closes_and_aborts_on_an_exception(run):
    store = HashStore()

    async def fails():
        with pytest.raises(ZeroDivisionError):
            async with aiocomms.new_comm("local", store=store, rank=0, size=2) as comm:
                1 / 0  # noqa: B018
        assert comm.closed
        with pytest.raises(CommAbortedError, match="aborted by rank 0: ZeroDivisionError: division by zero"):
            comm.barrier()

    async def waits():
        async with aiocomms.new_comm("local", store=store, rank=1, size=2) as comm:
            with pytest.raises(CommAbortedError, match="aborted by rank 0: ZeroDivisionError: division by zero"):
                await comm.recv(torch.zeros(1), 0)
        assert comm.closed
        assert comm.aborted

    run(lambda: together(fails, waits))


def test_closed_communicator_refuses_operations(run):
    async def main():
        comm = await aiocomms.new_comm("local", rank=0, size=1)
        await comm.aclose()
        with pytest.raises(CommClosedError, match=r"barrier on 'world' .*the communicator was closed on this rank"):
            comm.barrier()
        assert not comm.aborted

    run(main)


# ------------------------------------------------------------------------------------------------- a rank is missing


@pytest.mark.virtual_time
@pytest.mark.fault(33, transport="local")
@pytest.mark.parametrize("timeout", [1, timedelta(seconds=1)], ids=["seconds", "timedelta"])
def test_timeout_of_new_comm_names_the_missing_ranks(run, timeout):
    async def main():
        store, messages = new_store(), []

        async def come(r):
            with pytest.raises(CommTimeoutError) as caught:
                await opened(store=store, rank=r, size=4, timeout=timeout)
            messages.append(str(caught.value))

        await together(lambda: come(0), lambda: come(3))
        assert len(messages) == 2
        for message in messages:
            assert "after 1.0 s these ranks had not joined: 1, 2" in message
            assert "Was every rank started, with the same size and name?" in message
            assert "on 'world' (rank " in message

    run(main)


def leaves_nothing_behind(run, main):
    """Run a program twice: the second run leaves no new descriptor, and no thread once waits on stores have ended."""
    run(main)
    before = held()
    run(main)
    all_let_go(before)
    with pytest.raises(ArgumentError, match="no open communicator"):
        aiocomms.get_comm()


@pytest.mark.real
def test_failed_rendezvous_leaks_nothing(run):
    async def fails(n):
        with pytest.raises(CommTimeoutError):
            await opened(store=HashStore(), rank=0, size=2, timeout=0.02 * n)

    async def cancelled():
        with anyio.move_on_after(0.02):
            await opened(store=HashStore(), rank=0, size=2, timeout=0.1)

    leaves_nothing_behind(run, lambda: together(*(lambda n=n: fails(n) for n in range(1, 5)), cancelled, cancelled))


def test_transport_that_fails_while_opening_leaks_nothing(run, install):
    class Half(LocalTransport):
        @classmethod
        async def open(cls, rendezvous, options):
            exchange = rendezvous.exchange

            async def fails_at_last(key, value):
                result = await exchange(key, value)
                if key == "local-found":
                    raise StoreLostError("the store is gone")
                return result

            rendezvous.exchange = fails_at_last
            return await super().open(rendezvous, options)

    install(half=Half)

    async def main():
        with pytest.raises(StoreLostError):
            async with local_world(2, "half"):
                pass

    leaves_nothing_behind(run, main)


def test_local_rank_says_that_rank_0_has_given_up():
    """Rank 0 is in this process, so the error must not name other processes."""

    async def exchange(_key, mine):
        return [b"%d gone" % os.getpid(), mine]

    async def main():
        with pytest.raises(CommAbortedError, match="rank 0 has given up") as caught:
            await LocalTransport.open(SimpleNamespace(rank=1, size=2, exchange=exchange), {})
        assert caught.value.peer == 0

    asyncio.run(main())


async def come_to(look):
    """Wait until rank 0 has come to a store. A store has no events, so this polls."""
    while not look.check(["aiocomms/world/came/0"]):
        await anyio.lowlevel.checkpoint()


@pytest.mark.fault(32)
def test_cancelled_rendezvous_does_not_delay_the_next():
    """The ranks meet at once, although the abandoned wait could hold the store's connection for minutes."""
    mine = serve()
    theirs = connect(mine.port)

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: opened(store=mine, rank=0, size=2, timeout=300))
            await come_to(theirs)
            tasks.cancel_scope.cancel()
        alone = opened(store=mine, rank=0, size=2, name="again", timeout=20)
        comms = await together(lambda: alone, lambda: opened(store=theirs, rank=1, size=2, name="again", timeout=20))
        await part(comms)

    anyio.run(main)


def test_communicators_form_concurrently_in_any_order():
    server = serve()
    connections = [server, connect(server.port)]
    names = ["a", "b", "c"]

    async def rank(r):
        order = names if r == 0 else names[::-1]
        return await together(
            *(lambda n=n: opened(store=connections[r], rank=r, size=2, name=n, timeout=20) for n in order)
        )

    async def main():
        await part([comm for comms in await together(lambda: rank(0), lambda: rank(1)) for comm in comms])

    anyio.run(main)


@pytest.mark.virtual_time
def test_ranks_that_disagree_on_the_size_do_not_meet(run):
    async def main():
        store, failures = new_store(), []

        async def come(r, size):
            try:
                await opened(store=store, rank=r, size=size, timeout=1)
            except CommTimeoutError as error:
                failures.append(str(error))

        await together(lambda: come(0, 2), lambda: come(1, 3))
        assert any("these ranks had not joined: 2" in message for message in failures)

    run(main)


@pytest.mark.real
def test_unresponsive_store_fails_at_the_deadline(run):
    """A server accepts the connection and never answers; torch alone would wait without a limit."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(server.getsockname()[1]))

        async def main():
            with pytest.raises((CommTimeoutError, StoreLostError)):
                await aiocomms.new_comm("local", timeout=0.2)

        run(main)


STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.real
@pytest.mark.fault(32)
def test_stopped_store_server_fails_at_the_deadline():
    with subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            store = connect(int(server.stdout.readline()))

            async def main():
                server.send_signal(signal.SIGSTOP)
                with pytest.raises(CommTimeoutError, match="these ranks had not joined: 1"):
                    await opened(store=store, rank=0, size=2, timeout=0.2)
                server.send_signal(signal.SIGCONT)

            anyio.run(main)
        finally:
            server.kill()


@pytest.mark.fault(31)
def test_store_whose_server_has_ended_raises_store_lost_error():
    server = serve()
    store = connect(server.port)
    del server

    async def main():
        with pytest.raises(StoreLostError, match="the rendezvous store is lost"):
            await opened(store=store, rank=0, size=2, timeout=10)

    anyio.run(main)


@pytest.mark.fault(31)
def test_store_whose_server_ends_during_rendezvous_raises_store_lost_error():
    async def main():
        server = [serve()]
        store, look = connect(server[0].port), connect(server[0].port)

        async def come():
            with pytest.raises(StoreLostError, match="the rendezvous store is lost"):
                await opened(store=store, rank=0, size=2, timeout=10)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come)
            await come_to(look)
            server.clear()

    anyio.run(main)


@pytest.mark.fault(31)
def test_established_communicator_outlives_its_store():
    async def main():
        server = serve()
        comms = await meet(2, connect(server.port))
        del server
        results = await ranks(comms, lambda comm: comm.all_reduce(torch.tensor(1)))
        assert [r.item() for r in results] == [2, 2]
        await part(comms)

    anyio.run(main)


# ------------------------------------------------------------------------------------------------ the environment


def test_incomplete_environment_is_refused_at_once(run, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "none")

    async def main():
        with pytest.raises(ArgumentError) as caught:
            await aiocomms.new_comm("local")
        for complaint in ("WORLD_SIZE is missing", "MASTER_ADDR is missing", "MASTER_PORT is 'none'"):
            assert complaint in str(caught.value)

    run(main)


def test_arguments_override_the_environment(run, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")

    async def main():
        async with aiocomms.new_comm(rank=0, size=1) as comm:
            assert comm.size == 1

    run(main)


@pytest.mark.parametrize("place", [{}, {"rank": 0, "size": 1}], ids=list)
def test_join_without_a_store_is_refused(run, place):
    async def main():
        with pytest.raises(ArgumentError, match="join is True, and store is None"):
            await aiocomms.new_comm(join=True, **place)

    run(main)


def test_launched_single_rank_needs_no_store(run, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    async def main():
        async with aiocomms.new_comm() as comm:
            assert comm.size == 1

    run(main)


@pytest.mark.real
def test_new_comm_after_store_lost_error_finds_the_new_store(monkeypatch, free_port):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(formation, "_launched", {})  # A process keeps its launcher's store as long as it lives.

    async def meet_over(server):
        await part(await together(lambda: opened(store=server, rank=0, size=2), opened))

    for _ in range(2):
        server = TCPStore("127.0.0.1", int(free_port), is_master=True, wait_for_workers=False)
        anyio.run(meet_over, server)
        del server
        gc.collect()
        with pytest.raises(StoreLostError):
            anyio.run(opened)


RANK = """
import asyncio
import torch
import aiocomms
from aiocomms.communicator import formation

async def main():
    for _ in range(2):
        async with aiocomms.new_comm("c10d", timeout=30) as comm:
            total = await comm.all_reduce(torch.tensor(comm.rank + 1))
            gathered = await comm.all_gather_object(comm.rank)
    print(comm.rank, comm.size, total.item(), gathered, flush=True)

asyncio.run(main())
"""


@pytest.fixture(name="free_port")
def _free_port():
    return str(free_port())


def start(script, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.real
@pytest.mark.skipif("c10d" not in entry_points(group="aiocomms.transports").names, reason="needs the transport c10d")
@pytest.mark.parametrize("launcher", ["torchrun", "Slurm"])
def test_processes_meet_by_their_launchers_environment(free_port, launcher):
    def environment(rank):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
        if launcher == "torchrun":
            return {**place, "RANK": str(rank), "WORLD_SIZE": "2"}
        return {**place, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"}

    for rank in range(2):
        assert launchers.read_environment(environment(rank)).launcher == launcher
    processes = [start(RANK, **environment(rank)) for rank in range(2)]
    try:
        results = [process.communicate(timeout=HANGS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert results == [(f"{rank} 2 3 [0, 1]\n", "") for rank in range(2)]


@pytest.mark.search
@pytest.mark.real
@pytest.mark.skipif("c10d" not in entry_points(group="aiocomms.transports").names, reason="needs the transport c10d")
def test_lone_process_names_the_missing_ranks(free_port):
    script = RANK.replace("timeout=30", "timeout=1")
    process = start(script, RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    stdout, stderr = process.communicate(timeout=HANGS)
    assert stdout == ""
    assert "CommTimeoutError" in stderr
    assert "these ranks had not joined: 1, 2" in stderr


# ----------------------------------------------------------------------------------------- a store with earlier records


def crashed(store, *ranks):
    """Let these ranks of 2 arrive at the same time and crash; the store keeps their records."""
    here, given_up = PrefixStore("aiocomms/world", store), threading.Event()

    def came():
        return [here.get(f"came/{r}") if here.check([f"came/{r}"]) else b"" for r in ranks]

    before, seal = came(), Seal(None, "world")
    arrivals = [threading.Thread(target=Arrival(here, r, 2, seal).meet, args=(given_up,)) for r in ranks]
    for arrival in arrivals:
        arrival.start()
    while any(a == b for a, b in zip(came(), before, strict=True)) or (len(ranks) == 2 and arrivals[1].is_alive()):
        time.sleep(0.001)
    given_up.set()
    for arrival in arrivals:
        arrival.join(PATIENCE)


@pytest.mark.real
@pytest.mark.fault(33, transport="local")
@pytest.mark.fault(34)
@pytest.mark.parametrize("before", [[], [(0,)], [(1,)], [(0, 1)], [(1,), (1,)], [(0,), (0, 1), (1,)]], ids=str)
@pytest.mark.parametrize("kind", [HashStore, FileStore])
def test_records_of_a_crashed_run_in_the_store_are_ignored(kind, before, tmp_path):
    async def main():
        store = FileStore(str(tmp_path / "store"), 2) if kind is FileStore else HashStore()
        for came in before:
            crashed(store, *came)
        comms = await together(*(lambda r=r: opened(store=store, rank=r, size=2) for r in range(2)))
        await part(comms)

    anyio.run(main)


@pytest.mark.virtual_time
@pytest.mark.fault(34)
def test_later_of_two_processes_with_one_rank_replaces_the_first(run):
    async def main():
        store, comms = new_store(), []

        async def come(rank):
            comms.append(await opened(store=store, rank=rank, size=2))

        async with anyio.create_task_group() as tasks:
            failed = anyio.Event()

            async def be_first():
                with pytest.raises(ArgumentError, match="another process has joined as rank 1"):
                    await come(1)
                failed.set()

            tasks.start_soon(be_first)
            while not store.check(["aiocomms/world/came/1"]):  # noqa: ASYNC110 - a store has no events
                await anyio.sleep(0.001)
            tasks.start_soon(come, 1)
            await failed.wait()
            tasks.start_soon(come, 0)
        await part(comms)

    run(main)


def test_cancellation_that_a_scope_takes_for_its_own_still_ends_the_forming(monkeypatch):
    """A task group drops such an exception. It comes when the deadline of a scope passes in a cancelled task."""

    async def hear(_rendezvous, _missing, _heard, hearing, _forming):
        with hearing:
            await anyio.sleep_forever()

    async def tell(*_):
        pass

    async def opening():
        raise asyncio.CancelledError("Cancelled via cancel scope 7f0000000000; reason: deadline exceeded")

    async def main():
        monkeypatch.setattr(forming, "_hear", hear)
        monkeypatch.setattr(forming, "tell", tell)
        with pytest.raises(asyncio.CancelledError, match="deadline exceeded"):
            await forming.formed(SimpleNamespace(store=HashStore(), size=2), opening())

    asyncio.run(main())


def test_new_comm_cancelled_just_after_forming_closes_its_transport(monkeypatch):
    """The cancellation comes while the listener for other ranks' failures stops, so no program gets the transport."""
    closed, close, tasks = [], LocalTransport.aclose, []

    async def hear(rendezvous, _missing, _heard, hearing, _forming):
        with hearing:
            await anyio.sleep_forever()
        if rendezvous.rank == 0:
            tasks[0].cancel()

    async def aclose(self):
        closed.append(self)
        await close(self)

    async def main():
        monkeypatch.setattr(forming, "_hear", hear)
        monkeypatch.setattr(LocalTransport, "aclose", aclose)
        store = HashStore()
        tasks[:] = [asyncio.ensure_future(opened(store=store, rank=rank, size=2)) for rank in range(2)]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert len(closed) == 1
        await (await tasks[1]).aclose()

    asyncio.run(main())
