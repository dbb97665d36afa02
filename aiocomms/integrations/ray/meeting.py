"""The meeting by which ranks of Ray find each other, as each rank sees it. All of it blocks.

Rank 0 serves a store, and puts a record with its address into Ray's key-value store (that of the GCS), under the name
and a number of its own. The others look for such records. When all have said in the store that they are there, rank 0
takes its record away, and only then lets them go on. So a rank that looks for the next meeting of that name never finds
the last one's. The record of a rank 0 that was killed stays until the next rank 0 comes. Meanwhile another process may
listen there. So the number is in the store, too, and a rank that does not find it there goes on looking.
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
"""The namespace of the keys in the GCS."""
_OPEN: Final = "open"
"""The key by which rank 0 lets the others in, once it knows to be the only one."""
_VERDICT: Final = "verdict"
"""The key by which rank 0 lets the others go on: the ranks that did not come, or none."""
_PROBE: Final = 2.0
"""Seconds for one attempt to reach a store, so that one that does not answer hides no other."""
_SHORTEST: Final = 0.1
"""Seconds for the last attempt, however late it is."""
_WITHDRAWAL: Final = 5.0
"""Seconds for which a rank that gives up waits for what is under way: a probe, or an answer of Ray's store."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
"""Seconds between two looks for what is not there yet."""


class RayRecord(msgspec.Struct, array_like=True):
    """The record of rank 0: where it serves the store, and the size that it was told."""

    host: str
    port: int
    node: str
    size: int


_RECORDS = ControlCodec[RayRecord](RayRecord, "the record of a rendezvous in Ray")
_VERDICTS = ControlCodec[list[int]](list[int], "what rank 0 says of a meeting")


class RayMeeting:
    """One rank's part of a meeting."""

    def __init__(self, name: str, rank: int, size: int, seconds: float) -> None:
        if not internal_kv._internal_kv_initialized():
            raise CommError("Ray is not initialized in this process: this is for its actors, tasks and drivers")
        self._name, self._rank, self._size, self._seconds = name, rank, size, seconds
        self._ends = clock.now() + seconds
        self._prefix = f"{ray.get_runtime_context().namespace}\0{name}\0".encode()
        self._given_up, self._over = clock.event(), clock.event()

    def run(self) -> JobStore:
        """Meet, and return the store.

        :raises CommError: as :class:`aiocomms.integrations.ray.rendezvous` does.
        """
        try:
            return self._host() if self._rank == 0 else self._join()
        finally:
            self._over.set()

    def give_up(self) -> None:
        """Give :meth:`run` up, and wait, but not for long, until nothing of it is left."""
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
        """Be the only rank 0. Of two that come at once one sees the other here, for both have put their records.

        :param key: that of this one's record.
        :raises ArgumentError: another is, or has the smaller key.
        """
        for _ in self._looks():
            waiting = False
            for other, record in self._records():
                store = None if other == key else self._rival(other, record)
                if store is None:
                    continue
                waiting = True  # The wait lasts until the other rank 0 has seen this one, or has gone.
                with contextlib.suppress(RuntimeError):
                    if other < key or store.check([_OPEN]):
                        raise ArgumentError(
                            f"another actor, on node {record.node}, is rank 0 of '{self._name}' just now"
                        )
            if not waiting:
                return

    def _rival(self, key: bytes, record: RayRecord) -> JobStore | None:
        """Return the store of another rank 0, if it can be found. Remove what leads nowhere; nothing else does."""
        try:
            with store_errors():
                store = self._reached(key, record)
        except CommError:  # The rival may be there, and only this process be kept from it.
            return None
        if store is None:
            self._delete(key)
        return store

    def _absent(self, store: JobStore) -> list[int]:
        return [rank for rank in range(1, self._size) if not store.check([_arrival(rank)])]

    # ------------------------------------------------------------------------------------------------------ the others

    def _join(self) -> JobStore:
        store = self._find()
        with store_errors("rank 0 was lost before all had come"):
            if store.add(_arrival(self._rank), 1) > 1:
                raise ArgumentError(f"another actor is rank {self._rank} of '{self._name}' already")
            try:
                self._heed(store)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the store may be what was lost
                    store.delete_key(_arrival(self._rank))
                raise
        return store

    def _heed(self, store: JobStore) -> None:
        """Wait until rank 0 says to go on."""
        for _ in self._looks():
            if store.check([_VERDICT]):
                absent = _VERDICTS.decode(store.get(_VERDICT), 0)
                if absent:
                    raise self._late(absent)
                return
        raise self._late(self._absent(store) or [0])

    def _find(self) -> JobStore:
        """Rank 0's store, once it is served."""
        why = ""
        for _ in self._looks():
            refused: CommError | None = None
            for key, record in self._records():
                try:
                    with store_errors("rank 0 was lost when it had just been found"):
                        store = self._reached(key, record)
                        if store is not None and store.check([_OPEN]):
                            break
                    why = f"where its record says, {record.host}:{record.port}, nobody serves that meeting"
                except (ArgumentError, AuthError) as error:  # This stays so, unless there is another record.
                    refused = error
                except (StoreLostError, ProtocolError) as error:
                    # The address may be another process's by now, or is not to be reached.
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
        """Yield the records of the name, with their keys: more than one where a rank 0 was killed."""
        for key in internal_kv._internal_kv_list(self._prefix, namespace=NAMESPACE):
            value = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
            if value is not None:  # The key may just have been taken away.
                yield key, _RECORDS.decode(value, 0)

    def _reached(self, key: bytes, record: RayRecord) -> JobStore | None:
        """Return the store that a record leads to. None: no rank serves it there any more.

        :raises ArgumentError: it is on loopback, of another node.
        :raises StoreLostError: nothing can be said.
        :raises ProtocolError: who answers is no store of this version; AuthError, of this job.
        """
        check_reachable("rank 0", record.host, record.node)
        left = max(_SHORTEST, self._left())
        try:
            store = reach_store(record.host, record.port, self._rank, min(_PROBE, left))
        except StoreLostError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                return None
            raise
        if not store.check([key.hex()]):  # another meeting has got the port
            return None
        store.set_timeout(timedelta(seconds=left))
        return store

    def _delete(self, key: bytes) -> None:
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)

    def _looks(self) -> Iterator[None]:
        """Time to look, again and again, until time is up.

        :raises CommClosedError: no task waits any more.
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
            f"{who} of {self._size} did not come to '{self._name}' within {self._seconds:g} s{why and f': {why}'}",
            late=absent,
        )


def _arrival(rank: int) -> str:
    return f"rank {rank} is here"
