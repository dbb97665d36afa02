"""Weights that move into a server in a simulated world: what each step reads, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from notices import leave
from repeating import repeated

import aiocomms
from aiocomms import Communicator, Endpoint
from aiocomms.errors import CommError, CommTimeoutError, MoveLostError
from aiocomms.lowlevel import clock
from aiocomms.resharding import Chunk, Source, Target
from aiocomms.resharding.target import REPLACED
from aiocomms.testing.simulation import Faults, History, here, simulate

pytestmark = pytest.mark.deterministic

ROWS, COLUMNS = 6, 4
LAST = 3
LENGTH = 0.2
"""Seconds that a history takes without faults, about: to find out each time would take as long as the history."""
FAULTS = (
    Faults(deaths=1, within=LENGTH),
    Faults(pauses=1, within=LENGTH),
    Faults(cuts=1, within=LENGTH),
    Faults(partitions=1, within=LENGTH),
    Faults(slow=1, within=LENGTH),
    Faults(deaths=1, pauses=1, cuts=1, partitions=1, within=LENGTH),
)
SEARCHED = os.environ.get("MOVE_SEEDS", "0-100000")
"""The seeds that a search takes; half of them are each of two tests', for two processors."""
PATIENCE = 150.0
"""Seconds after which nobody is left who would do what a rank waits for."""


def tensor(version: int) -> torch.Tensor:
    """The whole tensor of a version: no element of two versions or places is the same."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1000 * version


def by_rows(version: int, rank: int) -> Chunk:
    return Chunk(tensor(version)[3 * rank : 3 * rank + 3], (ROWS, COLUMNS), (3 * rank, 0))


def by_columns(version: int, rank: int) -> Chunk:
    return Chunk(tensor(version)[:, 2 * rank : 2 * rank + 2].clone(), (ROWS, COLUMNS), (0, 2 * rank))


async def found(name: str) -> bytes:
    """Wait for what another rank has left."""
    store, ends, wait = here().world.store, clock.now() + PATIENCE, 0.01
    while not store.check([name]):
        if clock.now() > ends or store.check(["no server"]):
            raise CommTimeoutError(f"nobody has left {name!r}")
        await asyncio.sleep(wait := min(1.0, 1.5 * wait))
    return store.get(name)


class Seen(NamedTuple):
    """The history of a rank."""

    versions: list[int]
    """The versions that its steps had, or that it has moved."""
    error: CommError | None


async def serve(rank: int, seen: list[int]) -> None:
    """Take steps until the last version is there, or no source is left."""
    async with (
        aiocomms.new_comm(timeout=100) as comm,
        aiocomms.open_endpoint(timeout=100) as mine,
        await Target.open(comm, {"w": by_columns(0, rank)}, mine) as target,
    ):
        if rank == 0:
            leave("address", target.address)
        over, rests = False, 0.05
        while not over:
            async with target.step() as weights:
                rests = min(2.0, 1.2 * rests) if seen and seen[-1] == weights.version else 0.05
                seen.append(weights.version)
                assert weights["w"].equal(by_columns(weights.version, rank).tensor)
                now = weights.version == LAST or here().world.store.check(["over"])
                told = await comm.all_gather_object((weights.version, now))
                assert {version for version, _ in told} == {weights.version}
                await asyncio.sleep(rests * random.random())
                assert weights["w"].equal(by_columns(weights.version, rank).tensor)
                over = told[0][1]


async def train(versions: Iterable[int], seen: list[int], persists: bool = False) -> None:
    """Move some versions, one after the other.

    :param persists: whether to begin anew when another source, of which a rank has been late, takes the place.
    """
    left = deque(versions)
    async with aiocomms.new_comm(timeout=30) as comm:
        while left:
            try:
                async with aiocomms.open_endpoint(timeout=30) as mine:
                    await move_all(comm, mine, left, seen)
            except MoveLostError as error:
                if not persists or REPLACED not in str(error):
                    raise


async def move_all(comm: Communicator, mine: Endpoint, left: deque[int], seen: list[int]) -> None:
    chunk = by_rows(0, comm.rank)
    async with await Source.open(comm, {"w": chunk}, mine, await found("address")) as source:
        while left:
            chunk.tensor.copy_(by_rows(left[0], comm.rank).tensor)
            await source.move(left[0], timeout=40)
            seen.append(left.popleft())


async def whatever_goes_wrong() -> Seen:
    """Serve on two ranks; train on two others, which two more take the place of for the last version."""
    job, rank = divmod(here().rank, 2)
    seen: list[int] = []
    here().launched_as(("server", "trainer", "other trainer")[job], rank, 2)
    try:
        if job == 0:
            await serve(rank, seen)
        elif job == 1:
            await train(range(1, LAST), seen)
        else:
            await found("no trainer")
            await train([LAST], seen, persists=True)
    except CommError as error:
        leave(("no server", "no trainer", "over")[job], b"")
        return Seen(seen, error)
    if job == 1:
        leave("no trainer", b"")
    return Seen(seen, None)


def check(seed: int, faults: Faults | None = None) -> History:
    """Run a history, and judge it: what each step has read was checked there."""
    history = simulate(whatever_goes_wrong, 6, seed=seed, faults=faults, longest=2000)
    try:
        judge(history)
    except AssertionError as error:
        error.add_note(f"seed {history.seed}, {faults}: {[*map(str, history.faults)]}: {history.results}")
        raise
    return history


def judge(history: History) -> None:
    """Compare what the ranks have seen."""
    struck = {int(rank) for rank in re.findall(r"rank (\d)", str(history.faults))}
    servers, trainers, others = (history.results[at : at + 2] for at in (0, 2, 4))
    for seen in (*servers, *trainers, *others):
        assert seen is None or seen.versions == sorted(seen.versions), "a version comes back"
    if not struck & {2, 3}:
        assert [one.versions for one in trainers] == [[1, 2]] * 2 or struck & {0, 1}
    if not struck & {0, 1, 4, 5}:
        assert [one.versions for one in others] == [[LAST]] * 2, "nobody has taken the place of a lost source"
        assert [one.versions[-1] for one in servers] == [LAST] * 2


def test_every_step_reads_one_whole_version_on_all_ranks() -> None:
    for seed in range(2):
        history = repeated(whatever_goes_wrong, 6, seed=seed)
        judge(history)
        assert all(seen.error is None for seen in history.results)
        assert {*history.results[0].versions} <= {0, 1, 2, 3}


@pytest.mark.parametrize("faults", FAULTS, ids=str)
def test_server_goes_on_whatever_becomes_of_the_source(faults: Faults) -> None:
    for seed in range(2):
        check(seed, faults)


def test_source_whose_place_a_late_one_takes_begins_anew() -> None:
    check(1343, FAULTS[2])


@pytest.mark.search
@pytest.mark.timeout(0)
@pytest.mark.parametrize("half", range(2))
def test_server_goes_on_in_histories_of_new_seeds(half: int) -> None:
    first, last = map(int, SEARCHED.split("-"))
    for seed in range(first + half, last, 2):
        check(seed, FAULTS[seed // 2 % len(FAULTS)])
