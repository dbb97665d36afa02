"""Registers and areas in the job's store, for ranks on several hosts or without native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import anyio
import torch
from torch import Tensor
from torch.distributed import Store

from aiocomms.errors import CommClosedError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.stores import store_errors
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import buffers

_PAUSE: Final = 0.005
"""The seconds between two reads of a register. Ranks poll, because a store does not notify ranks of changes."""
_LENGTH: Final = 4
"""The size of the field that contains a header's length, in bytes."""

T = TypeVar("T")


class StoreRegisters:
    """The registers and areas of a live group in a store; see :class:`aiocomms.live.registers.Registers`.

    Each call makes one or two requests to the store. The store does not know which processes are alive.
    """

    def __init__(self, store: Store) -> None:
        self._store: Store | None = store

    async def load(self, register: int) -> int:
        """See :class:`aiocomms.live.registers.Registers`.

        If the store does not have the register's key, the call sets the key to 0.
        """
        return await self._ask(lambda store: int(store.add(f"r{register}", 0)))

    async def swap(self, register: int, expected: int, desired: int) -> int:
        """See :class:`aiocomms.live.registers.Registers`. The caller must have loaded the register before."""

        def swap(store: Store) -> int:
            found = int(store.compare_set(f"r{register}", str(expected), str(desired)))
            return expected if found == desired else found

        return await self._ask(swap)

    async def write(self, area: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """See :class:`aiocomms.live.registers.Registers`."""
        data = b"".join(part.numpy().tobytes() for part in parts)
        value: Any = len(header).to_bytes(_LENGTH, "little") + header + data
        await self._ask(lambda store: store.set(f"a{area}", value))

    async def written(self, areas: Sequence[int]) -> None:
        """Return at once, because a write copies its parts before it waits for the store."""

    async def read(self, area: int) -> tuple[bytes, Tensor]:
        """See :class:`aiocomms.live.registers.Registers`."""
        value = await self._ask(lambda store: store.get(f"a{area}"))
        end = _LENGTH + int.from_bytes(value[:_LENGTH], "little")
        data = bytearray(value[end:])
        if not data:
            return value[_LENGTH:end], buffers.empty(0, dtype=torch.uint8, device="cpu")
        return value[_LENGTH:end], torch.frombuffer(data, dtype=torch.uint8)

    def shortcut(self, *_: int) -> None:
        """See :class:`aiocomms.live.registers.Registers`. A store has no native code for rounds."""

    async def changed(self, register: int, held: int, ends: float) -> bool:
        """Wait for some milliseconds, because a store does not notify ranks of changes."""
        await anyio.sleep(max(0.0, min(_PAUSE, ends - clock.now())))
        return clock.now() < ends

    async def tell(self, register: int | None) -> None:
        """Do nothing, because all ranks poll the registers."""

    def alive(self, holder: int) -> bool:
        """Return True, because the store does not know which processes are alive."""
        return True

    def close(self) -> None:
        """See :class:`aiocomms.live.registers.Registers`. The store itself stays open."""
        self._store = None

    async def _ask(self, call: Callable[[Store], T]) -> T:
        store = self._store
        if store is None:
            raise CommClosedError("the group was closed")

        @store_errors("the store of the group is lost")
        def ask() -> T:
            return call(store)

        return await run_in_thread(ask)
