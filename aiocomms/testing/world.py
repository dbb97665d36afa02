"""The function ``local_world``, which opens a world of several ranks in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio
from torch.distributed import HashStore

from aiocomms.bootstrap.registry import in_process
from aiocomms.communicator import Communicator
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.opening import new_comm


@asynccontextmanager
async def local_world(
    size: int, transport: str | Mapping[str, str] | None = None, *, name: str = "world", timeout: float = 30.0
) -> AsyncIterator[list[Communicator]]:
    """Open a world whose ranks all live in this process and event loop.

    ``async with local_world(4) as comms:`` gives one communicator per rank. Run the ranks' code concurrently, with
    :func:`asyncio.gather` or a task group. At the end all communicators are closed, or aborted if the body raises.

    :param size: the number of ranks.
    :param transport: a transport that can run several ranks in one process; None: the simplest such transport.
    :param name: the communicators' name.
    :param timeout: the deadline of every op in seconds, so that a test that hangs fails.
    :raises ArgumentError: ``size`` is not a number of ranks.
    :raises UnsupportedOperation: no such transport is available.
    """
    if type(size) is not int:
        raise ArgumentTypeError(f"size is {size!r} ({type(size).__name__}), wanted the number of ranks as an int")
    if size < 1:
        raise ArgumentError(f"size is {size}, wanted at least 1 rank")
    comms: list[Communicator | None] = [None] * size
    try:
        await _open(comms, transport or in_process(), name, timeout)
        yield [comm for comm in comms if comm is not None]
    except BaseException as error:
        for comm in filter(None, comms):
            comm.abort(error)
        raise
    finally:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for comm in filter(None, comms):
                    tasks.start_soon(comm.aclose)


async def _open(
    comms: list[Communicator | None], transport: str | Mapping[str, str], name: str, timeout: float
) -> None:
    """Open every rank's communicator. If one fails, the others are cancelled instead of waiting for it."""
    store = HashStore()
    failures: list[Exception] = []

    async def open_rank(rank: int) -> None:
        try:
            comms[rank] = await new_comm(transport, store=store, rank=rank, size=len(comms), name=name, timeout=timeout)
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for rank in range(len(comms)):
            tasks.start_soon(open_rank, rank)
    if failures:
        raise failures[0]
