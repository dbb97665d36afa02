"""The file of ``aiocomms trace --output``, checked against the Trace Event Format and with Perfetto's viewer."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import perfetto
import pytest
import torch

from aiocomms.cli import main
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommTimeoutError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

RANKS = 3

Number = Annotated[int, msgspec.Meta(ge=1)]
"""A number of a process or a thread; Perfetto has no 0."""


class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    sort_index: int | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True, tag_field="ph", tag="M"):
    name: Literal["process_name", "process_sort_index", "thread_name"]
    pid: Number
    args: Arguments
    tid: Number | None = None


class Complete(msgspec.Struct, forbid_unknown_fields=True, tag_field="ph", tag="X"):
    name: str
    cat: str
    pid: Number
    tid: Number
    ts: Annotated[float, msgspec.Meta(ge=0)]
    dur: Annotated[float, msgspec.Meta(ge=0)]
    args: dict[str, int | str | list[str]]

    @property
    def end(self) -> float:
        return self.ts + self.dur


class Trace(msgspec.Struct, forbid_unknown_fields=True):
    """A trace in the JSON object format of "Trace Event Format" by Nat Duca and Dean Sinclair: "Complete" events."""

    traceEvents: list[Metadata | Complete]  # noqa: N815
    displayTimeUnit: Literal["ms", "ns"]  # noqa: N815


async def busy(comm: Communicator, folder: Path) -> None:
    """Call ops one after the other and at once; some end, some are withdrawn, and some are pending."""
    rank, size = comm.rank, comm.size
    for _ in range(5):
        await comm.all_reduce(torch.ones(1000))
    left, right = (rank - 1) % size, (rank + 1) % size
    works = [comm.recv(torch.zeros(1), left, tag=tag) for tag in range(4)]
    for tag in reversed(range(4)):  # Each receive ends before those that were called earlier.
        await comm.send(torch.ones(1), right, tag=tag)
        await works[tag]
    with pytest.raises(CommTimeoutError):
        await comm.recv(torch.zeros(1), left, tag=9, timeout=0.001)
    pending = [comm.recv(torch.zeros(1), left, tag=tag) for tag in (10, 11)]
    comm.dump(folder)
    await asyncio.gather(*(work.cancel() for work in pending))


@pytest.fixture
def output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Write a trace of real ranks, and return its path."""

    async def world() -> None:
        async with local_world(RANKS, name="tp") as comms:
            await asyncio.gather(*(busy(comm, tmp_path / "records") for comm in comms))

    asyncio.run(world())
    written = tmp_path / "trace.json"
    assert main(["trace", str(tmp_path / "records"), "--output", str(written)]) == 1
    assert f"{written}: {RANKS * 16} operations; open it in " in capsys.readouterr().out
    return written


def complete(written: Path) -> list[Complete]:
    events = msgspec.json.decode(written.read_bytes(), type=Trace).traceEvents
    return [event for event in events if isinstance(event, Complete)]


def test_trace_output_matches_the_chrome_trace_format(output: Path) -> None:
    trace = msgspec.json.decode(output.read_bytes(), type=Trace)
    metadata = [event for event in trace.traceEvents if isinstance(event, Metadata)]
    processes = {event.pid: event.args.name for event in metadata if event.name == "process_name"}
    assert processes == {rank + 1: f"tp: rank {rank}" for rank in range(RANKS)}
    threads = {event.tid: event.pid for event in metadata if event.name == "thread_name"}
    assert len(threads) == sum(event.name == "thread_name" for event in metadata)  # No number appears twice.
    assert all(threads[pid] == pid for pid in processes)
    ops = defaultdict[int, list[Complete]](list)
    for op in complete(output):
        assert threads[op.tid] == op.pid
        ops[op.tid].append(op)
    assert {event.tid for event in metadata if event.tid is not None} == ops.keys()
    for row in ops.values():
        for before, after in pairwise(sorted(row, key=lambda op: (op.ts, op.end))):
            assert before.end <= after.ts, (before, after)
    assert max(Counter(threads.values()).values()) > 2  # Ops that overlap are drawn in rows of their own.


@pytest.mark.real
@pytest.mark.skipif(bool(perfetto.absent()), reason=perfetto.absent())
def test_perfetto_viewer_shows_every_op_of_the_trace(output: Path) -> None:
    with perfetto.viewer(output) as viewer:
        told = viewer.query("select name, value from stats where severity != 'info' and value > 0", name="str", value=0)
        assert told == []  # The viewer has dropped nothing.
        shown = viewer.query(
            "select process.name as process, slice.name as name, slice.category as state, slice.dur as dur, "
            "thread.tid as tid, ifnull(extract_arg(slice.arg_set_id, 'args.seq'), -1) as seq "
            "from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) "
            "join process using (upid)",
            process="str", name="str", state="str", dur=0, tid=0, seq=0,
        )  # fmt: skip
        text = viewer.page.inner_text("body")
    wanted = [
        [f"tp: rank {op.pid - 1}", op.name, op.cat, op.dur * 1000, op.tid, op.args["seq"]] for op in complete(output)
    ]
    assert sorted(shown) == sorted(wanted)
    for rank in range(RANKS):
        assert f"tp: rank {rank}" in text
