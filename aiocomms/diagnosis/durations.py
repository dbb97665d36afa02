"""Histograms of durations.

Counting a duration takes a binary search and two additions. Any thread may read the counts.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS: Final = tuple(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2.5, 5))
"""The upper bounds of the classes of durations, in seconds: 1 µs, 2.5 µs, 5 µs, 10 µs, and so on up to 50 s."""


class Durations:
    """A histogram of durations."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)
        """The number of durations in each class.

        A class includes its upper bound. The last class counts the durations above all bounds.
        """
        self.seconds: float = 0.0
        """The sum of all durations, in seconds."""

    def note(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> Durations:
        """Return a copy of the current counts. Later counts do not change the copy. Thread-safe."""
        copied = Durations()
        copied.counts, copied.seconds = self.counts[:], self.seconds
        return copied
