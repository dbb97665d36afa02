"""The KV blocks of one node, which other nodes write by index: each node lends all of its blocks to each other one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

import aiocomms
from aiocomms.errors import ArgumentError, CommError


class Blocks:
    """Memory of equal blocks, and the nodes that write each other's. On one event loop."""

    def __init__(self, here: aiocomms.Endpoint, view: memoryview) -> None:
        """Open the memory; see :meth:`open`."""
        self._here = here
        pool = here.new_pool(torch.frombuffer(view.cast("B"), dtype=torch.uint8).view(view.shape))
        self._memory = pool.lease(len(view))
        self._lease: aiocomms.Lease
        self._lent: dict[aiocomms.Peer, asyncio.Future[aiocomms.HandedLease]] = {}
        """What each node that is connected lends to this one."""
        self._nodes: dict[str, aiocomms.HandedLease] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, view: memoryview, transport: str = "auto", host: str = "127.0.0.1") -> Blocks:
        """Open memory to other nodes.

        :param view: writable, of shape ``[blocks, bytes of a block]``.
        :param host: the address of this host at which they connect.
        """
        if view.ndim != 2 or view.readonly or not view.c_contiguous:
            raise ArgumentError(f"view has shape {view.shape}, wanted writable, contiguous [blocks, bytes of a block]")
        self = cls(await aiocomms.open_endpoint(transport, host=host, timeout=60), view)
        self._lease = await self._memory.__aenter__()
        self._begin(self._accept())
        self._begin(self._take())
        return self

    @property
    def metadata(self) -> bytes:
        """What another node is to be given, by whatever way."""
        return self._here.address

    async def add(self, name: str, metadata: bytes, blocks: int, length: int) -> None:
        """Connect with another node, and wait for its blocks.

        :param metadata: that node's.
        :param blocks: how many it has.
        :param length: their bytes, which must be this node's, too.
        :raises ArgumentError: they are not, or it is no metadata.
        :raises CommError: it cannot be reached.
        """
        if name in self._nodes:
            raise ArgumentError(f"node {name!r} was added already")
        peer = await self._here.connect(metadata)
        handed = await self._meet(peer)
        wanted = (blocks, length)
        if handed.shape != wanted or length != self._lease[0].numel():
            raise ArgumentError(f"node {name!r} has {handed.shape} blocks and bytes, wanted {wanted}, and as many here")
        self._nodes[name] = handed

    async def remove(self, name: str) -> None:
        """Part from another node. What is being written there ends before."""
        handed = self._nodes.pop(name, None)
        if handed is not None:
            await handed.peer.aclose()

    def fault(self, name: str) -> str:
        """Why a node cannot be written any more; empty: it can, or is not known."""
        handed = self._nodes.get(name)
        error = None if handed is None else handed.error
        return "" if error is None else error.message

    def check(self, name: str, local: Sequence[int], remote: Sequence[int]) -> tuple[Any, aiocomms.HandedLease]:
        """The blocks of both nodes that the indices name.

        :raises ArgumentError: an index is wrong, or there is no such node.
        """
        if name not in self._nodes:
            raise ArgumentError(f"node {name!r} was not added")
        if len(local) != len(remote):
            raise ArgumentError(f"{len(local)} local indices, and {len(remote)} remote ones")
        return self._lease.select(local), self._nodes[name].select(remote)

    async def write_blocks(self, name: str, local: Sequence[int], remote: Sequence[int]) -> None:
        """Write blocks of this node into another one's memory, by index; done when they can be seen there.

        :raises ArgumentError: an index is wrong; nothing was written.
        :raises CommError: that node is lost; some of them may have been written.
        """
        source, handed = self.check(name, local, remote)
        await handed.write(source)
        await handed.flush()

    async def aclose(self) -> None:
        """Take the memory back, and part from all nodes."""
        for task in self._tasks:
            task.cancel()
        try:
            await self._memory.__aexit__(None, None, None)
        finally:
            await self._here.aclose()

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            self._meet(await self._here.accept())

    async def _take(self) -> None:
        async for handed in self._here.handed():
            self._meet(handed.peer).set_result(handed)

    def _meet(self, peer: aiocomms.Peer) -> asyncio.Future[aiocomms.HandedLease]:
        """Lend this node's blocks to another one, once; what is returned gets what that one lends."""
        if peer not in self._lent:
            self._lent = {it: lent for it, lent in self._lent.items() if not it.closed}
            self._lent[peer] = asyncio.get_running_loop().create_future()
            self._begin(self._lend(peer))
        return self._lent[peer]

    async def _lend(self, peer: aiocomms.Peer) -> None:
        """Lend all blocks, for as long as the connection lasts."""
        with contextlib.suppress(CommError):  # The connection is over, which ``fault`` says.
            await peer.hand_over(self._lease, write=True, timeout=None)
        self._lent[peer].cancel()
