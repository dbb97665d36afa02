"""The clock of a process, and the events for which its threads wait: the seam at which a simulation takes their place.

Code reads the time as ``clock.now()`` and waits by ``clock.event()``, with the module's name in front, since a
simulation replaces the functions while it runs. It has several processes in one, each with its own clock, and time
passes in it when all of them wait.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

    from aiocomms.lowlevel.lines import Wires

_T = TypeVar("_T")


class ThreadEvent(Protocol):
    """The part of :class:`threading.Event` that code waits by."""

    def set(self) -> None:
        """Let all go on that wait for it."""

    def is_set(self) -> bool:
        """Return whether it was set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most some seconds; return whether it was."""


class Conduit(Protocol):
    """One end of a simulated connection. What is sent arrives in that order, or the connection ends."""

    heard: float
    """The time of the other process's last sign of life, by this one's monotonic clock."""

    def hear(self, on_frame: Callable[[Any], object], on_end: Callable[[bool], object]) -> None:
        """Hear the other end from now on, and before all else what has come meanwhile.

        :param on_frame: called with each frame; on the loop's thread, also while the loop's tasks wait for others.
        :param on_end: called once when the other end is gone, with whether it has closed the connection.
        """

    def send(self, frame: Any) -> None:
        """Send any object, which nobody changes any more. An end that is over drops it."""

    def ping(self) -> None:
        """Ask the other process for a sign of life, which is none of its tasks' business."""

    def close(self) -> None:
        """End the connection behind what was sent."""


class Network(Protocol):
    """The network between simulated processes."""

    def listen(self, arrived: Callable[[Conduit, Any], object]) -> bytes:
        """Accept connections to an address, which is returned.

        :param arrived: called with each connection, and with what the other process has said first.
        """

    def unlisten(self, address: bytes) -> None:
        """Accept none any more."""

    def connect(self, address: bytes, hello: Any, answered: Callable[[bool], object]) -> Conduit:
        """Connect with an address.

        :param hello: what the process that listens there hears first.
        :param answered: called once with whether it was accepted. False: nothing listens there, or it was cut before
            that; then the connection is over, and there is no other word of that.
        """


class HeldLock(Protocol):
    """The part of a lock that one thread waits by and another releases, once."""

    def acquire(self, *, timeout: float) -> bool:
        """Wait until it is released, for at most some seconds; return whether it was."""

    def release(self) -> None:
        """Let the thread go on that waits for it."""


class Simulation(Protocol):
    """A simulation of several processes. Each call is for the process that runs."""

    def now(self) -> float:
        """Return the seconds of its monotonic clock."""

    def wall(self) -> float:
        """Return the seconds since 1970 by its clock."""

    def event(self) -> ThreadEvent:
        """Make an event for threads of the process."""

    def start_thread(self, target: Callable[[], None]) -> None:
        """Start a thread of it."""

    async def run_in_thread(self, call: Callable[[], _T]) -> _T:
        """Make a blocking call in a thread of it."""

    def state(self) -> dict[str, Any]:
        """Return the state that the process has of its own, by name."""

    @property
    def network(self) -> Network:
        """Return the network between the processes."""

    def check_store(self, store: Store) -> None:
        """Check that a store of the program is in memory, or the simulation's.

        :raises SimulationError: it is another one, which uses sockets or files.
        """

    def launched(self) -> tuple[Store, int, int]:
        """Return the launcher's store, this rank, and the number of ranks."""

    def token_bytes(self, count: int) -> bytes:
        """Return random bytes, which depend on the seed."""

    def host(self) -> str:
        """Return the name of the host on which it runs: each rank has one of its own."""

    def serve_store(self) -> tuple[Store, int]:
        """Serve a new store, which ends with the process; return it, and its port."""

    def reach_store(self, host: str, port: int, timeout: float) -> Store:
        """Connect to a store that another process serves. Blocks.

        :raises OSError: none serves a store there, or it does not answer within ``timeout`` seconds.
        """

    def wires(self) -> Wires:
        """Return what its endpoints communicate by until they have a communicator."""


now: Callable[[], float] = time.monotonic
"""Return the seconds of the monotonic clock."""
wall: Callable[[], float] = time.time
"""Return the seconds since 1970."""
event: Callable[[], ThreadEvent] = threading.Event
"""Make an event for which threads wait."""
token_bytes: Callable[[int], bytes] = secrets.token_bytes
"""Return random bytes that nobody can guess, of which the course of a program may depend: of two ids the lower wins."""
simulation: Simulation | None = None
"""The simulation that runs; None: there is none."""

_state: dict[str, Any] = {}


def state() -> dict[str, Any]:
    """Return what this process keeps once, such as its watchdog, by name."""
    return _state if simulation is None else simulation.state()


def held_lock() -> HeldLock:
    """Make a lock that is held: it wakes one thread, once, sooner than an event does."""
    if simulation is not None:
        return _EventLock()
    lock = allocate_lock()
    lock.acquire()
    return lock


def sleep(seconds: float) -> None:
    """Block this thread for some seconds."""
    if simulation is None:
        time.sleep(seconds)
    else:
        event().wait(seconds)


@contextlib.contextmanager
def simulated_by(world: Simulation) -> Iterator[None]:
    """Have a simulation take the place of the clock, of events and of threads."""
    global now, wall, event, token_bytes, simulation
    before = now, wall, event, token_bytes, simulation
    now, wall, event, token_bytes, simulation = world.now, world.wall, world.event, world.token_bytes, world
    try:
        yield
    finally:
        now, wall, event, token_bytes, simulation = before


class _EventLock:
    """A :class:`HeldLock` of a simulation."""

    __slots__ = ("_released",)

    def __init__(self) -> None:
        self._released = event()

    def acquire(self, *, timeout: float) -> bool:
        """See :class:`HeldLock`."""
        return self._released.wait(timeout)

    def release(self) -> None:
        """See :class:`HeldLock`."""
        self._released.set()


class Reply(Generic[_T]):
    """A value that one thread waits for, and another gives."""

    __slots__ = ("_given", "_values")

    def __init__(self) -> None:
        self._given = event()
        self._values: list[_T] = []

    def put(self, value: _T) -> None:
        """Give the value; of several the first counts."""
        self._values.append(value)
        self._given.set()

    def get(self, seconds: float) -> _T:
        """Wait for the value, and return it.

        :raises TimeoutError: none was given within so many seconds.
        """
        if not self._given.wait(max(0.0, seconds)):
            raise TimeoutError(f"there is no reply after {seconds:g} s")
        return self._values[0]
