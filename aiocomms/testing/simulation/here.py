"""The place of a simulated program, and its hold on the world."""

from __future__ import annotations

from typing import NamedTuple

from aiocomms.errors import SimulationError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.world import JOB, SimulatedWorld


class SimulatedRank(NamedTuple):
    """The place of the running program.

    :param rank: its rank.
    :param ranks: how many there are.
    :param restarts: how often the rank has been started before.
    :param world: the world, whose methods ``kill``, ``pause``, ``slow``, ``cut``, ``part`` and ``lose_store`` do what
        faults do, at the time of the call.
    """

    rank: int
    ranks: int
    restarts: int
    world: SimulatedWorld

    def launched_as(self, job: str, rank: int, size: int) -> None:
        """Belong to one job of several: ``new_comm()`` finds its ranks, as by the environment of a launcher.

        :param job: its name; each job has a store of its own.
        :param rank: this process's rank in it.
        :param size: how many ranks it has.
        """
        self.world.process.state[JOB] = self.world.store_of(job), rank, size


def here() -> SimulatedRank:
    """Return the place of the running program in its simulation.

    :raises SimulationError: no simulation runs.
    """
    world = clock.simulation
    if not isinstance(world, SimulatedWorld):
        raise SimulationError("no simulation runs: call it in a program that simulate() runs")
    return SimulatedRank(world.process.rank, world.ranks, world.process.restarts, world)
