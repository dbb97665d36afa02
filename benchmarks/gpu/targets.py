"""Figures that are measured on a GPU, and the limits they must reach."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A figure and its limit."""

    key: str
    what: str
    unit: str
    """``"x"``: a ratio to the peer of the same run."""
    limit: float
    least: bool = False
    """A flag: the limit is the least that is wanted, and not the most."""
    size: int = 1
    """Ranks, all on one GPU."""

    def met(self, value: float) -> bool:
        """Return whether a value reaches it."""
        return value >= self.limit if self.least else value <= self.limit

    @property
    def wanted(self) -> str:
        """The limit as it is shown."""
        return f"{'>=' if self.least else '<='} {self.limit:g}{'x' if self.unit == 'x' else ' ' + self.unit}"


TARGETS = (
    Target("post", "host time to post an all_reduce / torch's with async_op=True", "x", 1.5),
    Target("await", "time of an await of a 10 µs op, less that of stream.synchronize()", "µs", 25.0),
    Target("heartbeat", "lateness of a 1 ms heartbeat, p99, while collectives of 10 ms run", "ms", 0.3),
    Target("parked", "CPU of the process while an await is parked, of one core", "%", 3.0),
    Target("bandwidth1", "bandwidth, 1 rank, all_gather of 64 MiB / torch's", "x", 0.98, least=True),
    Target("bandwidth2", "bus bandwidth, 2 ranks, all_reduce of 64 MiB / torch's", "x", 0.98, least=True, size=2),
    Target("p2p", "UCX send/recv of 64 MiB, 2 processes / device-to-device copy", "x", 0.7, least=True, size=2),
    Target("get", "time of a window's get of 64 MiB / of a put, 2 processes", "x", 1.2, size=2),
)
OF_WINDOWS_AND_MESSAGES = frozenset({"p2p", "get"})
"""The measures of the transport of windows and messages."""


def figure(target: Target, value: float, **detail: Any) -> dict[str, Any]:
    """A result.

    :param detail: what it was made of, for the JSON file
    """
    return {"key": target.key, "value": value, "met": target.met(value), "detail": detail}


def missing(target: Target, why: str) -> dict[str, Any]:
    """A figure that could not be had."""
    return {"key": target.key, "value": None, "met": None, "why": why}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of them do not exceed; the worst of too few."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios, so that the machine's drift hits both alike."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def bus_bandwidth(kind: str, nbytes: int, seconds: float, size: int) -> float:
    """Bytes per second, as nccl-tests counts them: comparable with the wire's, whatever the number of ranks.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: ``S/t * 2*(n-1)/n`` for all_reduce and ``S/t *
    (n-1)/n`` for all_gather, S being the larger buffer. With one rank that is 0; then it is ``S/t``.
    """
    factors = {"all_reduce": 2 * (size - 1) / size, "all_gather": (size - 1) / size}
    return nbytes / seconds * (factors[kind] if size > 1 else 1.0)
