"""``aiocomms trace``: merges the ranks' flight recorders, says who waits for whom, and draws a trace.

The files are another process's words: each line is decoded into a closed type, and what is wrong with a file is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aiocomms.diagnosis.dumps import LARGEST
from aiocomms.diagnosis.hang_report import instead_of, judge
from aiocomms.diagnosis.postmortem import printable, tidied, tidy
from aiocomms.diagnosis.recorder import FORMAT, LONGEST, MOST, Header, Item

_APART = 60.0
"""Seconds between the ranks' files, above which they may be of different runs."""

_header = msgspec.json.Decoder(Header)
_item = msgspec.json.Decoder(Item)


class Record(NamedTuple):
    """One file: one rank of one communicator."""

    path: Path
    header: Header
    items: list[Item]


def run(paths: Sequence[Path], output: Path | None) -> int:
    """Print what the files say.

    :returns: 1 if some rank waits for another.
    :raises ValueError: a path is no flight recorder.
    """
    stuck = False
    groups = _groups([_read(path) for path in _files(paths)])
    for (name, size), ranks in sorted(groups.items()):
        print(f"communicator '{name}', {size} ranks")
        for line in _notes(ranks, size):
            print(f"  note: {line}")
        verdict = list(judged(ranks))
        stuck = stuck or bool(verdict)
        for line in verdict or ["nobody waits for another rank"]:
            print(f"  {line}")
    if output is not None:
        events: list[dict[str, Any]] = []
        for ranks in groups.values():
            events += _events(ranks, len(events))
        output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        print(f"{output}: {sum(event['ph'] == 'X' for event in events)} operations; open it in https://ui.perfetto.dev")
    return int(stuck)


# ------------------------------------------------------------------------------------------------------------ reading


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.aiocomms.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path} holds no flight recorder (*.aiocomms.jsonl)")
        found += inside
    return list(dict.fromkeys(found))


def _read(path: Path) -> Record:
    with path.open("rb") as file:
        data = file.read(LARGEST + 65537)
    if len(data) > LARGEST + 65536:
        raise ValueError(f"{path} is no flight recorder: it is larger than {LARGEST} bytes")
    header, items = None, []
    try:
        for text in filter(None, data.split(b"\n")):
            if header is None:
                header = _checked(_header.decode(text))
            else:
                items.append(tidied(_item.decode(text)))
        if header is None or len(items) > 2 * MOST:
            raise ValueError("it is empty" if header is None else "it holds too many operations")
    except ValueError as error:  # msgspec's errors are, those of UTF-8 too
        line = 1 if header is None else len(items) + 2
        raise ValueError(f"{path} is no flight recorder: line {line}: {printable(str(error))}") from None
    return Record(path, header, items)


def _checked(header: Header) -> Header:
    if header.format != FORMAT:
        raise ValueError(f"its format is {printable(header.format)!r}, wanted {FORMAT!r}")
    if not 0 <= header.rank < header.size or header.brief.rank != header.rank:
        raise ValueError(f"it is of rank {header.rank} of {header.size}")
    header.comm, header.reason = printable(header.comm), printable(header.reason, 4 * LONGEST)
    tidy(header.brief)
    return header


Ranks = dict[int, Record]


def _groups(records: Sequence[Record]) -> dict[tuple[str, int], Ranks]:
    """The last file of each rank of each communicator."""
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
    """Who is behind in which collective, who waits for whose message, and whether they wait in a circle."""
    briefs = {rank: record.header.brief for rank, record in ranks.items()}
    pending = {rank: [item for item in record.items if item.state == "pending"] for rank, record in ranks.items()}
    numbered: dict[int, Item] = {}
    waits: dict[int, list[int]] = {rank: [] for rank in ranks}
    said = []
    for rank, items in sorted(pending.items()):
        for item in items:
            if item.collective is not None:
                numbered.setdefault(item.collective, item)
            for peer in (item.args[name] for name in ("src", "dst") if name in item.args):
                if peer not in waits[rank]:  # its oldest op is the one to look at
                    waits[rank].append(peer)
                    said.append(f"rank {rank} waits for rank {peer}: {item}{_since(ranks[rank], item)}")
    if numbered:
        first = numbered[min(numbered)]  # those behind it wait for it
        yield f"{first.name}: {judge(first, briefs)}"
        behind = [rank for rank, brief in briefs.items() if instead_of(first, brief)]
        for rank, brief in briefs.items():
            if instead_of(first, brief) is None:
                waits[rank] += behind
    yield from said
    circle = _circle(waits)
    if circle:
        yield f"they wait in a circle: {' -> '.join(f'rank {rank}' for rank in circle)}"


def _since(record: Record, item: Item) -> str:
    """For how long, and where in the program."""
    since = "" if item.posted is None else f", for {record.header.monotonic - item.posted:.1f} s"
    task = f", in task {item.task!r}" if item.task else ""
    return f"{since}{task}{f' at {item.where}' if item.where else ''}"


def _circle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Ranks each of which waits for the next one, the first one again at the end; empty if there are none."""
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


def _events(ranks: Ranks, first: int) -> Iterator[dict[str, Any]]:
    """Events of Chrome's Trace Event Format: a process per rank, numbered from ``first``, and a thread per overlap."""
    clocks: dict[str, float] = {}
    for number, (rank, (_, header, items)) in enumerate(sorted(ranks.items()), first):
        # Ranks of one host share a monotonic clock; their wall clock may have been set in between.
        ahead = clocks.setdefault(header.host or str(rank), header.wall - header.monotonic)
        pid = number
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{header.comm}: rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": number}}
        lanes: list[float] = []
        for item in sorted(items, key=lambda item: _span(header, item)):
            begin, end = _span(header, item)
            lane = next((i for i, free in enumerate(lanes) if free <= begin), len(lanes))
            lanes[lane:] = [end, *lanes[lane + 1 :]]
            index = None if item.collective is None else f"collective {item.collective}"
            details = {"seq": item.seq, "state": item.state, "number": index, "bytes": item.bytes, "error": item.error}
            more = {"tensors": item.tensors, "task": item.task, "where": item.where}
            yield {
                "ph": "X", "name": f"{item} (pending)" if item.state == "pending" else str(item), "cat": item.state,
                "pid": pid, "tid": lane, "ts": (begin + ahead) * 1e6, "dur": (end - begin) * 1e6,
                "args": {key: value for key, value in {**details, **more}.items() if value not in (None, "", [])},
            }  # fmt: skip


def _span(header: Header, item: Item) -> tuple[float, float]:
    """When an op began and ended; one that ended within its call is a point in time."""
    end = header.monotonic if item.finished is None else item.finished
    return min(end, end if item.posted is None else item.posted), end
