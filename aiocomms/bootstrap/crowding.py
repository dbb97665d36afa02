"""The warning that the ranks of one host have more of torch's threads together than processors.

Each rank has as many as its host has processors, unless ``OMP_NUM_THREADS`` says otherwise. Threads that want a
processor then keep the event loops of other ranks from theirs. A rank whose threads nobody has limited adds them to a
number in the store once it has met the others. So all are counted when a communicator is formed.
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
"""The part of the number that stands for one rank; the rest is threads."""
_log = logging.getLogger("aiocomms")
_counted: dict[int, object] = {}
"""This process, and what has counted it: ranks that are its tasks or threads share torch's threads."""


def may_crowd(size: int) -> bool:
    """Return whether to count this process: it is not counted yet, and nobody has limited torch's threads in it."""
    if size == 1 or clock.simulation is not None or "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() == 1:
        return False
    claim = object()
    return _counted.setdefault(os.getpid(), claim) is claim


def count(store: Store) -> str:
    """Add this process's threads to those of its host, which blocks. Ranks with other processors are counted apart.

    :param store: the part of the store that belongs to one communicator.
    :returns: the key of the number, for the one rank of them that is to warn; empty: another one does.
    """
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    key = f"threads/{hashlib.sha256(f'{host_id()} {processors}'.encode()).hexdigest()[:16]}"
    mine = _RANK + torch.get_num_threads()
    with contextlib.suppress(RuntimeError):  # Without the store no communicator is formed, which says why.
        return key if store.add(key, mine) == mine else ""
    return ""


def warn(store: Store, key: str) -> None:
    """Warn if the ranks of this host have too many threads together; blocks."""
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
