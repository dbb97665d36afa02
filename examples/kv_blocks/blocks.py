"""The KV blocks of one node, which other nodes write by index; over endpoints of aiocomms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

import aiocomms
from aiocomms.errors import ArgumentError, CommError


class Metadata(msgspec.Struct, array_like=True):
    """What another node needs to write this one's blocks."""

    address: bytes
    descriptor: bytes


class Node(msgspec.Struct):
    """Another node."""

    peer: aiocomms.Peer
    region: aiocomms.RemoteRegion
    blocks: int
    fault: str = ""
    """Why it cannot be used any more; empty: it can."""


class Blocks:
    """Memory of equal blocks, and the nodes that write each other's. On one event loop."""

    def __init__(self, here: aiocomms.Endpoint, view: memoryview) -> None:
        """Open the memory; see :meth:`open`."""
        self._here = here
        self._count, self._length = view.shape
        self._memory = torch.frombuffer(view.cast("B"), dtype=torch.uint8)
        self._region = here.register(self._memory, read=False)
        self._nodes: dict[str, Node] = {}

    @classmethod
    async def open(cls, view: memoryview, transport: str = "auto", host: str = "127.0.0.1") -> Blocks:
        """Open memory to other nodes.

        :param view: writable, of shape ``[blocks, bytes of a block]``.
        :param host: the address of this host at which they connect.
        """
        if view.ndim != 2 or view.readonly or not view.c_contiguous:
            raise ArgumentError(f"view has shape {view.shape}, wanted writable, contiguous [blocks, bytes of a block]")
        return cls(await aiocomms.open_endpoint(transport, host=host, timeout=60), view)

    @property
    def metadata(self) -> bytes:
        """What another node is to be given, by whatever way."""
        return msgspec.msgpack.encode(Metadata(self._here.address, self._region.descriptor))

    async def add(self, name: str, metadata: bytes, blocks: int, length: int) -> None:
        """Connect with another node, and open its memory.

        :param metadata: that node's.
        :param blocks: how many it has.
        :param length: their bytes, which must be this node's, too.
        :raises ArgumentError: they are not, or it is no metadata.
        :raises CommError: it cannot be reached, or gives no access.
        """
        if name in self._nodes:
            raise ArgumentError(f"node {name!r} was added already")
        if length != self._length:
            raise ArgumentError(f"node {name!r} has blocks of {length} bytes, and this one of {self._length}")
        try:
            given = msgspec.msgpack.decode(metadata, type=Metadata)
        except msgspec.MsgspecError as error:
            raise ArgumentError(f"metadata of node {name!r} makes no sense: {error}") from None
        peer = await self._here.connect(given.address)
        region = await peer.attach(given.descriptor)
        if region.count != blocks * length:
            await region.aclose()
            raise ArgumentError(f"node {name!r} has {region.count} bytes, wanted {blocks} blocks of {length}")
        node = self._nodes[name] = Node(peer, region, blocks)
        peer.register_abort_hook(lambda error: setattr(node, "fault", error.message))

    async def remove(self, name: str) -> None:
        """Part from another node. What is being written there ends before."""
        node = self._nodes.pop(name, None)
        if node is not None:
            await node.region.aclose()
            await node.peer.aclose()

    def fault(self, name: str) -> str:
        """Why a node cannot be written any more; empty: it can, or is not known."""
        node = self._nodes.get(name)
        if node is None or node.fault:
            return "" if node is None else node.fault
        return "it has closed the connection" if node.peer.closed else ""

    def check(self, name: str, local: Sequence[int], remote: Sequence[int]) -> Node:
        """The node, and whether the indices are right.

        :raises ArgumentError: they are not, or there is no such node.
        """
        node = self._nodes.get(name)
        if node is None:
            raise ArgumentError(f"node {name!r} was not added")
        if len(local) != len(remote):
            raise ArgumentError(f"{len(local)} local indices, and {len(remote)} remote ones")
        for what, indices, count in (("local", local, self._count), ("remote", remote, node.blocks)):
            if wrong := [index for index in indices if not 0 <= index < count]:
                raise ArgumentError(f"{what} indices {wrong[:5]}, wanted 0 <= index < {count}")
        return node

    async def write_blocks(self, name: str, local: Sequence[int], remote: Sequence[int]) -> None:
        """Write blocks of this node into another one's memory, by index; done when they can be seen there.

        :raises ArgumentError: an index is wrong; nothing was written.
        :raises CommError: that node is lost; some of them may have been written.
        """
        node, length = self.check(name, local, remote), self._length
        works = []
        failures = []
        try:
            for mine, theirs, count in runs(local, remote):
                works.append(node.region.put(self._memory[mine * length : (mine + count) * length], theirs * length))
        except CommError as error:
            failures.append(error)
        for work in works:  # each to its end: until then its blocks are read
            try:
                await work
            except CommError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        await node.region.flush()

    async def aclose(self) -> None:
        """Take the memory back, and part from all nodes."""
        try:
            await self._region.revoke()
        finally:
            await self._here.aclose()


def runs(local: Sequence[int], remote: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Blocks that lie behind each other on both sides, as one: the first on either side, and how many."""
    begin = 0
    for at in range(1, len(local) + 1):
        if at == len(local) or local[at] != local[at - 1] + 1 or remote[at] != remote[at - 1] + 1:
            yield local[begin], remote[begin], at - begin
            begin = at
