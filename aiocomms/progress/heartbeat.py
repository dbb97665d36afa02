"""The heartbeat, which detects silent ranks. A silent rank is stopped or disconnected, or its host has failed.

The connection to such a rank may stay open for minutes. While ops are pending, the watchdog's thread periodically sends
a message to the other ranks, which must answer. On those ranks, a thread of the transport sends the answer. Without
pending ops, no thread wakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from aiocomms.arguments import silence
from aiocomms.errors import CommError, gone
from aiocomms.progress.guard import guarded
from aiocomms.transport import Transport

_LONGEST_PERIOD: Final = 1.0
_FRESH: Final = 3
"""The number of periods after which a measurement of silence is too old to be used."""


class Heartbeat:
    """The heartbeat of one communicator.

    The heartbeat asks the other ranks for answers, and measures the silence of each rank.
    """

    def __init__(
        self, transports: Sequence[Transport], options: Mapping[str, Any], fail: Callable[[CommError], object]
    ) -> None:
        """Choose the transports that can ask the other ranks for an answer.

        :param transports: the communicator's transports.
        :param options: the user's hints.
        :param fail: the function that is called with a :class:`PeerDiedError` for the first rank that is silent for too
            long.
        """
        self._most = silence(options)
        self._transports = [
            transport for transport in transports if self._most and guarded(None, transport.last_heard) is not None
        ]
        self._fail = fail
        self._looked = float("-inf")
        self._silent: list[dict[int, float]] = [{} for _ in self._transports]
        self.period: float = min(self._most / 4, _LONGEST_PERIOD) if self._transports else float("inf")
        """The time in seconds between two calls of :meth:`look` while ops are pending."""

    def silence(self, now: float) -> dict[int, float]:
        """Return the time in seconds for which each rank was silent at the last measurement.

        Return an empty dictionary if this measurement is too old.

        Any thread may call this method.

        :param now: the current time, from ``clock.now()``.
        """
        found: dict[int, float] = {}
        if now - self._looked <= _FRESH * self.period:
            for silent in self._silent:
                for rank, seconds in dict(silent).items():
                    found[rank] = max(seconds, found.get(rank, 0.0))
        return found

    def look(self, now: float) -> None:
        """Record the ranks that have sent nothing since the last call, and ask all ranks for another answer.

        If this rank itself was stopped or had no processor time, it has not yet read the answers that have arrived. So
        the heartbeat ignores the silence of other ranks during that time.

        :param now: the current time, from ``clock.now()``.
        """
        before, self._looked = self._looked, now
        fresh = now - before > _FRESH * self.period
        for transport, silent in zip(self._transports, self._silent, strict=True):
            signs = guarded(None, transport.last_heard)
            for rank, sign in enumerate(signs or ()):
                silent[rank] = 0.0 if fresh or sign > before else silent.get(rank, 0.0) + min(now - before, self.period)
                if silent[rank] >= self._most:
                    self._fail(gone(rank, f"no sign of life for {self._most:g} s"))
                    return
