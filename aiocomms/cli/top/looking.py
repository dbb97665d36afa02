"""The query of processes: this module finds this user's processes, and reads the state of the processes' communicators.

In each process, :mod:`aiocomms.diagnosis.live` answers the query. This module decodes the answer into a fixed type. If
the answer is invalid, an error names the fault.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import msgspec

from aiocomms.cli.trace import TraceRecord, judged
from aiocomms.core.postmortem import printable, tidied, tidy
from aiocomms.diagnosis.dumps import LARGEST
from aiocomms.diagnosis.hang_report import NO_ANSWER, numbered
from aiocomms.diagnosis.live import PATIENCE, TOLD, Sight, listeners
from aiocomms.diagnosis.recorder import FORMAT, LONGEST, SHOWN, Item, bare
from aiocomms.diagnosis.stream_counts import StreamStatistics
from aiocomms.lowlevel.gate import same_user

_sight = msgspec.json.Decoder(Sight)


class RankPlace(NamedTuple):
    """The identity of one rank of a communicator in a process."""

    pid: int
    comm: str
    meeting: str
    rank: int


class TopGroup(NamedTuple):
    """The ranks of one communicator that have answered."""

    comm: str
    size: int
    ranks: dict[int, Sight]

    def plans(self) -> Iterator[tuple[int, float, str]]:
        """Yield the number and the age in seconds of each running plan, and a text.

        The text lists the operations of each rank in the plan.
        """
        held = {number for sight in self.ranks.values() for number in sight.statistics.plans}
        for number in sorted(held):
            ages, places = list[float](), dict[str, list[int]]()
            for rank, sight in sorted(self.ranks.items()):
                if number in sight.statistics.plans:
                    ages.append(sight.statistics.plans[number])
                    places.setdefault(_place_in(number, sight.pending), []).append(rank)
            yield number, max(ages), "; ".join(f"{numbered(ranks)} in {place}" for place, ranks in places.items())

    def waits(self) -> list[str]:
        """Return lines about the communicator's loss, the waits of its ranks, and the ranks that are not visible."""
        records = {rank: TraceRecord(Path(), sight.header, sight.pending) for rank, sight in self.ranks.items()}
        unseen = self.size - len(self.ranks)
        missing = [f"{unseen} of its ranks cannot be seen from here: on other hosts, or ended"] if unseen else []
        lost = {f"lost: {sight.header.reason}": None for sight in self.ranks.values() if sight.header.reason}
        return [*lost, *judged(records), *missing]


class TopFrame(NamedTuple):
    """The answers of all processes to one query."""

    groups: list[TopGroup]
    notes: list[str]
    """The processes whose state could not be read, each with the reason."""
    rates: dict[RankPlace, float]
    """The number of ops called per second since the previous frame, for each rank."""
    blocked: dict[tuple[RankPlace, int], tuple[float, float]]
    """The shares of time in which a task was suspended in ``send`` and in ``receive``, by stream.

    The time counts from the previous frame, or from the opening of the stream if the stream was
    opened after that frame.
    """


class Top:
    """The object that queries the processes repeatedly."""

    def __init__(self, pid: int | None, name: str = "*") -> None:
        """Prepare to query one process, or all processes of this user.

        :param pid: the ID of the process; None for all processes of this user.
        :param name: a shell pattern for the names of operations, lanes, streams, windows and plans.
        :raises ValueError: the process does not exist, belongs to another user, or has no open communicator.
        """
        self._pid, self._name = pid, name
        self._before: dict[RankPlace, tuple[float, int]] = {}
        self._streams: dict[tuple[RankPlace, int], StreamStatistics] = {}
        if pid is not None:
            _check(pid)

    def look(self) -> TopFrame:
        """Query all processes once."""
        found = _listeners()
        asked = {pid: found[pid] for pid in (found if self._pid is None else [self._pid]) if pid in found}
        notes, sights = list[str](), list[tuple[int, Sight]]()
        for pid, said in _ask(asked):
            if isinstance(said, str):
                notes.append(f"process {pid} {said}")
            else:
                sights += ((pid, self._filtered(sight)) for sight in said)
        if not asked:
            notes.append(_nothing(self._pid))
        now = {place_of(sight): (sight.header.monotonic, sight.statistics.issued) for _, sight in sights}
        rates = {
            place: max(0.0, (issued - self._before[place][1]) / (when - self._before[place][0]))
            for place, (when, issued) in now.items()
            if place in self._before and when > self._before[place][0]
        }
        streams = {(place_of(sight), each.number): each for _, sight in sights for each in sight.statistics.streams}
        blocked = {key: _shares(each, self._streams.get(key)) for key, each in streams.items()}
        self._before, self._streams = now, streams
        return TopFrame(_groups(sights), notes, rates, blocked)

    def _filtered(self, sight: Sight) -> Sight:
        streams = [each for each in sight.statistics.streams if any(fnmatchcase(n, self._name) for n in _names(each))]
        plans = {n: age for n, age in sight.statistics.plans.items() if _matches_plan(n, self._name)}
        sight.statistics = msgspec.structs.replace(sight.statistics, streams=streams, plans=plans)
        sight.pending = [item for item in sight.pending if item.matches(self._name)]
        return sight

    def ended(self) -> bool:
        """Return whether the queried process has ended. If all processes of a user are queried, return False."""
        return self._pid is not None and not _alive(self._pid)


# ------------------------------------------------------------------------------------------------------------ finding


def _listeners() -> dict[int, list[str]]:
    try:
        table = Path("/proc/net/unix").read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"the system does not say which processes can be looked at: {error}") from None
    return dict(listeners(table, os.geteuid()))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _check(pid: int) -> None:
    if not _alive(pid):
        raise ValueError(f"there is no process {pid}")
    owner = Path(f"/proc/{pid}").stat().st_uid
    if owner != os.geteuid():
        raise ValueError(f"process {pid} is of user {owner}, wanted one of this user's, {os.geteuid()}")
    if pid not in _listeners():
        raise ValueError(_nothing(pid))


def _nothing(pid: int | None) -> str:
    if pid is None:
        return "no process of this user has a communicator open that can be looked at"
    return f"process {pid} has no communicator open that can be looked at"


# ------------------------------------------------------------------------------------------------------------- querying


def _ask(asked: dict[int, list[str]]) -> Iterator[tuple[int, list[Sight] | str]]:
    """Query all processes at the same time, with one deadline for all answers.

    :returns: the answers by process ID. If a process has sent no valid answer, its value is a text with the reason.
        Processes that have ended are left out.
    """
    connections: list[tuple[int, socket.socket]] = []
    try:
        for pid, addresses in asked.items():
            connections += ((pid, found) for address in addresses if (found := _connect(address)) is not None)
        ends = time.monotonic() + PATIENCE
        for pid, connection in connections:
            said = _hear(connection, ends)
            if said is not None:
                yield pid, said
    finally:
        for _, connection in connections:
            connection.close()


def _connect(address: str) -> socket.socket | None:
    """Connect to a process. Return None if the process has ended, or belongs to another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        if same_user(connection):
            return connection
    except OSError:  # The process has ended.
        pass
    connection.close()
    return None


def _hear(connection: socket.socket, ends: float) -> list[Sight] | str | None:
    """Return the answer of a process.

    Return a text with the reason if the answer is late or invalid, and None if the process ends.
    """
    said = bytearray()
    try:
        while not said.endswith(b"\n\n") and said != b"\n":
            connection.settimeout(max(0.001, ends - time.monotonic()))
            more = connection.recv(1 << 20)
            if not more:
                return None
            said += more
            if len(said) > 8 * LARGEST:
                return f"says more than {8 * LARGEST} bytes"
        return [_checked(_sight.decode(line)) for line in filter(None, said.split(b"\n"))]
    except TimeoutError:
        return f"does {NO_ANSWER}"
    except OSError:
        return None
    except (ValueError, RecursionError) as error:  # Errors of msgspec and of UTF-8 are also ValueErrors.
        return f"says what makes no sense here: {printable(str(error))}"


def _checked(sight: Sight) -> Sight:
    header = sight.header
    if header.format != FORMAT or not 0 <= header.rank < header.size or header.brief.rank != header.rank:
        raise ValueError(f"its format is {header.format!r}, of rank {header.rank} of {header.size}")
    header.comm, header.reason = printable(header.comm), printable(header.reason, 4 * LONGEST)
    sight.meeting = printable(sight.meeting)
    tidy(header.brief)
    sight.pending = [tidied(item) for item in sight.pending[:TOLD]]
    streams = [msgspec.structs.replace(each, name=printable(each.name)) for each in sight.statistics.streams]
    sight.statistics = msgspec.structs.replace(sight.statistics, streams=streams)
    return sight


def _names(stream: StreamStatistics) -> tuple[str, str]:
    return stream.words, bare(stream.words)


def place_of(sight: Sight) -> RankPlace:
    """Return the identity of the rank that has answered."""
    return RankPlace(sight.header.pid, sight.header.comm, sight.meeting, sight.header.rank)


def _matches_plan(number: int, glob: str) -> bool:
    return any(fnmatchcase(name, glob) for name in (f"plan {number}", str(number)))


def _place_in(plan: int, pending: Sequence[Item]) -> str:
    """Return a text that lists a rank's pending operations of one plan."""
    ops = [msgspec.structs.replace(item, of="", lane="") for item in pending if item.of == f"plan {plan}"]
    return ", ".join(map(str, ops[:SHOWN])) or "no operation of its lane"


def _shares(now: StreamStatistics, before: StreamStatistics | None) -> tuple[float, float]:
    known = (0.0, 0.0, 0.0) if before is None else (before.seconds, before.send_blocked, before.receive_blocked)
    seconds, *blocked = now.seconds - known[0], now.send_blocked - known[1], now.receive_blocked - known[2]
    sending, receiving = (min(1.0, max(0.0, each / seconds)) if seconds > 0 else 0.0 for each in blocked)
    return sending, receiving


def _groups(sights: Sequence[tuple[int, Sight]]) -> list[TopGroup]:
    """Group the answers by communicator. Different communicators of size 1 with the same name are separate groups."""
    groups: list[tuple[tuple[str, int, str], TopGroup]] = []
    for _, sight in sorted(sights, key=lambda one: (one[1].header.comm, one[1].header.rank, one[0])):
        header = sight.header
        key = header.comm, header.size, sight.meeting
        alike = (group for known, group in groups if known == key and header.rank not in group.ranks)
        group = next(alike, None)
        if group is None:
            group = TopGroup(header.comm, header.size, {})
            groups.append((key, group))
        group.ranks[header.rank] = sight
    return [group for _, group in groups]
