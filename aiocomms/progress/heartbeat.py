"""Notices a rank that is silent: stopped, cut off, on a host that is gone; its connection may stay open for minutes.

Who waits for others asks them, every now and then and on the watchdog's thread, for a sign of life; what answers is the
transport's own thread. With nothing pending nobody asks, and nobody wakes up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from aiocomms.errors import ArgumentError, CommError, PeerDiedError
from aiocomms.ops import checks
from aiocomms.progress.guard import guarded
from aiocomms.transport import Transport

SILENCE: Final = 5.0
"""Seconds without a sign of life after which a rank is taken for dead."""
_VARIABLE: Final = "AIOCOMMS_HEARTBEAT"
_LONGEST_PERIOD: Final = 0.4


def silence(options: Mapping[str, Any]) -> float:
    """Seconds after which a silent rank is taken for dead: hint ``"heartbeat"``, or ``AIOCOMMS_HEARTBEAT``; 0: never.

    :raises ArgumentError: it is no such number.
    """
    what = 'hint "heartbeat"'
    value: Any = options.get("heartbeat")
    if value is None:
        what, value = _VARIABLE, os.environ.get(_VARIABLE) or SILENCE
        with contextlib.suppress(ValueError):
            value = float(value)
    try:
        return 0.0 if value == 0 and value is not False else checks.seconds(what, value)
    except ArgumentError as error:
        raise type(error)(f"{error.message}; or 0, for never") from None


class Heartbeat:
    """Of one communicator."""

    def __init__(
        self, transports: Sequence[Transport], options: Mapping[str, Any], fail: Callable[[CommError], object]
    ) -> None:
        """Begin.

        :param fail: told of the first rank that is silent for too long.
        """
        self._most = silence(options)
        self._transports = [it for it in transports if self._most and guarded(None, it.last_heard) is not None]
        self._fail = fail
        self._looked = float("-inf")
        self._silent: list[dict[int, float]] = [{} for _ in self._transports]
        self.period = min(self._most / 4, _LONGEST_PERIOD) if self._transports else float("inf")
        """Seconds between two looks while works are pending."""

    def look(self, now: float) -> None:
        """See who has given no sign since the last look, and ask again.

        Only time that this rank has watched counts as silence: it may itself have been stopped, or starved of the
        processor, with the answers unread.

        :param now: ``time.monotonic()``.
        """
        before, self._looked = self._looked, now
        fresh = now - before > 3 * self.period
        for transport, silent in zip(self._transports, self._silent, strict=True):
            signs = guarded(None, transport.last_heard)
            for rank, sign in enumerate(signs or ()):
                silent[rank] = 0.0 if fresh or sign > before else silent.get(rank, 0.0) + min(now - before, self.period)
                if silent[rank] >= self._most:
                    self._fail(PeerDiedError(f"rank {rank} is gone: no sign of life for {self._most:g} s", peer=rank))
                    return
