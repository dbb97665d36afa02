"""Live groups in simulated worlds: ranks die, are replaced, stand still, and are cut off from the store."""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from typing import Any

import pytest
import torch

import aiocomms
from aiocomms.errors import CommClosedError, LeftBehindError, StoreLostError
from aiocomms.live.lane import LiveLane, Partial
from aiocomms.testing.simulation import Faults, here, simulate

pytestmark = pytest.mark.deterministic

RANKS, CALLS = 3, 5
HISTORIES = int(os.environ.get("LIVE_HISTORIES", "100000"))


class Judge:
    """The judge of one history: it compares what ranks have been told with what they have contributed.

    Each contribution is a number of its own, in the place of its rank in a vector that is reduced by SUM. So a result
    shows whose contributions are in it, and which.
    """

    def __init__(self) -> None:
        self.given = 0
        self.of: dict[int, int] = {}
        """The rank of each contribution."""
        self.results: dict[tuple[str, int], tuple[tuple[int, ...], list[int]]] = {}
        self.rounds: dict[int, tuple[str, int]] = {}
        """The call that each contribution was in."""
        self.ended = self.partial = 0

    def gives(self, rank: int) -> torch.Tensor:
        """Make a contribution."""
        self.given += 1
        self.of[self.given] = rank
        vector = torch.zeros(RANKS, dtype=torch.int64)
        vector[rank] = self.given
        return vector

    def told(self, lane: str, mine: torch.Tensor, rank: int, found: Partial[torch.Tensor]) -> None:
        """Compare a result with those of the other ranks."""
        values, call = found.value.tolist(), (lane, found.number)
        assert self.results.setdefault(call, (found.ranks, values)) == (found.ranks, values), f"two results of {call}"
        assert [it for it, value in enumerate(values) if value] == list(found.ranks), f"{call}: {found}"
        for it in found.ranks:
            assert self.of[values[it]] == it
            assert self.rounds.setdefault(values[it], call) == call, f"{values[it]} is in two calls"
        if rank in found.ranks and values[rank] != mine[rank]:
            # This rank was late, and the process which had its place before has contributed.
            assert here().restarts, f"{call}: another contribution of rank {rank}"
        self.ended += 1
        self.partial += len(found.ranks) < RANKS


def simulated(seed: int, faults: Faults | None, judge: Judge) -> None:
    """Have ranks call collectives in two lanes, in a history of a seed."""

    async def program() -> None:
        rank = here().rank
        try:
            async with aiocomms.live_group(timeout=30) as group:
                lanes = [await group.lane(name) for name in ("one", "other")]
                for n in range(CALLS):
                    lane, mine = lanes[n % 3 == 2], judge.gives(rank)
                    try:
                        found = await lane.all_reduce(mine.clone(), timeout=0.2)
                    except LeftBehindError:
                        continue
                    judge.told(lane.name, mine, rank, found)
        except (StoreLostError, CommClosedError, aiocomms.errors.CommTimeoutError):
            pass

    simulate(program, RANKS, seed=seed, faults=faults)


def test_cancelled_calls_contribute_in_the_order_of_the_calls():
    """A call may be cancelled while it waits for the lane, contributes, or waits for the other ranks."""

    async def call(lane: LiveLane, number: int, ended: list[int]) -> None:
        tensor = torch.tensor([number])
        try:
            found = await lane.all_reduce(tensor)
        except asyncio.CancelledError:
            tensor.fill_(-1)  # The tensor is the caller's again.
            raise
        assert (found.number, found.ranks, found.value.item()) == (number, (0, 1, 2), RANKS * number)
        ended.append(number)

    async def program() -> int:
        ended: list[int] = []
        async with aiocomms.live_group(timeout=30) as group:
            lane = await group.lane()
            for number in range(8):
                task = asyncio.create_task(call(lane, number, ended))
                await asyncio.sleep(random.choice([0, 0.01, 0.1]) * random.random())
                if random.random() < 0.4:
                    task.cancel()
            assert (await lane.barrier()).number == 8
        return len(ended)

    counts = [count for seed in range(10) for count in simulate(program, RANKS, seed=seed).results]
    assert 0 < sum(counts) < 8 * len(counts)


def test_deadline_passes_while_a_call_waits_for_its_lane():
    async def program() -> None:
        async with aiocomms.live_group(timeout=30) as group:
            lane = await group.lane()
            if here().rank:
                await asyncio.sleep(5)
                assert [(await lane.barrier()).number for _ in range(3)] == [0, 1, 2]
                return
            earlier, now = asyncio.create_task(lane.barrier()), asyncio.get_running_loop().time
            await asyncio.sleep(0)
            began = now()
            with pytest.raises(aiocomms.errors.CommTimeoutError, match="earlier calls have not ended"):
                await lane.barrier(timeout=1)
            assert 1 <= now() - began < 1.1
            assert (await earlier).number == 0
            assert (await lane.barrier()).number == 2

    simulate(program, 2)


def faults(seed: int) -> Faults:
    """The faults of a seed."""
    return Faults(deaths=1 + seed % 2, restarts=bool(seed % 3), pauses=1, slow=1, partitions=seed % 2, within=0.08)


def test_all_are_in_each_call_where_nothing_goes_wrong():
    judge = Judge()
    simulated(1, None, judge)
    assert judge.ended == RANKS * CALLS
    assert not judge.partial


def test_ranks_are_told_the_same_whatever_goes_wrong():
    counts: dict[str, int] = defaultdict(int)
    for seed in range(25):
        judge = Judge()
        simulated(seed, faults(seed), judge)
        counts["ended"] += judge.ended
        counts["partial"] += judge.partial
    assert counts["partial"] > 20, f"nothing has gone wrong: {dict(counts)}"


@pytest.mark.search
@pytest.mark.timeout(7200)
def test_ranks_are_told_the_same_in_many_histories():
    counts: dict[str, Any] = defaultdict(int)
    for seed in range(1_000, 1_000 + HISTORIES):
        judge = Judge()
        try:
            simulated(seed, faults(seed), judge)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        counts["ended"] += judge.ended
        counts["partial"] += judge.partial
    print(dict(counts))
