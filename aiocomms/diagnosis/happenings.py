"""The format of the file with a simulated world's events. The flight recorders of the ranks are in the same folder."""

from __future__ import annotations

import msgspec

from aiocomms.diagnosis.recorder import Seconds

FORMAT = "aiocomms simulation 1"
DIED = "the rank has died"
"""The text of the field ``reason`` in the flight recorder of a simulated rank that has died."""


class WorldHeader(msgspec.Struct):
    """The first line of a simulated world's file; the other lines are the events."""

    format: str
    seed: str


class Happening(msgspec.Struct):
    """An event in a simulated world."""

    wall: Seconds
    """The time, in seconds since 1970."""
    rank: int | None
    """The rank to which the event belongs; None if the event does not belong to one rank."""
    what: str
