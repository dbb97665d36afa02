"""The log of lanes itself, on ranks that a test moves on step by step, in thousands of orders of the same steps."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from aiocomms_nccl import wire
from aiocomms_nccl.calls import CallPlan
from aiocomms_nccl.lane_log import LaneLog, LaneOwner

from aiocomms import ops
from aiocomms.errors import CommError, LaneAbortedError

pytestmark = pytest.mark.deterministic

COUNT = 3
"""The number of collectives of each lane."""


class LoggedWork:
    """A work."""

    hints = None

    def __init__(self, op: ops.Op) -> None:
        self.op = op
        self.outcome: Any = None

    def done(self) -> bool:
        return self.outcome is not None

    def complete(self, value: Any = None) -> None:
        assert not self.done()
        self.outcome = "completed"

    def fail(self, error: CommError) -> None:
        assert not self.done()
        self.outcome = error


class LoggedRank:
    """One rank's log above a launcher, and connections, that do nothing by themselves."""

    def __init__(self, world: LoggedWorld, rank: int) -> None:
        self.rank, self.size, self.aborted = rank, world.size, False
        self.world = world
        self.cuda = SimpleNamespace(capturing=lambda: False)
        self.library = SimpleNamespace(unique_id=lambda: bytes(128), communicator=lambda *_: None)
        self.control = self
        self.launcher = self
        self.peers = [peer for peer in range(world.size) if peer != rank]
        self.threads: deque[tuple[Callable[[], Any], Callable[[Any], object]]] = deque()
        self.launched: list[tuple[Any, Callable[[], object]]] = []
        self.ended = 0
        self.works: dict[int, list[LoggedWork]] = {}
        self.given_up: set[int] = set()
        self.lost: list[LoggedWork] = []  # the works that were pending in lanes when they were given up
        self.log = LaneLog(cast("LaneOwner", self))

    def send(self, peer: int, frame: wire.Frame) -> None:
        self.world.links[self.rank, peer].append(frame)

    def wake(self) -> None:
        self.world.woken.add(self.rank)

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        self.threads.append((call, then))

    def comm_stream(self, *_: Any) -> Any:
        return SimpleNamespace(warm=lambda: None)

    def plan(self, op: ops.Op) -> CallPlan:
        return CallPlan([], kept=[cast("torch.Tensor", op)])

    def mark(self) -> None:
        return None

    def adopt(self, *_: Any) -> None:
        pass

    def launch(self, cs: Any, what: str, plan: Any, after: Any, then: Callable[[], object]) -> object:
        self.launched.append((plan.kept[0], then))
        return self

    def call(self, lane: int) -> None:
        works = self.works.setdefault(lane, [])
        op = ops.Broadcast(torch.tensor([lane, len(works)]), 0)  # the tensor by which the test knows it
        works.append(LoggedWork(op))
        self.log.post(op, lane, works[-1])

    def give_up(self, lane: int) -> None:
        self.given_up.add(lane)
        self.lost += [work for work in self.works.get(lane, ()) if not work.done()]
        self.log.give_up(lane, LaneAbortedError("the lane was given up"))


class LoggedWorld:
    """All ranks, the frames on their way, and what may happen next."""

    def __init__(self, size: int, lanes: int, seed: int) -> None:
        self.size, self.lanes = size, lanes
        self.chance = random.Random(seed)
        self.links: dict[tuple[int, int], deque[wire.Frame]] = {
            (a, b): deque() for a in range(size) for b in range(size)
        }
        self.woken: set[int] = set()
        self.ranks = [LoggedRank(self, rank) for rank in range(size)]
        self.doomed = {lane for lane in range(lanes) if self.chance.random() < 0.3}

    def steps(self) -> list[Callable[[], object]]:
        """All that may happen next."""
        found: list[Callable[[], object]] = []
        for rank in self.ranks:
            for lane in range(self.lanes):
                if lane not in rank.given_up:
                    if len(rank.works.get(lane, ())) < COUNT:
                        found.append(lambda rank=rank, lane=lane: rank.call(lane))
                    if lane in self.doomed and any(lane in other.given_up for other in self.ranks):
                        found.append(lambda rank=rank, lane=lane: rank.give_up(lane))
            if rank.threads:
                found.append(lambda rank=rank: self.form(rank))
            if rank.rank in self.woken:
                found.append(lambda rank=rank: self.turn(rank))
            if self.may_end(rank):
                found.append(lambda rank=rank: self.end(rank))
        found += [lambda link=link: self.deliver(*link) for link, frames in self.links.items() if frames]
        return found

    def form(self, rank: LoggedRank) -> None:
        call, then = rank.threads.popleft()
        then(call())

    def turn(self, rank: LoggedRank) -> None:
        self.woken.discard(rank.rank)
        rank.log.turn(False)

    def deliver(self, src: int, dst: int) -> None:
        """Have a rank handle some of the frames that come from another one, in one turn of its loop."""
        frames = self.links[src, dst]
        for _ in range(self.chance.randint(1, len(frames))):
            packed = bytearray(wire.pack(frames.popleft()))
            (frame,) = wire.unpack(packed)
            self.ranks[dst].log.handle(src, cast("wire.LaneFrame", frame))
        self.ranks[dst].log.turn(True)

    def may_end(self, rank: LoggedRank) -> bool:
        """Return whether all ranks have launched the collective after a rank's last one that ended."""
        return rank.ended < min(len(other.launched) for other in self.ranks)

    def end(self, rank: LoggedRank) -> None:
        rank.ended += 1
        rank.launched[rank.ended - 1][1]()

    def run(self) -> None:
        """Let everything happen in some order, with faults amid it."""
        faults = deque(self.doomed)
        while steps := self.steps():
            self.chance.choice(steps)()
            if faults and self.chance.random() < 0.02:
                self.chance.choice(self.ranks).give_up(faults.popleft())
            self.check()

    def check(self) -> None:
        """All launch one sequence, of what all have called and nobody has ended."""
        names = [[tuple(op.tensor.tolist()) for op, _ in rank.launched] for rank in self.ranks]
        longest = max(names, key=len)
        assert all(row == longest[: len(row)] for row in names), names
        for rank in self.ranks:
            for lane, number in longest[rank.ended :]:
                assert not rank.works[lane][number].done()


@pytest.mark.parametrize(("size", "lanes"), [(1, 3), (2, 2), (3, 5)])
@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 2000), marks=pytest.mark.search)])
def test_everything_ends_in_whatever_order_it_happens(size: int, lanes: int, seeds: range) -> None:
    given_up = launched = 0
    for seed in seeds:
        world = LoggedWorld(size, lanes, seed)
        world.run()
        for rank in world.ranks:
            for lane in range(lanes):
                outcomes = [work.outcome for work in rank.works.get(lane, ())]
                if lane not in rank.given_up:
                    assert outcomes == ["completed"] * COUNT, (seed, rank.rank, lane)
                assert all(outcomes), (seed, rank.rank, lane, outcomes)
            assert all(isinstance(work.outcome, LaneAbortedError) for work in rank.lost)
            given_up += len(rank.lost)
            assert not rank.log._lanes
            assert not rank.log._posted
            assert rank.ended == len(rank.launched)
        assert not world.ranks[0].log._sequencer
        launched += len(world.ranks[0].launched)
    assert given_up > len(seeds) / 5
    assert launched > len(seeds) * lanes
