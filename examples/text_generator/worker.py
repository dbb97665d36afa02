"""A rank of a group: its part of a plan, and its process."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import torch

from .links import LOST, Channel, Endpoint, Group, World, join, open_endpoint, open_world
from .metrics import Measures
from .model import DTYPE, NEAR, Shard
from .pages import Cache, Step, run_step

PATIENCE = 30.0  # seconds after the loss of a group within which all ranks must meet, or this rank ends
Choice = tuple[torch.Tensor, torch.Tensor]
"""The tokens after sequences, and their margins."""


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    model: Path
    tp: int
    pp: int
    pages: int
    """The pages of each decode group. One of them has no owner."""
    decoders: int
    host: str = ""
    port: int = 0

    def group_of(self, rank: int) -> tuple[str, list[int]]:
        """Return the name of a rank's group, and the ranks of the group."""
        size = self.tp * self.pp
        index = (rank - 1) // size
        return f"decode-{index - 1}" if index else "prefill", list(range(1 + index * size, 1 + (index + 1) * size))


class Rank:
    """A rank of any group. A plan is a kind and its arguments."""

    def __init__(self, group: Group, shard: Shard, cache: Cache, measures: Measures) -> None:
        self.group, self.shard, self.cache, self.measures = group, shard, cache, measures
        self.kinds: dict[str, Callable[..., Awaitable[Any]]] = {"step": self.step, "metrics": self.metrics}
        group.measure(measures.registry)

    async def execute(self, plan: tuple[Any, ...]) -> Any:
        """Carry out a plan."""
        kind, *what = plan
        return await self.kinds[kind](*what)

    async def step(self, packed: list[torch.Tensor]) -> Any:
        """Take tokens through the model. The leader gets the next tokens and their margins."""
        step = Step(*packed)
        return await self._chosen(len(step.tokens), await run_step(self.shard, self.cache, self.group, step))

    async def _chosen(self, sequences: int, choice: Choice | None) -> Choice | None:
        """Send the last stage's choice to the leader. Return it there, and None elsewhere."""
        group, last = self.group, self.group.part.shards * (self.group.part.stages - 1)
        if last == 0:
            return choice if group.rank == 0 else None
        if group.rank == last:
            assert choice is not None
            await group.send(torch.stack([choice[0].to(DTYPE), choice[1]]), 0)
        if group.rank != 0:
            return None
        tokens, margins = await group.recv(torch.empty(2, sequences, dtype=DTYPE), last)
        return tokens.long(), margins

    async def metrics(self) -> list[str] | None:
        """Return the metrics of all ranks on the leader; None elsewhere."""
        return await self.group.gather(self.measures.text())


class Leader:
    """Rank 0 of a group, which gets messages from the front. Both kinds of groups share this code."""

    def __init__(self, rank: Rank, channel: Channel) -> None:
        self.rank, self.group, self.channel = rank, rank.group, channel
        self._near = rank.measures.counter("near_ties", "Tokens that have won by less than 1e-9.")

    async def run(self) -> None:
        """Handle the front's messages until the front ends the group."""
        async with anyio.create_task_group() as self.tasks:
            self.tasks.start_soon(self.group.lost)
            self.begin()
            while (message := await self.channel.hear())[0] != "end":
                kind, *what = message
                getattr(self, f"on_{kind}")(*what)
            self.tasks.cancel_scope.cancel()

    def begin(self) -> None:
        """Start the tasks that run all the time."""

    async def choose(self, plan: tuple[Any, ...]) -> list[int]:
        """Run a step on the group, and return the token after each sequence."""
        tokens, margins = await self.group.run(plan)
        self._near.inc(int((margins < NEAR).sum()))
        return tokens.tolist()

    def on_metrics(self) -> None:
        """Send the group's metrics to the front."""
        self.tasks.start_soon(self._metrics)

    async def _metrics(self) -> None:
        self.channel.tell("metrics", await self.group.run(("metrics",)))


async def run(options: Options) -> None:
    """Run a rank of a group until the front ends.

    :raises LOST: ranks are lost and are not replaced
    """
    gc.freeze()
    torch.set_num_threads(1)
    async with open_world() as world:
        told: list[Any] | None = await world.meet(None)
        while told is not None:
            told = await be_whole(world, options, told)


async def be_whole(world: World, options: Options, told: list[Any]) -> list[Any] | None:
    """Form this rank's group, and work until a meeting shows that the group is incomplete.

    All its ranks notice that at the same meeting, and form the group again. Their sequences are lost.

    :param told: the objects of this meeting: the front's address, and the group's name of each other rank
    :returns: the objects of the later meeting; None if the front has ended
    """
    group, ranks = options.group_of(world.comm.rank)
    front, name = told[0], f"{group}.{world.turn}"
    anew = None
    try:
        async with anyio.create_task_group() as tasks:

            async def join_and_work() -> None:
                lost: BaseException | None = None
                try:
                    async with open_endpoint() as here, join(world, ranks, name, options.tp, options.pp) as joined:
                        await work(joined, name, options, here, front)
                except* LOST as errors:
                    lost = errors
                if lost is not None:
                    await anyio.sleep(PATIENCE)  # a rank has died, so a meeting follows soon
                    raise lost
                tasks.cancel_scope.cancel()

            tasks.start_soon(join_and_work)
            whole = [front, *(name for _ in ranks)]
            while anew is None:
                told = await world.meet(name)
                if [told[rank] for rank in (0, *ranks)] != whole:
                    anew = told
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup:
        if anew is None:  # errors of a cancelled group do not matter
            raise
    return anew


async def work(group: Group, name: str, options: Options, here: Endpoint, front: bytes) -> None:
    """Run this rank of a group until the front ends it.

    :param front: the address of the front
    """
    from .decode import DecodeLeader, DecodeRank
    from .prefill import PrefillLeader, PrefillRank, pages_at_once

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher signals all ranks, but the front ends groups
    role = name.partition("-")[0].partition(".")[0]
    ranks, leaders = {"prefill": PrefillRank, "decode": DecodeRank}, {"prefill": PrefillLeader, "decode": DecodeLeader}
    measures = Measures(f"{name} rank {group.rank}")
    shard = Shard(options.model, group.part)
    pages = options.pages if role == "decode" else pages_at_once(shard.shape)
    cache = Cache(shard.shape, group.part, pages, whole=role == "prefill")
    rank = ranks[role](group, shard, cache, measures, here, name)
    found = await group.gather((os.getpid(), rank.description))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measures.beat)
        tasks.start_soon(rank.listen)
        if found is not None:
            pids, descriptions = map(list, zip(*found, strict=True))
            print(f"{name} is processes {' '.join(map(str, pids))}", flush=True)
            async with group.lead(rank.execute):
                channel = await Channel.open(here, front)
                channel.tell("hello", role, name, descriptions, pages)
                await leaders[role](rank, channel, pages).run()
        else:
            await group.follow(rank.execute)
        tasks.cancel_scope.cancel()
