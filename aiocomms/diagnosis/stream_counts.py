"""The counts of streams: the name of each, what it has carried, what it holds, and how long tasks were blocked in it.

A stream changes its own :class:`StreamCounts`. All others read them: statistics, exporters, ``aiocomms top``, and the
flight recorder, which finds in them the stream that a message is of. So no message carries its stream's name, and none
costs more because of it.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from aiocomms.lowlevel import clock
from aiocomms.lowlevel.threads import copied
from aiocomms.ops import STREAM, STREAM_DATA

_PARTS = 4
"""The tags of one end: of headers, of what follows them, and of credits; the fourth is free."""


class StreamStatistics(msgspec.Struct, frozen=True):
    """One end of a stream at one time. Counts and seconds are of this end alone, since both ends are open."""

    name: str
    """The name with which it was opened; empty: none."""
    number: int
    """The number among the streams that this rank has opened on its communicator, from 1."""
    peer: int
    """The other rank."""
    seconds: float
    """Seconds for which both ends have been open, until this end was closed; 0: the other one is not yet."""
    sent: int
    """Items whose send has begun: there was room for them."""
    received: int
    """Items that the program has taken."""
    queued: int
    """Items that have arrived, and that the program has not taken."""
    queued_bytes: int
    """The bytes of these."""
    capacity: int
    """The number of items that this end holds at most."""
    send_blocked: float
    """Seconds in which a task, or several, was suspended in ``send``: no room at the other end, or a slow transfer."""
    receive_blocked: float
    """Seconds in which a task, or several, was suspended in ``receive``."""

    @property
    def words(self) -> str:
        """The name as reports have it: ``stream 'tokens'``, or ``stream 3`` if it was opened without a name."""
        return words(self.name, self.number)

    def bubble(self, after: StreamStatistics) -> float:
        """Return the share of a stage's time in which it waited: for an item of this stream, or to send on another.

        :param after: the stream by which the stage sends what it has made of the items of this one.
        :returns: from 0, the stage has always worked, to 1; 0 of streams that are not open yet.
        """
        seconds = max(self.seconds, after.seconds)
        return min(1.0, (self.receive_blocked + after.send_blocked) / seconds) if seconds else 0.0


def words(name: str, number: int) -> str:
    """Return what reports call a stream."""
    return f"stream {name!r}" if name else f"stream {number}"


class Blocked:
    """The seconds in which one task or several are suspended somewhere; changed on one thread, read on any."""

    __slots__ = ("_sum", "_tasks")

    def __init__(self) -> None:
        self._tasks = 0
        # One number, so that other threads see no half of a change. While a task is suspended the time since when that
        # is so is subtracted, which makes it negative.
        self._sum = 0.0

    def begin(self) -> None:
        """Note that a task is about to be suspended."""
        if not self._tasks:
            self._sum -= clock.now()
        self._tasks += 1

    def end(self) -> None:
        """Note that it goes on."""
        self._tasks -= 1
        if not self._tasks:
            self._sum += clock.now()

    def seconds(self, now: float) -> float:
        """Return the sum until now."""
        known = self._sum
        return known if known >= 0 else max(0.0, now + known)


class StreamCounts:
    """The counts of one end of a stream, which changes them as it goes."""

    def __init__(self, name: str, number: int, peer: int, capacity: int, queue: deque[tuple[Any, int]]) -> None:
        """Begin with nothing.

        :param queue: the items that have arrived, each with its size in bytes.
        """
        self.name, self.number, self.peer = name, number, peer
        self.words: str = words(name, number)
        self.names: dict[Key, str] = {}
        """The stream's name in words, by the keys of its messages."""
        self.sent = self.received = 0
        self.sending: Blocked = Blocked()
        self.receiving: Blocked = Blocked()
        self._capacity, self._queue = capacity, queue
        self._opened: float | None = None
        self._closed: float | None = None

    def has(self, op: str, tag: int, channel: int = STREAM_DATA) -> None:
        """Note that messages of this tag are the stream's.

        :param op: ``send`` or ``recv``.
        """
        self.names[key_of(op, self.peer, tag, channel)] = self.words

    def open(self) -> None:
        """Note that both ends are open."""
        self._opened = clock.now()

    def close(self) -> None:
        """Note that this end is closed."""
        self._closed = clock.now()

    def statistics(self) -> StreamStatistics:
        """Return all of it at this time; on any thread."""
        now = clock.now() if self._closed is None else self._closed
        sizes = [size for _, size in copied(self._queue)]
        return StreamStatistics(
            name=self.name,
            number=self.number,
            peer=self.peer,
            seconds=0.0 if self._opened is None else max(0.0, now - self._opened),
            sent=self.sent,
            received=self.received,
            queued=len(sizes),
            queued_bytes=sum(sizes),
            capacity=self._capacity,
            send_blocked=self.sending.seconds(now),
            receive_blocked=self.receiving.seconds(now),
        )


Key = tuple[str, int, int, int]
"""The key that tells messages of a stream from others: ``send`` or ``recv``, the other rank, channel and tag."""


def key_of(op: str, peer: int, tag: int, channel: int) -> Key:
    """Return the key of a message. The tags of what follows a stream's greeting are one."""
    return op, peer, channel, tag if channel == STREAM else tag // _PARTS


class StreamLedger:
    """The counts of a communicator's open streams, and the names of those that were closed last."""

    def __init__(self, kept: int) -> None:
        """Begin with none.

        :param kept: the number of ops that are recorded, of which a stream has more than one.
        """
        self._open: WeakValueDictionary[int, StreamCounts] = WeakValueDictionary()
        self._closed: deque[dict[Key, str]] = deque(maxlen=kept)

    def add(self, counts: StreamCounts) -> None:
        """Keep a stream until it is closed or forgotten."""
        self._open[counts.number] = counts

    def close(self, counts: StreamCounts) -> None:
        """Keep of a stream the names of its messages. Idempotent."""
        counts.close()
        if self._open.pop(counts.number, None) is not None:
            self._closed.append(counts.names)

    def statistics(self) -> list[StreamStatistics]:
        """Return those of all that are open; on any thread."""
        return [counts.statistics() for counts in copied(self._open.values())]

    def names(self) -> list[dict[Key, str]]:
        """Return the names of messages; on any thread or signal handler."""
        return [*copied(self._closed), *(counts.names for counts in copied(self._open.values()))]
