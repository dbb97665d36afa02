"""The command ``aiocomms trace``, which merges flight recorders, explains the waits of ranks, and draws a trace.

Other processes have written the files of the flight recorders. So this module decodes each line of a file into a fixed
type. If a line is invalid, an error names the fault.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aiocomms.core.postmortem import printable, tidied, tidy
from aiocomms.diagnosis import happenings
from aiocomms.diagnosis.dumps import LARGEST
from aiocomms.diagnosis.hang_report import instead_of, judge
from aiocomms.diagnosis.happenings import Happening, WorldHeader
from aiocomms.diagnosis.recorder import FORMAT, LONGEST, MOST, SHOWN, UNMATCHED, Brief, Format, Header, Item

_APART = 60.0
"""The largest difference in seconds between the times at which two files of one run are written.

If the difference is larger, the output contains a note.
"""

_format = msgspec.json.Decoder(Format)
_header = msgspec.json.Decoder(Header)
_item = msgspec.json.Decoder(Item)
_world = msgspec.json.Decoder(WorldHeader)
_happening = msgspec.json.Decoder(Happening)


class TraceRecord(NamedTuple):
    """The content of one file: the flight recorder of one rank of one communicator."""

    path: Path
    header: Header
    items: list[Item]


def run(paths: Sequence[Path], output: Path | None, name: str = "*") -> int:
    """Print an explanation of the files.

    :param paths: files, or folders of files.
    :param output: the file for the trace; None for no trace.
    :param name: a shell pattern for the names of operations, lanes, streams, windows and plans to explain.
    :returns: the exit status: 1 if a rank waits for another rank.
    :raises ValueError: a path is not a file of a flight recorder, or a folder with such files.
    """
    stuck = False
    read = [_read(path) for path in _files(paths)]
    happened = [event for found in read if isinstance(found, list) for event in found]
    records = [found for found in read if isinstance(found, TraceRecord)]
    groups = _groups([found._replace(items=[i for i in found.items if i.matches(name)]) for found in records])
    for (name, size), ranks in sorted(groups.items()):
        print(f"communicator '{name}', {size} ranks")
        for line in _notes(ranks, size):
            print(f"  note: {line}")
        report = list(judged(ranks))
        stuck = stuck or bool(report)
        for line in report or ["no rank waits for another"]:
            print(f"  {line}")
    if output is not None:
        events = list(_events(list(groups.values()), happened))
        output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        print(f"{output}: {sum(event['ph'] == 'X' for event in events)} operations; open it in https://ui.perfetto.dev")
    return int(stuck)


# ------------------------------------------------------------------------------------------------------------ reading


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} is not there, wanted a flight recorder's file, or a folder of them")
        inside = sorted(path.glob("*.aiocomms.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path} holds no flight recorder (*.aiocomms.jsonl)")
        found += inside
    return list(dict.fromkeys(found))


def _read(path: Path) -> TraceRecord | list[Happening]:
    """Read the flight recorder of a rank, or the events of a simulated world."""
    with path.open("rb") as file:
        data = file.read(LARGEST + 65537)
    if len(data) > LARGEST + 65536:
        raise ValueError(f"{path} is no flight recorder: it is larger than {LARGEST} bytes")
    header, items, events = None, [], []
    try:
        for text in filter(None, data.split(b"\n")):
            if header is None:
                header = _head(text)
            elif isinstance(header, WorldHeader):
                events.append(_happening.decode(text))
            else:
                items.append(tidied(_item.decode(text)))
        if header is None or len(items) > 2 * MOST:
            raise ValueError("it is empty" if header is None else "it holds too many operations")
    except (ValueError, RecursionError) as error:  # Errors of msgspec and of UTF-8 are also ValueErrors.
        line = 1 if header is None else len(items) + len(events) + 2
        raise ValueError(f"{path} is no flight recorder: line {line}: {printable(str(error))}") from None
    return events if isinstance(header, WorldHeader) else TraceRecord(path, header, items)


def _head(text: bytes) -> Header | WorldHeader:
    found = _format.decode(text).format
    if found == happenings.FORMAT:
        return _world.decode(text)
    if found != FORMAT:
        raise ValueError(f"its format is {printable(found)!r}, wanted {FORMAT!r}")
    return _checked(_header.decode(text))


def _checked(header: Header) -> Header:
    if not 0 <= header.rank < header.size or header.brief.rank != header.rank:
        raise ValueError(f"it is of rank {header.rank} of {header.size}")
    header.comm, header.reason = printable(header.comm), printable(header.reason, 4 * LONGEST)
    tidy(header.brief)
    return header


Ranks = dict[int, TraceRecord]


def _groups(records: Sequence[TraceRecord]) -> dict[tuple[str, int], Ranks]:
    """Return the newest file of each rank. The key of the outer mapping is the communicator's name and size."""
    groups: dict[tuple[str, int], Ranks] = {}
    for record in sorted(records, key=lambda record: record.header.wall):
        groups.setdefault((record.header.comm, record.header.size), {})[record.header.rank] = record
    return groups


def _notes(ranks: Ranks, size: int) -> Iterator[str]:
    absent = [rank for rank in range(min(size, 65536)) if rank not in ranks]
    if absent:
        shown = ", ".join(map(str, absent[:20])) + (" ..." if len(absent) > 20 else "")
        yield f"no file of rank{'s' * (len(absent) > 1)} {shown}: died without writing one, or elsewhere"
    first = min(ranks.values(), key=lambda record: record.header.wall)
    walls = [record.header.wall for record in ranks.values()]
    if max(walls) - min(walls) > _APART:
        yield f"the files were written {max(walls) - min(walls):.0f} s apart: are they of one run?"
    yield f"rank {first.header.rank} was the first to write, because: {first.header.reason}"


# ------------------------------------------------------------------------------------------------------------ judging


def judged(ranks: Ranks) -> Iterator[str]:
    """Yield lines about ranks that are late for a collective, ranks that wait for messages, and circular waits."""
    briefs = {rank: record.header.brief for rank, record in ranks.items()}
    pending = {rank: list(filter(_waits, record.items)) for rank, record in ranks.items()}
    numbered: dict[tuple[str, int], Item] = {}
    waits: dict[int, list[int]] = {rank: [] for rank in ranks}
    moving = _moving(ranks)
    waiting_lines: dict[tuple[int, int], str] = {}
    for rank, items in sorted(pending.items()):
        for item in items:
            if item.collective is not None:
                numbered.setdefault((item.lane, item.collective), item)
            for peer in _peers(item):
                if _message(rank, item) not in moving:
                    waits[rank].append(peer)
                line = f"rank {rank} waits for rank {peer}: {item}{_since(ranks[rank], item)}"
                waiting_lines.setdefault((rank, peer), line)  # Only the oldest op with that peer is shown.
    for lane in sorted({lane for lane, _ in numbered}):
        first = numbered[min(key for key in numbered if key[0] == lane)]  # Later collectives wait for this one.
        yield f"{msgspec.structs.replace(first, args={})}: {judge(first, briefs)}"
        behind = [rank for rank, brief in briefs.items() if instead_of(first, brief)]
        for rank, brief in briefs.items():
            if instead_of(first, brief) is None:
                waits[rank] += behind
    yield from waiting_lines.values()
    circle = _circle({rank: [] if _died(ranks[rank]) else peers for rank, peers in waits.items()})
    if circle:
        yield f"they wait in a circle: {_arrows(circle)}"
    else:
        yield from _waited(ranks)


def _died(record: TraceRecord) -> bool:
    """Return whether a simulated rank has died. A dead rank waits for no other rank."""
    return record.header.reason == happenings.DIED


def _message(rank: int, item: Item) -> tuple[int | None, ...]:
    """Return the sender, the receiver, the tag and the channel of a rank's message."""
    return item.args.get("src", rank), item.args.get("dst", rank), item.args.get("tag"), item.args.get("channel")


def _moving(ranks: Ranks) -> set[tuple[int | None, ...]]:
    """Return the messages that are pending on both the sender and the receiver. Their transfer is in progress."""
    ends = [
        {_message(rank, item) for item in record.items if item.state == "pending" and "tag" in item.args}
        for rank, record in ranks.items()
    ]
    return {message for message, count in Counter(chain.from_iterable(ends)).items() if count > 1}


class _TraceWait(NamedTuple):
    """An op that waits for another rank, or waited until its deadline. All times are wall-clock times."""

    peer: int
    begin: float
    end: float
    item: Item


def _waited(ranks: Ranks) -> Iterator[str]:
    """Yield lines about a circle of ranks that waited for each other until a receive missed its deadline."""
    ahead = _clocks(ranks)
    briefs = {rank: record.header.brief for rank, record in ranks.items()}
    waits: dict[int, list[_TraceWait]] = {}
    for rank, (_, header, items) in ranks.items():
        late = [item for item in items if _waits(item) or (item.finished and UNMATCHED in item.error)]
        spans = [(item, *_span(header, item)) for item in late[-SHOWN:]]
        waits[rank] = [
            _TraceWait(peer, begin + ahead[rank], end + ahead[rank], item)
            for item, begin, end in spans
            for peer in _awaited(item, briefs)
        ]
    ends = [[wait.end for wait in found if wait.item.error] for found in waits.values()]
    for moment in sorted((max(found) for found in ends if found), reverse=True):
        then = {rank: [w for w in found if w.begin <= moment <= w.end] for rank, found in waits.items()}
        circle = _circle({rank: [wait.peer for wait in found] for rank, found in then.items()})
        for rank, peer in pairwise(circle):
            wait = next(wait for wait in then[rank] if wait.peer == peer)
            yield f"rank {rank} waited for rank {peer}: {wait.item}, for {wait.end - wait.begin:.1f} s"
        if circle:
            yield f"they waited in a circle, until a deadline passed: {_arrows(circle)}"
            return


def _waits(item: Item) -> bool:
    """Return whether an op is pending. An idle receive does not count, because its message may never come."""
    return item.state == "pending" and not item.idle


def _peers(item: Item) -> list[int]:
    """Return the ranks to which an op sends, or for which it waits."""
    return [item.args[name] for name in ("src", "dst") if name in item.args]


def _awaited(item: Item, briefs: Mapping[int, Brief]) -> list[int]:
    """Return the ranks for which an op waits. A collective waits for the ranks that have not called it."""
    if item.collective is None:
        return _peers(item)
    return [rank for rank, brief in briefs.items() if instead_of(item, brief)]


def _arrows(circle: Sequence[int]) -> str:
    return " -> ".join(f"rank {rank}" for rank in circle)


def _clocks(ranks: Ranks) -> dict[int, float]:
    """Return, for each rank, the difference between the wall clock and the monotonic clock, in seconds.

    The ranks of one host share a monotonic clock. All of them get the difference of the lowest rank
    of the host, because the wall clock may have been set after that rank wrote its file.
    """
    hosts: dict[str, float] = {}
    return {
        rank: hosts.setdefault(header.host or str(rank), header.wall - header.monotonic)
        for rank, (_, header, _) in sorted(ranks.items())
    }


def _since(record: TraceRecord, item: Item) -> str:
    """Return text with the time for which an op has been pending, and the line in which its task is suspended."""
    since = "" if item.posted is None else f", for {record.header.monotonic - item.posted:.1f} s"
    task = f", in task {item.task!r}" if item.task else ""
    return f"{since}{task}{f' at {item.where}' if item.where else ''}"


def _circle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a circle of ranks, in which each rank waits for the next rank.

    The first rank is repeated at the end. If there is no circle, the list is empty.
    """
    finished: set[int] = set()
    for start in waits:
        path, left = [start], [iter(waits[start])]
        while path and start not in finished:
            following = next(left[-1], None)
            if following is None:
                finished.add(path.pop())
                left.pop()
            elif following in path:
                circle = path[path.index(following) :]
                first = circle.index(min(circle))
                return [*circle[first:], *circle[: first + 1]]
            elif following not in finished:
                path.append(following)
                left.append(iter(waits.get(following, ())))
    return []


# ------------------------------------------------------------------------------------------------------------ drawing


def _events(groups: Sequence[Ranks], happened: Sequence[Happening]) -> Iterator[dict[str, Any]]:
    """Yield the events of Chrome's Trace Event Format.

    Each rank is drawn as a process. The process numbers begin with 1. Ops that overlap in time are drawn as different
    threads of the process. Perfetto requires thread numbers that are above 0 and unique among all
    processes. The main thread of a process must have the process number as its thread number.
    """
    records = [record for ranks in groups for _, record in sorted(ranks.items())]
    clocks = [ahead for ranks in groups for _, ahead in sorted(_clocks(ranks).items())]
    for pid, ((_, header, items), ahead) in enumerate(zip(records, clocks, strict=True), 1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{header.comm}: rank {header.rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        lanes: list[float] = []
        for item in sorted(items, key=lambda item: _span(header, item)):
            begin, end = _span(header, item)
            lane = next((i for i, free in enumerate(lanes) if free <= begin), len(lanes))
            tid = pid + lane * len(records)
            if lane == len(lanes):
                name = f"operations{f', {lane + 1}' if lane else ''}"
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            lanes[lane:] = [end, *lanes[lane + 1 :]]
            yield _event(item, pid, tid, _micros(begin + ahead), _micros(end + ahead))
    yield from _instants(happened, [record.header.rank for record in records])


def _instants(happened: Sequence[Happening], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the events of a simulated world.

    Each event is drawn in the first row of its rank. A rank without rows gets a new row.

    :param ranks: the rank of each row, in the order of the rows.
    """
    rows: dict[int | None, int] = {}
    for pid, rank in enumerate(ranks, 1):
        rows.setdefault(rank, pid)
    for event in happened:
        if event.rank not in rows:
            pid = rows[event.rank] = len(ranks) + 1 + len(rows)
            name = "simulation" if event.rank is None else f"simulation: rank {event.rank}"
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        pid = rows[event.rank]
        yield {
            "ph": "i", "s": "t", "name": printable(event.what), "cat": "simulation", "pid": pid, "tid": pid,
            "ts": _micros(event.wall),
        }  # fmt: skip


def _micros(wall: float) -> float:
    """Return a time in µs, rounded down to a multiple of 0.25 µs.

    A float represents such a multiple exactly, so that the drawings of successive ops do not overlap.
    """
    return math.floor(4e6 * wall) / 4


def _event(item: Item, pid: int, tid: int, begin: float, end: float) -> dict[str, Any]:
    index = None if item.collective is None else f"collective {item.collective}"
    details = {"seq": item.seq, "state": item.state, "number": index, "bytes": item.bytes, "error": item.error}
    more = {"tensors": item.tensors, "task": item.task, "where": item.where}
    return {
        "ph": "X", "name": f"{item} (pending)" if item.state == "pending" else str(item), "cat": item.state,
        "pid": pid, "tid": tid, "ts": begin, "dur": end - begin,
        "args": {key: value for key, value in {**details, **more}.items() if value not in (None, "", [])},
    }  # fmt: skip


def _span(header: Header, item: Item) -> tuple[float, float]:
    """Return the times at which an op began and ended. For an op that ended within its call, both times are equal."""
    end = header.monotonic if item.finished is None else item.finished
    return min(end, end if item.posted is None else item.posted), end
