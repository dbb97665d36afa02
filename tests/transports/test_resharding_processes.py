"""A source that is killed amid a move, between processes: the server goes on, and another source moves the next one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from processes import KILLED, Rank, Run

import aiocomms
from aiocomms.errors import MoveLostError
from aiocomms.resharding import Chunk, Source, Target

pytestmark = [pytest.mark.real, pytest.mark.search]

SIZE = 4096
"""Rows and columns: 64 MiB, of which each source rank writes four blocks to each target rank."""


@pytest.fixture
def transport() -> str:
    return "ucx"


async def serve(place: Rank) -> list[tuple[int, float]]:
    """Take steps until there is version 2; return the versions, and what they consisted of."""
    async with place.open("server", [0, 1]) as comm, aiocomms.open_endpoint("ucx") as mine:
        columns = Chunk(torch.zeros(SIZE, SIZE // 2), (SIZE, SIZE), (0, SIZE // 2 * place.rank))
        async with await Target.open(comm, {"w": columns}, mine) as target:
            if place.rank == 0:
                place.give("address", target.address)
            seen: list[tuple[int, float]] = []
            while not seen or seen[-1][0] < 2:
                async with target.step() as weights:
                    least, most = map(float, weights["w"].aminmax())
                    assert least == most, f"version {weights.version} has {least} and {most}"
                    seen.append((weights.version, most))
                    assert await comm.all_gather_object(seen[-1]) == [seen[-1]] * 2
    return sorted({*seen})


async def train(place: Rank) -> float:
    """Move version 1; then rank 1 is killed while it packs its third block of version 2."""
    packed = 0

    def convert(name: str, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        nonlocal packed
        packed += 1
        if place.rank == 3 and packed == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return part

    rank, address = place.rank - 2, await place.heard_of("address")
    async with place.open("trainer", [2, 3]) as comm, aiocomms.open_endpoint("ucx") as mine:
        rows = Chunk(torch.ones(SIZE // 2, SIZE), (SIZE, SIZE), (SIZE // 2 * rank, 0))
        async with await Source.open(comm, {"w": rows}, mine, address, convert=convert) as source:
            await source.move(1)
            rows.tensor.fill_(2.0)
            with pytest.raises(MoveLostError, match=r"version 2 is not current: .*rank 1"):
                await source.move(2)
            place.tell("the trainer is lost")
            return source.version


async def train_anew(place: Rank) -> float:
    """Move version 2 in the place of the trainer that is lost."""
    await place.heard("the trainer is lost")
    rank, address = place.rank - 4, await place.heard_of("address")
    async with place.open("other trainer", [4, 5]) as comm, aiocomms.open_endpoint("ucx") as mine:
        rows = Chunk(torch.full((SIZE // 2, SIZE), 20.0), (SIZE, SIZE), (SIZE // 2 * rank, 0))
        async with await Source.open(comm, {"w": rows}, mine, address) as source:
            before = source.version
            await source.move(2)
            return before


async def each(place: Rank) -> Any:
    return await (serve, train, train_anew)[place.rank // 2](place)


def test_server_goes_on_when_a_source_is_killed_amid_a_move(ranks: Run) -> None:
    results = ranks(6, each)
    assert results[0] == results[1]
    assert set(results[0]) <= {(0, 0.0), (1, 1.0), (2, 20.0)}
    assert results[2:] == [1, KILLED, 1, 1]
