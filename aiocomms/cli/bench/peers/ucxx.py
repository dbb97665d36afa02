"""The peer UCXX, through its asyncio interface in its fastest mode, which polls. UCXX has only sends and receives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from aiocomms.cli.bench.cases import ROOT, BenchCase
from aiocomms.cli.bench.operations import BURST
from aiocomms.cli.bench.ours import Call
from aiocomms.communicator.communicator import Communicator

_NAME = __name__.rpartition(".")[2]


class TagPeer:
    """One of exactly two ranks of UCXX. The first rank listens, and the second rank connects."""

    blocking = False

    def __init__(self) -> None:
        self._library: Any = None
        self._endpoint: Any = None
        self._listener: Any = None

    def missing(self) -> str | None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
        if find_spec(_NAME) is None:
            return f"it is not installed: pip install {_NAME}-cu13, which needs no GPU"
        try:
            self._library = import_module(_NAME)
        except (ImportError, OSError) as error:
            return f"it cannot be loaded: {error}"
        return None

    async def open(self, comm: Communicator, host: str) -> None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
        if comm.size != 2:
            raise NotImplementedError("it is measured between two ranks")
        self._library.init(progress_mode="polling")
        came: asyncio.Queue[Any] = asyncio.Queue()
        if comm.rank == ROOT:
            self._listener = self._library.create_listener(came.put)
        port = await comm.broadcast_object(self._listener.port if comm.rank == ROOT else 0, ROOT)
        connecting = came.get() if comm.rank == ROOT else self._library.create_endpoint(host, port)
        self._endpoint = await connecting
        await self.leave()

    async def aclose(self) -> None:
        """See :class:`aiocomms.cli.bench.peers.BenchPeer`."""
        self._poll()
        await self._endpoint.close()
        if self._listener is not None:
            self._listener.close()
        self._endpoint = self._listener = None
        await self._rest()

    async def enter(self) -> None:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        self._poll()
        await self._meet()

    async def leave(self) -> None:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        await self._meet()
        await self._rest()

    async def _meet(self) -> None:
        mine, theirs = bytearray(1), bytearray(1)
        await asyncio.gather(self._endpoint.send(mine), self._endpoint.recv(theirs))

    def _polling(self) -> Any:
        """Return the object that contains the library's polling task.

        The polling task is stopped between the turns of UCXX, because polling would slow down other libraries.
        """
        context = import_module(f"{_NAME}._lib_async.application_context")
        return context.ProgressTasks[asyncio.get_running_loop()]

    def _poll(self) -> None:
        polling = self._polling()
        if polling.progress_task.done():
            polling.progress_task = asyncio.get_running_loop().create_task(polling._progress_task())

    async def _rest(self) -> None:
        task = self._polling().progress_task
        task.cancel()
        await asyncio.wait([task])

    @asynccontextmanager
    async def bound(self, case: BenchCase) -> AsyncIterator[Call]:
        """See :class:`aiocomms.cli.bench.ours.Contender`."""
        endpoint, into, out = self._endpoint, case.input.numpy(), case.output.numpy()
        send, receive = partial(endpoint.send, into), partial(endpoint.recv, out)

        async def ping_pong() -> None:
            for step in (send, receive) if case.rank == ROOT else (receive, send):
                await step()

        async def burst() -> None:
            await asyncio.gather(*((send if case.rank == ROOT else receive)() for _ in range(BURST)))

        calls = {"send": ping_pong, "send_burst": burst}
        if case.op not in calls:
            raise NotImplementedError("it has sends and receives only")
        yield calls[case.op]


PEER = TagPeer
"""The class that the benchmark uses for this peer."""
