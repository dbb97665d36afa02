"""Refs of tensors that a transport moves, as a coroutine waits for them."""

from __future__ import annotations

from typing import Any

import ray

from aiocomms.lowlevel import run_in_thread


async def get(ref: Any) -> Any:
    """Wait for an object of Ray, and return it: what ``await ref`` does for those whose tensors no transport moves.

    For those whose tensors one does ``await ref`` never ends (Ray issue 56398), and ``ray.get(ref)`` keeps the event
    loop of an async actor. A wait that is cancelled leaves the transfer to end by itself.

    :param ref: an ``ObjectRef``, or a list of these.
    :returns: as ``ray.get``.
    :raises ray.exceptions.RayError: as ``ray.get`` does; ``RayDirectTransportError``: the transfer failed.
    """
    return await run_in_thread(lambda: ray.get(ref))
