"""Ranks as processes of a simulated world: the bodies of tests that start processes, in virtual time.

A module's fixture ``transport`` that has ``NET`` among its parameters runs its bodies here, too. ``NET`` is the first
of them, and `make test` runs only the first parameter of a real test: the processes are left to `make search`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
from processes import KILLED, PATIENCE, Before, Body, Rank, Run, hear

from aiocomms.lowlevel import clock
from aiocomms.testing.simulation import here, simulate

NET = pytest.param("net", marks=pytest.mark.deterministic)
"""The parameter by which a test runs in a simulation."""
IN_BOTH = pytest.mark.parametrize("transport", [NET, pytest.param("c10d", marks=pytest.mark.every_case), "ucx"])
"""Marks the test of a kind of event of the system: `make test` runs it in a simulation and with processes."""
PROCESSES = pytest.mark.parametrize("transport", ["c10d", "ucx"])
"""Marks a test of what the operating system does, in a module whose other tests run in a simulation, too."""
SEEDS = 30 if os.environ.get("AIOCOMMS_SEARCH") == "1" else 3
"""The number of histories of a test."""


class SimulatedRank(Rank):
    """The knowledge of a body about its place in a simulated world."""

    simulated = True

    def __init__(self, rank: int, size: int, folder: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__("net", rank, size, folder)
        self._patch, self._serves = patch, False

    def store(self) -> Any:
        """Return the world's."""
        return here().world.store

    def told(self, note: str) -> None:
        """Refuse: it would block the world."""
        raise AssertionError(f"a simulated rank cannot block its loop until {note!r}")

    async def heard(self, note: str) -> None:
        """Wait for a note."""
        ends = clock.now() + PATIENCE
        while not (self.folder / note).exists():
            assert clock.now() < ends, f"nobody told {note!r}"
            await asyncio.sleep(0.001)

    async def all_told(self, note: str, *ranks: int) -> None:
        """Wait for some ranks' notes."""
        await hear(self, note, *ranks)

    async def die(self) -> None:
        """End without a word; the coroutine goes no further."""
        self._die(here().world)

    def die_later(self, seconds: float) -> None:
        """Die after some seconds, wherever the program is by then."""
        world = here().world
        world.at(world.time + seconds, None, self._die, world)

    def _die(self, world: Any) -> None:
        (self.folder / "died").write_text(str(world.time))
        if self._serves:
            world.lose_store()
        world.kill(self.rank)

    def launch(self, port: int) -> None:
        """See :meth:`Rank.launch`. The world is the launcher, and rank 0 takes its store along when it dies."""
        self._serves = self.rank == 0

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """See :meth:`Rank.replace`; until the history is over."""
        before = getattr(owner, name)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (function if here().rank == self.rank else before)(*args, **kwargs)

        self._patch.setattr(owner, name, chosen)

    def end(self, end: Callable[[], object]) -> None:
        """End in another way, and write down when."""
        (self.folder / "died").write_text(str(here().world.time))
        end()

    def stop(self, rank: int, after: float = 0.0, simulated: float = 20.0) -> None:
        """See :meth:`Rank.stop`."""
        world = here().world
        world.at(world.time + after, None, world.pause, rank, simulated)

    def go_on(self, rank: int) -> None:
        """See :meth:`Rank.go_on`: it does so by itself."""

    def lose_store(self, pid: int) -> None:
        """See :meth:`Rank.lose_store`."""
        here().world.lose_store()

    def since_death(self) -> float:
        """Seconds of the world since another rank did so."""
        return here().world.time - float((self.folder / "died").read_text())


@contextlib.contextmanager
def simulated_runner(folder: Path) -> Iterator[Run]:
    """Gives what :func:`processes.runner` does, for bodies that run in some histories of a simulation.

    What it returns is of the last one. The ranks share one environment: ``before`` is called once, and may change that.
    """
    made = 0

    def run(
        size: int,
        body: Body,
        *args: Any,
        before: Before | None = None,
        codes: Mapping[int, int] = MappingProxyType({}),
    ) -> list[Any]:
        nonlocal made
        results: list[Any] = []
        for seed in range(SEEDS):
            made += 1
            own = folder / f"{body.__name__}{made}"
            own.mkdir()

            with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
                if before is not None:
                    before(0)

                async def program(own: Path = own, patch: pytest.MonkeyPatch = patch) -> tuple[Any]:
                    return (await body(SimulatedRank(here().rank, size, str(own), patch), *args),)

                found = simulate(program, size, seed=seed, longest=PATIENCE).results
            results = [KILLED if one is None else one[0] for one in found]
        return results

    yield run
