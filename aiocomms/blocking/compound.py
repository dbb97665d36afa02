"""Works of ``torch.distributed`` that consist of several operations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch import distributed as dist

from aiocomms.lowlevel.handles import Handle


class Ending(Protocol):
    """A part of a :class:`CompoundWork`: an operation, or a step that follows an operation."""

    def done(self) -> bool:
        """Return whether the operation or step has ended."""


class CompoundWork(Handle, dist.Work):
    """A work that ends when all its parts have ended. The method ``wait`` raises the error of a failed work."""

    _parts: Sequence[Ending]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block the calling thread until the work has ended."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Block the calling thread until the work has ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the work has ended, with or without an error."""
        return all(part.done() for part in self._parts)

    def is_success(self) -> bool:
        """Return whether the work has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a failed work; None if the work has succeeded or is pending."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None
