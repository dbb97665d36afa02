"""The flight recorder: its ring of ops, its files, and the reports that are made of them."""

from __future__ import annotations

import gc
import json
import logging
import re
import stat
import threading
import time
import weakref
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from concurrency import ranks, run_on, together, turns
from processes import HANGS, PATIENCE
from torch.distributed import HashStore

import aiocomms
from aiocomms.bootstrap.forming import broken_off
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.cli import main as command
from aiocomms.cli.top import looking
from aiocomms.core import postmortem
from aiocomms.core.postmortem import read_brief
from aiocomms.diagnosis import dumps, recorder
from aiocomms.diagnosis.hang_report import behind, judge
from aiocomms.diagnosis.recorder import Brief, Header, Item
from aiocomms.errors import (
    CommAbortedError,
    CommError,
    CommTimeoutError,
    MessageTruncatedError,
    MismatchError,
    PeerDiedError,
)
from aiocomms.serving import Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

HERE = Path(__file__).read_text().splitlines()


@pytest.fixture(autouse=True)
def records(tmp_path, monkeypatch):
    """Return the folder of the recorder's files."""
    folder = tmp_path / "records"
    monkeypatch.setenv("AIOCOMMS_RECORDER_DIR", str(folder))
    monkeypatch.setattr(dumps, "_complained", [])
    return folder


def read(path):
    first, *rest = path.read_bytes().splitlines()
    return msgspec.json.decode(first, type=Header), [msgspec.json.decode(line, type=Item) for line in rest]


async def written(folder, count):
    """Wait until so many files are complete, and return them."""
    with anyio.fail_after(HANGS):
        while True:
            found = [path for path in folder.glob("*") if path.read_bytes().endswith(b"\n")]
            if len(found) >= count:
                return found
            await anyio.sleep(0.005)


# --------------------------------------------------------------------------------------------------------- the ring


@pytest.mark.parametrize(("said", "kept"), [("4", 4), ("5", 8), ("1", 1)])
def test_recorder_keeps_the_last_ops(run, monkeypatch, said, kept):
    monkeypatch.setenv("AIOCOMMS_RECORDER", said)

    async def main():
        async with local_world(1) as (comm,):
            for _ in range(21):
                await comm.all_reduce(torch.ones(2))
            header, items = read(comm.dump())
            assert [item.seq for item in items] == list(range(21 - kept, 21))
            assert [item.collective for item in items] == list(range(22 - kept, 22))
            assert {(item.name, item.state) for item in items} == {("all_reduce", "done")}
            assert [item.finished for item in items] == sorted(item.finished for item in items)
            assert (header.brief.calls, header.brief.ended, header.brief.last) == (21, 21, "all_reduce #20")

    run(main)


def test_recorder_shows_no_older_op_in_the_slot_of_a_pending_one(run, monkeypatch):
    """The ring has no entry for a pending op, or for one that a hook has refused."""
    monkeypatch.setenv("AIOCOMMS_RECORDER", "4")

    def refuse(op, seq):
        raise LookupError

    async def main():
        async with local_world(2) as (one, two):
            for _ in range(4):
                first = one.barrier()
                await two.barrier()
                await first
            pending = two.recv(torch.ones(2), 0)
            assert [(item.seq, item.name) for item in read(two.dump())[1]] == [
                (1, "barrier"), (2, "barrier"), (3, "barrier"), (4, "recv")
            ]  # fmt: skip
            await pending.cancel()
        async with local_world(1) as (alone,):
            for _ in range(4):
                await alone.barrier()
            hook = alone.register_pre_hook(refuse)
            with pytest.raises(LookupError):
                alone.barrier()
            hook.remove()
            assert [item.seq for item in read(alone.dump())[1]] == [1, 2, 3]
            await alone.barrier()
            header, items = read(alone.dump())
            assert [(item.seq, item.collective) for item in items] == [(2, 3), (3, 4), (5, 5)]
            assert (header.brief.calls, header.brief.ended) == (5, 5)

    run(main)


def test_recorder_keeps_an_op_that_ends_late_or_fails_at_once(run, monkeypatch):
    """One op was called before all others in the ring; another op has failed when its call returns."""
    monkeypatch.setenv("AIOCOMMS_RECORDER", "4")

    async def main():
        async with local_world(2) as (one, two):
            late = one.recv(torch.zeros(3), 1, 9)
            for _ in range(20):
                given = two.send(torch.ones(2), 0, 1)
                await one.recv(torch.ones(2), 1, 1)
                await given
            await two.send(torch.ones(3), 0, 9)
            await late
            assert [item.seq for item in read(one.dump())[1]] == [0, 18, 19, 20]
            given = two.send(torch.ones(3), 0)
            with pytest.raises(MessageTruncatedError):
                await one.recv(torch.zeros(1), 1)
            await given
            assert [(item.seq, str(item), item.state) for item in read(one.dump())[1]] == [
                (0, "recv(src=1, tag=9)", "done"), (19, "recv(src=1, tag=1)", "done"),
                (20, "recv(src=1, tag=1)", "done"), (21, "recv(src=1, tag=0)", "failed"),
            ]  # fmt: skip

    run(main)


@pytest.mark.parametrize("said", ["0", "-1", "many", "65537", "1e3", "٣"])
def test_invalid_recorder_size_is_logged_and_the_default_used(said, monkeypatch, caplog):
    monkeypatch.setenv("AIOCOMMS_RECORDER", said)
    assert recorder.capacity() == recorder.DEFAULT == 512
    assert "wanted a number from 1 to 65536" in caplog.text


def test_recorder_describes_each_op(run):
    async def main():
        async with local_world(2, name="pair") as (one, two):
            late = one.recv(torch.zeros(4, dtype=torch.int16), 1, 9)
            recv = one.recv(torch.zeros(3), 1, 7)
            await two.send(torch.ones(3), 0, 7)
            await recv
            short = one.recv(torch.zeros(1), 1)
            await two.send(torch.ones(3), 0)
            with pytest.raises(MessageTruncatedError):
                await short
            works = [comm.reduce(torch.ones(2), 1) for comm in (one, two)]
            for work in works:
                await work
            (_, mine), (_, theirs) = read(one.dump()), read(two.dump())
            assert [str(item) for item in mine] == [
                "recv(src=1, tag=9)", "recv(src=1, tag=7)", "recv(src=1, tag=0)", "reduce(root=1)"
            ]  # fmt: skip
            assert [item.state for item in mine] == ["pending", "done", "failed", "done"]
            assert [item.bytes for item in mine][:2] == [8, 12]
            assert mine[0].tensors == ["tensor: int16 [4]"]
            assert mine[1].error == ""
            assert "the message from rank 1 is float32[3]" in mine[2].error
            assert mine[1].posted <= mine[1].finished
            assert str(theirs[0]) == "send(dst=0, tag=7)"
            assert mine[3].collective == theirs[-1].collective == 1
            assert await late.cancel()

    run(main)


def test_recorder_describes_ops_without_a_tensor_on_some_ranks(run):
    async def main():
        async with local_world(2) as world:

            async def both(comm):
                root = comm.rank == 0
                chunks = torch.arange(4.0) if root else None
                assert (await aiocomms.functional.scatter(chunks, 0, group=comm)).numel() == 2
                await comm.gather_single(torch.zeros(4) if root else None, torch.ones(2), 0)
                assert await comm.broadcast_object("x" if root else None, 0) == "x"
                pending = [comm.scatter(torch.zeros(2), None, 0)] if not root else []
                _, items = read(comm.dump())
                assert [item.name for item in items][-1] in ("scatter", "broadcast_object")
                assert {item.state for item in items[:3]} == {"done"}
                await comm.scatter(torch.zeros(2), [torch.ones(2)] * 2, 0) if root else await pending[0]

            await ranks(world, both)

    run(main)


def test_recorder_keeps_no_tensor_alive(run):
    async def main():
        async with local_world(2) as world:
            seen = []

            async def both(comm):
                for call in (
                    lambda t: comm.all_reduce(t),
                    lambda t: comm.send(t, 1) if comm.rank == 0 else comm.recv(t, 0),
                    lambda t: comm.all_to_all([t, t.clone()], [t.clone(), t.clone()]),
                ):
                    tensor = torch.ones(4)
                    seen.append(weakref.ref(tensor))
                    await call(tensor)
                    del tensor

            await ranks(world, both)
            await turns()
            gc.collect()
            assert len(seen) == 6
            assert [ref() for ref in seen] == [None] * 6
            for comm in world:
                _, items = read(comm.dump())
                assert len(items) == 3

    run(main)


def test_dump_names_the_awaiting_task_and_line(run):
    async def waits(comm):
        await comm.recv(torch.zeros(1), 1)  # this line

    async def main():
        async with local_world(2) as (one, _), anyio.create_task_group() as tasks:
            tasks.start_soon(waits, one, name="a waiter")
            await turns()
            paths = []
            thread = threading.Thread(target=lambda: paths.append(one.dump()))
            thread.start()
            thread.join()
            ((item,),) = [read(path)[1] for path in paths]
            assert item.task == "a waiter"
            assert re.search(r"test_recorder\.py:\d+ in .*waits$", item.where)
            assert HERE[int(re.search(r":(\d+) ", item.where)[1]) - 1].endswith("# this line")
            tasks.cancel_scope.cancel()

    run(main)


# --------------------------------------------------------------------------------------------------------- the files


@pytest.mark.real
@pytest.mark.fault(75)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_hanging_recorder_folder_does_not_delay_the_error(run, transport, monkeypatch):
    thaws, writes = threading.Event(), threading.Semaphore(0)

    def hang(snapshot, folder=None):
        writes.release()
        thaws.wait()
        raise OSError("it is gone")

    monkeypatch.setattr(dumps, "write", hang)

    async def main():
        async with local_world(2, transport) as (one, two):
            late = one.all_reduce(torch.ones(3), timeout=0.1)
            other = two.recv(torch.zeros(3), 0)
            for work in (late, other):
                with pytest.raises(CommTimeoutError):
                    await work
            for _ in range(2):  # Each rank must write now, and not later into another test's folder.
                await anyio.to_thread.run_sync(writes.acquire)

    try:
        run(main)
    finally:
        thaws.set()


@pytest.mark.fault(75)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_hanging_recorder_folder_keeps_no_buffer_alive(run, transport, how, monkeypatch):
    thaws, writes = threading.Event(), threading.Semaphore(0)

    def hang(snapshot, folder=None):
        writes.release()
        thaws.wait()
        raise OSError("it is gone")

    monkeypatch.setattr(dumps, "write", hang)

    async def main():
        async with local_world(2, transport) as (one, two):
            seconds = 0.1 if how == "deadline" else None
            works = [one.all_reduce(torch.ones(3), timeout=seconds), two.recv(torch.zeros(3), 0)]
            kept = [weakref.ref(work.op.tensor) for work in works]
            if how == "abort":
                one.abort("enough")
            for work in works:
                with pytest.raises(CommError) as caught:
                    await work
                caught.value.__traceback__ = None
            for _ in range(2):
                await anyio.to_thread.run_sync(writes.acquire)
        works.clear()
        del work, caught
        gc.collect()
        assert [ref() for ref in kept] == [None, None]

    try:
        run(main)
    finally:
        thaws.set()


@pytest.mark.fault(69)
def test_recorder_file_is_private_and_replaces_no_other(run, records, tmp_path):
    async def main():
        async with local_world(1, name="../a b/é") as (comm,):
            first, second = comm.dump(), comm.dump(tmp_path / "other")
            assert first.parent == records
            assert first.name.startswith(".._a_b__.rank0.")
            assert second.parent == tmp_path / "other"
            for path in (first, second):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert read(first)[0].comm == "../a b/é"

    run(main)


@pytest.mark.fault(69)
def test_recorder_refuses_to_write_through_a_symlink(records, tmp_path, monkeypatch):
    async def main():
        async with local_world(1) as (comm,):
            path = comm.dump()
            monkeypatch.setattr(dumps, "_counter", iter(range(10_000, 10_010)))
            snapshot = comm._core.recorder.snapshot("x")
            name = re.sub(r"-\d+\.aiocomms", "-10000.aiocomms", path.name)
            snapshot.header.wall = read(path)[0].wall
            victim = tmp_path / "victim"
            victim.write_text("mine")
            (records / name).symlink_to(victim)
            with pytest.raises(FileExistsError):
                dumps.write(snapshot)
            assert victim.read_text() == "mine"

    run_on("asyncio", main)


def test_recorder_limits_the_number_and_size_of_files(records, monkeypatch):
    async def main():
        monkeypatch.setattr(dumps, "LARGEST", 3000)
        async with local_world(1) as (comm,):
            for _ in range(100):
                await comm.barrier()
            others = records / "somebody.rank0.else.1-1.aiocomms.jsonl"
            paths = [comm.dump() for _ in range(dumps.PER_PROCESS)]
            others.write_text("")
            paths += [comm.dump() for _ in range(5)]
            assert sorted(records.iterdir()) == sorted([others, *paths[-dumps.PER_PROCESS :]])
            assert 2000 < paths[-1].stat().st_size < 3000 + 1000
            assert read(paths[-1])[1][-1].seq == 99  # The oldest ops are left out.

    run_on("asyncio", main)


def test_default_recorder_folder_is_private_and_bounded(tmp_path, monkeypatch):
    monkeypatch.delenv("AIOCOMMS_RECORDER_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(dumps, "PER_FOLDER", 3)

    async def main():
        async with local_world(1) as (comm,):
            folder = tmp_path / "aiocomms"
            for _ in range(5):
                assert comm.dump().parent == folder
            assert len(list(folder.iterdir())) == 3
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            folder.chmod(0o755)
            with pytest.raises(CommError, match="is open to other users") as caught:
                comm.dump()
            assert isinstance(caught.value.__cause__, PermissionError)

    run_on("asyncio", main)


async def time_out(comm):
    with pytest.raises((CommTimeoutError, CommAbortedError)) as caught:
        await comm.all_reduce(torch.ones(1), timeout=0.05)
    return str(caught.value)


@pytest.mark.fault(59)
@pytest.mark.parametrize("why", ["unwritable", "full", "unwanted"])
@pytest.mark.usefixtures("patient")
def test_unwritable_recorder_file_is_logged_once_and_leaves_the_error(run, records, monkeypatch, caplog, why):
    if why == "unwritable":
        records.write_text("no folder")
    elif why == "unwanted":
        monkeypatch.setenv("AIOCOMMS_RECORDER_DIR", "")
    else:
        monkeypatch.setattr(dumps, "encode", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    async def main():
        for _ in range(2):
            async with local_world(2) as (one, _):
                message = await time_out(one)
                assert (
                    "waiting for rank 1: rank 0 is in it (collective 1), rank 1 has finished no collective" in message
                )
                assert "[flight recorder" not in message

    with caplog.at_level(logging.WARNING):
        run(main)
    said = [record for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(said) == (0 if why == "unwanted" else 1)
    ends = time.monotonic() + PATIENCE
    while why == "full" and list(records.iterdir()):  # Another rank may have begun to write a file.
        assert time.monotonic() < ends
    assert why == "full" or not records.is_dir()


@pytest.mark.real
def test_lost_communicator_writes_a_recorder_file_on_every_rank(run, records):
    """An abort makes every rank write a file, and delays none."""

    async def main():
        async with local_world(2) as world:
            work = world[1].recv(torch.zeros(1), 0, 5)
            world[0].abort("enough")
            with pytest.raises(CommAbortedError):
                await work
            files = await written(records, 2)
            found = {header.rank: (header.reason, items) for header, items in map(read, files)}
            assert all("aborted by rank 0: enough" in reason for reason, _ in found.values())
            assert not found[0][1]
            assert [(str(item), item.state) for item in found[1][1]] == [("recv(src=0, tag=5)", "pending")]

    run(main)


# ------------------------------------------------------------------------------------------------------- the verdicts


@pytest.mark.usefixtures("patient")
def test_timeout_error_says_what_every_rank_is_doing(run, records):
    async def main():
        async with local_world(4, name="tp") as world:
            await ranks(world, lambda comm: comm.all_reduce(torch.ones(1)))
            lost = [world[3].recv(torch.zeros(1), 1, 7), world[1].all_reduce(torch.ones(1))]
            world[2].all_reduce(torch.ones(1)).add_done_callback(lambda work: work.exception())
            message = await time_out(world[0])
            assert (
                "all_reduce #1 on 'tp' (rank 0): its deadline passed; waiting for rank 3: ranks 0, 1, 2 are in it "
                "(collective 2), rank 3 has finished collective 1 (all_reduce #0) and is in recv(src=1, tag=7) "
                f"[flight recorder: {records}" in message
            )
            for work in lost:
                with pytest.raises(CommTimeoutError, match=r"ranks 0, 1, 2 are in it .* is in recv\(src=1, tag=7\)"):
                    await work
            with pytest.raises(CommAbortedError, match="ranks 0, 1, 2 are in it"):
                world[0].barrier()

    run(main)


def test_timeout_error_without_a_store_names_the_missing_rank(run, monkeypatch):
    """Ranks without a store, through which they could ask each other, still name the missing rank."""
    monkeypatch.setattr(postmortem, "WRITING", PATIENCE)

    async def main():
        store = HashStore()
        comms = await together(
            *(lambda r=r: aiocomms.new_comm("local", store=store, rank=r, size=2, name="n")._open() for r in range(2))
        )
        comms[0]._rendezvous.store = None
        assert "its deadline passed; waiting for rank 1 [flight" in await time_out(comms[0])
        await ranks(comms, lambda comm: comm.aclose())

    run(main)


def test_hanging_store_does_not_delay_the_timeout_error(run, monkeypatch):
    """A store hangs if its host is stopped. A rank that waits for the late rank's verdict does not hang either."""
    given_up = threading.Event()
    monkeypatch.setattr(StoreRendezvous, "tell", lambda *_: given_up.wait(30))
    monkeypatch.setattr(postmortem, "WRITING", PATIENCE)

    async def main():
        async with local_world(2) as world:
            other = world[1].recv(torch.zeros(1), 0)
            try:
                assert "its deadline passed; waiting for rank 1 [flight" in await time_out(world[0])
                with pytest.raises(CommTimeoutError, match="its deadline passed"):
                    await other
                assert not given_up.is_set()
            finally:
                given_up.set()

    run(main)


def test_judge_tells_for_each_rank_how_it_relates_to_the_late_op():
    late = Item("all_reduce", 9, "pending", collective=5)
    other = Item("broadcast", 3, "pending", {"root": 1}, 5)
    briefs = {
        0: Brief(0, 5, 4, "", [late]),
        1: Brief(1, 5, 4, "", [other]),
        2: Brief(2, 6, 6, "barrier #7"),
        3: Brief(3, 0, 0, "", [Item("send", 0, "pending", {"dst": 1, "tag": 0, "channel": 0})] * 2, 4),
    }
    assert judge(late, briefs, [5, 4]) == (
        "rank 0 is in it (collective 5), rank 2 is done with it, rank 1 is in broadcast(root=1) instead, "
        "rank 3 has finished no collective and is in send(dst=1, tag=0), send(dst=1, tag=0) and 4 more, "
        "ranks 4, 5 do not answer: dead, stopped or busy"
    )


@pytest.mark.fault(124)
def test_behind_finds_the_ranks_that_a_late_collective_waits_for():
    """A step waits for rank 1, which waits for rank 3; rank 2 is done. A silent rank is late if a step waits for it."""
    late = Item("all_reduce", 9, "pending", collective=5)
    briefs = {
        0: Brief(0, 5, 4, "", [late]),
        1: Brief(1, 5, 4, "", [late]),
        2: Brief(2, 6, 6, "barrier #7"),
        3: Brief(3, 4, 4, "barrier #7"),
    }
    assert behind(late, briefs, (), [1]) == (3,)
    assert behind(late, briefs, (), [3]) == (3,)
    assert behind(late, briefs, {4, 5}, [4]) == (4,)
    assert behind(late, {0: briefs[0]}, {1, 2, 3}, [3, 1]) == (1, 3)
    assert behind(late, {0: briefs[0]}, (), [3, 1]) == (1, 3)


@pytest.mark.fault(124)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
@pytest.mark.parametrize("where", ["communicator", "lane"])
def test_timeout_errors_of_all_ranks_name_the_same_late_rank(run, transport, where):
    """A rank that waits is not late, even in a lane, whose collectives are made of messages."""

    async def main():
        async with local_world(5, transport) as world:
            ended = []

            async def one(comm):
                if comm.rank == 3:
                    return
                on = comm.lane("key") if where == "lane" else comm
                with pytest.raises(CommTimeoutError) as caught:
                    await on.all_reduce(torch.ones(4), timeout=0.5 if comm.rank == 0 else 30)
                ended.append((caught.value.late, caught.value.peer))

            await ranks(world, one)
            assert ended == [((3,), 3)] * 4
            with pytest.raises(CommAbortedError) as caught:
                world[0].barrier()
            assert caught.value.peer == 3

    run(main)


@pytest.mark.fault(124)
def test_late_rank_of_a_split_is_named_by_its_rank_in_the_parent(run):
    async def main():
        async with local_world(4) as world:
            late = CommTimeoutError("nobody came", comm="half", late=[1])
            assert broken_off(late, [2, 3]).late == (3,)
            assert "ranks [3] of the communicator that is split" in str(broken_off(late, [2, 3]))
            gone = broken_off(PeerDiedError("rank 0 is gone", peer=0), [2, 3])
            assert (type(gone), gone.peer) == (PeerDiedError, 2)
            world[0]._core.lose(broken_off(late, [2, 3]))
            errors = await ranks(world, lambda comm: comm.lost())
            assert [(error.late, error.peer) for error in errors] == [((3,), 3)] * 4

    run(main)


def test_judge_keeps_collectives_of_different_lanes_apart():
    """Collectives of another lane, or of the communicator, say nothing about the late one."""
    late = Item("all_reduce", 9, "pending", collective=0, lane="a")
    briefs = {
        0: Brief(0, 5, 4, "", [late]),
        1: Brief(1, 5, 5, "", [Item("barrier", 3, "pending", collective=0, lane="a")]),
        2: Brief(2, 6, 6, "", [Item("all_reduce", 3, "pending", collective=0, lane="b")]),
    }
    assert judge(late, briefs) == (
        "rank 0 is in it, rank 1 is in barrier in lane a instead, "
        "rank 2 has finished collective 6 and is in all_reduce in lane b"
    )


def test_collectives_of_lanes_are_recorded_with_lane_name_and_no_number(records):
    """Collectives of lanes do not count among the communicator's own, which all ranks number alike."""

    async def main():
        async with local_world(2) as world:
            one = world[0]
            await ranks(world, lambda comm: comm.barrier())
            await ranks(world, lambda comm: comm.lane("done").barrier())
            await ranks(world, lambda comm: comm.all_reduce(torch.ones(2)))
            message = world[1].lane(7).send(torch.ones(1), 0, 3)
            await one.lane(7).recv(torch.ones(1), 1, 3)
            await message
            waiting = one.lane("waits").all_reduce(torch.ones(2))
            _, items = read(one.dump())
            assert [(item.name, item.lane, item.collective, item.state) for item in items] == [
                ("barrier", "", 1, "done"),
                ("barrier", "done", 0, "done"),
                ("all_reduce", "", 2, "done"),
                ("recv", "7", None, "done"),
                ("all_reduce", "waits", 0, "pending"),
            ]
            assert str(items[3]) == "recv(src=1, tag=3) in lane 7"
            await world[1].lane("waits").all_reduce(torch.ones(2))
            await waiting

    run_on("asyncio", main)


@pytest.mark.parametrize(
    "said",
    [None, b"", b"{}", b"[1]", b"\xff", b'{"rank":1,"calls":"x","ended":0}', b'{"rank":2,"calls":0,"ended":0}',
     b'{"rank":1,"calls":0,"ended":0,"last":"' + b"x" * 20000 + b'"}'],
)  # fmt: skip
def test_malformed_brief_of_another_rank_is_ignored(said):
    assert read_brief(said, 1) is None


def test_brief_of_another_rank_is_made_printable():
    item = {"name": "re\u001b[31mcv" * 90, "seq": 1, "state": "pending", "args": {"sr\nc": 1}}
    said = {"rank": 1, "calls": 1, "ended": 0, "last": "a\r\nb" * 500, "pending": [item] * 9}
    brief = read_brief(msgspec.msgpack.encode(said), 1)
    assert len(brief.pending) == recorder.SHOWN
    text = f"{brief.last} {brief.pending[0]}"
    assert text.isprintable()
    assert len(text) < 500


# ------------------------------------------------------------------------------------------------------------- trace


def header(**more):
    fields = {
        "format": recorder.FORMAT, "comm": "tp", "rank": 0, "size": 2, "host": "h", "pid": 1, "wall": 1000.0,
        "monotonic": 10.0, "reason": "why", "verdict": "", "brief": {"rank": 0, "calls": 0, "ended": 0},
    }  # fmt: skip
    return json.dumps(fields | more).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"hello", "line 1: JSON is malformed"),
        (b"\x00\xff" * 50, "line 1: JSON is malformed"),
        (b"[" * 100_000, "line 1: "),
        (b"{}", "line 1: Object missing required field"),
        (header(format="other\x1b[31m"), r"its format is 'other\?"),
        (
            b'{"format":"aiocomms recorder 9","other":1}',
            "its format is 'aiocomms recorder 9', wanted 'aiocomms recorder 1'",
        ),
        (header(rank=2), "it is of rank 2 of 2"),
        (header(rank=-1), "it is of rank -1 of 2"),
        (header(rank=1), "it is of rank 1 of 2"),
        (header(wall="x"), "line 1: Expected `float`"),
        (header(wall=1e308), r"line 1: Expected `float` <= 1000000000000.0 - at `\$.wall`"),
        (header() + b'\n{"name":"a","seq":1,"state":"done","posted":-1e308}', r"line 2: .* - at `\$.posted`"),
        (header()[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1: maximum recursion depth exceeded"),
        (header() + b'\n{"name":1}', "line 2: Expected `str`"),
        (header() + b'\n{"name":"a","seq":1,"state":"done"}\n{"na', "line 3: Input data was truncated"),
        (header() + b"\n" + b" " * (10 << 20), "larger than"),
    ],
)
def test_trace_says_why_a_file_is_no_flight_recorder(content, why, tmp_path, capsys):
    path = tmp_path / "x.aiocomms.jsonl"
    path.write_bytes(content)
    assert command(["trace", str(path)]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(f"aiocomms trace: {path} is no flight recorder: ")
    assert re.search(why, said.err)
    assert len(said.err.splitlines()) == 1


def test_trace_of_an_empty_folder_fails(tmp_path, capsys):
    assert command(["trace", str(tmp_path)]) == 1
    assert "holds no flight recorder" in capsys.readouterr().err


def test_trace_aligns_clocks_and_names_missing_ranks(tmp_path, capsys):
    """Ranks of one host share the monotonic clock, whatever happens to the wall clock."""
    pending = b'\n{"name":"recv","seq":4,"state":"pending","args":{"src":2,"tag":1},"posted":4.0}\n'
    done = b'\n{"name":"all_reduce","seq":0,"state":"done","collective":1,"posted":3.0,"finished":5.0}\n'
    (tmp_path / "a.aiocomms.jsonl").write_bytes(header(size=3) + done + pending)
    brief = {"rank": 1, "calls": 1, "ended": 1}
    (tmp_path / "b.aiocomms.jsonl").write_bytes(header(size=3, rank=1, wall=5000.0, monotonic=11.0, brief=brief) + done)
    output = tmp_path / "trace.json"
    assert command(["trace", str(tmp_path), "--output", str(output)]) == 1
    said = capsys.readouterr().out
    assert "no file of rank 2" in said
    assert "the files were written 4000 s apart" in said
    assert "rank 0 waits for rank 2: recv(src=2, tag=1), for 6.0 s" in said
    spans = [(e["name"], e["ts"], e["dur"]) for e in json.loads(output.read_text())["traceEvents"] if e["ph"] == "X"]
    assert spans == [
        ("all_reduce", 993e6, 2e6),
        ("recv(src=2, tag=1) (pending)", 994e6, 6e6),
        ("all_reduce", 993e6, 2e6),
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_trace_names_a_circle_of_recvs_that_timed_out(run, size, records, capsys):
    async def main():
        async with local_world(size) as world:
            works = [comm.recv(torch.zeros(1), (comm.rank + 1) % size, tag=7, timeout=0.05) for comm in world]
            for work in works:
                await work.wait()
            await ranks(world, lambda comm: comm.barrier())  # The communicator stays usable.
            for comm in world:
                comm.dump()

    run(main)
    assert command(["trace", str(records)]) == 1
    said = capsys.readouterr().out
    for rank in range(size):
        assert re.search(rf"rank {rank} waited for rank {(rank + 1) % size}: recv\(src=\d, tag=7\), for [\d.]+ s", said)
    circle = " -> ".join(f"rank {rank % size}" for rank in range(size + 1))
    assert f"they waited in a circle, until a deadline passed: {circle}" in said


def test_trace_names_a_circle_of_a_withdrawn_recv_and_a_collective(run, records, capsys):
    async def main():
        async with local_world(2) as (one, two):
            barrier = two.barrier()
            with pytest.raises(CommTimeoutError):
                await one.recv(torch.zeros(1), 1, tag=7, timeout=0.05)
            one.dump()
            two.dump()
            await one.barrier()
            await barrier

    run(main)
    assert command(["trace", str(records)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"rank 0 waited for rank 1: recv\(src=1, tag=7\), for [\d.]+ s", said)
    assert re.search(r"rank 1 waited for rank 0: barrier, for [\d.]+ s", said)
    assert "they waited in a circle, until a deadline passed: rank 0 -> rank 1 -> rank 0" in said


MESSAGE = '{{"name":"{}","seq":{},"state":"pending","args":{{"{}":{},"tag":{}}},"posted":4.0}}'


@pytest.mark.parametrize(
    ("reason", "second", "circle"),
    [
        ("its deadline passed", ("recv", 4, "src", 0, 7), True),
        ("the rank has died", ("recv", 4, "src", 0, 7), False),
        ("its deadline passed", ("send", 4, "dst", 0, 7), False),
    ],
    ids=["stuck", "dead", "in flight"],
)
def test_trace_names_no_circle_through_a_dead_rank_or_a_message_in_flight(reason, second, circle, tmp_path, capsys):
    for rank, given in enumerate([[("recv", 4, "src", 1, 7)], [("recv", 3, "src", 0, 5), second]]):
        head = header(rank=rank, brief={"rank": rank, "calls": 0, "ended": 0}, reason=reason if rank else "why")
        lines = [head, *(MESSAGE.format(*op).encode() for op in given), b""]
        (tmp_path / f"{rank}.aiocomms.jsonl").write_bytes(b"\n".join(lines))
    assert command(["trace", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "rank 1 waits for rank 0: recv(src=0, tag=5), for 6.0 s" in said
    assert ("they wait in a circle: rank 0 -> rank 1 -> rank 0" in said) is ("circle" in said) is circle


@pytest.mark.parametrize("second", ["later", "answered"])
def test_trace_names_no_circle_of_recvs_that_matched_or_waited_apart(run, second, records, capsys):
    """The receives did not wait at the same time, or were matched."""

    async def main():
        async with local_world(2) as (one, two):
            other = two.recv(torch.zeros(1), 0, timeout=30) if second == "answered" else None
            with pytest.raises(CommTimeoutError):
                await one.recv(torch.zeros(1), 1, timeout=0.05)
            if other is not None:
                await one.send(torch.ones(1), 1)
                await other
            else:
                with pytest.raises(CommTimeoutError):
                    await two.recv(torch.zeros(1), 0, timeout=0.05)
            one.dump()
            two.dump()

    run(main)
    assert command(["trace", str(records)]) == 0
    assert "no rank waits for another" in capsys.readouterr().out


@pytest.mark.fault(125)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_mismatch_error_has_the_communicators_collective_number(run, transport):
    """The number is not the transport's, for which one collective of an object is several."""

    async def differ(comm):
        await comm.new_window(torch.zeros(4))
        await comm.broadcast_object(1, root=0)
        with pytest.raises(MismatchError) as caught:
            await (comm.all_reduce(torch.ones(3)) if comm.rank else comm.barrier())
        return caught.value.message

    async def main():
        async with local_world(2, transport) as world:
            said = await ranks(world, differ)
            for comm, message in zip(world, said, strict=True):
                number = next(item.collective for item in items_of(comm) if item.name in ("barrier", "all_reduce"))
                assert re.match(rf"in collective {number} rank \d calls ", message)
                assert number == comm._core.ledger.calls

    run(main)


@pytest.mark.fault(125)
def test_trace_of_a_missing_path_fails(tmp_path, capsys):
    assert command(["trace", str(tmp_path / "nowhere")]) == 1
    wanted = "wanted a flight recorder's file, or a folder of them"
    assert capsys.readouterr().err == f"aiocomms trace: {tmp_path}/nowhere is not there, {wanted}\n"


def test_trace_of_idle_ranks_says_that_none_waits(run, records, capsys):
    async def main():
        async with local_world(2) as world:
            await ranks(world, lambda comm: comm.barrier())
            for comm in world:
                comm.dump()

    run(main)
    assert command(["trace", str(records)]) == 0
    assert "no rank waits for another" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------- info and bench


def test_info_shows_versions_and_transports_and_hides_the_token(capsys, monkeypatch):
    monkeypatch.setenv("AIOCOMMS_TOKEN", "a-secret")
    monkeypatch.setenv("MASTER_ADDR", "host\x1b")
    counts = ("MPI_LOCALNRANKS", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    for name in counts:
        monkeypatch.setenv(name, "1")
    assert command(["info"]) == 0
    said = capsys.readouterr().out
    assert f"torch                        {torch.__version__}" in said
    assert "local on cpu                 available" in said
    assert "c10d on cuda                 not available: it carries tensors on cpu" in said
    assert "a-secret" not in said
    assert "AIOCOMMS_TOKEN               set, and not shown" in said
    assert r"'host\x1b'" in said
    assert [name for name in counts if f"  {name} " not in said] == []


@pytest.mark.fault(123)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_trace_of_an_idle_stream_and_service_says_that_none_waits(run, transport, records, capsys):
    """The receives that stand ready are pending on both ranks; no report says that a rank waits."""

    async def execute(plan):
        return plan

    async def serve(comm):
        async with Service(comm) as service:
            if comm.rank:
                await service.work(execute)
            else:
                async with service.drive(execute) as driver:
                    assert await driver.run("plan") == "plan"
                    await look()

    async def look():
        a, b = await together(*(lambda c=c: c.open_stream(1 - c.rank, name="idle") for c in world))
        await a.send(torch.ones(2))
        assert (await b.receive()).tolist() == [1.0, 1.0]
        for comm in world:
            peer = 1 - comm.rank
            stand = {f"recv(src={peer}) of stream 'idle'{what}" for what in ("", ", for room")}
            while {str(item) for item in items_of(comm) if item.idle} != {
                *stand,
                f"recv_object(src={peer}) of the service",
            }:
                await turns()
        for comm in world:
            comm.dump()
            assert comm.statistics().oldest is None
            assert comm._core.recorder.snapshot("").header.brief.pending == []
            doing, waits, *_ = comm._core._inquiry._look()  # Other ranks that ask get this answer.
            assert (doing, waits) == ("has finished no collective and is in no operation", [])
        assert looking.TopGroup("", 2, {comm.rank: comm._sight() for comm in world}).waits() == []

    async def main():
        nonlocal world
        async with local_world(2, transport) as world:
            await ranks(world, serve)

    world = None
    run(main)
    assert command(["trace", str(records)]) == 0
    assert "no rank waits for another" in capsys.readouterr().out


@pytest.mark.fault(123)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
@pytest.mark.parametrize("what", ["an item", "room"])
def test_trace_names_the_task_that_waits_for_a_stream(run, transport, what, records, capsys):
    async def takes(stream):
        await stream.receive()

    async def gives(stream):
        while True:
            await stream.send(torch.ones(1))

    async def main():
        async with local_world(2, transport) as world:
            _, stream = await together(*(lambda c=c: c.open_stream(1 - c.rank, 1, "tokens") for c in world))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(takes if what == "an item" else gives, stream, name="the culprit")
                while not any(item.of and item.state == "pending" and not item.idle for item in items_of(world[1])):
                    await turns()
                for comm in world:
                    comm.dump()
                tasks.cancel_scope.cancel()

    run(main)
    assert command(["trace", str(records)]) == 1
    said = capsys.readouterr().out
    room = ", for room" if what == "room" else ""
    assert f"rank 1 waits for rank 0: recv(src=0) of stream 'tokens'{room}, for " in said
    name, line = ("takes", "await stream.receive()") if not room else ("gives", "await stream.send(torch.ones(1))")
    place = re.search(rf"in task 'the culprit' at (.*):(\d+) in .*{name}", said)
    assert place
    assert HERE[int(place[2]) - 1].strip() == line
    assert "rank 0 waits" not in said


def items_of(comm):
    return comm._core.recorder.snapshot("").items()
