"""The clock of a process, and the events for which its threads wait: the seam at which a simulation takes their place.

Code reads the time as ``clock.now()`` and waits by ``clock.event()``, with the module's name in front, since a
simulation replaces the functions while it runs. It has several processes in one, each with its own clock, and time
passes in it when all of them wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

_T = TypeVar("_T")


class Event(Protocol):
    """The part of :class:`threading.Event` that code waits by."""

    def set(self) -> None:
        """Let all go on that wait for it."""

    def is_set(self) -> bool:
        """Return whether it was set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most some seconds; return whether it was."""


class Simulation(Protocol):
    """A simulation of several processes. Each call is for the process that runs."""

    def now(self) -> float:
        """Return the seconds of its monotonic clock."""

    def wall(self) -> float:
        """Return the seconds since 1970 by its clock."""

    def event(self) -> Event:
        """Make an event for threads of the process."""

    def start(self, target: Callable[[], None]) -> None:
        """Start a thread of it."""

    async def run(self, call: Callable[[], _T]) -> _T:
        """Make a blocking call in a thread of it."""

    def state(self) -> dict[str, Any]:
        """Return the state that the process has of its own, by name."""

    def launched(self) -> tuple[Store, int, int]:
        """Return the launcher's store, this rank, and the number of ranks."""


now: Callable[[], float] = time.monotonic
"""Return the seconds of the monotonic clock."""
wall: Callable[[], float] = time.time
"""Return the seconds since 1970."""
event: Callable[[], Event] = threading.Event
"""Make an event for which threads wait."""
simulation: Simulation | None = None
"""The simulation that runs; None: there is none."""

_state: dict[str, Any] = {}


def state() -> dict[str, Any]:
    """Return what this process keeps once, such as its watchdog, by name."""
    return _state if simulation is None else simulation.state()


@contextlib.contextmanager
def simulated_by(world: Simulation) -> Iterator[None]:
    """Have a simulation take the place of the clock, of events and of threads."""
    global now, wall, event, simulation
    before = now, wall, event, simulation
    now, wall, event, simulation = world.now, world.wall, world.event, world
    try:
        yield
    finally:
        now, wall, event, simulation = before
