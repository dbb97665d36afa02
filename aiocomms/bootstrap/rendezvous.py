"""The rendezvous: the ranks of a communicator find each other through a store. A single rank does not need a store."""

from __future__ import annotations

import functools
import math
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import anyio
import torch
from torch.distributed import PrefixStore, Store

from aiocomms.arguments import FORMING
from aiocomms.bootstrap.board import Board
from aiocomms.bootstrap.generations import Arrival
from aiocomms.bootstrap.records import append, believed, last_look, listed, number, pauses
from aiocomms.errors import CommTimeoutError, StoreLostError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import Seal, job_token
from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.stores import store_errors
from aiocomms.lowlevel.threads import run_in_thread

PROBE: Final = 0.5
"""The seconds for which a caller waits for the store's answer, if the caller does not need the store."""


class StoreRendezvous(Board):
    """The rendezvous of ranks in a shared ``torch.distributed.Store``, for transports and for recovery.

    Transports use the methods of :class:`aiocomms.transport.Rendezvous`. Recovery also uses the methods that only this
    class and its base :class:`Board` have.
    """

    store: Store | None

    def __init__(
        self, store: Store | None, rank: int, size: int, *, name: str, device: torch.device, timeout: float, seal: Seal
    ) -> None:
        """Create the rendezvous, and start its timeout.

        :param timeout: the seconds within which the ranks must form the communicator; infinity stands for
            :data:`FORMING`.
        """
        super().__init__(store, rank, seal)
        self.root: Store | None = None
        """The store that all communicators of these ranks share.

        :attr:`store` is the part that belongs to this communicator alone.
        """
        self.base = name
        """The communicator's name before its first reconfiguration."""
        self.label = name
        """The communicator's name in metrics.

        This name does not contain the epochs of the communicator and its parents.
        """
        self.epoch = 1
        """The epoch of the communicator: 1 at first, and one more after each reconfiguration."""
        self.size = size
        self.name = name
        self.device = device
        self.hosts: Sequence[str] = ()
        self.home: dict[Any, Any] | None = None
        self.timeout: float = FORMING if timeout == math.inf else timeout
        """The seconds within which the ranks must form the communicator.

        After the forming, the value is the default timeout of ops in seconds.
        """
        self._ends = clock.now() + self.timeout
        # This attribute holds the store at the bottom, because a PrefixStore holds no reference to a store in Python.
        self._kept: Store | None = None

    def child(
        self, key: str, name: str, rank: int, size: int, store: Store | None = None, timeout: float | None = None
    ) -> StoreRendezvous:
        """Return the rendezvous of a communicator of some of these ranks.

        :param key: a text that distinguishes the child from every other child. All ranks of the child pass the same
            text.
        :param store: the store to use in place of :attr:`store`.
        :param timeout: the seconds to use in place of :attr:`timeout`.
        """
        parent = self.store if store is None else store
        child = StoreRendezvous(
            None if parent is None else PrefixStore(key, parent),
            rank, size, name=name, device=self.device, timeout=self.timeout if timeout is None else timeout,
            seal=self._seal.child(key),
        )  # fmt: skip
        if name.startswith(f"{self.name}/"):
            child.label = self.label + name.removeprefix(self.name)
        child.root, child._kept = self.root, self._kept or self.root or self.store
        return child

    def successor(self, root: Store, key: str, epoch: int, rank: int, size: int, timeout: float) -> StoreRendezvous:
        """Return the rendezvous of the communicator's next epoch.

        :param key: a text that distinguishes the new rendezvous from all other rendezvous. All ranks of the next epoch
            pass the same text.
        """
        new = StoreRendezvous(
            PrefixStore(f"aiocomms/{self.base}/{key}", root), rank, size, name=f"{self.base}@{epoch}",
            device=self.device, timeout=timeout, seal=Seal(job_token(), self.base, key),
        )  # fmt: skip
        new.root, new.base, new.label, new.epoch = root, self.base, self.label, epoch
        return new

    async def arrive(self, root: Store) -> None:
        """Meet the ranks that arrive at a store now, and ignore the keys of earlier runs."""
        self.root, self.store = root, PrefixStore(f"aiocomms/{self.base}", root)
        await self.meet()

    async def meet(self, turn: threading.Lock | None = None) -> Arrival | None:
        """Wait until all other ranks have arrived in the store, under the keys of this rendezvous.

        Later calls use new keys, which no other meeting uses.

        :param turn: see :class:`Arrival`.
        :returns: the arrival of this rank; None if there is no other rank to wait for.
        """
        if self.size == 1:
            self.store = None if self.store is None else PrefixStore(secrets.token_hex(8), self.store)
            return None
        here = self._store()
        arrival, given_up = Arrival(here, self.rank, self.size, self._seal, turn), clock.event()
        key = await self._meeting("all at once", lambda: arrival.meet(given_up, self.left()), arrival.present, given_up)
        self.store, self._seal = PrefixStore(key, here), self._seal.child(key)
        return arrival

    async def leave(self) -> None:
        """Release the store, because no ranks meet here again. Another communicator may still use the store."""
        root = self.root
        if isinstance(root, JobStore) and root.serves:  # The last release waits for the server's thread.
            del root
            with anyio.CancelScope(shield=True):
                await run_in_thread(self._forget, anyhow=True)
        else:
            self._forget()

    def _forget(self) -> None:
        self.store = self.root = self._kept = None

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
        given_up = clock.event()
        call = functools.partial(self._meet, self._store(), key, got, given_up)
        await self._meeting(key, call, got, given_up)
        return [got[rank] for rank in range(self.size)]

    async def _meeting(
        self, what: str, call: Callable[[], Any], got: Collection[int], given_up: clock.ThreadEvent
    ) -> Any:
        """Wait for the other ranks in a thread. The thread adds the ranks that have arrived to ``got``."""
        try:
            return await self.run(f"meeting the other ranks ({what})", call)
        except CommTimeoutError as error:
            raise self._absent(got) from error
        except StoreLostError as error:
            raise error.about(comm=self.name, rank=self.rank) from error.__cause__
        finally:
            given_up.set()

    @store_errors()
    def _meet(self, store: Store, key: str, got: dict[int, bytes], given_up: clock.ThreadEvent) -> None:
        """Run the steps of an exchange.

        This method makes no store call that blocks, because a connection carries one call at a time. Such a call would
        block other communicators that form over the same connection, even after this exchange has been given up.
        """
        for pause in self.steps(store, key, got):
            if given_up.wait(pause):
                return

    def steps(self, store: Store, key: str, got: dict[int, bytes]) -> Iterator[float]:
        """Append this rank's value to a list, increment a counter, and read the list when all values are counted.

        A process outside the job may raise the counter if it can write to the store. So only the list shows which ranks
        are present. Before the count is complete, only a rank whose time is nearly over reads the list. If all ranks
        read the list earlier, the number of transferred bytes would grow with the square of the number of ranks.

        :param got: the dictionary to which the values of the ranks are added.
        :returns: the seconds to wait before each further step.
        :raises ProtocolError: a record makes no sense. If a record is not signed, the error is an AuthError.
        :raises RuntimeError: a call of torch's store has failed.
        """
        append(store, self._seal, key, self.rank, key, got[self.rank])
        counted, seen, last = store.add(f"{key}/count", 1), 0, last_look(self.size, self.timeout)
        for pause in pauses(self.size):
            if counted != seen and (counted >= self.size or self.left() < last):
                seen = counted
                for rank, records in listed(store.get(key), self.size, key).items():
                    got[rank] = believed(self._seal, key, rank, records)
            if len(got) == self.size:
                return
            yield min(pause, last / 8)
            counted = number(store.get(f"{key}/count"), f"{key}/count")

    def left(self) -> float:
        """See :meth:`aiocomms.transport.Rendezvous.left`."""
        return self._ends - clock.now()

    def _absent(self, got: Collection[int]) -> CommTimeoutError:
        absent = [rank for rank in range(self.size) if rank not in got]
        who = f"these ranks had not joined: {', '.join(map(str, absent))}" if absent else "not all ranks saw each other"
        return CommTimeoutError(
            f"after {self.timeout} s {who}. "
            "Was every rank started, with the same size and name?",
            comm=self.name, rank=self.rank, late=absent,
        )  # fmt: skip
