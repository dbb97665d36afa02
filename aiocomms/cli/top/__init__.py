"""The command ``aiocomms top``, which shows the pending operations of the communicators in this user's processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec

from aiocomms.cli.top.looking import Top, TopFrame


def run(target: int | None, *, once: bool, interval: float, name: str = "*") -> int:
    """Show frames (full screens) until Ctrl-C or the end of the queried process.

    If the output is not a terminal, or ``TERM=dumb``, show one frame.

    :param target: the ID of a process; None for all processes of this user.
    :param once: whether to show only one frame, also on a terminal.
    :param interval: the seconds between two queries. A single frame needs two queries, because their difference gives
        the rates.
    :param name: a shell pattern for the names of operations, lanes, streams, windows and plans to show.
    :raises ValueError: there is no process to query, or rich is not installed.
    """
    if find_spec("rich") is None:
        raise ValueError("it needs rich: pip install 'aiocomms[top]'")
    from aiocomms.cli.top.drawing import redraws, show, watch

    top = Top(target, name)
    if not once and redraws():
        watch(_frames(top, interval))
        return 0
    top.look()
    time.sleep(interval)
    frame = top.look()
    if top.ended():
        raise ValueError(f"process {target} has ended")
    show(frame)
    return 0


def _frames(top: Top, interval: float) -> Iterator[TopFrame]:
    while not top.ended():
        yield top.look()
        time.sleep(interval)
