"""Time ranges of operations for torch's profiler, like the ranges that torch's own backends make."""

from __future__ import annotations

from aiocomms.integrations import profiler
from aiocomms.integrations.torch_backend.completer import Completer
from aiocomms.integrations.torch_backend.parts import WorkPart, WorkStep, wait_for


class WorkRange(profiler.Range):
    """A time range in the profiler, from the object's creation to the end of an operation on another thread."""

    def around(self, parts: list[WorkPart], completer: Completer) -> list[WorkPart]:
        """Return a new part of a work. When the given parts have ended, the new part ends the range.

        A thread that waits for the new part resumes after the end of the range.
        """

        def end() -> None:
            self.end()
            wait_for(parts, None)  # This call raises the error of a part that failed.

        return [WorkStep(parts, end).after(completer, here=False)]
