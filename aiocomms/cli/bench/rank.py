"""The code of ``aiocomms bench`` on each rank. Each rank measures all contenders, and rank 0 reports."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import torch

import aiocomms
from aiocomms.bootstrap.launchers import Launch
from aiocomms.bootstrap.registry import choose
from aiocomms.cli.bench import peers
from aiocomms.cli.bench.arguments import BenchPlan
from aiocomms.cli.bench.machine import bind, neighbours
from aiocomms.cli.bench.measure import idle_lateness
from aiocomms.cli.bench.ours import Contender, Ours
from aiocomms.cli.bench.report import Reporter
from aiocomms.cli.bench.turns import BenchTurns, first
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, UnsupportedOperation
from aiocomms.testing import local_world, run_ranks

_TIMEOUT = 60.0
"""The deadline in seconds for each operation, and for connecting the ranks."""
_CPU = torch.device("cpu")


def run(plan: BenchPlan, ranks: int, launch: Launch | None) -> int:
    """Measure as one rank of a job that a launcher has started. Without a launcher, run all ranks in this process.

    :returns: the exit status: 1 if a result was wrong, or a transport could not be measured. Ranks other than 0 always
        return 0.
    """
    torch.set_num_threads(1)
    if plan.bind and launch is not None:
        bind(launch.rank, launch.size)
    return asyncio.run(_Rank(plan, ranks, launch).run())


class _Rank:
    def __init__(self, plan: BenchPlan, ranks: int, launch: Launch | None) -> None:
        self._plan, self._ranks = plan, ranks
        self._host = (launch.host if launch is not None else None) or "127.0.0.1"
        self._prints = launch is None or launch.rank == 0
        self._reporter: Reporter | None = None

    async def run(self) -> int:
        plan = self._plan
        if self._prints:
            self._reporter = Reporter(plan, self._ranks)
        for transport in plan.transports:
            try:
                await self._transport(transport)
            except _NotHereError as error:
                if self._reporter is not None:
                    self._reporter.missing(transport, None, str(error).partition("\n")[0])
        if self._reporter is None:
            return 0
        self._reporter.end()
        if plan.plot is not None:
            from aiocomms.cli.bench.plot import draw  # This module imports matplotlib.

            draw(self._reporter.report, plan.plot)
        return int(not self._reporter.report.good(plan.transports))

    async def _transport(self, name: str) -> None:
        try:
            choose(name, _CPU, self._ranks, {})
            if self._plan.in_process:
                await self._in_process(name)
                return
            comm = await aiocomms.new_comm(name, name=f"bench {name}", timeout=_TIMEOUT)
        except (ArgumentError, UnsupportedOperation) as error:
            raise _NotHereError(error.message) from error
        async with comm:
            await self._measure(name, comm)

    async def _in_process(self, name: str) -> None:
        async with local_world(self._ranks, name, name=f"bench {name}", timeout=_TIMEOUT) as world:
            await run_ranks(world, partial(self._measure, name))

    async def _measure(self, name: str, comm: Communicator) -> None:
        reporter = self._reporter if comm.rank == 0 else None
        await comm.barrier()
        idle = max(await comm.all_gather_object(await idle_lateness()))
        if reporter is not None:
            reporter.idle(name, idle)
        async with AsyncExitStack() as stack:
            stack.enter_context(neighbours(self._plan.neighbours if comm.rank == 0 else 0))
            contenders: dict[str, Contender] = {name: Ours(comm)}
            for peer in self._plan.peers:
                reason = await self._open(peer, comm, contenders, stack)
                if reason is not None and reporter is not None:
                    reporter.missing(peer, None, reason)
            await BenchTurns(self._plan, name, comm, contenders, reporter).run()

    async def _open(
        self, name: str, comm: Communicator, contenders: dict[str, Contender], stack: AsyncExitStack
    ) -> str | None:
        """Open a peer. Return None, or the reason why a rank cannot open the peer."""
        peer = peers.make(name)
        reason = first(await comm.all_gather_object(peer.missing()))
        if reason is not None:
            return reason
        try:
            await peer.open(comm, self._host)
        except Exception as error:  # Another library may raise any error.
            reason = str(error).partition("\n")[0] or type(error).__name__
        else:
            stack.push_async_callback(peer.aclose)
        reason = first(await comm.all_gather_object(reason))
        if reason is None:
            contenders[name] = peer
        return reason


class _NotHereError(Exception):
    """The error for a transport that is not available here. The error's message gives the reason."""
