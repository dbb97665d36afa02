"""The command ``aiocomms top``: what communicators of this user's processes are doing now, and who waits for whom."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec

from aiocomms.cli.top.looking import Top, TopFrame


def run(target: int | None, *, once: bool, interval: float, name: str = "*") -> int:
    """Show frames, on a terminal until Ctrl-C or the process's end, elsewhere one.

    :param target: the number of a process; None: all of this user's.
    :param once: one frame also on a terminal.
    :param interval: seconds between two looks; one frame is made of two, whose difference tells the rates.
    :param name: a pattern of the shell's for the operations and streams to show.
    :raises ValueError: there is nothing to look at, or rich is not installed.
    """
    if find_spec("rich") is None:
        raise ValueError("it needs rich: pip install 'aiocomms[top]'")
    from aiocomms.cli.top.drawing import show, watch

    top = Top(target, name)
    if not once and sys.stdout.isatty():
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
