"""Ranks meet: from a launcher's environment, through a store, or alone."""

from __future__ import annotations

import functools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import anyio
import torch
from torch.distributed import PrefixStore, Store

from aiocomms.bootstrap.directory import DEFAULT
from aiocomms.bootstrap.generations import Arrival, Claims
from aiocomms.bootstrap.launchers import read_environment
from aiocomms.bootstrap.recovery import read_invitation
from aiocomms.bootstrap.registry import Plan, choose, choose_adopter, open_transports
from aiocomms.bootstrap.stores import connect_store
from aiocomms.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    CommError,
    CommTimeoutError,
    MismatchError,
    ProtocolError,
    StoreLostError,
)
from aiocomms.families.issuer import Timeout
from aiocomms.lowlevel.auth import Seal, read_token
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import checks
from aiocomms.progress import heartbeat

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


class new_comm:  # noqa: N801 - it is called like a function, as asyncpg.create_pool is
    """Form a communicator with the other ranks; collective.

    Await it for a :class:`~aiocomms.communicator.Communicator`, or use it as ``async with new_comm(...) as comm:``,
    which closes the communicator at the end, and aborts it on all ranks if the body raises.

    :param transport: a transport's name; ``"auto"`` for the best that is available; or a name for each of some of the
        families ``"collectives"``, ``"p2p"`` and ``"rma"``.
    :param device: the device of all tensors.
    :param store: where the ranks meet, with ``rank`` and ``size``. With none of the three the launcher's environment
    says (torchrun, Open MPI, MPICH, Slurm), and without a launcher it is a world of one.
    :param rank: this rank.
    :param size: how many ranks there are.
    :param name: the communicator's name, the same on all ranks; tells apart communicators that share a store.
    :param timeout: the deadline in seconds for forming it, and afterwards that of ops that name none.
    :param hints: advice to the transports, by name; and ``"heartbeat"``: seconds without a sign of life after which a
        rank is taken for dead, 0 for never. Without it ``AIOCOMMS_HEARTBEAT`` says, or else it is 5.
    :param join: take the place of a rank that was lost, or an additional one, in a communicator that exists: the others
        call :meth:`~aiocomms.communicator.Communicator.reconfigure` with this ``size``.
    :raises ArgumentError: an argument is wrong, or the environment is incomplete; one error lists all that is.
    :raises UnsupportedOperation: the transport is not available; says why, and what else there is.
    :raises CommTimeoutError: some rank did not come in time; says which.
    :raises StoreLostError: the store cannot be reached.
    :raises AuthError: some rank has not the same token; says which.
    """

    def __init__(
        self,
        transport: str | Mapping[str, str] = "auto",
        device: str | torch.device = "cpu",
        *,
        store: Store | None = None,
        rank: int | None = None,
        size: int | None = None,
        name: str = DEFAULT,
        timeout: float | timedelta = 600.0,
        hints: Mapping[str, Any] | None = None,
        join: bool = False,
    ) -> None:
        self._transport = transport
        self._device = _device(device)
        self._where = (store, rank, size)
        self._name = checks.label(name)
        self._timeout = checks.seconds("timeout", timeout)
        if hints is not None:
            checks.mapping("hints", hints)
        self._options = dict(hints or {})
        heartbeat.silence(self._options)
        self._join = join
        self._comm: Communicator | None = None
        _check_place(store, rank, size)

    def __await__(self) -> Generator[Any, Any, Communicator]:
        return self._open().__await__()

    async def __aenter__(self) -> Communicator:
        self._comm = await self._open()
        return await self._comm.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._comm is not None
        await self._comm.__aexit__(kind, error, trace)

    async def _open(self) -> Communicator:
        store, rank, size = self._where
        if rank is None or size is None:
            store, rank, size = await self._launched()
        if self._join and store is None:
            raise ArgumentError("join is True, and no store and no launcher says where the others are", rank=rank)
        plan = choose(self._transport, self._device, size, self._options)
        try:
            return await _form(plan, store, rank, size, self._name, self._device, self._timeout, self._join)
        except StoreLostError:  # another attempt finds the one that is served by then
            for where in [where for where, known in _launched.items() if known is store]:
                del _launched[where]
            raise

    async def _launched(self) -> tuple[Store | None, int, int]:
        launch = read_environment(os.environ)
        if launch is None or launch.host is None or launch.port is None:
            return None, 0, 1
        host, port = launch.host, launch.port
        alone = StoreRendezvous(
            None, launch.rank, launch.size, name=self._name, device=self._device, timeout=self._timeout, seal=Seal(None)
        )
        if (host, port) not in _launched:
            _launched[host, port] = await alone.run(
                f"reaching the store at {host}:{port}",
                lambda: connect_store(
                    host, port, launch.rank, launch.size, agent_store=launch.agent_store, timeout=self._timeout
                ),
            )
        return _launched[host, port], launch.rank, launch.size


async def from_process_group(
    pg: Any, device: str | torch.device = "cpu", *, name: str = DEFAULT, timeout: Timeout = 600.0
) -> Communicator:
    """Form a communicator over a ``torch.distributed`` process group that exists already; collective.

    The group stays its owner's: it is neither closed nor aborted, and may go on being used.

    :param pg: the process group. The ranks meet over it: until this returns nothing else may use it, nor another call.
    :param device: the device of all tensors.
    :param name: the communicator's name.
    :param timeout: the deadline in seconds for forming it, and afterwards that of ops that name none.
    :raises ArgumentTypeError: no available transport can run over it.
    """
    where = _device(device)
    plan = choose_adopter(pg, where, {})
    seconds = checks.seconds("timeout", 600.0 if timeout is None else timeout)
    return await _form(plan, None, pg.rank(), pg.size(), checks.label(name), where, seconds)


async def _form(
    plan: Plan, store: Store | None, rank: int, size: int, name: str, device: torch.device, timeout: float,
    join: bool = False,
) -> Communicator:  # fmt: skip
    seal = Seal(read_token(os.environ), name)
    rendezvous = StoreRendezvous(None, rank, size, name=name, device=device, timeout=timeout, seal=seal)
    try:
        if store is not None and join:
            rendezvous = await rendezvous.join(store)
        elif store is not None:
            await rendezvous.arrive(store)
        transports = await open_transports(plan, lambda cls, _: cls.open(rendezvous, plan.options))
        rendezvous.timeout = timeout
        return Communicator(rendezvous, plan, transports)
    except CommError as error:
        raise error.about(comm=name, rank=rank) from error.__cause__


_launched: dict[tuple[str, int], Store] = {}
"""The launcher's store, which outlives each communicator: its host cannot know when the last rank has done with it."""


def _check_place(store: Store | None, rank: int | None, size: int | None) -> None:
    """Check that rank, size and store fit together; one error lists all that does not."""
    if store is None and rank is None and size is None:
        return
    wrong = []
    for what, value in (("rank", rank), ("size", size)):
        if type(value) is not int:
            wrong.append(f"{what} is missing" if value is None else f"{what} is {value!r}, wanted an int")
    if type(size) is int and size < 1:
        wrong.append(f"size is {size}, wanted at least 1")
    elif type(size) is int and type(rank) is int and not 0 <= rank < size:
        wrong.append(f"rank is {rank}, wanted 0 <= rank < size = {size}")
    if store is None and size != 1:
        wrong.append("store is missing")
    elif store is not None and not isinstance(store, Store):
        wrong.append(f"store is a {type(store).__name__}, wanted a torch.distributed.Store")
    if wrong:
        raise ArgumentError(f"rank, size and store belong together: {'; '.join(wrong)}")


def _device(value: str | torch.device) -> torch.device:
    try:
        device = torch.device(value)
    except TypeError:
        raise checks.wrong_type("device", value, "a torch.device or its name") from None
    except RuntimeError as error:
        raise ArgumentError(f"device is {value!r}, wanted a torch.device or its name: {error}") from None
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
