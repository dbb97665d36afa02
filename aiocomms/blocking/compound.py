"""Works of ``torch.distributed`` that are made of operations for which a thread can wait."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch import distributed as dist

from aiocomms.lowlevel.handles import Handle


class Ending(Protocol):
    """An operation, or a step behind it."""

    def done(self) -> bool:
        """Return whether it has ended."""


class CompoundWork(Handle, dist.Work):
    """A work that has ended when all its parts have. What its ``wait`` raises is why it has failed."""

    _parts: Sequence[Ending]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block this thread until it has ended."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Block this thread until it has ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""
        return all(part.done() for part in self._parts)

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return why it has failed; None: it has not, or has not ended."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None
