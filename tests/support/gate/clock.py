"""The clock of deadlines in a deterministic test: it stands still, and a short one passes once the loop has turned.

A test that shows what a deadline does asks for a short one, which nobody meets. Here that passes when the tasks that
are ready have run, on whatever machine. A longer one is there for the case of a defect, and never passes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from aiocomms.lowlevel import clock

SHORT = 1.0
"""Seconds: a deadline that is nearer passes."""
TURNS = 10
"""Rounds of the loop before a short deadline passes."""


class StoppedClock:
    """The clock that the watchdog has in place of the module ``clock``, which has all the rest."""

    def __init__(self) -> None:
        self.time = clock.now()

    def now(self) -> float:
        """Return the time of deadlines; in a simulation, that of the process that runs."""
        return self.time if clock.simulation is None else clock.now()

    def __getattr__(self, name: str) -> Any:
        return getattr(clock, name)


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have deadlines pass by their length and not by the time, as long as ``monkeypatch`` lasts."""
    from aiocomms.core import inquiry
    from aiocomms.progress import deadlines, driver

    stopped, wake_by = StoppedClock(), deadlines.Watchdog.wake_by

    def wakes_soon(dog: deadlines.Watchdog, deadline: float) -> None:
        wake_by(dog, deadline)
        if deadline - clock.now() < SHORT:
            after_turns(lambda: pass_until(dog, deadline))

    def pass_until(dog: deadlines.Watchdog, deadline: float) -> None:
        with dog._lock:
            stopped.time = max(stopped.time, deadline + deadlines.GRACE)
            dog._changed.notify_all()

    monkeypatch.setenv("AIOCOMMS_HEARTBEAT", "0")
    for module in (deadlines, inquiry):  # an inquiry compares the time of an answer with deadlines
        monkeypatch.setattr(module, "clock", stopped)
    monkeypatch.setattr(deadlines.Watchdog, "wake_by", wakes_soon)
    # An await of a done work suspends its task after so long a time, which a busy machine takes between two statements.
    monkeypatch.setattr(driver, "TURN", math.inf)


def after_turns(call: Callable[[], Any]) -> None:
    """Call a function when the loop of this thread has come round some times; at once where there is no loop."""
    soon = _call_soon()

    def turn(left: int) -> None:
        if left and soon is not None:
            soon(lambda: turn(left - 1))
        else:
            call()

    turn(TURNS)


def _call_soon() -> Callable[[Callable[[], Any]], Any] | None:
    try:
        return asyncio.get_running_loop().call_soon
    except RuntimeError:
        pass
    try:
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
    except (ImportError, RuntimeError):
        return None
