"""The wait of a coroutine for refs of tensors that a transport moves."""

from __future__ import annotations

from typing import Any

import ray

from aiocomms.lowlevel import run_in_thread


async def get(ref: Any) -> Any:
    """Wait for an object of Ray, and return it. Use this for objects whose tensors a tensor transport moves.

    For such objects ``await ref`` never ends (Ray issue 56398), and ``ray.get(ref)`` blocks the event loop of an async
    actor. The cancellation of the wait does not stop the transfer.

    :param ref: an ``ObjectRef``, or a list of these.
    :returns: the same as ``ray.get``.
    :raises ray.exceptions.RayError: as for ``ray.get``; ``RayDirectTransportError`` if the transfer failed.
    """
    return await run_in_thread(lambda: ray.get(ref))
