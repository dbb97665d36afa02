"""The function ``get`` lets a coroutine wait for a Ray object if a tensor transport transfers the object's tensors."""

from __future__ import annotations

from typing import Any

import ray

from aiocomms.lowlevel import run_in_thread


async def get(ref: Any) -> Any:
    """Wait for a Ray object, and return the object.

    Use this function for objects whose tensors a tensor transport transfers. For such objects, ``await ref`` never ends
    (Ray issue 56398), and ``ray.get(ref)`` blocks the event loop of an async actor. If the caller of this function is
    cancelled, the transfer continues.

    :param ref: an ``ObjectRef``, or a list of ``ObjectRef`` objects.
    :returns: the result of ``ray.get(ref)``.
    :raises ray.exceptions.RayError: the error that ``ray.get`` raises. If the transfer failed, the error is a
        ``RayDirectTransportError``.
    """
    return await run_in_thread(lambda: ray.get(ref))
