"""The common parts of the twins: process groups of gloo, whose calls block threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

IDLE = timedelta(days=365)
"""The longest time of a call: a worker waits in one for the next plan."""


class Group:
    """A process group, and the thread that its calls block.

    :param lost: made of a sentence, and raised when a rank is lost.
    """

    def __init__(self, ranks: list[int], lost: Callable[[str], Exception]) -> None:
        self.ranks, self.group = ranks, dist.new_group(ranks, backend="gloo", timeout=IDLE)
        self._lost = lost
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gloo")

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with this group, on its thread."""
        call = partial(function, *args, group=self.group)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError as error:
            raise self._lost(f"gloo has failed: {error}") from error


def meet() -> None:
    """Form the default group, by the launcher's store, in which the ranks of before a restart have left addresses."""
    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", dist.TCPStore(*at, is_master=False))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=IDLE)
