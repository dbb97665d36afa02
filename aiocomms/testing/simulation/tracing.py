"""The files of a failed history (a failed simulated run).

The files contain the ranks' flight recorders, with the last operations of each rank, and all events.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aiocomms.diagnosis import dumps, happenings
from aiocomms.diagnosis.recorder import Snapshot

if TYPE_CHECKING:
    from aiocomms.testing.simulation.process import Process
    from aiocomms.testing.simulation.world import SimulatedWorld


def write_trace(world: SimulatedWorld, folder: Path, seed: str, error: BaseException) -> None:
    """Write the files of a failed history, which ``aiocomms trace`` can read. Existing files are not replaced.

    :raises OSError: a file exists already, or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count(1)
    for process in world.processes:
        world.enter(process)
        for shot in _snapshots(world, process, f"the history has failed: {type(error).__name__}: {error}"):
            name = re.sub(r"[^\w.-]", "_", shot.header.comm, flags=re.ASCII)[:40]
            path = folder / f"{name}.rank{process.rank}.{next(numbers)}{dumps.SUFFIX}"
            with path.open("xb") as file:
                file.write(dumps.encode(shot))
    encoder = msgspec.json.Encoder()
    lines: list[msgspec.Struct] = [happenings.WorldHeader(happenings.FORMAT, seed), *_happenings(world)]
    with (folder / f"simulation{dumps.SUFFIX}").open("xb") as file:
        file.write(b"\n".join((*map(encoder.encode, lines), b"")))


def _snapshots(world: SimulatedWorld, process: Process, reason: str) -> Iterator[Snapshot]:
    """Yield a snapshot of each communicator of a process.

    If the communicator was lost, the snapshot shows its state at the loss. Otherwise the snapshot shows its state at
    the end of the process.
    """
    records = {record.recorder: record for record in process.state.get(dumps.RECORDS, ())}
    if process.over:
        reason = happenings.DIED if process.dead else "the rank has ended"
    time = min(process.ended, world.time)
    for recorder in process.state.get(dumps.RECORDERS, ()):
        record = records.get(recorder)
        shot = None if record is None else record.shot or record.snapshot()
        if shot is None:
            shot = recorder.snapshot(reason)
            shot.header.wall, shot.header.monotonic = world.wall_at(time), process.says_at(time)
        shot.header.host = f"simulated {process}"  # Each process has a monotonic clock of its own.
        yield shot


def _happenings(world: SimulatedWorld) -> Iterator[happenings.Happening]:
    for time, who, what in world.trace:
        found = re.match(r"rank (\d+)", who)
        rank = None if found is None else int(found[1])
        yield happenings.Happening(world.wall_at(time), rank, what if found else f"{who} {what}")
