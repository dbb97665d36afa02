"""The function ``local_world``, which opens the communicators of several ranks in one process."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import anyio
import torch
from torch.distributed import HashStore, PrefixStore

from aiocomms import arguments
from aiocomms.arguments import Timeout, as_int
from aiocomms.bootstrap.registry import Selection, choose, in_process, open_transports
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommError
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.auth import Seal, read_token
from aiocomms.testing.stranded import StrandedWatch


@asynccontextmanager
async def local_world(
    size: int, transport: str | Mapping[str, str] | None = None, *, name: str = "world", timeout: Timeout = 30.0
) -> AsyncIterator[list[Communicator]]:
    """Open the communicators of several ranks, which all run in this process and on this event loop.

    ``async with local_world(4) as comms:`` gives one communicator per rank. Run the ranks' code concurrently, with
    :func:`aiocomms.testing.run_ranks`, :func:`asyncio.gather` or a task group. The end of the block closes all
    communicators. If the block raises an exception, the end of the block aborts the communicators.

    :param size: the number of ranks.
    :param transport: a transport that can run several ranks in one process; None: the simplest such transport.
    :param name: the communicators' name.
    :param timeout: the deadline in seconds of ops that are called without ``timeout``; None: no deadline. The deadline
        makes a hanging test fail. With the transport ``local`` on asyncio, an op fails earlier if nothing that could
        complete the op is pending on the event loop.
    :raises ArgumentError: ``size`` is not a number of ranks, or another argument is wrong.
    :raises UnsupportedOperation: no available transport can run all ranks in one process.
    """
    size = as_int(size)
    if type(size) is not int:
        raise ArgumentTypeError(f"size is {size!r} ({type(size).__name__}), wanted the number of ranks as an int")
    if size < 1:
        raise ArgumentError(f"size is {size}, wanted at least 1 rank")
    options: dict[str, object] = {}
    arguments.silence(options)
    cpu = torch.device("cpu")
    plan = await run_in_thread(lambda: choose(transport or in_process(), cpu, size, options), anyhow=True)
    meeting = _Meeting(size, arguments.label(name), arguments.deadline("timeout", timeout))
    comms: list[Communicator | None] = [None] * size
    try:
        await _open(comms, plan, meeting)
        with _watched(plan, opened := [comm for comm in comms if comm is not None]):
            yield opened
    except BaseException as error:
        for comm in filter(None, comms):
            comm.abort(error)
        raise
    finally:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for comm in filter(None, comms):
                    tasks.start_soon(comm.aclose)


@contextmanager
def _watched(plan: Selection, world: list[Communicator]) -> Iterator[None]:
    """Within the ``with`` block, look for ops that nothing pending on the event loop can complete.

    Do nothing if other threads may also move the ranks' messages.
    """
    watch = StrandedWatch(world) if set(plan.names.values()) == {in_process()} else None
    try:
        yield
    finally:
        if watch is not None:
            watch.close()


class _Meeting:
    """The state that the ranks share while their communicators open, and their store for splits and recoveries."""

    def __init__(self, size: int, name: str, timeout: float) -> None:
        self.size, self.name, self.timeout = size, name, timeout
        self.store = HashStore()
        self.key = secrets.token_hex(8)
        self.seal = Seal(read_token(os.environ), name).child(self.key)
        self._given: dict[str, tuple[dict[int, bytes], anyio.Event]] = {}

    def given(self, key: str) -> tuple[dict[int, bytes], anyio.Event]:
        """Return a dict from ranks to values, and the event that is set when all ranks have added their values."""
        if key not in self._given:
            self._given[key] = ({}, anyio.Event())
        return self._given[key]


class _Together(StoreRendezvous):
    """The rendezvous of one rank. All ranks exchange their values in the memory of this process.

    If the ranks exchanged values through a store, each rank would need a thread that polls the store.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        here = PrefixStore(f"aiocomms/{meeting.name}", meeting.store)
        super().__init__(
            PrefixStore(meeting.key, here), rank, meeting.size, name=meeting.name, device=torch.device("cpu"),
            timeout=meeting.timeout, seal=meeting.seal,
        )  # fmt: skip
        self.root = meeting.store
        self._meeting_point = meeting

    async def exchange(self, key: str, value: bytes) -> list[bytes]:
        """See :meth:`aiocomms.transport.Rendezvous.exchange`."""
        given, all_there = self._meeting_point.given(key)
        given[self.rank] = value
        if len(given) == self.size:
            all_there.set()
        with anyio.move_on_after(self.left()):
            await all_there.wait()
            return [given[rank] for rank in range(self.size)]
        raise self._absent(given)


async def _open(comms: list[Communicator | None], plan: Selection, meeting: _Meeting) -> None:
    """Open every rank's communicator. If one rank's opening fails, cancel the opening of the other ranks."""
    failures: list[Exception] = []

    async def open_rank(rank: int) -> None:
        rendezvous = _Together(meeting, rank)
        try:
            transports = await open_transports(plan, lambda cls, _: cls.open(rendezvous, plan.options))
            rendezvous.timeout = meeting.timeout
            comms[rank] = Communicator(rendezvous, plan, transports)
        except Exception as error:
            known = error.about(comm=meeting.name, rank=rank) if isinstance(error, CommError) else error
            failures.append(known)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for rank in range(len(comms)):
            tasks.start_soon(open_rank, rank)
    if failures:
        raise failures[0]
