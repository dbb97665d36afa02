"""A simulated process: its clock, its loop, its threads, and what it has once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from aiocomms.errors import SimulationError
from aiocomms.progress import deadlines
from aiocomms.testing.simulation.loop import SimulatedLoop, SimulatedTask
from aiocomms.testing.simulation.threads import SimulatedEvent, SimulatedThread, started

if TYPE_CHECKING:
    from aiocomms.testing.simulation.world import Occurrence, World

_T = TypeVar("_T")


class SimulatedWatchdog(deadlines.Watchdog):
    """The watchdog of a process: a thread of it runs when a deadline has passed, and at no other time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._owners: dict[deadlines.Watched, None] = {}
        self.wakes_at = float("inf")

    def register(self, who: deadlines.Watched) -> None:
        """See :meth:`Watchdog.register`."""
        self._owners[who] = None

    def unregister(self, who: deadlines.Watched) -> None:
        """See :meth:`Watchdog.unregister`."""
        self._owners.pop(who, None)

    @property
    def leaving(self) -> list[Any]:
        """No thread outlives its calls."""
        return []

    def wake_by(self, deadline: float) -> None:
        """See :meth:`Watchdog.wake_by`."""
        if deadline < self.wakes_at and self._owners:
            self.wakes_at = deadline
            self._process.at(deadline + deadlines.GRACE, self._wake, deadline)

    def _wake(self, deadline: float) -> None:
        if deadline == self.wakes_at:  # An earlier deadline may have come since.
            started(self._process, self._look)

    def _look(self) -> None:
        self.wakes_at = float("inf")
        for who in list(self._owners):
            self.wake_by(who.expire(self._process.now()))


class Process:
    """One incarnation of a rank."""

    def __init__(self, world: World, rank: int, restarts: int) -> None:
        """Set it up; :meth:`start` has it run.

        :param restarts: how often the rank has been started before.
        """
        self.world, self.rank, self.restarts = world, rank, restarts
        draw = world.random.random
        # Monotonic clocks of hosts begin anywhere, and differ by some parts in a hundred thousand.
        self._begins, self._rate = 1000.0 * draw(), 1.0 + 1e-4 * (draw() - 0.5)
        self._least = 0.0
        self.loop = SimulatedLoop(self)  # type: ignore[abstract]  # It refuses the rest.
        self.threads: dict[SimulatedThread, None] = {}
        self.state: dict[str, Any] = {deadlines.SIMULATED: SimulatedWatchdog(self)}
        self.dead = self.over = False
        self.paused_until = 0.0
        self.slowness = 0.0
        self.main: asyncio.Task[Any] | None = None
        self.faults: list[dict[str, Any]] = []
        """What the loop's exception handler and threads have been told."""

    def __repr__(self) -> str:
        return f"rank {self.rank}" + (f" (restart {self.restarts})" if self.restarts else "")

    # ---------------------------------------------------------------------------------------------------- time

    def now(self) -> float:
        """Return its monotonic clock, in seconds."""
        return max(self._least, self._begins + self.world.time * self._rate)

    def at(self, when: float, call: Callable[..., object], *args: Any) -> Occurrence:
        """Make a call when its clock says ``when``."""
        return self.world.at((when - self._begins) / self._rate, self, self._punctually, when, call, args)

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> Occurrence:
        """Make a call after some seconds."""
        return self.world.at(self.world.time + seconds, self, call, *args)

    def _punctually(self, when: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._least = max(self._least, when)  # A float may be a bit too small.
        call(*args)

    # ------------------------------------------------------------------------------------------------- threads

    def event(self) -> SimulatedEvent:
        """Make an event for its threads."""
        return SimulatedEvent(self)

    def start(self, target: Callable[[], object]) -> None:
        """Start a thread of it."""
        started(self, target)

    async def run(self, call: Callable[[], _T]) -> _T:
        """Make a blocking call in a thread. A cancelled wait leaves the thread behind."""
        done: asyncio.Future[_T] = self.loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def target() -> None:
            result, error = None, None
            try:
                result = call()
            except Exception as raised:
                error = raised
            self.loop.call_soon_threadsafe(settle, result, error)

        self.start(target)
        return await done

    # ------------------------------------------------------------------------------------------------ its life

    def begin(self, program: Callable[[], Awaitable[Any]]) -> None:
        """Run the program; on its loop."""
        self.main = self.loop.create_task(_awaited(program), name="main")
        self.main.add_done_callback(lambda _: self.loop.create_task(self._leave(), name="end"))

    async def _leave(self) -> None:
        """End as :func:`asyncio.run` does: cancel the other tasks, and wait for them."""
        mine = asyncio.current_task()
        others: list[SimulatedTask] = [task for task in self.loop.tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.world.left(self)

    @property
    def error(self) -> BaseException | None:
        """What its program has raised, or what nobody was there to catch."""
        main = self.main
        if main is not None and main.done() and not main.cancelled() and main.exception() is not None:
            return main.exception()
        if self.faults:
            context = self.faults[0]
            return context.get("exception") or SimulationError(str(context.get("message")))
        return None

    @property
    def result(self) -> Any:
        """What its program has returned; None if it has died."""
        return None if self.dead or self.main is None else self.main.result()

    def dispose(self) -> None:
        """Give up what is left of it when the history is over. Its ``finally`` blocks run now, and reach nothing."""
        for comms in self.state.get("communicators", {}).values():
            for comm in list(comms):
                comm._disown()
        for task in self.loop.tasks():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()

    def report(self, context: dict[str, Any]) -> None:
        """Note an error that has no caller."""
        self.faults.append(context)


async def _awaited(program: Callable[[], Awaitable[_T]]) -> _T:
    return await program()
