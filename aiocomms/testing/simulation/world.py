"""The simulated world of one run: its virtual time, its events and its processes."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from asyncio.events import _set_running_loop
from collections.abc import Awaitable, Callable, Iterator
from contextvars import copy_context
from typing import Any, Final, NoReturn, cast

import torch
from torch.distributed import HashStore, Store

from aiocomms import arguments
from aiocomms.arguments import as_int
from aiocomms.bootstrap.casualties import at_the_bottom
from aiocomms.errors import ArgumentError, SimulationError
from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.lines import Wires
from aiocomms.testing.simulation.clockwork import Clockwork
from aiocomms.testing.simulation.network import SimulatedNetwork
from aiocomms.testing.simulation.process import Process
from aiocomms.testing.simulation.refusing import refuse
from aiocomms.testing.simulation.store import SimulatedStore, StoreService
from aiocomms.testing.simulation.surroundings import outside_the_loop
from aiocomms.testing.simulation.threads import Killed, SimulatedEvent, run_in_thread, started, stay_in_thread
from aiocomms.testing.simulation.wires import SimulatedWires

JOB: Final = "job"
"""The key of the job in a process's state. Its value is the job's store, the process's rank and the job's size."""
EPOCH: Final = 1_800_000_000.0
"""The time at which a history begins, in seconds since 1970."""
_STILL: Final = 60.0
"""The seconds after which ranks count as stuck, if they only check whether other ranks live.

Pauses of ranks are shorter than this time.
"""
_START: Final = 1e-3
"""The seconds within which all processes start."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the logs and warnings of coroutines that end because a history ends."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class SimulatedWorld(Clockwork):
    """The simulated world of one history; see :class:`aiocomms.lowlevel.clock.Simulation`."""

    def __init__(self, seed: int, ranks: int, latency: tuple[float, float]) -> None:
        """Create a world without processes.

        :param latency: the smallest and the largest latency of a message, in seconds.
        """
        super().__init__(seed)
        self.ranks = ranks
        self.network = SimulatedNetwork(self, lambda: self.process, latency)
        self._services = [StoreService()]
        """The services of stores, by port. The first service is the launcher's store."""
        self.store = self._store(0)
        self.processes: list[Process] = []
        """All processes of all ranks, in the order of their starts."""
        self._living = 0
        """The number of processes that have not ended."""
        self.current: Process | None = None
        self.disk: dict[Any, Any] = {}
        """Data of the program that survive the restart of a rank. The data are lost at the end of the history."""
        self._stores: dict[str, SimulatedStore] = {}
        self.failed: Process | None = None
        """The first process that has ended with an error."""
        self._program: Callable[[], Awaitable[Any]] | None = None
        self._longest = float("inf")
        self._context = copy_context()
        self._broken: BaseException | None = None
        """The error that ended the history while code of a dead process was still on the stack."""
        self._happened = 0.0
        """The time of the last call that did more than check whether other ranks live."""

    # ------------------------------------------------------------------------------------- course of the history

    def wall_at(self, time: float) -> float:
        """Convert a virtual time to seconds since 1970."""
        return EPOCH + time

    def lines(self) -> list[str]:
        """Return the recorded events as lines of text."""
        return [f"{time:.9f} {who}: {what}" for time, who, what in self.trace]

    def run(self, program: Callable[[], Awaitable[Any]], longest: float) -> None:
        """Run the program on all ranks, until all processes have ended or one process has failed.

        :param longest: the largest duration of the history, in virtual seconds.
        :raises SimulationError: a rank has not ended within ``longest``, or all ranks wait and nothing can happen.
        """
        self._program, self._longest = program, longest
        for rank in range(self.ranks):
            self.start(rank, _START * self.random.random())
        self._run_on()

    def _run_on(self) -> None:
        """Make the scheduled calls until the history ends."""
        while self._living and self.failed is None:
            coming = self.next_time
            if coming == float("inf") or (self.time - self._happened > _STILL and self._stands_still()):
                raise SimulationError(f"all ranks wait, and nothing will happen any more:\n{self._waiting()}")
            if coming > self._longest:
                raise SimulationError(f"the history takes longer than {self._longest:g} s:\n{self._waiting()}")
            self.step()
            if self._broken is not None:
                error, self._broken = self._broken, None
                raise error

    def step(self) -> None:
        """Make the next call, and run the call's process until the process waits."""
        coming = self.next()
        if coming is None:
            return
        process = cast(Process | None, coming.timeline)
        self.enter(process)
        if process is None:
            coming.call(*coming.args)
            return
        self.only_looks = False
        with contextlib.suppress(Killed):  # The process may kill itself.
            coming.call(*coming.args)
        process.loop.turn()
        if not self.only_looks:
            self._happened = self.time

    def _stands_still(self) -> bool:
        """Return True if ranks only check whether other ranks live, and will do nothing else."""
        self._happened = self.time  # If not, the next check comes after _STILL seconds.
        paused = any(process.paused_until > self.time for process in self.alive())
        return not paused and all(isinstance(it.timeline, Process) and it.timeline.idle(it) for it in self.to_come)

    def enter(self, process: Process | None) -> None:
        """Make a process the running process; None: no process runs."""
        if process is not self.current:
            self.current = process
            _set_running_loop(None if process is None else process.loop)

    # ----------------------------------------------------------------------- processes, and their faults

    def start(self, rank: int, after: float = 0.0) -> Process:
        """Start a rank, or restart a rank that has ended."""
        before = [process for process in self.processes if process.rank == rank]
        process = Process(self, rank, len(before))
        self.processes.append(process)
        self._living += 1
        self.note(process, "starts")
        assert self._program is not None
        self.at(self.time + after, process, process.begin, self._program, self.left)
        return process

    def left(self, process: Process) -> None:
        """Record that a process has ended, and was not killed."""
        process.end()
        self._living -= 1
        self.note(process, "ends")
        self.network.close(process)
        if process.error is not None and self.failed is None:
            self.failed = process

    def living(self, rank: int) -> Process | None:
        """Return the process of a rank; None if the process has ended or died."""
        return next((process for process in self.alive() if process.rank == rank), None)

    def kill(self, rank: int, restart: float | None = None) -> None:
        """Kill a rank, as SIGKILL does: the rank runs no more code, not even a ``finally`` block.

        :param restart: the seconds until the rank restarts; None: the rank does not restart.
        """
        self._check_ranks(rank=rank)
        after = None if restart is None else arguments.seconds("restart", restart)
        if (process := self.living(rank)) is not None:
            process.dead = True
            process.end()
            self._living -= 1
            self.note(process, "dies")
            self.network.die(process)
            if after is not None:
                self.start(rank, after)
            if process is self.current:
                self._stay(process)

    def _stay(self, process: Process) -> NoReturn:
        """Suspend the code of a process that has killed itself, until the history is over.

        This code stays on the stack, so the rest of the history runs in deeper frames. Python's recursion limit allows
        about 80 such kills in one history.

        :raises Killed: the history is over.
        """
        stay_in_thread()
        with outside_the_loop(), torch.inference_mode(False):
            try:
                self._context.copy().run(self._run_on)
            except BaseException as error:  # The dead process must not handle it.
                self._broken = error
            self.enter(process)
            process.disown()
        raise Killed

    def pause(self, rank: int, seconds: float) -> None:
        """Stop a rank for some seconds, as SIGSTOP does."""
        self._check_ranks(rank=rank)
        seconds = arguments.seconds("seconds", seconds)
        if (process := self.living(rank)) is not None:
            self.note(process, "stands still")
            process.paused_until = max(process.paused_until, self.time + seconds)

    def slow(self, rank: int, seconds: float) -> None:
        """Delay each later event of a rank by up to ``seconds``; 0: do not delay later events."""
        self._check_ranks(rank=rank)
        seconds = arguments.seconds("seconds", seconds) if seconds else 0.0
        if (process := self.living(rank)) is not None:
            self.note(process, "is slow")
            process.slowness = seconds

    def part(self, source: int, target: int, seconds: float) -> None:
        """Stop all traffic from one rank to another for some seconds."""
        self._check_ranks(source=source, target=target)
        seconds = arguments.seconds("seconds", seconds)
        self.note(f"rank {source}", f"does not reach rank {target}")
        self.network.part(source, target, seconds)

    def cut(self, one: int, other: int) -> None:
        """Break the connections between two ranks. Frames in transit are lost, and both ranks notice the loss."""
        self._check_ranks(one=one, other=other)
        self.note(f"rank {one}", f"loses its connections with rank {other}")
        self.network.cut_between(one, other)

    def _check_ranks(self, **ranks: int) -> None:
        """Check that all given ranks exist, and that no two of them are equal.

        :raises ArgumentError: a rank is wrong.
        """
        for name, rank in ranks.items():
            if type(as_int(rank)) is not int or not 0 <= rank < self.ranks:
                raise ArgumentError(f"{name} is {rank!r}, wanted a rank from 0 to {self.ranks - 1}")
        if len(set(ranks.values())) < len(ranks):
            raise ArgumentError(f"{' and '.join(ranks)} are {rank}, wanted two ranks")

    def lose_store(self) -> None:
        """End the launcher's store permanently."""
        self.note("the store", "dies")
        self._services[0].dead = True

    def alive(self) -> list[Process]:
        """Return the processes that have not ended."""
        return [process for process in self.processes if not process.over]

    def _waiting(self) -> str:
        return "\n".join(f"  {process.waiting()}" for process in self.alive())

    def end(self) -> None:
        """End all processes of the history, without any effect outside the simulation."""
        any_task = any(process.loop.tasks() for process in self.processes)
        with _quiet() if any_task else contextlib.nullcontext():
            for process in self.processes:
                self.enter(process)
                process.dispose()
        self.clear()
        self.enter(None)
        self.network.clear()
        gc.collect(0)

    # ---------------------------------------------------------------------------- calls of aiocomms.lowlevel.clock

    def now(self) -> float:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return self.time if self.current is None else self.current.now()

    def wall(self) -> float:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return self.wall_at(self.time)

    def event(self) -> SimulatedEvent:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return SimulatedEvent(self.process)

    def token_bytes(self, count: int) -> bytes:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return self.random.randbytes(count)

    def start_thread(self, target: Callable[[], object]) -> None:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        started(self.process, target)

    async def run_in_thread(self, call: Callable[[], Any]) -> Any:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return await run_in_thread(self.process, call)

    def state(self) -> dict[str, Any]:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return self.process.state

    def host(self) -> str:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return f"host{self.process.rank}"

    def serve_store(self) -> tuple[JobStore, int]:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        self._services.append(StoreService(self.process))
        port = len(self._services) - 1
        self.note(self.process, "serves a store")
        return self._store(port), port

    def reach_store(self, host: str, port: int, timeout: float) -> JobStore:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        store = self._store(port)
        if not store.reach(timeout):
            raise ConnectionRefusedError(f"no process of {host} answers")
        return store

    def _store(self, port: int) -> SimulatedStore:
        return SimulatedStore(self._services[port], self.network, lambda: self.process)

    def wires(self) -> Wires:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        return SimulatedWires(self.network)

    def check_store(self, store: Store) -> None:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        bottom = at_the_bottom(store)
        if not isinstance(bottom, SimulatedStore | HashStore):
            raise refuse(f"a {type(bottom).__name__}")

    def launched(self) -> tuple[Store, int, int]:
        """See :class:`aiocomms.lowlevel.clock.Simulation`."""
        job: tuple[Store, int, int] | None = self.process.state.get(JOB)
        return job or (self.store, self.process.rank, self.ranks)

    def store_of(self, job: str) -> SimulatedStore:
        """Return the store of one of several jobs."""
        if job not in self._stores:
            self._services.append(StoreService())
            self._stores[job] = self._store(len(self._services) - 1)
        return self._stores[job]

    @property
    def process(self) -> Process:
        """The running process."""
        assert self.current is not None
        return self.current
