"""The arrival of ranks at a store that may hold keys of an earlier run.

Some stores keep the keys of a crashed run: for example a reused file, or the store of a launcher that restarts ranks.
So each rank chooses a random name for every arrival, and overwrites the name of its last arrival in the store. A record
whose key contains such a name is newer than the name. So the writer of this record was present at the same time as the
rank that has the name. Ranks meet thus:

1. Rank 0 writes its name. Each rank that reads the name adds its own name to a list under rank 0's name.
2. When the list has a name of every rank, rank 0 signs these names. A rank that finds its own name among the signed
   names has met the other ranks.

If rank 0 is gone, the list has no effect, because no rank signs it. A rank that waits long *calls the roll*: it asks
every rank to answer. A rank that answers this call is present, even if rank 0 is not present. Ranks ignore the keys of
a process that is gone, and records without the signature of the job's token.

Names, lists and the statement of rank 0 have the same format in every protocol version from 3 on. So ranks of two
versions can report that their versions differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import secrets
import threading
from collections.abc import Generator
from typing import Final, NoReturn

from torch.distributed import Store

from aiocomms.bootstrap.casualties import Casualties
from aiocomms.bootstrap.records import append, believed, fetch, last_look, listed, pauses, write
from aiocomms.errors import ArgumentError, AuthError, ProtocolError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import Seal, claimed
from aiocomms.lowlevel.stores import store_errors

_NAME: Final = re.compile(r"[0-9a-f]{16}")
_LENGTH: Final = 16
_NOBODY: Final = "-" * _LENGTH
_BORED: Final = 2.0
"""The seconds after its arrival at which a rank first calls the roll, unless another rank has recently called the roll.

To call the roll means to ask all ranks to answer.
"""
_TURN: Final = 0.001
"""The seconds between two checks whether an earlier arrival of this rank has ended."""
_LEADER: Final = "came/0"
_SAID: Final = re.compile(
    r"[0-9a-f]{16} (?P<digest>[0-9a-f]{32}) (?:(?P<unsigned>[01]) (?P<peer>\d{1,9}) (?P<message>.*))?", re.DOTALL
)
"""The format of rank 0's statement.

The statement contains the name of rank 0 and the digest of the signed names. After an error the statement also contains
the rank at fault and the reason.
"""


class Arrival:
    """One arrival of a rank at a store, under a communicator's name.

    Only one thread uses this object, and each call blocks.
    """

    def __init__(self, store: Store, rank: int, size: int, seal: Seal, turn: threading.Lock | None = None) -> None:
        """Create an arrival. The other ranks see the arrival only after the call of :meth:`meet`.

        :param store: the part of the store that belongs to the communicator's name.
        :param turn: a lock that all arrivals of this rank share. Ranks that meet here repeatedly need the lock. With
            the lock, an arrival waits until an earlier arrival that was given up has ended. So the newest arrival
            writes its name last. None means that the ranks have not met before. Then this rank also reads the notices
            of ranks that failed before their arrival.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._seal = seal
        self._turn = turn
        self.present: set[int] = {rank}
        """The ranks that have arrived, as far as this rank knows."""
        self._mine = secrets.token_hex(_LENGTH // 2)
        self._came = f"came/{rank}"
        self._answered = ""
        self._refused = self._seen = b""
        self._met: dict[int, str] = {}  # The names under which the ranks met that :meth:`repeated` looks at.

    @store_errors()
    def meet(self, given_up: clock.ThreadEvent, seconds: float = math.inf) -> str:
        """Wait until rank 0 has seen all ranks, or until ``given_up`` is set.

        :param seconds: the seconds after which the caller will set ``given_up``.
        :returns: a text that all ranks of this meeting get, and that no other meeting at this store gets; an empty text
            if ``given_up`` was set.
        :raises ArgumentError: another process has arrived as this rank.
        :raises CommAbortedError: a rank has failed before it arrived.
        :raises AuthError: a rank of this meeting has not signed its record, or the record under this rank's name is not
            signed.
        :raises ProtocolError: a rank of this meeting has another protocol version.
        :raises StoreLostError: the store is gone.
        """
        turn = self._turn
        while turn is not None and not turn.acquire(blocking=False):
            if given_up.wait(_TURN):
                return ""
        try:
            return self._meet(given_up, seconds)
        finally:
            if turn is not None:
                turn.release()

    def _meet(self, given_up: clock.ThreadEvent, seconds: float) -> str:
        steps, pause = self.steps(seconds), 0.0
        while not given_up.wait(pause):
            try:
                pause = next(steps)
            except StopIteration as end:
                return str(end.value)
        return ""

    def steps(self, seconds: float) -> Generator[float, None, str]:
        """Run :meth:`meet` in steps: before each further step, yield the seconds to wait instead of waiting."""
        casualties = Casualties(self._store, self._rank, self._size) if self._turn is None else None
        if casualties is not None:
            casualties.arrive()
        write(self._store, self._seal, "came", self._rank, self._came, self._mine.encode())
        roll, key = _Roll(self._store, self._rank, self._size, self._seal, seconds, self.present), ""
        if self._rank == 0:
            self._answer(self._mine)
        else:
            # The key must exist, so that one call can read it together with others.
            self._store.compare_set(_LEADER, "", _NOBODY)
        for pause in pauses(self._size):
            key = self._lead(roll) if self._rank == 0 else self._follow(roll)
            if key:
                break
            pause = min(pause, roll.patience)
            yield pause
            if casualties is not None:
                casualties.after(pause)
        return key

    @store_errors()
    def repeated(self) -> list[int]:
        """Return the ranks that have arrived again since the meeting. Blocks.

        Rank 0 checks all ranks; every other rank checks only rank 0.
        """
        records = self._store.multi_get([f"came/{rank}" for rank in self._met])
        return [rank for rank, record in zip(self._met, records, strict=True) if self._is_new(rank, record)]

    def _is_new(self, rank: int, record: bytes) -> bool:
        try:
            return self._seal.verify("came", rank, record)[:_LENGTH] != self._met[rank].encode()
        except ProtocolError:  # AuthError is a ProtocolError: the record is a stranger's.
            return False

    # ----------------------------------------------------------------------------------------------------- rank 0

    def _lead(self, roll: _Roll) -> str:
        """Read which ranks have arrived, and write rank 0's statement when all ranks have arrived.

        Return the key of the meeting, or an empty text if the meeting is not complete.
        """
        where = self._list(self._mine)
        came, here, called = self._store.multi_get([_LEADER, where, roll.KEY])
        if self._seal.verify("came", 0, came) != self._mine.encode():
            self._taken()
        roll.heard(called)
        if here == self._seen:
            return ""
        self._seen = here
        records = listed(here, self._size, where)
        self.present |= set(records)
        names = {rank: _name(claimed(theirs[-1])) for rank, theirs in records.items()}
        text = "".join(names.get(rank, _NOBODY) for rank in range(self._size)).encode()
        try:
            for rank, theirs in records.items():
                names[rank] = _name(believed(self._seal, where, rank, theirs))
        except ProtocolError as error:  # AuthError is a ProtocolError. The others wait for this report.
            self._say(text, f"{type(error) is AuthError:d} {error.peer} {error.message}")
            raise
        if _NOBODY in names.values() or len(names) < self._size:
            return ""
        text = "".join(names[rank] for rank in range(self._size)).encode()
        self._say(text, "")
        self._met = names
        return _digest(text)

    def _say(self, names: bytes, trouble: str) -> None:
        self._store.set(f"met/{self._mine}", names)  # type: ignore[arg-type]  # torch takes bytes, too.
        said = f"{self._mine} {_digest(names)} {trouble}"
        write(self._store, self._seal, "came", 0, _LEADER, said.encode())

    # -------------------------------------------------------------------------------------------------- the other ranks

    def _follow(self, roll: _Roll) -> str:
        """Answer rank 0 if rank 0 has newly arrived, and read rank 0's statement.

        Return the key of the meeting, or an empty text if the meeting is not complete.
        """
        leader, came, called = self._store.multi_get([_LEADER, self._came, roll.KEY])
        name, _, said = claimed(leader).decode(errors="replace").partition(" ")
        if name != self._answered and _NAME.fullmatch(name):
            self._answer(name)
        elif said and leader != self._refused:
            names = fetch(self._store, f"met/{name}") or b""
            if names[_LENGTH * self._rank :][:_LENGTH] == self._mine.encode():
                self._met = {0: name}
                return self._heard(leader, names)
            self._refused = leader  # This rank 0 is gone, or counts another process as this rank.
        if self._seal.verify("came", self._rank, came) != self._mine.encode():
            self._taken()
        roll.heard(called)
        roll.look()
        return ""

    def _heard(self, leader: bytes, names: bytes) -> str:
        """Return the key of the meeting that rank 0 reports, or raise the error that rank 0 reports.

        The caller has found the name of this arrival in rank 0's statement. So the process of rank 0 was present after
        this rank arrived. The caller ignores a statement without this name, because that statement may be of an earlier
        run. So another token or version in that statement is not an error.
        """
        said = _SAID.fullmatch(self._seal.verify("came", 0, leader).decode(errors="replace"))
        if said is None or said["digest"] != _digest(names):
            raise ProtocolError("rank 0's list of the present ranks in the store makes no sense", peer=0)
        if said["message"] is not None:
            raise (AuthError if said["unsigned"] == "1" else ProtocolError)(said["message"], peer=int(said["peer"]))
        return said["digest"]

    def _answer(self, leader: str) -> None:
        where = self._list(leader)
        append(self._store, self._seal, where, self._rank, where, self._mine.encode())
        self._answered = leader

    def _list(self, leader: str) -> str:
        """Return the key of the list of the ranks that have seen rank 0 arrive under the name ``leader``.

        The key contains the number of the job's ranks.
        """
        return f"here/{self._size}/{leader}"

    def _taken(self) -> NoReturn:
        raise ArgumentError(
            f"another process has joined as rank {self._rank} while this one waited: was a rank started twice, "
            "or do two jobs use one store and one name?"
        )


class _Roll:
    """The roll: the list of the ranks that answer while this rank waits.

    If the wait of this rank fails, the error names the ranks that are not in the roll. The roll works even if rank 0 is
    not present.
    """

    KEY: Final = "roll"

    def __init__(self, store: Store, rank: int, size: int, seal: Seal, seconds: float, present: set[int]) -> None:
        """Create the roll of this rank.

        :param seconds: the time for which this rank waits.
        :param present: the set to which ranks that answer are added.
        """
        self._store, self._rank, self._size, self._seal = store, rank, size, seal
        self._present = present
        now, last = clock.now(), last_look(size, seconds)
        self._last = last
        self.patience: float = last / 8
        """The largest number of seconds between two reads of the store.

        So each rank answers a call of the roll in time.
        """
        self._calls = [now + min(_BORED, seconds / 4), now + seconds - last]
        self._look = now + seconds - last / 2
        self._before = store.compare_set(self.KEY, "", _NOBODY)
        self._known = b""
        self._heard = ""  # This is the newest call since this rank arrived. A rank that answers it is present.
        self._heard_at = -math.inf

    def heard(self, called: bytes) -> None:
        """Answer a call of the roll if the call is new."""
        name = _name(called)
        if called == self._known or name == _NOBODY:
            return
        self._note()  # This notes the ranks that answered the previous call, and may have given up since.
        append(self._store, self._seal, f"roll/{name}", self._rank, f"roll/{name}", b"")
        self._known = called
        if called != self._before:
            self._heard, self._heard_at = name, clock.now()

    def look(self) -> None:
        """Call the roll, or record the ranks that have answered, if the planned time for the step has come."""
        now = clock.now()
        if self._calls and now >= self._calls[0]:
            self._calls.pop(0)
            if now - self._heard_at > self._last:  # Few ranks answer a call if another call replaces it at once.
                self._store.set(self.KEY, secrets.token_hex(_LENGTH // 2))
        if now >= self._look:
            self._note()

    def _note(self) -> None:
        """Record the ranks that have answered the newest call."""
        where = f"roll/{self._heard}"
        with contextlib.suppress(ProtocolError):  # There is no list.
            answers = (fetch(self._store, where) or b"") if self._heard else b""
            for rank, records in listed(answers, self._size, where).items():
                with contextlib.suppress(ProtocolError):  # AuthError is a ProtocolError: the record is a stranger's.
                    believed(self._seal, where, rank, records)
                    self._present.add(rank)


def _name(text: bytes) -> str:
    name = text.decode(errors="replace")
    return name if _NAME.fullmatch(name) else _NOBODY


def _digest(names: bytes) -> str:
    return hashlib.sha256(names).hexdigest()[: 2 * _LENGTH]
