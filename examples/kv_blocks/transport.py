"""The KV blocks for callers without an event loop, with the interface of vLLM's ``DataTransport``.

The methods and properties are from ``vllm/v1/kv_offload/tiering/p2p/data/base.py`` of vLLM 0.33.0. They were not tested
with vLLM itself. A transport for vLLM must also derive from that class, and vLLM's manager must select it.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import itertools
import json
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, TypeVar

from aiocomms.errors import CommError
from kv_blocks.blocks import Blocks

T = TypeVar("T")


class PollResult(NamedTuple):
    """The transfers that have ended since the last call of ``poll``."""

    done: Sequence[int]
    failed: Sequence[int]
    peer_fault: str | None = None


class _Transfer(NamedTuple):
    peer: str
    future: Future[None]


class EndpointTransport:
    """The transport that writes KV blocks into other nodes' memory. Its event loop runs on its own thread.

    Only one thread at a time may use it.
    """

    def __init__(
        self, view: memoryview, config_fields: dict[str, Any] | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        """Open the memory.

        :param view: writable memory of shape ``[blocks, bytes of a block]``.
        :param config_fields: the settings that must be equal on nodes that exchange blocks.
        """
        self._view = view
        self.base_addr = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self.num_blocks, self.block_len = view.shape
        canonical = json.dumps(config_fields or {}, sort_keys=True, separators=(",", ":"))
        self.config_fingerprint = hashlib.sha256(canonical.encode()).hexdigest()[:16] if config_fields else ""
        self._numbers = itertools.count(1)
        self._transfers: dict[int, _Transfer] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv blocks", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._blocks = self._call(Blocks.open(view, host=host)).result()
            self._metadata = self._blocks.metadata
        except BaseException:
            self._stop()
            raise

    def get_agent_metadata(self) -> bytes:
        """Return the metadata for another node's ``add_remote_peer``."""
        return self._metadata

    def add_remote_peer(
        self, peer_id: str, agent_metadata: bytes, base_addr: int, num_blocks: int, block_len: int
    ) -> None:
        """Connect to another node, and block until the connection is ready.

        :param base_addr: unused, because the metadata names the memory.
        :raises CommError: the node cannot be reached, gives no access, or has blocks of another size.
        """
        self.add_remote_peer_async(peer_id, agent_metadata, base_addr, num_blocks, block_len).result()

    def add_remote_peer_async(
        self, peer_id: str, agent_metadata: bytes, base_addr: int, num_blocks: int, block_len: int
    ) -> Future[None]:
        """Connect to another node like :meth:`add_remote_peer`, without blocking."""
        return self._call(self._blocks.add(peer_id, agent_metadata, num_blocks, block_len))

    def remove_remote_peer(self, peer_id: str) -> None:
        """Disconnect from a node."""
        self._call(self._blocks.remove(peer_id)).result()

    def write_blocks(self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]) -> int | None:
        """Begin to write blocks. This method never blocks and never raises.

        :returns: the number of the transfer; None if the node is unknown or lost, or if an index is wrong.
        """
        try:
            self._blocks.check(peer_id, local_idxs, remote_idxs)
        except CommError:
            return None
        if self._blocks.fault(peer_id):
            return None
        number = next(self._numbers)
        future = self._call(self._blocks.write_blocks(peer_id, list(local_idxs), list(remote_idxs)))
        self._transfers[number] = _Transfer(peer_id, future)
        return number

    def poll(self, peer_id: str | None = None) -> PollResult:
        """Return the transfers that have ended since the last call. This method never blocks.

        :param peer_id: the node whose transfers are returned; None for all nodes.
        """
        ended = {
            number: it
            for number, it in self._transfers.items()
            if it.future.done() and (peer_id is None or it.peer == peer_id)
        }
        for number in ended:
            del self._transfers[number]
        failed = [number for number, it in ended.items() if it.future.exception() is not None]
        fault = self._blocks.fault(peer_id) if peer_id is not None else ""
        return PollResult([number for number in ended if number not in failed], failed, fault or None)

    def cancel(self, transfer_ids: Iterable[int], mode: Literal["immediate", "wait"] = "immediate") -> list[int]:
        """Forget transfers. Their blocks may already be written.

        :param mode: with ``"wait"``, forget no transfer. ``poll`` still reports all of them.
        :returns: with ``"wait"``, the transfers that have not ended; else an empty list.
        """
        known = [number for number in transfer_ids if number in self._transfers]
        if mode == "wait":
            return [number for number in known if not self._transfers[number].future.done()]
        for number in known:
            del self._transfers[number]
        return []

    def close(self) -> None:
        """Close the blocks and end the thread. A second call does nothing."""
        if not self._closed:
            self._closed = True
            try:
                self._call(self._blocks.aclose()).result()
            finally:
                self._stop()

    def _call(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
