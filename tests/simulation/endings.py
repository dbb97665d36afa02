"""End a communicator on purpose: each way loses it on all ranks, with a known failure."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from place import BrokenPromiseError, Place

from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, MismatchError


async def _lost(at: Place, kind: Any, *peers: int) -> None:
    """Reduce until the communicator is lost, by an error of a class that names one of some ranks, or nobody."""
    try:
        for _ in range(20):
            await at.end(at.comm.all_reduce(torch.ones(4), timeout=0.5), 0.5)
    except CommError:
        if at.calm:
            with at.timely(0.5, "lost"):
                lost = await at.comm.lost()
            if not isinstance(lost, kind) or lost.peer not in (*peers, None):
                raise BrokenPromiseError(f"rank {at.rank} of {at.size}: {lost!r}, wanted {kind} of {peers}") from lost
        raise


async def abort(at: Place) -> bool:
    """One rank aborts."""
    who, seconds = at.someone(), at.draw.choice((0.0, 0.001, 0.01))
    if at.rank == who:
        await asyncio.sleep(seconds)
        at.comm.abort("it was drawn")
    await _lost(at, CommAbortedError, who)
    return False


async def leave(at: Place) -> bool:
    """One rank closes, and does not come again."""
    who = at.someone()
    if at.rank == who:
        with at.timely(5, "close of a rank that leaves"):
            await at.comm.aclose()
        return True
    await _lost(at, CommAbortedError, who)
    return False


async def late(at: Place) -> bool:
    """One rank does not call what the others have called."""
    who = at.someone()
    if at.rank == who and at.size > 1:
        with at.timely(0.5 if at.calm else 600, "loss of a communicator by a rank that does not come"):
            raise await at.comm.lost()
    if at.size == 1:
        at.comm.abort("there is nobody to wait for")
    try:
        await _lost(at, CommTimeoutError if at.size > 1 else CommAbortedError, who)
    except CommError:
        lost = await at.comm.lost()
        if at.calm and at.size > 1 and getattr(lost, "late", None) != (who,):
            raise BrokenPromiseError(f"rank {who} was late, and {lost!r} names others") from lost
        raise
    return False


async def disagree(at: Place) -> bool:
    """One rank calls something else, in another place."""
    who = at.someone()
    if at.size == 1:
        at.comm.abort("there is nobody to disagree with")
    if at.rank == who:
        await at.end(at.comm.all_reduce(torch.ones(5), timeout=0.5), 0.5)
    await _lost(at, (MismatchError, CommTimeoutError) if at.size > 1 else CommAbortedError, *range(at.size))
    return False


async def misfit(at: Place) -> bool:
    """A message has another dtype than the buffer that it is received into."""
    dst = at.someone()
    src = (dst + 1) % at.size
    works = [at.comm.send(torch.ones(2), dst, at.tag())] if at.rank == src else []
    works += [at.comm.recv(torch.ones(2, dtype=torch.int32), src, at.tag())] if at.rank == dst else []
    try:
        await at.all_end(works)
    except CommError:
        if not at.calm or not at.comm.aborted:
            raise
    await _lost(at, MismatchError, src, dst)
    return False


ENDINGS = (abort, leave, late, disagree, misfit)
