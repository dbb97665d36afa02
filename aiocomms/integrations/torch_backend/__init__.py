"""A backend of ``torch.distributed`` over aiocomms, with awaitable works.

>>> import aiocomms.integrations.torch_backend
>>> dist.init_process_group("aiocomms")
>>> dist.all_reduce(t)  # from any thread, as with other backends
>>> await dist.all_reduce(t, async_op=True)  # in a coroutine of asyncio or trio

The import registers the backend. The argument ``pg_options`` of ``init_process_group`` and ``new_group`` selects the
transport, like the argument ``transport`` of :func:`aiocomms.new_comm`. Without ``pg_options``, aiocomms chooses a
transport for the CPU and one for a GPU. Programs of ``torch.distributed`` run unchanged, also with DDP, FSDP2, DTensor,
pipelining schedules, functional collectives and checkpoints.
"""

from __future__ import annotations

from torch import distributed as dist

from aiocomms.integrations.torch_backend import functional
from aiocomms.integrations.torch_backend.communicators import DEVICES
from aiocomms.integrations.torch_backend.group import Group, create
from aiocomms.integrations.torch_backend.works import BACKEND, GroupWork

__all__ = ["BACKEND", "Group", "GroupWork", "register"]


def register() -> None:
    """Register the backend. The import of this module calls this function.

    torch 2.14 and later calls this function through an entry point.
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=[*DEVICES])
        functional.register()


register()
