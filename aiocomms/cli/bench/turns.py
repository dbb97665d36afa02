"""The turns of the contenders, which are a communicator of aiocomms and the peers for comparison.

In a turn, one contender runs one operation several times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from aiocomms.cli.bench.arguments import BenchPlan
from aiocomms.cli.bench.cases import BenchCase
from aiocomms.cli.bench.machine import HostProbe, HostState
from aiocomms.cli.bench.measure import BEATING, lateness, median, percentile, turn
from aiocomms.cli.bench.operations import OPERATIONS, PING_PONG
from aiocomms.cli.bench.ours import Call, Contender, Ours
from aiocomms.cli.bench.report import Reporter, Row
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import UnsupportedOperation

_ROUNDS = 5
_FEWEST, _MOST = 10, 100_000
"""The smallest and the largest number of iterations in a measurement of the loop's lateness."""


class Entry:
    """A contender, its tensors for one case, and its measurements on this rank."""

    name: str
    contender: Contender
    case: BenchCase
    used: float
    wrong: int

    def __init__(self, name: str, contender: Contender, case: BenchCase, call: Call | None) -> None:
        self.name, self.contender, self.case, self._call = name, contender, case, call
        self.took: list[int] = []
        self.used = 0.0
        self.wrong = 0

    async def check(self, count: int) -> None:
        """Run the operation ``count`` times, and check the results each time."""
        for _ in range(count):
            self.case.fill()
            await self.turn(1)
            self.wrong += self.case.wrong()
        self.case.clear()

    async def turn(self, count: int) -> tuple[list[int], float]:
        """Run the operation ``count`` times, between two barriers of all ranks.

        The barriers are operations of the contender's own library. A contender's call may block the event loop of its
        rank. A barrier of aiocomms would wait for this event loop, but the contender's own barrier does not.
        """
        await self.contender.enter()
        measured = await turn(self._call, self.contender.blocking, count)
        await self.contender.leave()
        return measured

    async def time(self, count: int) -> None:
        """Run one turn, and record its times."""
        took, used = await self.turn(count)
        self.took += took
        self.used += used

    async def lateness(self, count: int) -> float:
        """Run one turn while another task sleeps repeatedly. Return the lateness of the sleeps in seconds."""
        await self.contender.enter()
        late = await lateness(self._call, self.contender.blocking, count)
        await self.contender.leave()
        return late


class BenchTurns:
    """The measurements of one communicator and its peers, for all operations and sizes."""

    def __init__(
        self, plan: BenchPlan, transport: str, comm: Communicator, contenders: Mapping[str, Contender],
        reporter: Reporter | None,
    ) -> None:  # fmt: skip
        self._plan, self._transport, self._comm = plan, transport, comm
        self._contenders, self._reporter = contenders, reporter
        self._probe = HostProbe(comm)
        self._without: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Measure all contenders, and report on rank 0."""
        cases = [(op, size) for op in self._plan.ops for size in (self._plan.sizes if op != "barrier" else (0,))]
        await self._probe.open()
        async with AsyncExitStack() as stack:
            if self._reporter is not None:
                stack.enter_context(self._reporter.progress(len(cases)))
            for op, nbytes in cases:
                await self._measure(op, nbytes)
                if self._reporter is not None:
                    self._reporter.step(f"{self._transport} {op}")

    async def _measure(self, op: str, nbytes: int) -> None:
        async with AsyncExitStack() as stack:
            entries = [
                entry
                for name in self._contenders
                if (name, op) not in self._without and (entry := await self._bind(stack, name, op, nbytes)) is not None
            ]
            counts = [await self._count(entry) for entry in entries]
            states = [await self._probe.look()]
            for number in range(_ROUNDS):
                for place in range(number, number + len(entries)):
                    await entries[place % len(entries)].time(counts[place % len(entries)])
                states.append(await self._probe.look())
            ours: Row | None = None
            for entry in entries:
                row = await self._row(entry, ours, states)
                ours = row if isinstance(entry.contender, Ours) else ours
                if self._reporter is not None:
                    self._reporter.row(row)

    async def _bind(self, stack: AsyncExitStack, name: str, op: str, nbytes: int) -> Entry | None:
        """Prepare a contender for a case, run at least one iteration, and check the result.

        Return None if the contender cannot run the case.
        """
        contender = self._contenders[name]
        entry = reason = None
        try:
            case = BenchCase(op, nbytes, self._comm.rank, self._comm.size)
            entry = Entry(name, contender, case, await stack.enter_async_context(contender.bound(case)))
            await entry.check(max(1, self._plan.check))
        except Exception as error:
            if isinstance(contender, Ours) and not isinstance(error, UnsupportedOperation):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__  # Other libraries may raise any error.
        reason = first(await self._comm.all_gather_object(reason))
        if reason is None:
            return entry
        self._without.add((name, op))
        if self._reporter is not None:
            self._reporter.missing(name, op, reason)
        return None

    async def _count(self, entry: Entry) -> int:
        """Run the warm-up iterations, and return the number of iterations of each recorded turn."""
        count = -(-self._plan.iterations // _ROUNDS)
        took, _ = await entry.turn(self._plan.warmup)
        if self._plan.seconds == math.inf:
            return count
        slowest = max(await self._comm.all_gather_object(median(took) / 1e9 if took else 0.0))
        return max(1, min(count, int(self._plan.seconds / _ROUNDS / max(slowest, 1e-9))))

    async def _row(self, entry: Entry, ours: Row | None, states: Sequence[HostState]) -> Row:
        operation, case, size = OPERATIONS[entry.case.op], entry.case, self._comm.size
        shares = [(took, used) for took, used in await self._comm.all_gather_object((entry.took, entry.used)) if took]
        timed = shares[:1] if operation.share == PING_PONG else shares
        # The time of an op is the longest time of all ranks.
        took = [max(each) * operation.share / 1e3 for each in zip(*(times for times, _ in timed), strict=True)]
        p50 = median(took)
        seconds = BEATING if self._plan.seconds == math.inf else max(BEATING, self._plan.seconds)
        late = await entry.lateness(min(_MOST, max(_FEWEST, int(seconds * 1e6 / p50))))
        if self._plan.check:
            await entry.check(self._plan.check)
        found = await self._comm.all_gather_object((late, entry.wrong))
        algbw = case.nbytes / p50 / 1e3 if case.nbytes else None
        used = sum(used for _, used in shares) / len(shares) / len(took) * operation.share
        return Row(
            op=case.op, transport=self._transport, by=entry.name, carrier=self._carrier(entry),
            bytes=case.nbytes, count=case.count, iterations=len(took),
            p50_us=round(p50, 3), p99_us=round(percentile(took, 99), 3), mean_us=round(sum(took) / len(took), 3),
            algbw_gbs=algbw and round(algbw, 6), busbw_gbs=algbw and round(algbw * operation.factor(size), 6),
            late_p99_us=round(max(late for late, _ in found) * 1e6, 3), cpu_us=round(used * 1e6, 3),
            states=[one.worst(other) for one, other in itertools.pairwise(states)],
            wrong=sum(wrong for _, wrong in found) if self._plan.check else None,
            ratio=round(p50 / ours.p50_us, 3) if ours is not None else 1.0 if self._carrier(entry) else None,
        )  # fmt: skip

    def _carrier(self, entry: Entry) -> str | None:
        """Return the transport that executed the operation; None for a peer."""
        if not isinstance(entry.contender, Ours):
            return None
        family = {"send": "p2p", "put": "rma", "put_signal": "rma", "get": "rma"}.get(entry.case.moves, "collectives")
        return self._comm.transports.get(family) or self._comm.transports["p2p"]


def first(reasons: Sequence[str | None]) -> str | None:
    """Return the first of the reasons that is not None; None if all are None."""
    return next((reason for reason in reasons if reason is not None), None)
