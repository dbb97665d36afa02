"""The warning that the torch threads of all ranks on a host outnumber the host's processors.

By default torch makes as many threads in each rank as the host has processors. The threads of one rank then delay the
event loops of other ranks. After the rendezvous, a rank without ``OMP_NUM_THREADS`` adds the number of its threads to a
counter in the store. So the counter is complete when the communicator is formed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from typing import Final

import torch
from torch.distributed import Store

from aiocomms.lowlevel import clock
from aiocomms.lowlevel.hosts import host_id

_RANK: Final = 1 << 32
"""The amount that each rank adds to the counter in the store, besides the number of its threads.

So the quotient of the counter and this amount is the number of ranks, and the remainder is the number of threads.
"""
_log = logging.getLogger("aiocomms")
_counted: dict[int, object] = {}
"""A mapping from the pid of each counted process to an object of the rank that counts the process.

Ranks in one process share torch's threads, so only one rank counts the process.
"""


def may_crowd(size: int) -> bool:
    """Return whether this rank must count the threads of this process.

    A rank counts the threads if no other rank has counted the process, and if the user has not limited the threads.
    """
    if size == 1 or clock.simulation is not None or "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() == 1:
        return False
    claim = object()
    return _counted.setdefault(os.getpid(), claim) is claim


def count(store: Store) -> str:
    """Add the number of this process's threads to a counter of this host in the store. Blocks.

    Ranks that may use different processors of the host have different counters.

    :param store: the part of the store that belongs to one communicator.
    :returns: on the one rank that must warn, the key of the counter; on the other ranks, an empty text.
    """
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    key = f"threads/{hashlib.sha256(f'{host_id()} {processors}'.encode()).hexdigest()[:16]}"
    mine = _RANK + torch.get_num_threads()
    with contextlib.suppress(RuntimeError):  # The store is gone. The forming communicator raises the error.
        return key if store.add(key, mine) == mine else ""
    return ""


def warn(store: Store, key: str) -> None:
    """Warn if the ranks of this host have too many threads in total. Blocks."""
    with contextlib.suppress(RuntimeError):
        ranks, threads = divmod(store.add(key, 0), _RANK)
        processors = len(os.sched_getaffinity(0))
        if ranks > 1 and threads > processors:
            each = max(1, processors // ranks)
            _log.warning(
                "%d ranks on this host have %d of torch's threads together for %d processors, which slows all of them "
                "down: set OMP_NUM_THREADS=%d for each, or call torch.set_num_threads(%d) first",
                ranks, threads, processors, each, each,
            )  # fmt: skip
