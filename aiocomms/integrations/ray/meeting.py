"""The meeting, in which the ranks of a Ray job discover each other. All calls of this module block.

Each rank runs the code of this module. Rank 0 serves a store, and puts a record with the address of this store into
Ray's own key-value store (the GCS). The record's key consists of the rendezvous's name and a random number. The other
ranks search the GCS for records with the rendezvous's name, and set a key in rank 0's store to report their arrival.
When all ranks have arrived, rank 0 first deletes its record, and then lets the other ranks continue. So a rank that
joins the next meeting with the same name never finds an old record.

If rank 0 is killed, its record stays in the GCS until the next rank 0 arrives. Meanwhile another process may listen at
the address in the record. Therefore rank 0 also writes the random number into its own store. A rank that reaches a
store without this number continues to search.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import msgspec
import ray
from ray.experimental import internal_kv

from aiocomms.errors import (
    ArgumentError,
    AuthError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    MismatchError,
    ProtocolError,
    StoreLostError,
)
from aiocomms.integrations.ray.places import check_reachable, node, own_host
from aiocomms.lowlevel import ControlCodec, clock, reach_store, serve_store, store_errors
from aiocomms.lowlevel.jobstore import JobStore

NAMESPACE: Final = "aiocomms"
"""The namespace of the keys in Ray's key-value store (the GCS)."""
_OPEN: Final = "open"
"""The key in rank 0's store that admits the other ranks.

Rank 0 sets this key after a check that no second rank 0 exists.
"""
_VERDICT: Final = "verdict"
"""The key that rank 0 sets in its store at the end of the meeting. The key's value is the list of missing ranks."""
_PROBE: Final = 2.0
"""The largest number of seconds for one attempt to reach a store.

After a failed attempt the rank can try another store.
"""
_SHORTEST: Final = 0.1
"""The smallest number of seconds for an attempt to reach a store, even if less time is left until the deadline."""
_WITHDRAWAL: Final = 5.0
"""Seconds for which a cancelled rank waits until the thread of its meeting has ended."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
"""The pauses between two polls of a store, in seconds: the first pause and the longest pause."""


class RayRecord(msgspec.Struct, array_like=True):
    """The record of rank 0: the address of its store, and the number of ranks that rank 0 expects."""

    host: str
    port: int
    node: str
    size: int


_RECORDS = ControlCodec[RayRecord](RayRecord, "the record of a rendezvous in Ray")
_VERDICTS = ControlCodec[list[int]](list[int], "what rank 0 says of a meeting")


class RayMeeting:
    """The actions of one rank in a meeting."""

    def __init__(self, name: str, rank: int, size: int, seconds: float) -> None:
        if not internal_kv._internal_kv_initialized():
            raise CommError("Ray is not initialized in this process: this is for its actors, tasks and drivers")
        self._name, self._rank, self._size, self._seconds = name, rank, size, seconds
        self._ends = clock.now() + seconds
        self._prefix = f"{ray.get_runtime_context().namespace}\0{name}\0".encode()
        self._given_up, self._over = clock.event(), clock.event()

    def run(self) -> JobStore:
        """Wait until all ranks have arrived, and return the store that rank 0 serves.

        :raises CommError: see the errors of :class:`aiocomms.integrations.ray.rendezvous`.
        """
        try:
            return self._host() if self._rank == 0 else self._join()
        finally:
            self._over.set()

    def give_up(self) -> None:
        """Request the end of :meth:`run`, and wait up to 5 s until :meth:`run` has ended."""
        self._given_up.set()
        self._over.wait(_WITHDRAWAL)

    # ---------------------------------------------------------------------------------------------------------- rank 0

    def _host(self) -> JobStore:
        key = self._prefix + secrets.token_bytes(8)
        host = own_host()
        store, port = serve_store(host, self._seconds)
        store.set(key.hex(), b"")
        record = RayRecord(host, port, node(), self._size)
        with store.admitting():
            internal_kv._internal_kv_put(key, _RECORDS.encode(record), namespace=NAMESPACE)
            try:
                self._claim(key)
                store.set(_OPEN, b"")
                for _ in self._looks():
                    absent = self._absent(store)
                    if not absent:
                        break
            finally:
                self._delete(key)
            store.set(_VERDICT, _VERDICTS.encode(absent))
        if absent:
            raise self._late(absent)
        return store

    def _claim(self, key: bytes) -> None:
        """Ensure that no other process is rank 0 of the same rendezvous.

        A process that is rank 0 puts its record into the GCS before this call. So if two processes are rank 0 of the
        rendezvous, they find each other's records.

        :param key: the key of this process's record.
        :raises ArgumentError: another process is already rank 0, or claims rank 0 with a record that has a smaller key.
        """
        for _ in self._looks():
            waiting = False
            for other, record in self._records():
                store = None if other == key else self._rival(other, record)
                if store is None:
                    continue
                waiting = True  # The wait lasts until the other rank 0 has seen this one, or has ended.
                with contextlib.suppress(RuntimeError):
                    if other < key or store.check([_OPEN]):
                        raise ArgumentError(
                            f"another actor, on node {record.node}, is rank 0 of '{self._name}' at this time"
                        )
            if not waiting:
                return

    def _rival(self, key: bytes, record: RayRecord) -> JobStore | None:
        """Return the store at the address of another rank 0's record, or None if this store cannot be reached.

        If no rank 0 serves a store at this address, delete the record.
        """
        try:
            with store_errors():
                store = self._reached(key, record)
        except CommError:  # The rival may exist and only be unreachable from this process.
            return None
        if store is None:
            self._delete(key)
        return store

    def _absent(self, store: JobStore) -> list[int]:
        return [rank for rank in range(1, self._size) if not store.check([_arrival(rank)])]

    # ------------------------------------------------------------------------------------------------------ the others

    def _join(self) -> JobStore:
        store = self._find()
        with store_errors("rank 0 was lost before all ranks had joined"):
            if store.add(_arrival(self._rank), 1) > 1:
                raise ArgumentError(f"another actor is rank {self._rank} of '{self._name}' already")
            try:
                self._heed(store)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # The store itself may be lost.
                    store.delete_key(_arrival(self._rank))
                raise
        return store

    def _heed(self, store: JobStore) -> None:
        """Wait until rank 0 ends the meeting."""
        for _ in self._looks():
            if store.check([_VERDICT]):
                absent = _VERDICTS.decode(store.get(_VERDICT), 0)
                if absent:
                    raise self._late(absent)
                return
        raise self._late(self._absent(store) or [0])

    def _find(self) -> JobStore:
        """Wait until rank 0 serves its store, and return the store."""
        why = ""
        for _ in self._looks():
            refused: CommError | None = None
            for key, record in self._records():
                try:
                    with store_errors("rank 0 was lost when it had just been found"):
                        store = self._reached(key, record)
                        if store is not None and store.check([_OPEN]):
                            break
                    why = f"where its record says, {record.host}:{record.port}, no process serves that meeting"
                except (ArgumentError, AuthError) as error:  # This error is final, unless there is another record.
                    refused = error
                except (StoreLostError, ProtocolError) as error:
                    # Another process may listen at the address now, or the address is unreachable.
                    why = error.message
            else:
                if refused is not None:
                    raise refused
                continue
            if record.size != self._size:
                raise MismatchError(f"size is {self._size}, and rank 0's is {record.size}", peer=0)
            return store
        raise self._late([0], why)

    # ------------------------------------------------------------------------------------------------------------ both

    def _records(self) -> Iterator[tuple[bytes, RayRecord]]:
        """Yield the records with the rendezvous's name, and the keys of these records.

        Several records exist if an earlier rank 0 was killed.
        """
        for key in internal_kv._internal_kv_list(self._prefix, namespace=NAMESPACE):
            value = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
            if value is not None:  # The key may just have been deleted.
                yield key, _RECORDS.decode(value, 0)

    def _reached(self, key: bytes, record: RayRecord) -> JobStore | None:
        """Return the store at a record's address, or None if this store no longer exists.

        :raises ArgumentError: the address is the loopback address of another node.
        :raises StoreLostError: the address cannot be reached, so the state of the store is unknown.
        :raises ProtocolError: another service, or a store of another version, answers.
        :raises AuthError: the store of another job answers.
        """
        check_reachable("rank 0", record.host, record.node)
        left = max(_SHORTEST, self._left())
        try:
            store = reach_store(record.host, record.port, self._rank, min(_PROBE, left))
        except StoreLostError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                return None
            raise
        if not store.check([key.hex()]):  # Another meeting uses the port now.
            return None
        store.set_timeout(timedelta(seconds=left))
        return store

    def _delete(self, key: bytes) -> None:
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)

    def _looks(self) -> Iterator[None]:
        """Yield once for each poll, with pauses between the polls, until the deadline.

        :raises CommClosedError: the caller was cancelled.
        """
        pause = _FIRST_PAUSE
        while True:
            if self._given_up.is_set():
                raise CommClosedError("the rendezvous was given up")
            yield
            if self._left() <= 0:
                return
            self._given_up.wait(min(pause, self._left()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _left(self) -> float:
        return max(0.0, self._ends - clock.now())

    def _late(self, absent: list[int], why: str = "") -> CommTimeoutError:
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        return CommTimeoutError(
            f"{who} of {self._size} did not join '{self._name}' within {self._seconds:g} s{why and f': {why}'}",
            late=absent,
        )


def _arrival(rank: int) -> str:
    return f"rank {rank} is here"
