"""The wait of a coroutine for refs of tensors that a transport moves."""

from __future__ import annotations

from typing import Any

import ray

from aiocomms.lowlevel import run_in_thread


async def get(ref: Any) -> Any:
    """Wait for an object of Ray, and return it. Use it for objects whose tensors a tensor transport moves.

    For such objects ``await ref`` never ends (Ray issue 56398), and ``ray.get(ref)`` blocks the event loop of an async
    actor. A cancelled wait leaves the transfer to end by itself.

    :param ref: an ``ObjectRef``, or a list of these.
    :returns: the same as ``ray.get``.
    :raises ray.exceptions.RayError: as ``ray.get`` does; ``RayDirectTransportError``: the transfer failed.
    """
    return await run_in_thread(lambda: ray.get(ref))
