"""Ranges of operations for torch's profiler, as torch's own backends have them."""

from __future__ import annotations

from aiocomms.integrations import profiler
from aiocomms.integrations.torch_backend.completer import Completer
from aiocomms.integrations.torch_backend.parts import WorkPart, WorkStep, wait_for


class WorkRange(profiler.Range):
    """A range of the profiler. It lasts from its creation until an operation has ended on another thread."""

    def around(self, parts: list[WorkPart], completer: Completer) -> list[WorkPart]:
        """Return a part that ends the range when the started parts have ended, before a waiting thread resumes."""

        def end() -> None:
            self.end()
            wait_for(parts, None)  # This call raises the error of a part that failed.

        return [WorkStep(parts, end).after(completer, here=False)]
