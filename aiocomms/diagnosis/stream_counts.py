"""The counts of streams: the numbers of sent, received and queued items, and the times for which tasks were blocked.

A stream changes its own :class:`StreamCounts`. Statistics, exporters, ``aiocomms top`` and the flight recorder read
these counts. The flight recorder also looks up the name of a message's stream here, because a message does not contain
this name.
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
"""The number of tags that one end of a stream uses: one each for headers, data and credits, and one unused tag."""


class StreamStatistics(msgspec.Struct, frozen=True):
    """The statistics of one end of a stream, from the time at which both ends were open."""

    name: str
    """The argument ``name`` of ``open_stream``; empty if the caller passed no name."""
    number: int
    """The stream's number among the streams that this rank has opened on the communicator, counted from 1."""
    peer: int
    """The rank at the other end."""
    seconds: float
    """The seconds for which both ends have been open, until now or until this end was closed.

    The value is 0 before both ends are open.
    """
    sent: int
    """The number of items whose transfer has begun. A transfer begins when the other end can queue the item."""
    received: int
    """The number of items that ``receive`` has returned to the program."""
    queued: int
    """The number of items that have arrived, but that ``receive`` has not returned yet."""
    queued_bytes: int
    """The total size of the queued items, in bytes."""
    capacity: int
    """The maximum number of items that this end queues."""
    send_blocked: float
    """The seconds during which at least one task was suspended in ``send``.

    A task is suspended if the other end's queue is full, or if the transfer is slow.
    """
    receive_blocked: float
    """The seconds during which at least one task was suspended in ``receive``."""

    @property
    def words(self) -> str:
        """The name as reports show it: ``stream 'tokens'``, or ``stream 3`` for a stream without a name."""
        return words(self.name, self.number)

    def bubble(self, after: StreamStatistics) -> float:
        """Return the share of time in which a pipeline stage waited to receive from this stream, or to send a result.

        :param after: the stream on which the stage sends its results for the items of this stream.
        :returns: a number from 0 (the stage always worked) to 1. The number is 0 if neither stream is open yet.
        """
        seconds = max(self.seconds, after.seconds)
        return min(1.0, (self.receive_blocked + after.send_blocked) / seconds) if seconds else 0.0


def words(name: str, number: int) -> str:
    """Return a stream's name as reports show it."""
    return f"stream {name!r}" if name else f"stream {number}"


class Blocked:
    """The seconds during which at least one task was suspended.

    Only one thread changes the object. Any thread may read it.
    """

    __slots__ = ("_sum", "_tasks")

    def __init__(self) -> None:
        self._tasks = 0
        # The state is one number, so that other threads see no partial change. While a task is suspended, the start
        # time of the suspension is subtracted, which makes the number negative.
        self._sum = 0.0

    def begin(self) -> None:
        """Record that a task is about to be suspended."""
        if not self._tasks:
            self._sum -= clock.now()
        self._tasks += 1

    def end(self) -> None:
        """Record that a task has resumed."""
        self._tasks -= 1
        if not self._tasks:
            self._sum += clock.now()

    def seconds(self, now: float) -> float:
        """Return the total number of seconds. A suspension that has not ended counts until the time ``now``."""
        known = self._sum
        return known if known >= 0 else max(0.0, now + known)


class StreamCounts:
    """The counts of one end of a stream, which the stream changes."""

    def __init__(self, name: str, number: int, peer: int, capacity: int, queue: deque[tuple[Any, int]]) -> None:
        """Begin with all counts at 0.

        :param queue: the stream's queue of arrived items. An entry is an item and the item's size in bytes.
        """
        self.name, self.number, self.peer = name, number, peer
        self.words: str = words(name, number)
        self.names: dict[Key, str] = {}
        """A dictionary that maps each key of the stream's messages to the stream's name, as reports show it."""
        self.sent = self.received = 0
        self.sending: Blocked = Blocked()
        self.receiving: Blocked = Blocked()
        self._capacity, self._queue = capacity, queue
        self._opened: float | None = None
        self._closed: float | None = None

    def has(self, op: str, tag: int, channel: int = STREAM_DATA) -> None:
        """Record that messages with this tag belong to the stream.

        :param op: ``send`` or ``recv``.
        """
        self.names[key_of(op, self.peer, tag, channel)] = self.words

    def open(self) -> None:
        """Record that both ends are open."""
        self._opened = clock.now()

    def close(self) -> None:
        """Record that this end is closed."""
        self._closed = clock.now()

    def statistics(self) -> StreamStatistics:
        """Return the current statistics. Thread-safe."""
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
"""The key of a stream's messages: a tuple of ``send`` or ``recv``, the other rank, the channel, and a tag's number."""


def key_of(op: str, peer: int, tag: int, channel: int) -> Key:
    """Return the key of a message.

    All messages with the tags of one end of a stream have the same key, except the first message of this end.
    """
    return op, peer, channel, tag if channel == STREAM else tag // _PARTS


class StreamLedger:
    """The counts of a communicator's open streams, and the names of the most recently closed streams."""

    def __init__(self, kept: int) -> None:
        """Create an empty ledger.

        :param kept: the number of closed streams whose names the ledger keeps. The flight recorder needs at most as
            many names as it stores ops.
        """
        self._open: WeakValueDictionary[int, StreamCounts] = WeakValueDictionary()
        self._closed: deque[dict[Key, str]] = deque(maxlen=kept)

    def add(self, counts: StreamCounts) -> None:
        """Add a stream. The ledger lists the stream until the stream is closed or garbage-collected."""
        self._open[counts.number] = counts

    def close(self, counts: StreamCounts) -> None:
        """Remove a closed stream from the ledger, but keep its name and the keys of its messages. Idempotent."""
        counts.close()
        if self._open.pop(counts.number, None) is not None:
            self._closed.append(counts.names)

    def statistics(self) -> list[StreamStatistics]:
        """Return the statistics of all open streams. Thread-safe."""
        return [counts.statistics() for counts in copied(self._open.values())]

    def names(self) -> list[dict[Key, str]]:
        """Return dictionaries from the keys of messages to the names of streams.

        Any thread or signal handler may call this method.
        """
        return [*copied(self._closed), *(counts.names for counts in copied(self._open.values()))]
