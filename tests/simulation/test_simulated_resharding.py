"""Weights that move into a server in a simulated world: what each step reads, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from repeating import repeated

import aiocomms
from aiocomms.errors import CommError, CommTimeoutError
from aiocomms.lowlevel import clock
from aiocomms.resharding import Chunk, Source, Target
from aiocomms.testing.simulation import Faults, History, here, simulate

pytestmark = pytest.mark.deterministic

ROWS, COLUMNS = 6, 4
LAST = 3
FAULTS = (
    Faults(deaths=1),
    Faults(pauses=1),
    Faults(cuts=1),
    Faults(partitions=1),
    Faults(slow=1),
    Faults(deaths=1, pauses=1, cuts=1, partitions=1),
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


def leave(name: str, value: bytes) -> None:
    """Leave something for the ranks of all jobs."""
    here().world.store.set(name, value)


async def found(name: str) -> bytes:
    """Wait for what another rank has left."""
    store, ends = here().world.store, clock.now() + PATIENCE
    while not store.check([name]):
        if clock.now() > ends or store.check(["no server"]):
            raise CommTimeoutError(f"nobody has left {name!r}")
        await asyncio.sleep(0.02)
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
        over = False
        while not over:
            async with target.step() as weights:
                seen.append(weights.version)
                assert weights["w"].equal(by_columns(weights.version, rank).tensor)
                now = weights.version == LAST or here().world.store.check(["over"])
                told = await comm.all_gather_object((weights.version, now))
                assert {version for version, _ in told} == {weights.version}
                await asyncio.sleep(0.05 * random.random())
                assert weights["w"].equal(by_columns(weights.version, rank).tensor)
                over = told[0][1]


async def train(rank: int, versions: Iterable[int], seen: list[int]) -> None:
    """Move some versions, one after the other."""
    async with (
        aiocomms.new_comm(timeout=30) as comm,
        aiocomms.open_endpoint(timeout=30) as mine,
    ):
        chunk = by_rows(0, rank)
        async with await Source.open(comm, {"w": chunk}, mine, await found("address")) as source:
            for version in versions:
                chunk.tensor.copy_(by_rows(version, rank).tensor)
                await source.move(version, timeout=40)
                seen.append(version)


async def whatever_goes_wrong() -> Seen:
    """Serve on two ranks; train on two others, which two more take the place of for the last version."""
    job, rank = divmod(here().rank, 2)
    seen: list[int] = []
    here().launched_as(("server", "trainer", "other trainer")[job], rank, 2)
    try:
        if job == 0:
            await serve(rank, seen)
        elif job == 1:
            await train(rank, range(1, LAST), seen)
        else:
            await found("no trainer")
            await train(rank, [LAST], seen)
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


def test_history_that_has_failed_does_not() -> None:
    """A work that a cancelled move had left behind was reported as forgotten."""
    check(1030, Faults(cuts=1))


@pytest.mark.search
@pytest.mark.timeout(0)
@pytest.mark.parametrize("half", range(2))
def test_server_goes_on_in_histories_of_new_seeds(half: int) -> None:
    first, last = map(int, SEARCHED.split("-"))
    for seed in range(first + half, last, 2):
        check(seed, FAULTS[seed // 2 % len(FAULTS)])
