"""The network of a simulated world: connections between processes, with latency, cuts and partitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.clockwork import Clockwork, Timeline

_PING, _PONG, _END, _RESET, _LOST, _WELCOME = (object() for _ in range(6))
KEEPALIVE: Final = 5.0
"""The time in seconds after which a connection ends if a partition delays its frames.

An attempt to connect does not end in this way.
"""
_WORDS: Final = {_END: "goodbye", _RESET: "reset", _WELCOME: "welcome"}


def describe(frame: Any) -> str:
    """Return a text that describes a frame. The text is the same in every run."""
    if type(frame) is object:
        return _WORDS[frame]
    return repr(frame) if isinstance(frame, int | str | bytes) else type(frame).__name__


def address_of(number: int) -> bytes:
    """Return the address with a given number. This function makes all addresses of a simulated world."""
    return b"simulated %d" % number


def number_of(address: bytes) -> int:
    """Return the number in an address."""
    return int(address.rpartition(b" ")[2])


def _ignore(_: Any) -> None:
    """Ignore an event that has no listener."""


class SimulatedConduit:
    """See :class:`aiocomms.lowlevel.clock.Conduit`."""

    def __init__(self, network: SimulatedNetwork, process: Timeline) -> None:
        self._network = network
        self.process = process
        self.other: SimulatedConduit = self
        self._on_frame: Callable[[Any], object] | None = None
        self._on_end: Callable[[bool], object] = _ignore
        self._answered: Callable[[bool], object] | None = None
        """The callback for the answer to this end's attempt to connect; None if no answer is pending."""
        self._kept: list[Any] = []
        """Calls that :meth:`hear` makes later.

        These calls deliver the frames that have already arrived, and the end of a connection that has already ended.
        """
        self.heard = process.now()
        self.over = False
        """True if this end no longer sends or receives."""
        self.coming: deque[Any] = deque()
        """The frames in transit to this end."""
        self.cut = False
        """True if no frame can reach this end any more, even if this end has not noticed the cut yet."""
        self.last = 0.0
        """The time at which the last frame in transit arrives."""

    def hear(self, on_frame: Callable[[Any], object], on_end: Callable[[bool], object]) -> None:
        """See :class:`aiocomms.lowlevel.clock.Conduit`."""
        self._on_frame, self._on_end = on_frame, on_end
        kept, self._kept = self._kept, []
        for take in kept:
            take()

    def send(self, frame: Any) -> None:
        """See :class:`aiocomms.lowlevel.clock.Conduit`. A frame without a receiver is lost."""
        if not self.over and self.other is not self:
            self._network.carry(self.other, frame)

    def unhear(self) -> None:
        """Store arriving frames until the next :meth:`hear`."""
        self._on_frame = None

    def ping(self) -> None:
        """See :class:`aiocomms.lowlevel.clock.Conduit`."""
        if self._network.undisturbed(self):
            self.heard = self.process.now()  # The answer would come at once, and have no other effect.
        else:
            self.send(_PING)

    def close(self) -> None:
        """See :class:`aiocomms.lowlevel.clock.Conduit`."""
        if not self.over:
            self.send(_END)
            self.over = True

    def arrive(self) -> None:
        """Receive the next frame, unless it was lost in transit."""
        if not self.coming:
            return
        frame = self.coming.popleft()
        if self.over or frame is _LOST:
            return
        self.heard = self.process.now()
        self._network.arrived(self, frame)
        if frame is _PING:
            self.send(_PONG)
        elif frame is _END or frame is _RESET:
            self.end(frame is _END)
        elif frame is _WELCOME:
            self._answer(True)
        elif frame is not _PONG:
            self._take(frame)

    def call(self, answered: Callable[[bool], object]) -> None:
        """Make this end the side that connects.

        :param answered: see :meth:`aiocomms.lowlevel.clock.Network.connect`.
        """
        self._answered = answered

    @property
    def calling(self) -> bool:
        """True if this end has tried to connect, and has no answer yet."""
        return self._answered is not None

    def _answer(self, welcome: bool) -> None:
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(welcome)

    def _take(self, frame: Any) -> None:
        if self._on_frame is None:
            self._kept.append(lambda: self._take(frame))
        else:
            self._on_frame(frame)

    def end(self, closed: bool) -> None:
        """End the connection at this end only.

        :param closed: whether the other end has closed the connection.
        """
        if not self.over:
            self.over = True
            if self.calling:
                self._answer(False)
            elif self._on_frame is None:
                self._kept.append(lambda: self._on_end(closed))
            else:
                self._on_end(closed)


class SimulatedNetwork:
    """See :class:`aiocomms.lowlevel.clock.Network`."""

    def __init__(self, clockwork: Clockwork, running: Callable[[], Timeline], latency: tuple[float, float]) -> None:
        """Begin with no connection.

        :param running: a function that returns the process that runs now.
        :param latency: the least and the greatest latency of a frame, in seconds.
        """
        self._clockwork, self._running = clockwork, running
        self._least, self._range = latency[0], latency[1] / latency[0]
        self._listeners: dict[bytes, tuple[Timeline, Callable[[clock.Conduit, Any], object]]] = {}
        self._owners: dict[bytes, Timeline] = {}
        """A dict from each address to its process. A process stays in the dict when it no longer listens."""
        self._conduits: dict[SimulatedConduit, None] = {}
        self._parted: dict[tuple[int, int], float] = {}
        """A dict from the pair (sender, receiver) to the time until which a partition separates these ranks."""

    # ------------------------------------------------------------------------------------ calls of processes

    def listen(self, arrived: Callable[[clock.Conduit, Any], object]) -> bytes:
        """See :class:`aiocomms.lowlevel.clock.Network`."""
        address = address_of(len(self._owners) + 1)
        self._owners[address] = self._running()
        self._listeners[address] = self._running(), arrived
        return address

    def unlisten(self, address: bytes) -> None:
        """See :class:`aiocomms.lowlevel.clock.Network`."""
        self._listeners.pop(address, None)

    def connect(self, address: bytes, hello: Any, answered: Callable[[bool], object]) -> SimulatedConduit:
        """See :class:`aiocomms.lowlevel.clock.Network`."""
        mine = SimulatedConduit(self, self._running())
        mine.call(answered)
        found = self._listeners.get(address)
        if found is None or found[0].over:
            held = self.held(mine.process, self._owners.get(address, mine.process))
            mine.process.later(held + self._latency(), mine.end, False)
            return mine
        process, arrived = found
        theirs = SimulatedConduit(self, process)
        mine.other, theirs.other = theirs, mine
        self._conduits[mine] = self._conduits[theirs] = None

        def first(frame: Any) -> None:
            theirs.unhear()
            if address in self._listeners:
                theirs.send(_WELCOME)
                arrived(theirs, frame)
            else:
                theirs.close()

        theirs.hear(first, _ignore)
        mine.send(hello)
        return mine

    # -------------------------------------------------------------------------------------- events of the world

    def carry(self, to: SimulatedConduit, frame: Any) -> None:
        """Schedule the arrival of a frame after the latency, and after all frames that were sent earlier."""
        if to.process.over or to.cut:
            return
        to.coming.append(frame)
        self._depart(to, self._clockwork.time)

    def _depart(self, to: SimulatedConduit, sent: float) -> None:
        """Schedule the arrival of a frame. A partition delays the frame until the partition's end.

        :param sent: the time at which the frame was sent.
        """
        world = self._clockwork
        parted = self._parted.get((to.other.process.rank, to.process.rank), 0.0)
        if parted <= world.time:
            to.last = max(to.last, world.time + self._latency())
            world.at(to.last, to.process, to.arrive)
            return
        if parted > sent + KEEPALIVE and not to.calling and not to.other.calling:
            world.at(sent + KEEPALIVE, None, self.cut, to)
        world.at(parted, None, self._depart, to, sent)  # Another partition may have begun by then.

    def undisturbed(self, end: SimulatedConduit) -> bool:
        """Return whether a connection works now.

        The other process must be alive and not paused, and no partition may separate the two processes.
        """
        other, now = end.other.process, self._clockwork.time
        parted = {(end.process.rank, other.rank), (other.rank, end.process.rank)} & self._parted.keys()
        standing = other.over or other.paused_until > now or end.over
        return not standing and all(self._parted[pair] <= now for pair in parted)

    def arrived(self, end: SimulatedConduit, frame: Any) -> None:
        """Record in the trace that a frame has arrived."""
        if frame is not _PING and frame is not _PONG:
            self._clockwork.note(end.process, f"hears {describe(frame)} of {end.other.process}")

    def held(self, one: Timeline, other: Timeline) -> float:
        """Return the time in seconds for which a partition still separates two processes, in either direction."""
        ways = (one.rank, other.rank), (other.rank, one.rank)
        return max(0.0, *(self._parted.get(way, 0.0) - self._clockwork.time for way in ways))

    def _latency(self) -> float:
        latency: float = self._least * self._range ** self._clockwork.random.random()
        return latency

    def cut(self, one: SimulatedConduit) -> None:
        """Cut a connection. Frames in transit are lost, and both ends notice the cut a moment later."""
        for end in (one, one.other):
            end.cut = True
            end.coming.clear()
            if not end.process.over:
                end.process.later(self._latency(), end.end, False)

    def die(self, process: Timeline) -> None:
        """End the connections of a process that has died. Some of the last frames that it sent are lost."""
        for mine in [it for it in self._conduits if it.process is process]:
            theirs = mine.other
            mine.over = True
            kept = int(self._clockwork.random.random() * (len(theirs.coming) + 1))
            for place in range(kept, len(theirs.coming)):
                theirs.coming[place] = _LOST
            self.carry(theirs, _RESET)
        self._forget(process)

    def close(self, process: Timeline) -> None:
        """End the connections of a process that has ended normally."""
        for mine in [it for it in self._conduits if it.process is process]:
            mine.close()
        self._forget(process)

    def _forget(self, process: Timeline) -> None:
        for address in [it for it, (owner, _) in self._listeners.items() if owner is process]:
            del self._listeners[address]
        for mine in [it for it in self._conduits if it.process is process]:
            del self._conduits[mine]

    def part(self, source: int, target: int, seconds: float) -> None:
        """Stop all traffic from one rank to another for some seconds."""
        ends = self._clockwork.time + seconds
        self._parted[source, target] = max(ends, self._parted.get((source, target), 0.0))

    def cut_between(self, one: int, other: int) -> None:
        """End the connections of two ranks."""
        for end in list(self._conduits):
            if (end.process.rank, end.other.process.rank) == (one, other):
                self.cut(end)

    def clear(self) -> None:
        """Delete all connections and listeners."""
        self._conduits.clear()
        self._listeners.clear()
        self._owners.clear()
