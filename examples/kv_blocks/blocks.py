"""The KV blocks of one node, which other nodes write by index. Each node lends all its blocks to every other node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

import aiocomms
from aiocomms.errors import ArgumentError, CommError


class Blocks:
    """The blocks of this node, all of one size, and the connected nodes. All methods run on one event loop."""

    def __init__(self, here: aiocomms.Endpoint, view: memoryview) -> None:
        """Open the memory; see :meth:`open`."""
        self._here = here
        pool = here.new_pool(torch.frombuffer(view.cast("B"), dtype=torch.uint8).view(view.shape))
        self._memory = pool.lease(len(view))
        self._lease: aiocomms.Lease
        self._lent: dict[aiocomms.Peer, asyncio.Future[aiocomms.HandedLease]] = {}
        """The blocks that each connected node lends to this node."""
        self._nodes: dict[str, aiocomms.HandedLease] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, view: memoryview, transport: str = "auto", host: str = "127.0.0.1") -> Blocks:
        """Open memory to other nodes.

        :param view: writable memory of shape ``[blocks, bytes of a block]``.
        :param host: the address of this host for connections from other nodes.
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
        """The bytes that another node needs for :meth:`add`."""
        return self._here.address

    async def add(self, name: str, metadata: bytes, blocks: int, length: int) -> None:
        """Connect to another node, and wait for its blocks.

        :param metadata: the metadata of that node.
        :param blocks: the number of its blocks.
        :param length: the bytes of a block, which must be the same on both nodes.
        :raises ArgumentError: the blocks do not match, the node was added already, or the metadata is invalid.
        :raises CommError: the node cannot be reached.
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
        """Disconnect from another node, after the running writes to it have ended."""
        handed = self._nodes.pop(name, None)
        if handed is not None:
            await handed.peer.aclose()

    def fault(self, name: str) -> str:
        """Return the reason why a node cannot be written; empty if it can be written or is unknown."""
        handed = self._nodes.get(name)
        error = None if handed is None else handed.error
        return "" if error is None else error.message

    def check(self, name: str, local: Sequence[int], remote: Sequence[int]) -> tuple[Any, aiocomms.HandedLease]:
        """Return the blocks of both nodes at the indices.

        :raises ArgumentError: an index is wrong, or the node is unknown.
        """
        if name not in self._nodes:
            raise ArgumentError(f"node {name!r} was not added")
        if len(local) != len(remote):
            raise ArgumentError(f"local has {len(local)} indices and remote has {len(remote)}, wanted as many")
        return self._lease.select(local), self._nodes[name].select(remote)

    async def write_blocks(self, name: str, local: Sequence[int], remote: Sequence[int]) -> None:
        """Write blocks of this node into another node's memory, and wait until they are visible there.

        :raises ArgumentError: an index is wrong. No block was written.
        :raises CommError: that node is lost. Some blocks may have been written.
        """
        source, handed = self.check(name, local, remote)
        await handed.write(source)
        await handed.flush()

    async def aclose(self) -> None:
        """Take the memory back, and disconnect from all nodes."""
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
        """Lend this node's blocks to a peer once. Return a future of the blocks that the peer lends."""
        if peer not in self._lent:
            self._lent = {it: lent for it, lent in self._lent.items() if not it.closed}
            self._lent[peer] = asyncio.get_running_loop().create_future()
            self._begin(self._lend(peer))
        return self._lent[peer]

    async def _lend(self, peer: aiocomms.Peer) -> None:
        """Lend all blocks for as long as the connection lasts."""
        with contextlib.suppress(CommError):  # The connection is over, and ``fault`` reports that.
            await peer.hand_over(self._lease, write=True, timeout=None)
        self._lent[peer].cancel()
