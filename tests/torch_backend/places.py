"""A process group of the backend in each of several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from processes import Rank

import aiocomms.integrations.torch_backend


@contextlib.contextmanager
def group(
    place: Rank, backend: str = aiocomms.integrations.torch_backend.BACKEND, **more: Any
) -> Iterator[dist.ProcessGroup]:
    """Open the default group, over the transport of the place."""
    if backend == aiocomms.integrations.torch_backend.BACKEND:
        more["pg_options"] = place.transport
    where = {"store": place.store(), "rank": place.rank, "world_size": place.size, "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, **{**where, **more})
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
