"""The flight recorder of a communicator: the last ops and the pending ops.

If the communicator is lost, the recorder's content is written to a file.

The recorder is always on. For an op that ends within its call, the recorder stores the op's type, the time of the op's
end, and the op's integer arguments. The recorder stores no tensor. Reading a tensor's size would take as much time as
all other work of the recorder. So the recorder stores sizes only for ops that did not end within their call. The
communicator already has a list of its pending ops. On request, the recorder describes these pending ops in full.

Most of the recorder's cost is space in the processor's cache. The types and times of 512 ops fit into the first-level
cache together with the program's data. The types and times of 2,048 ops do not fit. A tuple for each op would take
twice the space.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol
from weakref import WeakSet

import msgspec
import torch

from aiocomms.diagnosis.places import suspended
from aiocomms.diagnosis.stream_counts import Key, StreamLedger, key_of
from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.hosts import host_id
from aiocomms.lowlevel.threads import copied
from aiocomms.ops import STREAM, STREAM_DATA, USER, Batch, CollectiveBatch, Op, WindowInfo, tensor_of
from aiocomms.progress.inflight import Flying, InFlight, LaneWork, StartedWork
from aiocomms.transport.native import Ring

if TYPE_CHECKING:
    from aiocomms.core.core import Core

FORMAT = "aiocomms recorder 1"
DEFAULT, MOST = 512, 65536
"""The default and the maximum of the number of ops that a recorder stores.

A recorder also describes at most ``MOST`` pending ops.
"""
SHOWN = 8
"""The maximum number of pending ops in a :class:`Brief`.

The number also limits the tensors in an :class:`Item`, and the messages in the text of a batch.
"""
LONGEST = 300
"""The maximum length of a name, a source line or an error's text, in characters."""
UNMATCHED = "nothing matched"
"""The text of the error for a receive that was withdrawn at its deadline."""

PLAN_LANE = "aiocomms.serving plan"
"""The beginning of the lane key of a service's plan; the plan's number follows."""
_CHANNELS = {STREAM: "a stream", STREAM_DATA: "a stream"}
"""The names that reports use for this library's own messages, by channel.

A communicator's ops use only these channels and ``USER``.
"""
_ARGUMENTS = ("src", "dst", "root", "rank", "tag", "channel")
_log = logging.getLogger("aiocomms")


Entry = type[Op] | tuple[Any, ...] | float
"""An entry of the ring buffer. The call of an op adds the op's type as an entry.

The end of an op adds another entry: the time of the end, or a tuple from :meth:`Recorder.row`.
"""

Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""A time in seconds, from a file or from another process.

The decoder refuses times below -1e12 or above 1e12, so that sums of times, and times in microseconds, are always
finite.
"""


class Item(msgspec.Struct, omit_defaults=True):
    """One op. Times are seconds of this host's monotonic clock."""

    name: str
    seq: int
    """The op's number among the ops of its communicator on its rank, from 0."""
    state: str
    """``pending``, ``done`` or ``failed``."""
    args: dict[str, int] = {}
    """The integer arguments of the op, such as peers and tag, by name."""
    collective: int | None = None
    """The op's number among the collectives of its communicator, counted from 1.

    A collective has the same number on all ranks.

    A collective in a lane has the number 0. The number is None if the op is not a collective, or if the recorder has
    already dropped the entry for the op's call.
    """
    bytes: int | None = None
    """The size of the op's tensors, in bytes; None if unknown, for example if the op ended within its call."""
    posted: Seconds | None = None
    """The time of the op's call; None if the op ended within its call."""
    finished: Seconds | None = None
    tensors: list[str] = []
    """The names, dtypes and shapes of a pending op's tensors."""
    error: str = ""
    task: str = ""
    """The name of the task that awaits the op."""
    where: str = ""
    """The line of the program in which the task that awaits the op is suspended."""
    lane: str = ""
    """The key of the op's lane, as text; empty if the op is in no lane."""
    of: str = ""
    """The name of the stream, service, plan or window to which the op belongs.

    The name of a window is missing if the op ended within its call.
    """
    idle: bool = False
    """True if the op is a receive that the library itself has posted, for a message that may never come.

    No task waits for an idle op.
    """

    def __str__(self) -> str:
        of = self.of or _CHANNELS.get(self.args.get("channel", USER), "")
        shown = {k: v for k, v in self.args.items() if k != "channel" and not (of and k == "tag")}
        called = f"{self.name}({', '.join(f'{k}={v}' for k, v in shown.items())})" if shown else self.name
        called += f" of {of}" if of else ""
        return f"{called} in lane {self.lane}" if self.lane and not self.of else called

    def matches(self, glob: str) -> bool:
        """Return whether a shell pattern matches the op's name, its lane, or its stream, plan or window."""
        of = self.of.removesuffix(", for room")
        return any(fnmatchcase(name, glob) for name in (self.name, self.lane, of, bare(of)))


def bare(words: str) -> str:
    """Remove the kind and the quotes from a name in a report: return ``tokens`` for ``stream 'tokens'``."""
    return words.partition(" ")[2].strip("'\"")


class Brief(msgspec.Struct, omit_defaults=True):
    """A report on the ops of one rank, in a few hundred bytes, for the other ranks."""

    rank: int
    calls: int
    """The number of collectives that the rank has called."""
    ended: int
    """The largest number n for which the collectives 1 to n have all ended; 0 if there is none."""
    last: str = ""
    """The name of the collective with the number ``ended``. Empty if the recorder has already dropped this op."""
    pending: list[Item] = []
    """The oldest pending ops that are not idle."""
    more: int = 0
    """The number of pending ops that are neither idle nor listed in ``pending``."""


class Format(msgspec.Struct):
    """The first field of a file's header. The header has this field in every version of the file format."""

    format: str


class Header(msgspec.Struct):
    """The first line of a flight recorder's file; the other lines are the ops."""

    format: str
    comm: str
    rank: int
    size: int
    host: str
    pid: int
    wall: Seconds
    """The times of the wall clock (``wall``) and the monotonic clock (``monotonic``) at the snapshot, in seconds."""
    monotonic: Seconds
    reason: str
    verdict: str
    brief: Brief


class Snapshot(msgspec.Struct):
    """The content of a recorder at one time."""

    header: Header
    finished: list[tuple[Any, ...]]
    pending: list[Item]
    streams: dict[Key, str]
    """A dictionary from the keys of messages to the names of their streams."""

    def items(self) -> list[Item]:
        """Return all ops, in the order of the calls."""
        finished = (_finished(row, self.streams) for row in self.finished)
        return sorted((*finished, *self.pending), key=lambda item: item.seq)


class PlanUnderWay(Protocol):
    """The interface through which reports read a running plan of a service."""

    @property
    def called(self) -> float:
        """The time at which rank 0 called the plan; on another rank, the time at which the plan arrived there."""


class Look(NamedTuple):
    """A copy of all changing data of a recorder at one time.

    Making the copy is fast. :meth:`Recorder.describe` may use the copy later.
    """

    flying: list[Flying]
    tasks: list[tuple[str, str]]
    """The names of the tasks that await the pending works, each with the line in which the task is suspended."""
    entries: list[Entry]
    lanes: dict[int, str]
    """The lanes of ops, by the ops' sequence numbers."""
    streams: list[dict[Key, str]]
    """Dictionaries from the keys of messages to the names of their streams."""
    refused: set[int]
    """The sequence numbers of collectives that did not start.

    The number of called collectives does not include these collectives.
    """
    issued: int
    calls: int
    wall: float
    monotonic: float


def _arguments(cls: type[Op]) -> list[str]:
    """Return the names of an op's integer arguments."""
    return [name for name in _ARGUMENTS if name in cls.__struct_fields__]


PEERS: dict[type[Op], Callable[[Any], Any]] = {}
"""A dictionary from a type of op to the function that returns an op's integer arguments.

A type without integer arguments has no entry.
"""
_KEPT: dict[type[Op], Callable[[Any], Any]] = {}
"""A dictionary from a type of op to the function that returns what the recorder stores of an op.

The function returns the op's integer arguments, the name of the op's window, and the size of the op's tensor in bytes.
"""


def _on_window(cls: type[Op]) -> bool:
    return "window" in cls.__struct_fields__


def _learn(cls: type[Op]) -> None:
    if cls not in _KEPT:
        names = _arguments(cls)
        if names:
            PEERS[cls] = attrgetter(*names)
        tensor = tensor_of(cls)
        paths = [*names, *(["window.name"] if _on_window(cls) else []), *([f"{tensor}.nbytes"] if tensor else [])]
        _KEPT[cls] = attrgetter(*paths) if paths else _nothing
    for below in cls.__subclasses__():
        _learn(below)


def _nothing(op: Op) -> None:
    """Return None, because an op without integer arguments and tensors has no values to store."""


class Recorder:
    """The flight recorder of one communicator."""

    def __init__(self, comm: Core, in_flight: InFlight, size: int) -> None:
        """Create an empty recorder.

        :param size: the number of ops that the recorder stores.
        """
        self._comm = comm
        self._in_flight = in_flight
        self.size: int = size
        self.ring: Ring = comm.ledger.ring
        """The ring buffer of entries. The call of an op adds the op's type, and the end of the op adds a second entry.

        The second entry is the time of the end. If the op was pending, has failed, or has integer arguments, the second
        entry is a tuple from :meth:`row` instead.
        """
        self.lanes: Ring = comm.ledger.lanes
        """Pairs of an op's sequence number and the key of the op's lane as text, for the ops in lanes."""
        self.refused: deque[int] = deque(maxlen=self.size)
        """See :class:`Look`."""
        self.streams: StreamLedger = StreamLedger(self.size)
        self.windows: WeakSet[WindowInfo] = WeakSet()
        """The windows that have been opened, and have not been garbage-collected yet."""
        self.window_numbers: Iterator[int] = count(1)
        self.plans: Mapping[int, PlanUnderWay] = {}
        """The plans that still run on this rank, if the communicator belongs to a service."""
        _learn(Op)

    @property
    def open(self) -> bool:
        """True while the communicator is open."""
        return not self._comm.closed

    def row(
        self, work: StartedWork[Any], posted: float | None = None, error: CommError | None = None
    ) -> tuple[Any, ...]:
        """Return the tuple that the ring buffer stores for an op that has ended or failed.

        :param posted: the time at which the op began to be pending; None if the op ended within its call.
        """
        op = work.op
        cls = type(op)
        try:
            kept = (PEERS if posted is None else _KEPT)[cls](op)
        except (AttributeError, KeyError):
            # The op has no numbers, or no single tensor on this rank, or its type was defined later.
            kept = PEERS[cls](op) if cls in PEERS else None
        # The row keeps only the text of an error: a traceback would keep frames alive, and with them tensors.
        text = None if error is None else str(error)[:LONGEST]
        return work.seq, cls, clock.now(), kept, text, posted

    def snapshot(self, reason: str) -> Snapshot:
        """Return a description of the current ops. Any thread may call this method, even while the loop is blocked."""
        return self.describe(self.look(self._in_flight.look()), reason)

    def number(self, seq: int) -> int | None:
        """See :meth:`aiocomms.progress.work.Owner.collective`."""
        look = self.look(self._in_flight.look())
        return _numbers(look, _rows(look)[0]).get(seq)

    def look(self, flying: list[Flying]) -> Look:
        """Copy all changing data. Thread-safe. A signal handler may call this method, so the copy takes no lock.

        :param flying: the pending works, and works that have just ended but whose tasks are still suspended.
        """
        comm = self._comm
        while True:  # Other threads may call ops meanwhile.
            issued, calls = comm.ledger.issued, comm.ledger.calls
            entries = copied(self.ring)
            lanes, refused = dict(copied(self.lanes)), set(copied(self.refused))
            if comm.ledger.issued == issued:
                break
        found = comm.driver.tasks_of([waiter for one in flying for waiter in one.waiters])
        tasks = []
        for one in flying:
            name, coroutine = next((found[waiter] for waiter in one.waiters if waiter in found), ("", None))
            tasks.append((name[:LONGEST], suspended(coroutine)[-LONGEST:]))
        return Look(
            flying, tasks, entries, lanes, self.streams.names(), refused, issued, calls, clock.wall(), clock.now()
        )

    def describe(self, look: Look, reason: str) -> Snapshot:
        """Describe the copied data. Thread-safe."""
        called, finished = _rows(look)
        numbers = _numbers(look, called)
        ended = _ended(look, numbers, {row[0] for row in finished})
        flying = sorted(zip(look.flying, look.tasks, strict=True), key=lambda one: one[0].work.seq)[:MOST]
        streams = {key: name for each in look.streams for key, name in each.items()}
        pending = [_item(one, *task, numbers.get(one.work.seq), streams) for one, task in flying]
        finished = [
            (numbers.get(row[0]), look.lanes.get(row[0], ""), *row)
            for row in sorted(finished[-self.size :], key=lambda row: row[2])
        ]
        comm = self._comm
        header = Header(
            FORMAT, comm.name, comm.rank, comm.size, _boot(), os.getpid(), look.wall, look.monotonic,
            reason[: 4 * LONGEST], "", _brief(comm.rank, look, ended, pending, finished),
        )  # fmt: skip
        return Snapshot(header, finished, pending, streams)


def _rows(look: Look) -> tuple[dict[int, type[Op]], list[tuple[Any, ...]]]:
    """Return the types of the last ops by sequence number, and the tuples of :meth:`Recorder.row` for the ended ops.

    The ring buffer stores no sequence numbers of calls. But every call has one entry with a type, so this function
    counts these entries back from the last call.
    """
    pending = {one.work.seq for one in look.flying}
    seq = look.issued - sum(isinstance(entry, type) for entry in look.entries)
    cls: Any = None
    called: dict[int, type[Op]] = {}
    rows: dict[int, tuple[Any, ...]] = {}
    for entry in look.entries:
        if isinstance(entry, type):
            called[seq] = cls = entry
            seq += 1
        elif isinstance(entry, tuple):
            rows[entry[0]] = entry
        elif cls is not None:  # Without a type before it, the entry belongs to a call that the ring has dropped.
            rows[seq - 1] = (seq - 1, cls, entry, None, None, None)
    return called, [row for number, row in rows.items() if number not in pending]


def _numbers(look: Look, called: dict[int, type[Op]]) -> dict[int, int]:
    """Return the number of each collective, by the collective's sequence number among all ops.

    The numbers are counted back from the last call of a collective.
    """
    seqs = {seq for seq, cls in called.items() if cls.family == "collectives"}
    seqs |= {one.work.seq for one in look.flying if one.work.op.family == "collectives"}
    lanes = look.lanes.keys() | {one.work.seq for one in look.flying if isinstance(one.work, LaneWork)}
    counted = sorted(seqs - lanes - look.refused, reverse=True)
    return {**dict.fromkeys(lanes & seqs, 0), **dict(zip(counted, range(look.calls, 0, -1), strict=False))}


def _ended(look: Look, numbers: dict[int, int], finished: set[int]) -> int:
    """Return the largest number n for which the collectives 1 to n have all ended."""
    return min((number - 1 for seq, number in numbers.items() if number and seq not in finished), default=look.calls)


def _brief(rank: int, look: Look, ended: int, pending: Sequence[Item], finished: Sequence[tuple[Any, ...]]) -> Brief:
    last = next((row for row in reversed(finished) if ended and row[0] == ended), None)
    busy = [item for item in pending if not item.idle]
    few = [msgspec.structs.replace(item, tensors=[], task="", where="") for item in busy[:SHOWN]]
    name = f"{last[3].name} #{last[2]}" if last else ""
    return Brief(rank, look.calls, ended, name, few, len(busy) - len(few))


@cache
def _boot() -> str:
    """Return the id of this host, or an empty string if the id is unknown.

    The monotonic clock of this host gives the times of the ops.
    """
    try:
        return host_id()
    except OSError:  # There may be no free descriptor.
        return ""


def capacity() -> int:
    """Return the number of ops that a recorder keeps: ``AIOCOMMS_RECORDER``, rounded up to a power of two."""
    text = os.environ.get("AIOCOMMS_RECORDER", "")
    if not text:
        return DEFAULT
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST:
        return 1 << (int(text) - 1).bit_length()
    _log.warning("AIOCOMMS_RECORDER is %r, wanted a number from 1 to %d; it is taken as %d", text, MOST, DEFAULT)
    return DEFAULT


def _item(flying: Flying, task: str, where: str, number: int | None, streams: dict[Key, str]) -> Item:
    """Return the :class:`Item` of a pending op."""
    work, posted, _, of = flying
    op = work.op
    args = _numbers_of(op)
    buffers = {name: tensor for name, tensor in (*op.reads(), *op.writes()) if isinstance(tensor, torch.Tensor)}
    tensors = [f"{name}: {_dtype(t.dtype)} {list(t.shape)}"[:LONGEST] for name, t in list(buffers.items())[:SHOWN]]
    total = sum(t.nbytes for t in buffers.values()) if buffers else None
    lane = work.lane if isinstance(work, LaneWork) else ""
    return Item(
        op.name, work.seq, "pending", args, number, total, posted, None, tensors, task=task, where=where, lane=lane,
        of=of or window_of(op) or _plan_of(lane) or _of(op.name, args, streams), idle=flying.idle,
    )  # fmt: skip


def called(op: Op) -> str:
    """Return an op as reports show it, such as ``recv(src=1, tag=7)``; for a batch, the first few messages."""
    if isinstance(op, (Batch, CollectiveBatch)):
        more = ", ..." if len(op.parts) > SHOWN else ""
        return f"{', '.join(map(called, op.parts[:SHOWN]))}{more}"
    return str(Item(op.name, 0, "pending", _numbers_of(op), of=window_of(op)))


def window_of(op: Op) -> str:
    """Return the name of an op's window in reports; empty if the op has no window, or an internal one."""
    window = getattr(op, "window", None)
    return window.name if isinstance(window, WindowInfo) else ""


def peers(op: Op) -> list[int]:
    """Return the ranks with which a message, a batch or an op on a window communicates."""
    parts = getattr(op, "parts", (op,))
    return sorted({rank for part in parts for name, rank in _numbers_of(part).items() if name in ("src", "dst")})


def _numbers_of(op: Op) -> dict[str, int]:
    return {name: value for name in _arguments(type(op)) if type(value := getattr(op, name)) is int}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plan_of(lane: str) -> str:
    """Return the plan of a lane, such as ``plan 3``; empty if the lane belongs to no plan."""
    number = lane.removeprefix(f"{PLAN_LANE} ")
    return f"plan {number}" if number != lane and number.isdecimal() else ""


def _of(op: str, args: dict[str, int], streams: dict[Key, str]) -> str:
    """Return the stream of a message, as text; empty if the message belongs to no stream."""
    channel = args.get("channel", USER)
    if channel not in _CHANNELS:
        return ""
    return streams.get(key_of(op, args["dst" if op == "send" else "src"], args["tag"], channel), _CHANNELS[channel])


def _finished(row: tuple[Any, ...], streams: dict[Key, str]) -> Item:
    """Return the :class:`Item` of an op that has ended.

    :param row: the op's number among the collectives, the op's lane, and the tuple from :meth:`Recorder.row`.
    """
    number, lane, seq, cls, finished, kept, error, posted = row
    values = kept if isinstance(kept, tuple) else (kept,)
    args = dict(zip([*_arguments(cls), *(["of"] if _on_window(cls) else []), "bytes"], values, strict=False))
    size, of = args.pop("bytes", None), args.pop("of", "")
    args = {name: value for name, value in args.items() if type(value) is int}
    state = "done" if error is None else "failed"
    text, of = str(error or "")[:LONGEST], of or _plan_of(lane) or _of(cls.name, args, streams)
    return Item(cls.name, seq, state, args, number, size, posted, finished, error=text, lane=lane, of=of)
