"""The output of ``aiocomms top`` with rich: tables on a terminal, or the same tables as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiocomms.cli.top.looking import TopFrame, TopGroup, place_of
from aiocomms.diagnosis.live import Sight
from aiocomms.diagnosis.recorder import Item

_PLAIN = 1000
"""The width in columns if the output is not a terminal.

Each line of a frame fits into this width, so no line is cut off or wrapped.
"""
_OLD = 1.0, 10.0
"""Two ages in seconds.

The output shows a pending op as late from the first age on, and as very late from the second age on.
"""
_UNITS = ("KiB", "MiB", "GiB", "TiB")
_SHOWN = 16
"""The largest number of pending ops and of streams shown for a rank, and of plans shown for a communicator."""
_OF_STREAMS = (
    "rank", "stream", "to rank", "sent", "received", "queued", "bytes", "blocked in send", "in receive"
)  # fmt: skip
_HEADINGS = ("rank", "process", "ops/s", "done", "failed", "pending", "bytes", "age", "operation", "task", "awaited at")


def show(frame: TopFrame) -> None:
    """Print one frame."""
    if sys.stdout.isatty():
        Console(highlight=False).print(drawn(frame))
        return
    console = Console(file=StringIO(), width=_PLAIN, highlight=False)
    with console.capture() as captured:
        console.print(drawn(frame))
    for line in captured.get().splitlines():
        print(line.rstrip())


def redraws() -> bool:
    """Return whether the output is a terminal that is still open and can replace one frame by the next."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def watch(frames: Iterable[TopFrame]) -> None:
    """Show each frame in place of the previous frame.

    The function ends at Ctrl-C, after the last frame, or when the terminal is closed.
    """
    with Live(auto_refresh=False, vertical_overflow="crop") as screen:
        try:
            for frame in frames:
                screen.update(drawn(frame), refresh=True)
                if not redraws():  # In this case rich draws nothing.
                    break
        except KeyboardInterrupt:  # Ctrl-C ends a view that has no end.
            pass


def drawn(frame: TopFrame) -> RenderableType:
    """Return a frame as an object that rich can draw."""
    parts: list[RenderableType] = []
    for group in frame.groups:
        parts += [_title(group), _table(group, frame), *_plans(group), *_streams(group, frame)]
        parts += [*(_line(line) for line in group.waits()), Text()]
    return Stack(*parts, *(Text(note, style="yellow") for note in frame.notes))


def _title(group: TopGroup) -> Text:
    carriers = [sight.statistics.transports for sight in group.ranks.values()]
    by = ", ".join(dict.fromkeys(name for each in carriers for family, name in each.items() if family != "rma"))
    return Text(f"communicator '{group.comm}', {group.size} rank{'s' * (group.size > 1)}, {by}", style="bold")


def _line(text: str) -> Text:
    return Text(f"  {text}", style="bold red" if "circle" in text or text.startswith("lost") else "yellow")


def _empty(headings: Iterable[str], words: Sequence[str]) -> Table:
    """Return a table without rows.

    :param words: the headings of the columns whose cells contain text. Only these cells may be wrapped.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        left = heading in words
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    return table


def _table(group: TopGroup, frame: TopFrame) -> Table:
    table = _empty(_HEADINGS, ("operation", "task", "awaited at"))
    for _, sight in sorted(group.ranks.items()):
        for row in _rows(sight, frame.rates.get(place_of(sight))):
            table.add_row(*row)
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain text. The cells are ``Text`` objects, because rich treats brackets in a ``str`` as markup."""
    table.add_row(*map(Text, cells))


def _plans(group: TopGroup) -> Iterator[Table]:
    """Yield the table of a service's running plans, if there are any. It shows the age and the state of each plan."""
    table = _empty(("plan", "age", "where it is"), ("where it is",))
    plans = list(group.plans())
    for number, age, where in plans[:_SHOWN]:
        _add(table, str(number), f"{age:.1f} s", where)
    if len(plans) > _SHOWN:
        _add(table, "", "", f"and {len(plans) - _SHOWN} more")
    if table.rows:
        yield table


def _streams(group: TopGroup, frame: TopFrame) -> Iterator[Table]:
    """Yield the table of the streams, if there are any.

    It shows the counts of each stream, and the shares of blocked time.
    """
    table = _empty(_OF_STREAMS, ("stream",))
    for rank, sight in sorted(group.ranks.items()):
        streams = sight.statistics.streams
        for each in streams[:_SHOWN]:
            shares = [f"{share:.0%}" for share in frame.blocked[place_of(sight), each.number]]
            counts = f"{each.sent:,}", f"{each.received:,}", f"{each.queued} of {each.capacity}"
            _add(table, str(rank), each.words, str(each.peer), *counts, _size(each.queued_bytes), *shares)
        if len(streams) > _SHOWN:
            _add(table, str(rank), f"and {len(streams) - _SHOWN} more")
    if table.rows:
        yield table


def _rows(sight: Sight, rate: float | None) -> Iterator[list[Text]]:
    """Yield a row for each pending op of a rank. If the rank has no pending ops, yield one row."""
    header, now = sight.header, sight.statistics
    failed = sum(each.count for each in now.failed)
    known = (
        str(header.rank), str(header.pid), "-" if rate is None else f"{rate:,.0f}", f"{now.done:,}",
        str(failed), str(now.pending), _size(now.pending_bytes),
    )  # fmt: skip
    first = [Text(cell, style="red" if cell != "0" and index == 4 else "") for index, cell in enumerate(known)]
    for index, item in enumerate(sight.pending[:_SHOWN] or [None]):
        yield [*(first if not index else [Text()] * len(known)), *_op(item, header.monotonic)]
    if len(sight.pending) > _SHOWN:
        yield [*[Text()] * len(known), Text(), Text(f"and {len(sight.pending) - _SHOWN} more")]


def _op(item: Item | None, now: float) -> list[Text]:
    """Return an op's age and name, the task that awaits it, and the line in which this task is suspended."""
    if item is None:
        return [Text()]
    age = 0.0 if item.posted is None else max(0.0, now - item.posted)
    if item.idle:
        return [Text(), Text(str(item)), Text("no task waits for it", style="dim")]
    style = "red" if age >= _OLD[1] else "yellow" if age >= _OLD[0] else ""
    return [Text(f"{age:.1f} s", style=style), Text(str(item)), Text(item.task), Text(item.where)]


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_UNITS))
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"
