"""The clock of a process, and the events for which its threads wait. A simulation replaces the clock and the events.

Code reads the time by ``clock.now()`` and waits by ``clock.event()``. Code must write ``clock.`` before these names,
because a simulation replaces the functions in this module. A simulation runs several simulated processes in one
process, each with its own clock. Simulated time passes when all of these processes wait.
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
    """The methods of :class:`threading.Event` that aiocomms uses."""

    def set(self) -> None:
        """Wake all threads that wait for the event."""

    def is_set(self) -> bool:
        """Return whether the event was set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, for at most ``timeout`` seconds; return whether it was set."""


class Conduit(Protocol):
    """One end of a simulated connection.

    Frames arrive in the order in which they were sent. If a frame cannot arrive, the connection ends.
    """

    heard: float
    """The last time when this process knew that the other process was alive, by this process's monotonic clock."""

    def hear(self, on_frame: Callable[[Any], object], on_end: Callable[[bool], object]) -> None:
        """Start to receive frames. The first frames are those that have already arrived.

        :param on_frame: a function that is called with each frame on the event loop's thread, even if all tasks of the
            loop wait.
        :param on_end: a function that is called once when the connection has ended. The argument of the function is
            True if the other end closed the connection.
        """

    def send(self, frame: Any) -> None:
        """Send an object, which no code may change afterwards. If the connection is over, the object is dropped."""

    def ping(self) -> None:
        """Send a message that the other process must answer, to check that this process is alive.

        The connection itself sends the answer, so the answer does not depend on a task of that process.
        """

    def close(self) -> None:
        """End the connection. The frames that were already sent arrive before the end."""


class Network(Protocol):
    """The network between simulated processes."""

    def listen(self, arrived: Callable[[Conduit, Any], object]) -> bytes:
        """Accept connections to a new address, and return the address.

        :param arrived: a function that is called with each new connection and the other process's ``hello``.
        """

    def unlisten(self, address: bytes) -> None:
        """Stop accepting connections to an address."""

    def connect(self, address: bytes, hello: Any, answered: Callable[[bool], object]) -> Conduit:
        """Connect to an address.

        :param hello: the first object that the listening process gets.
        :param answered: a function that is called once, with True if the connection was accepted. False means that no
            process listens there, or that the connection broke before the answer. If the connection was not accepted,
            the ``on_end`` of :meth:`Conduit.hear` is not called.
        """


class HeldLock(Protocol):
    """The methods of a lock that is locked when it is made.

    One thread waits for the lock, and another thread releases the lock once.
    """

    def acquire(self, *, timeout: float) -> bool:
        """Wait until the lock is released, for at most ``timeout`` seconds; return whether it was released."""

    def release(self) -> None:
        """Wake the thread that waits for the lock."""


class Simulation(Protocol):
    """A simulation of several processes. Each method applies to the simulated process that runs now."""

    def now(self) -> float:
        """Return the time of the process's monotonic clock, in seconds."""

    def wall(self) -> float:
        """Return the seconds since 1970 by the process's clock."""

    def event(self) -> ThreadEvent:
        """Make an event for threads of the process."""

    def start_thread(self, target: Callable[[], None]) -> None:
        """Start a thread of the process."""

    async def run_in_thread(self, call: Callable[[], _T]) -> _T:
        """Make a blocking call in a thread of the process."""

    def state(self) -> dict[str, Any]:
        """Return a dictionary with the state of the process."""

    @property
    def network(self) -> Network:
        """Return the network between the processes."""

    def check_store(self, store: Store) -> None:
        """Check that the program's store is an in-memory store or the simulation's store.

        :raises SimulationError: the store uses sockets or files.
        """

    def launched(self) -> tuple[Store, int, int]:
        """Return the launcher's store, the rank of the process, and the number of ranks."""

    def token_bytes(self, count: int) -> bytes:
        """Return random bytes, which depend on the seed."""

    def host(self) -> str:
        """Return the name of the process's host. Each rank has a separate host."""

    def serve_store(self) -> tuple[Store, int]:
        """Serve a new store until the process ends; return the store and its port."""

    def reach_store(self, host: str, port: int, timeout: float) -> Store:
        """Connect to a store that another process serves. Blocks.

        :raises OSError: no process serves a store at this host and port, or the server does not answer within
            ``timeout`` seconds.
        """

    def wires(self) -> Wires:
        """Return the factory of the connections that two endpoints use before they form a communicator."""


now: Callable[[], float] = time.monotonic
"""Return the time of the monotonic clock, in seconds."""
wall: Callable[[], float] = time.time
"""Return the seconds since 1970."""
event: Callable[[], ThreadEvent] = threading.Event
"""Make an event for which threads wait."""
token_bytes: Callable[[int], bytes] = secrets.token_bytes
"""Return random bytes that no other process can guess.

Use this function if the behaviour of a program may depend on the random bytes, because a simulation can repeat them.

In a simulation, the bytes depend only on the simulation's seed.
"""
simulation: Simulation | None = None
"""The simulation that runs now; None outside a simulation."""

_state: dict[str, Any] = {}


def state() -> dict[str, Any]:
    """Return a dictionary with the state of this process, such as its watchdog."""
    return _state if simulation is None else simulation.state()


def held_lock() -> HeldLock:
    """Make a lock that is already held.

    The release of the lock wakes one thread, and is faster than :meth:`ThreadEvent.set`.
    """
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
    """Replace the clock, the events and the threads by those of a simulation, within the context."""
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
    """A value that one thread sets, and for which another thread waits."""

    __slots__ = ("_given", "_values")

    def __init__(self) -> None:
        self._given = event()
        self._values: list[_T] = []

    def put(self, value: _T) -> None:
        """Set the value. Only the first call has an effect."""
        self._values.append(value)
        self._given.set()

    def get(self, seconds: float) -> _T:
        """Wait for the value, and return it.

        :raises TimeoutError: no value was set within ``seconds``.
        """
        if not self._given.wait(max(0.0, seconds)):
            raise TimeoutError(f"there is no reply after {seconds:g} s")
        return self._values[0]
