"""Notices that the simulated processes of one world leave for each other, in the world's store."""

from __future__ import annotations

import asyncio

from aiocomms.testing.simulation import here


def leave(name: str, value: bytes = b"") -> None:
    """Leave a notice for the ranks of all jobs."""
    here().world.store.set(name, value)


async def found(name: str) -> bytes:
    """Wait for a notice of another rank, and return its value."""
    while not here().world.store.check([name]):  # noqa: ASYNC110 - another process sets it
        await asyncio.sleep(0.005)
    return here().world.store.get(name)
