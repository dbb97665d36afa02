"""The ranges that torch's profiler shows of operations, as torch's own backends make them."""

from __future__ import annotations

from aiocomms.integrations import profiler
from aiocomms.integrations.torch_backend.completer import Completer
from aiocomms.integrations.torch_backend.parts import WorkPart, WorkStep, wait_for


class WorkRange(profiler.Range):
    """One range: from here until an operation has ended, on another thread."""

    def around(self, parts: list[WorkPart], completer: Completer) -> list[WorkPart]:
        """Return the started parts with the end of the range behind them, before a thread that waits goes on."""

        def end() -> None:
            self.end()
            wait_for(parts, None)  # This call raises the error of a part that failed.

        return [WorkStep(parts, end).after(completer, here=False)]
