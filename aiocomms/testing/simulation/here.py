"""What a simulated program can ask about itself, and do to its world."""

from __future__ import annotations

from typing import NamedTuple

from aiocomms.errors import SimulationError
from aiocomms.lowlevel import clock
from aiocomms.testing.simulation.world import World


class Here(NamedTuple):
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
    world: World


def here() -> Here:
    """Return the place of the running program in its simulation.

    :raises SimulationError: no simulation runs.
    """
    world = clock.simulation
    if not isinstance(world, World):
        raise SimulationError("no simulation runs: call it in a program that simulate() runs")
    return Here(world.process.rank, world.ranks, world.process.restarts, world)
