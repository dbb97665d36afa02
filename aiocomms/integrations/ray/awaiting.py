"""The function ``get``, with which a coroutine waits for Ray objects whose tensors a transport moves."""

from __future__ import annotations

from typing import Any

import ray

from aiocomms.lowlevel import run_in_thread


async def get(ref: Any) -> Any:
    """Wait for a Ray object, and return the object. Use this for objects whose tensors a tensor transport moves.

    For such objects, ``await ref`` never ends (Ray issue 56398), and ``ray.get(ref)`` blocks the event loop of an async
    actor. The cancellation of the wait does not stop the transfer.

    :param ref: an ``ObjectRef``, or a list of ``ObjectRef`` objects.
    :returns: the result of ``ray.get(ref)``.
    :raises ray.exceptions.RayError: ``ray.get`` would raise this error; ``RayDirectTransportError`` if the transfer
        failed.
    """
    return await run_in_thread(lambda: ray.get(ref))
