"""Simulations of a distributed program, which runs in one thread and in virtual time. One seed decides each run."""

from __future__ import annotations

from aiocomms.testing.simulation.faults import Faults
from aiocomms.testing.simulation.here import here
from aiocomms.testing.simulation.history import explore, simulate
from aiocomms.testing.simulation.trial import History

__all__ = ["Faults", "History", "explore", "here", "simulate"]
