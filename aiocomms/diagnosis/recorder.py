"""The flight recorder: the last ops of a communicator and those that are pending, to be written down when it is lost.

It is always on, so of an op that ends within its call it keeps the type and the time, one behind the other; the numbers
only where there are some, and no tensor. To read a tensor's size costs as much as all the rest, so it is kept only of
ops that did not end within their call. The communicator knows its pending ops anyway, and they are described in full on
request.

Its cost is for the most part cache. The types and times of 512 ops fit into the innermost cache beside what the program
works on. Four times as many drive each other out, and a tuple for each takes twice as much.
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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakSet

import msgspec
import torch

from aiocomms.diagnosis.places import suspended
from aiocomms.diagnosis.stream_counts import Key, StreamLedger, key_of
from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.hosts import host_id
from aiocomms.lowlevel.threads import copied
from aiocomms.ops import STREAM, STREAM_DATA, USER, Batch, Op, WindowInfo, tensor_of
from aiocomms.progress.inflight import Flying, InFlight, LaneWork, StartedWork
from aiocomms.transport.native import Ring

if TYPE_CHECKING:
    from aiocomms.core.core import Core

FORMAT = "aiocomms recorder 1"
DEFAULT, MOST = 512, 65536
"""Ops that a communicator keeps, and at most keeps; of pending ones it writes down as many."""
SHOWN = 8
"""Pending ops and tensors that are described where there is little room."""
LONGEST = 300
"""Characters of a name, place or message."""
UNMATCHED = "nothing matched"
"""The error's words for a receive that was withdrawn when its deadline passed."""

PLAN_LANE = "aiocomms.serving plan"
"""The beginning of the key of the lane of a service's plan; its number follows."""
_CHANNELS = {STREAM: "a stream", STREAM_DATA: "a stream"}
"""The names of messages that the program has not called, by channel; others are not among a communicator's ops."""
_ARGUMENTS = ("src", "dst", "root", "rank", "tag", "channel")
_log = logging.getLogger("aiocomms")


Entry = type[Op] | tuple[Any, ...] | float
"""An entry of the ring: an op's type when it is called; when it has ended, the time or a :meth:`Recorder.row`."""


class Item(msgspec.Struct, omit_defaults=True):
    """One op. Times are seconds of this host's monotonic clock."""

    name: str
    seq: int
    """Its number among the ops of its communicator on its rank, from 0."""
    state: str
    """``pending``, ``done`` or ``failed``."""
    args: dict[str, int] = {}
    """Peers, tag and the like, by their names."""
    collective: int | None = None
    """Its number among the collectives of its communicator, from 1: the same on all ranks. Of a lane's, 0. None: it is
    no collective, or one whose call has gone from the ring."""
    bytes: int | None = None
    """The size of the tensor that it is about, unless it ended within the call."""
    posted: float | None = None
    """The time of the call, if it did not end within the call."""
    finished: float | None = None
    tensors: list[str] = []
    """Names, dtypes and shapes of a pending op's tensors."""
    error: str = ""
    task: str = ""
    """The task that awaits it, and where in the program."""
    where: str = ""
    lane: str = ""
    """The key of its lane, in words; empty: of none."""
    of: str = ""
    """The stream, service or plan that it is a step of, or the window that it is on. A window's only if it did not end
    within the call."""
    idle: bool = False
    """True if it stands ready for what may come, and no task waits for that."""

    def __str__(self) -> str:
        of = self.of or _CHANNELS.get(self.args.get("channel", USER), "")
        shown = {k: v for k, v in self.args.items() if k != "channel" and not (of and k == "tag")}
        called = f"{self.name}({', '.join(f'{k}={v}' for k, v in shown.items())})" if shown else self.name
        called += f" of {of}" if of else ""
        return f"{called} in lane {self.lane}" if self.lane and not self.of else called

    def matches(self, glob: str) -> bool:
        """Return whether a pattern of the shell's matches the op's name, its lane, or what it is of."""
        of = self.of.removesuffix(", for room")
        return any(fnmatchcase(name, glob) for name in (self.name, self.lane, of, bare(of)))


def bare(words: str) -> str:
    """Return a name out of the words that reports have for what bears it: ``tokens`` of ``stream 'tokens'``."""
    return words.partition(" ")[2].strip("'\"")


class Brief(msgspec.Struct, omit_defaults=True):
    """The activity of one rank, in a few hundred bytes, for the other ranks."""

    rank: int
    calls: int
    """Collectives that it has called."""
    ended: int
    """The number of the last collective that has ended, with all before it; 0: none."""
    last: str = ""
    """The name of that collective, where the recorder still knows it."""
    pending: list[Item] = []
    """The oldest few."""
    more: int = 0
    """Further pending ops."""


class Format(msgspec.Struct):
    """The beginning of a file, in every version."""

    format: str


class Header(msgspec.Struct):
    """The first line of a file; the others are the ops."""

    format: str
    comm: str
    rank: int
    size: int
    host: str
    pid: int
    wall: float
    """Both clocks when it was written, in seconds."""
    monotonic: float
    reason: str
    verdict: str
    brief: Brief


class Snapshot(msgspec.Struct):
    """The knowledge of a recorder at one time."""

    header: Header
    finished: list[tuple[Any, ...]]
    pending: list[Item]
    streams: dict[Key, str]
    """The names of streams, by the keys of their messages."""

    def items(self) -> list[Item]:
        """All ops, in the order of the calls."""
        finished = (_finished(row, self.streams) for row in self.finished)
        return sorted((*finished, *self.pending), key=lambda item: item.seq)


class PlanUnderWay(Protocol):
    """A plan of a service, as reports see it."""

    @property
    def called(self) -> float:
        """The time when it was called on rank 0, or has arrived on another one."""


class Look(NamedTuple):
    """All that changes of what a recorder knows, at one time; made in few calls, and described at leisure."""

    flying: list[Flying]
    tasks: list[tuple[str, str]]
    """The task that awaits each of these, and the line of the program in which that task is suspended."""
    entries: list[Entry]
    lanes: dict[int, str]
    """The lanes of ops, by their numbers."""
    streams: list[dict[Key, str]]
    """The names of streams, by the keys of their messages."""
    refused: set[int]
    """The numbers of collectives that could not be posted, and are none of those that all ranks count."""
    issued: int
    calls: int
    wall: float
    monotonic: float


def _arguments(cls: type[Op]) -> list[str]:
    """Return the names of the numbers among an op's fields."""
    return [name for name in _ARGUMENTS if name in cls.__struct_fields__]


PEERS: dict[type[Op], Callable[[Any], Any]] = {}
"""The readers of the numbers that an op of each type has, if it has any."""
_KEPT: dict[type[Op], Callable[[Any], Any]] = {}
"""The readers of these numbers, the name of the window and the size of the tensor that an op of each type is about."""


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
    """Return None, for an op without numbers and tensors."""


class Recorder:
    """The ops of one communicator."""

    def __init__(self, comm: Core, in_flight: InFlight, size: int) -> None:
        """Record nothing yet.

        :param size: the number of ops that are kept.
        """
        self._comm = comm
        self._in_flight = in_flight
        self.size: int = size
        self.ring: Ring = comm.ledger.ring
        """The entries of ops: the type of each, when it is called, and an end.

        The end is the time, or a :meth:`row` if the op was pending, has failed, or has numbers.
        """
        self.lanes: Ring = comm.ledger.lanes
        """The number of each op of a lane, and the lane's key in words."""
        self.refused: deque[int] = deque(maxlen=self.size)
        """See :class:`Look`."""
        self.streams: StreamLedger = StreamLedger(self.size)
        self.windows: WeakSet[WindowInfo] = WeakSet()
        """The windows that were opened and that somebody still has."""
        self.window_numbers: Iterator[int] = count(1)
        self.plans: Mapping[int, PlanUnderWay] = {}
        """The plans of the service, if there is one, that this rank has not ended."""
        _learn(Op)

    @property
    def open(self) -> bool:
        """True while the communicator is open."""
        return not self._comm.closed

    def row(
        self, work: StartedWork[Any], posted: float | None = None, error: CommError | None = None
    ) -> tuple[Any, ...]:
        """Return what is kept of an op that has ended, or failed, and was pending since then; in its call, if None."""
        op = work.op
        cls = type(op)
        try:
            kept = (PEERS if posted is None else _KEPT)[cls](op)
        except (AttributeError, KeyError):
            # The op has no numbers, or not one tensor on this rank; or its type came later.
            kept = PEERS[cls](op) if cls in PEERS else None
        # The record keeps the text of an error alone: its traceback would keep frames, and with them tensors.
        text = None if error is None else str(error)[:LONGEST]
        return work.seq, cls, clock.now(), kept, text, posted

    def snapshot(self, reason: str) -> Snapshot:
        """Everything, now, described. On any thread, whatever the loop is doing."""
        return self.describe(self.look(self._in_flight.look()), reason)

    def number(self, seq: int) -> int | None:
        """See :meth:`aiocomms.progress.work.Owner.collective`."""
        look = self.look(self._in_flight.look())
        return _numbers(look, _rows(look)[0]).get(seq)

    def look(self, flying: list[Flying]) -> Look:
        """Note all that may change. On any thread; takes no lock, for a signal handler calls it.

        :param flying: the pending works. They may have been ended in this very turn of the loop: the tasks that await
            them are where they were until the next one.
        """
        comm = self._comm
        while True:  # Other threads may be calling more ops.
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
        """Put what was noted into words; on any thread, at any time."""
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
    """Return the types of the last ops by their numbers, and :meth:`Recorder.row` of those that have ended.

    There is a type for every call, so counted back from the last one they tell the numbers.
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
        elif cls is not None:  # An entry without a type here is of a call that has gone from the ring.
            rows[seq - 1] = (seq - 1, cls, entry, None, None, None)
    return called, [row for number, row in rows.items() if number not in pending]


def _numbers(look: Look, called: dict[int, type[Op]]) -> dict[int, int]:
    """Return the numbers of collectives by sequence number, counted back from the last, which may be in its post."""
    seqs = {seq for seq, cls in called.items() if cls.family == "collectives"}
    seqs |= {one.work.seq for one in look.flying if one.work.op.family == "collectives"}
    lanes = look.lanes.keys() | {one.work.seq for one in look.flying if isinstance(one.work, LaneWork)}
    counted = sorted(seqs - lanes - look.refused, reverse=True)
    return {**dict.fromkeys(lanes & seqs, 0), **dict(zip(counted, range(look.calls, 0, -1), strict=False))}


def _ended(look: Look, numbers: dict[int, int], finished: set[int]) -> int:
    """Return the number of the last collective that has ended, with all before it."""
    return min((number - 1 for seq, number in numbers.items() if number and seq not in finished), default=look.calls)


def _brief(rank: int, look: Look, ended: int, pending: Sequence[Item], finished: Sequence[tuple[Any, ...]]) -> Brief:
    last = next((row for row in reversed(finished) if ended and row[0] == ended), None)
    busy = [item for item in pending if not item.idle]
    few = [msgspec.structs.replace(item, tensors=[], task="", where="") for item in busy[:SHOWN]]
    name = f"{last[3].name} #{last[2]}" if last else ""
    return Brief(rank, look.calls, ended, name, few, len(busy) - len(few))


@cache
def _boot() -> str:
    """Return the host whose monotonic clock the times are of; empty: it is not known."""
    try:
        return host_id()
    except OSError:  # There may be no descriptors left.
        return ""


def capacity() -> int:
    """Return how many ops a communicator keeps: ``AIOCOMMS_RECORDER``, rounded up to a power of two."""
    text = os.environ.get("AIOCOMMS_RECORDER", "")
    if not text:
        return DEFAULT
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST:
        return 1 << (int(text) - 1).bit_length()
    _log.warning("AIOCOMMS_RECORDER is %r, wanted a number from 1 to %d; it is taken as %d", text, MOST, DEFAULT)
    return DEFAULT


def _item(flying: Flying, task: str, where: str, number: int | None, streams: dict[Key, str]) -> Item:
    """Return a pending op."""
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
    """Return an op as reports name it, ``recv(src=1, tag=7)``; of a batch the first few messages."""
    if isinstance(op, Batch):
        more = ", ..." if len(op.parts) > SHOWN else ""
        return f"{', '.join(map(called, op.parts[:SHOWN]))}{more}"
    return str(Item(op.name, 0, "pending", _numbers_of(op), of=window_of(op)))


def window_of(op: Op) -> str:
    """Return what reports call the window that an op is about; empty: it is about none, or one of this library's."""
    window = getattr(op, "window", None)
    return window.name if isinstance(window, WindowInfo) else ""


def peers(op: Op) -> list[int]:
    """Return the ranks that a message or batch is to and from, or whose part of a window an op is about."""
    parts = getattr(op, "parts", (op,))
    return sorted({rank for part in parts for name, rank in _numbers_of(part).items() if name in ("src", "dst")})


def _numbers_of(op: Op) -> dict[str, int]:
    return {name: value for name in _arguments(type(op)) if type(value := getattr(op, name)) is int}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plan_of(lane: str) -> str:
    """Return the plan that a lane is of, ``plan 3``; empty: of none."""
    number = lane.removeprefix(f"{PLAN_LANE} ")
    return f"plan {number}" if number != lane and number.isdecimal() else ""


def _of(op: str, args: dict[str, int], streams: dict[Key, str]) -> str:
    """Return the stream that a message is of, in words; empty: of none."""
    channel = args.get("channel", USER)
    if channel not in _CHANNELS:
        return ""
    return streams.get(key_of(op, args["dst" if op == "send" else "src"], args["tag"], channel), _CHANNELS[channel])


def _finished(row: tuple[Any, ...], streams: dict[Key, str]) -> Item:
    """Return an op that has ended, from its number among the collectives, its lane and what was kept of it."""
    number, lane, seq, cls, finished, kept, error, posted = row
    values = kept if isinstance(kept, tuple) else (kept,)
    args = dict(zip([*_arguments(cls), *(["of"] if _on_window(cls) else []), "bytes"], values, strict=False))
    size, of = args.pop("bytes", None), args.pop("of", "")
    args = {name: value for name, value in args.items() if type(value) is int}
    state = "done" if error is None else "failed"
    text, of = str(error or "")[:LONGEST], of or _plan_of(lane) or _of(cls.name, args, streams)
    return Item(cls.name, seq, state, args, number, size, posted, finished, error=text, lane=lane, of=of)
