"""SIGINT and SIGTERM on their way to a server's good end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import anyio

from aiocomms.progress.driver import Driver as Loop

_telling: list[Callable[[], object]] = []
_before: dict[int, Any] = {}


def _on_signal(number: int, frame: FrameType | None) -> None:
    for tell in tuple(_telling):
        tell()


@contextmanager
def stop_signals() -> Iterator[anyio.Event]:
    """Set an event on SIGINT and SIGTERM, which do nothing else within the block.

    Only the main thread may say what a signal does: on any other one nothing is changed, and nothing sets the event.
    A server that has signal handlers of its own, as uvicorn has, needs none of this.
    """
    event, loop = anyio.Event(), Loop.current()

    def tell() -> None:
        loop.call_threadsafe(event.set)

    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    if not _telling:
        _before.update({number: signal.signal(number, _on_signal) for number in (signal.SIGINT, signal.SIGTERM)})
    _telling.append(tell)
    try:
        yield event
    finally:
        _telling.remove(tell)
        for number in () if _telling else list(_before):
            signal.signal(number, _before.pop(number))
