"""The function ``here``, with which a simulated program gets its rank and its simulated world."""

from __future__ import annotations

from typing import NamedTuple

from aiocomms.errors import SimulationError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.world import JOB, SimulatedWorld


class SimulatedRank(NamedTuple):
    """The description of the running program's rank in a simulation.

    :param rank: the program's rank.
    :param ranks: the number of ranks.
    :param restarts: the number of earlier starts of the rank.
    :param world: the world. The world's methods ``kill``, ``pause``, ``slow``, ``cut``, ``part`` and ``lose_store``
        inject faults at the time of the call.
    """

    rank: int
    ranks: int
    restarts: int
    world: SimulatedWorld

    def launched_as(self, job: str, rank: int, size: int) -> None:
        """Make the calling process a rank of one of several simulated jobs.

        A later ``new_comm()`` in this process then connects the ranks of this job.

        :param job: the job's name. Each job has its own store.
        :param rank: this process's rank in the job.
        :param size: the number of ranks in the job.
        """
        self.world.process.state[JOB] = self.world.store_of(job), rank, size


def here() -> SimulatedRank:
    """Return the description of the running program's rank in its simulation.

    :raises SimulationError: no simulation runs.
    """
    world = clock.simulation
    if not isinstance(world, SimulatedWorld):
        raise SimulationError("no simulation runs: call it in a program that simulate() runs")
    return SimulatedRank(world.process.rank, world.ranks, world.process.restarts, world)
