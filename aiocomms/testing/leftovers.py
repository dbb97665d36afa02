"""The leftovers of a test: unmatched messages, and collectives that only some ranks have called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiocomms.communicator.communicator import Communicator
from aiocomms.diagnosis.hang_report import judge
from aiocomms.diagnosis.recorder import Item
from aiocomms.ops import STREAM, STREAM_DATA
from aiocomms.progress.inflight import StartedWork


class Leftovers:
    """The operations that are pending when a test ends.

    An operation that succeeds while the communicators close, such as a send without ``await``, is not reported.
    Messages of streams are not reported, because an open stream always waits for messages.
    """

    def __init__(self, world: Sequence[Communicator]) -> None:
        looks = [(comm._core.in_flight.look(), comm._core.recorder.snapshot("the test has ended")) for comm in world]
        self._briefs = {look.header.brief.rank: look.header.brief for _, look in looks}
        self._pending: list[tuple[int, Item, StartedWork[Any]]] = []
        for flying, look in looks:
            works = {one.work.seq: one.work for one in flying}
            for item in look.pending:
                if item.args.get("channel") not in (STREAM, STREAM_DATA):
                    self._pending.append((look.header.brief.rank, item, works[item.seq]))

    def report(self) -> str:
        """Return a text that describes the operations that failed because the communicators were closed.

        The text is empty if no operations failed.
        """
        lines: dict[str, None] = {}
        for rank, item, work in self._pending:
            if work.error is None:
                continue
            if item.collective is None:
                where = f", at {item.where}" if item.where else ""
                lines[f"rank {rank} is in {item}, which nothing has matched{where}"] = None
            else:  # A collective is named once, though several ranks are in it.
                lines[f"{item.name}: {judge(item, self._briefs)}"] = None
        return (
            "\n".join(("the test has ended, and these operations have not:", *map("  {}".format, lines)))
            if lines
            else ""
        )
