"""Ranks meet: through a store, or alone."""

from __future__ import annotations

import functools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import anyio
import torch
from torch.distributed import PrefixStore, Store

from aiocomms.bootstrap.generations import Arrival, Claims
from aiocomms.bootstrap.recovery import read_invitation
from aiocomms.errors import (
    ArgumentError,
    CommTimeoutError,
    MismatchError,
    ProtocolError,
    StoreLostError,
)
from aiocomms.lowlevel.auth import Seal, read_token
from aiocomms.lowlevel.threads import run_in_thread

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
"""Seconds between looking for a rank that has not come: soon at first, and later without loading the store."""

ANYBODY = -1
"""Who has signed what all ranks agree on."""


class StoreRendezvous:
    """Ranks that share a ``torch.distributed.Store``; see :class:`aiocomms.transport.Rendezvous`."""

    def __init__(
        self, store: Store | None, rank: int, size: int, *, name: str, device: torch.device, timeout: float, seal: Seal
    ) -> None:
        self.store = store
        self.root: Store | None = None
        self.base = name
        self.epoch = 1
        self.rank = rank
        self.size = size
        self.name = name
        self.device = device
        self.timeout = timeout
        self._seal = seal
        self._ends = time.monotonic() + timeout

    def child(self, key: str, name: str, rank: int, size: int, store: Store | None = None) -> StoreRendezvous:
        """See :meth:`aiocomms.transport.Rendezvous.child`."""
        parent = self.store if store is None else store
        child = StoreRendezvous(
            None if parent is None else PrefixStore(key, parent),
            rank, size, name=name, device=self.device, timeout=self.timeout, seal=self._seal.child(key),
        )  # fmt: skip
        child.root = self.root
        return child

    def successor(self, root: Store, key: str, epoch: int, rank: int, size: int, timeout: float) -> StoreRendezvous:
        """See :meth:`aiocomms.transport.Rendezvous.successor`."""
        new = StoreRendezvous(
            PrefixStore(f"aiocomms/{self.base}/{key}", root), rank, size, name=f"{self.base}@{epoch}",
            device=self.device, timeout=timeout, seal=Seal(read_token(os.environ), self.base, key),
        )  # fmt: skip
        new.root, new.base, new.epoch = root, self.base, epoch
        return new

    async def arrive(self, root: Store) -> None:
        """Meet the ranks that are there on a store, and share nothing with those that were there before."""
        self.root = root
        here = PrefixStore(f"aiocomms/{self.base}", root)
        if self.size == 1:  # nobody to wait for
            self.store = PrefixStore(secrets.token_hex(8), here)
            return
        arrival, given_up = Arrival(here, self.rank, self.size), threading.Event()
        key = await self._meeting("all at once", lambda: arrival.meet(given_up), arrival.present, given_up)
        self.store, self._seal = PrefixStore(key, here), self._seal.child(key)

    async def join(self, root: Store) -> StoreRendezvous:
        """Wait until the ranks of an earlier epoch take this one in.

        :returns: the rendezvous with them.
        """
        claims, given_up = Claims(PrefixStore(f"aiocomms/{self.base}", root)), threading.Event()
        rank = self.rank

        def wait() -> bytes:
            return claims.wait(rank, claims.add(rank), given_up)

        try:
            record = await self._meeting("to be taken in", wait, {rank}, given_up)
        except CommTimeoutError as error:
            raise CommTimeoutError(
                f"within {self.timeout} s nobody took this process in as rank {rank}: do the others call "
                f"reconfigure(size={self.size})?", comm=self.name, rank=rank,
            ) from error  # fmt: skip
        epoch, size, key = read_invitation(self._seal.verify("join", rank, record))
        if size != self.size:
            raise MismatchError(f"size is {self.size}, and the others have agreed on {size}", rank=rank)
        return self.successor(root, key, epoch, rank, size, max(0.001, self.left()))

    def invite(self, root: Store, rank: int, number: int, invitation: bytes) -> None:
        """See :meth:`aiocomms.transport.Rendezvous.invite`."""
        record = Seal(read_token(os.environ), self.base).sign("join", rank, invitation)
        Claims(PrefixStore(f"aiocomms/{self.base}", root)).answer(rank, number, record)

    def claim(self, root: Store, rank: int) -> int:
        """See :meth:`aiocomms.transport.Rendezvous.claim`."""
        return Claims(PrefixStore(f"aiocomms/{self.base}", root)).newest(rank)

    def decide(self, key: str, value: bytes) -> bytes:
        """See :meth:`aiocomms.transport.Rendezvous.decide`."""
        wanted = self._seal.sign(key, ANYBODY, value).hex()
        return self._opened(key, self._store().compare_set(key, "", wanted))

    def decided(self, key: str) -> bytes | None:
        """See :meth:`aiocomms.transport.Rendezvous.decided`."""
        store = self._store()
        record = store.get(key) if store.check([key]) else None
        return None if record is None else self._opened(key, record)

    def _opened(self, key: str, record: bytes) -> bytes:
        try:
            return self._seal.verify(key, ANYBODY, bytes.fromhex(record.decode()))
        except ValueError:
            raise ProtocolError(f"the record {key!r} in the store makes no sense") from None

    def secret(self, purpose: str) -> bytes:
        """See :meth:`aiocomms.transport.Rendezvous.secret`."""
        return self._seal.secret(purpose)

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """See :meth:`aiocomms.transport.Rendezvous.run`."""
        with anyio.move_on_after(self.left()):
            return await run_in_thread(call)
        raise CommTimeoutError(f"{what} took longer than {self.timeout} s", comm=self.name, rank=self.rank)

    async def exchange(self, key: str, value: bytes) -> list[bytes]:
        """See :meth:`aiocomms.transport.Rendezvous.exchange`."""
        if self.size == 1:
            return [value]
        got: dict[int, bytes] = {self.rank: value}
        given_up = threading.Event()
        store, record = self._store(), self._seal.sign(key, self.rank, value)
        call = functools.partial(self._meet, store, key, record, got, given_up)
        await self._meeting(key, call, got, given_up)
        return [got[rank] for rank in range(self.size)]

    async def _meeting(
        self, what: str, call: Callable[[], Any], got: Collection[int], given_up: threading.Event
    ) -> Any:
        """Wait for the other ranks in a thread, which adds to ``got`` those that have come."""
        try:
            return await self.run(f"meeting the other ranks ({what})", call)
        except CommTimeoutError as error:
            raise self._absent(got) from error
        except RuntimeError as error:  # the base of torch's store errors
            raise StoreLostError(f"the rendezvous store is gone: {error}", comm=self.name, rank=self.rank) from error
        finally:
            given_up.set()

    def _meet(self, store: Store, key: str, record: bytes, got: dict[int, bytes], given_up: threading.Event) -> None:
        """Look for the other ranks' values until all are there.

        Never waits in the store: a connection carries one call at a time, so other communicators that form over it at
        once would wait too, and for a wait that was given up as long as for any other.
        """
        store.set(f"{key}/{self.rank}", record)  # type: ignore[arg-type]  # bytes are fine
        left = deque(rank for rank in range(self.size) if rank != self.rank)
        pause = _FIRST_PAUSE
        while left and not given_up.is_set():
            rank = left.popleft()
            if store.check([f"{key}/{rank}"]):
                got[rank] = self._seal.verify(key, rank, store.get(f"{key}/{rank}"))
            else:
                left.append(rank)  # the others first, so that an error names those who are missing and nobody else
                given_up.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def tell(self, key: str, value: bytes) -> None:
        """See :meth:`aiocomms.transport.Rendezvous.tell`."""
        record = self._seal.sign(key, self.rank, value)
        self._store().set(f"{key}/{self.rank}", record)  # type: ignore[arg-type]  # bytes are fine

    def told(self, key: str, rank: int) -> bytes | None:
        """See :meth:`aiocomms.transport.Rendezvous.told`."""
        store, where = self._store(), f"{key}/{rank}"
        try:
            return self._seal.verify(key, rank, store.get(where)) if store.check([where]) else None
        except ProtocolError:  # AuthError is one
            return None

    def left(self) -> float:
        """See :meth:`aiocomms.transport.Rendezvous.left`."""
        return self._ends - time.monotonic()

    def _store(self) -> Store:
        if self.store is None:
            raise ArgumentError(
                f"store is None, and {self.size} ranks need one to meet", comm=self.name, rank=self.rank
            )
        return self.store

    def _absent(self, got: Collection[int]) -> CommTimeoutError:
        absent = [rank for rank in range(self.size) if rank not in got]
        who = f"these ranks had not come: {', '.join(map(str, absent))}" if absent else "not all ranks saw each other"
        return CommTimeoutError(
            f"after {self.timeout} s {who}. "
            "Was every rank started, with the same size and name?",
            comm=self.name, rank=self.rank,
        )  # fmt: skip
