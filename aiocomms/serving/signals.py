"""The handling of SIGINT and SIGTERM on the main threads of a service's ranks.

Rank 0's program handles the signals, and the workers wait until rank 0 ends them. A signal to all ranks ends the job.
If only one worker gets SIGTERM, another process replaces this worker. Before ``aiocomms run`` sends a signal to a
process, it announces whether the job ends or the process is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Final

from aiocomms.bootstrap import supervised
from aiocomms.lowlevel import clock
from aiocomms.serving.driver import Driver
from aiocomms.serving.plans import Worker

_log = logging.getLogger("aiocomms")
_TAKEN: Final = (signal.SIGINT, signal.SIGTERM)
_workers: list[Worker] = []
"""The workers of this process."""


def _mine() -> bool:
    return clock.simulation is None and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def held(worker: Worker) -> Iterator[None]:
    """Handle signals within the block: ignore SIGINT, and let the worker leave on SIGTERM.

    If the process already ignores one of the signals with SIG_IGN, this function does not change the handler of that
    signal.
    """
    before = {}
    if _mine() and signal.getsignal(signal.SIGINT) is not _take:
        taken = [number for number in _TAKEN if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, _take) for number in taken}
    _workers.append(worker)
    try:
        yield
    finally:
        _workers.remove(worker)
        for number, handler in before.items():
            signal.signal(number, handler)


def _take(number: int, frame: object) -> None:
    """Handle a signal. Child processes do not inherit this handler, but they would inherit SIG_IGN."""
    if number != signal.SIGTERM:
        return
    leaving = [worker for worker in _workers if worker._recover is not None]
    leave = partial(Worker.leave, all_end=supervised.is_announced(supervised.ENDS))
    for worker in leaving:
        worker._comm._core.driver.call_threadsafe(leave, worker)
    if not leaving:  # A sender of SIGTERM to this process alone would wait for its end.
        _log.warning("SIGTERM does not end a rank that works: rank 0 ends it when it has drained, so send it there")


@contextlib.contextmanager
def noted(driver: Driver) -> Iterator[None]:
    """Notify the driver if a SIGTERM arrives within the block. The program's own handler, such as uvicorn's, also runs.

    If the workers also got the signal, they ask to leave. After the notification, the driver does not release any
    worker before the driver has finished its plans.
    """
    before = signal.getsignal(signal.SIGTERM) if _mine() and driver._recover is not None else None
    if not callable(before) or before is _take:  # Otherwise SIGTERM ends this process, or a worker in it leaves.
        yield
        return
    take = before

    def note(number: int, frame: FrameType | None) -> None:
        driver._comm._core.driver.call_threadsafe(driver._told_to_end)
        take(number, frame)

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is note:
            signal.signal(signal.SIGTERM, before)
