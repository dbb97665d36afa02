"""The body of one rank of ``make chaos``: checked ops, while something goes wrong around it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import torch
from disturbances import FATAL, GENTLE, HARSH, PLUG_INS, PROCESS_WIDE, Interrupted
from inside import Entry
from oracle import oracle
from processes import HANGS, Rank
from soak_rank import Work
from torch.distributed import HashStore, Store

import aiocomms
from aiocomms.bootstrap import registry
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommError
from aiocomms.transport import Transport

SIZE = 3
LONGEST = 20.0
"""Seconds for forming a communicator, and for each op, if one rank may give up while the others wait for it."""
RIGHT, INTERRUPTED = "right", "interrupted"

Outcome = tuple[str, dict[str, int]]
"""The outcome of a rank: RIGHT, INTERRUPTED, or the text of the error that ended its communicator; and its counts."""


async def play(place: Rank, what: str, seed: int, steps: int) -> list[Outcome]:
    """Run the ranks of this process, beside a communicator that must go on unless the disturbance is harsh.

    A process has one rank, or on ``local`` all ranks, of which one brings a disturbance of the whole process.
    """
    victim = random.Random(seed).randrange(SIZE)
    ranks = range(SIZE) if place.transport == "local" else [place.rank]
    store = HashStore() if place.transport == "local" else place.store()
    victims = [victim % place.size] if what in HARSH else []
    async with oracle(place, *victims, reported="'chaos'|Spoilt" if what in FATAL else None):
        return list(
            await asyncio.gather(*(live(place.transport, store, it, victim, what, seed, steps) for it in ranks))
        )


async def live(transport: str, store: Store, rank: int, victim: int, what: str, seed: int, steps: int) -> Outcome:
    """Form a communicator, run ops, close it, and check that the disturbance permits the outcome."""
    rng, counts = random.Random(seed + 1 + rank), Counter[str]()
    alone = what in FATAL or (transport == "local" and what in PROCESS_WIDE)
    own = what if rank == victim or not alone else None
    with plugged_in(transport, own, rng) as name:
        timeout = LONGEST if what in FATAL else HANGS
        opening = aiocomms.new_comm(name, store=store, rank=rank, size=SIZE, name="chaos", timeout=timeout)
        outcome = await lives(opening, own, rng, seed, steps, counts)
    if what not in FATAL:
        assert outcome == RIGHT, outcome
    elif outcome not in (RIGHT, INTERRUPTED):
        assert "'chaos'" in outcome, f"nobody names the communicator: {outcome}"
    if own == "raises" and outcome != RIGHT:
        assert "Spoilt" in outcome or "spoilt" in outcome, f"nobody names the plug-in: {outcome}"
    if outcome == INTERRUPTED:
        assert rank == victim or transport == "local"
    return outcome, dict(counts)


async def lives(opening: Any, what: str | None, rng: random.Random, seed: int, steps: int, counts: Counter[str]) -> str:
    try:
        async with opening as comm:
            try:
                async with (GENTLE | HARSH).get(what or "", undisturbed)(rng, comm):
                    await works(comm, seed, steps, counts)
            except Interrupted as error:
                comm.abort(f"chaos: {error!r}")
                return INTERRUPTED
    except Interrupted:
        return INTERRUPTED
    except CommError as error:
        return str(error)
    return RIGHT


@contextlib.asynccontextmanager
async def undisturbed(rng: random.Random, comm: Communicator) -> AsyncIterator[None]:
    yield


async def works(comm: Communicator, seed: int, steps: int, counts: Counter[str]) -> None:
    window = await comm.new_window(torch.zeros(8, dtype=torch.int64))
    work = Work(comm, window, seed, counts)
    for _ in range(steps):
        await work.step()
    await comm.barrier()
    assert int(window.tensor[0]) == work.added, "wrong data: a sum"
    await window.aclose()


@contextlib.contextmanager
def plugged_in(transport: str, what: str | None, rng: random.Random) -> Any:
    """Yield the name of the transport to use: for a fault of a plug-in, the name of a spoilt one."""
    if what not in PLUG_INS:
        yield transport
        return
    known = registry.entries()
    base: type[Transport] = known[transport].load()
    with PLUG_INS[what](rng, base) as kind:
        entry = Entry("spoilt", kind)
        before, registry.entries = registry.entries, lambda: {**known, "spoilt": entry}  # type: ignore[assignment]
        try:
            yield "spoilt"
        finally:
            registry.entries = before
