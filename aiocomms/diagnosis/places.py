"""Source lines of the program: the line of a call, or the line in which a task is suspended."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = str(Path(__file__).parents[1]) + os.sep


class SourceLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller() -> SourceLine:
    """Return the innermost line of the call stack outside this library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


def suspended(coroutine: Any) -> str:
    """Return the innermost line outside this library in which a task is suspended.

    Return an empty string if there is no such line.
    """
    found = ""
    while coroutine is not None:
        frame = below = None
        for kind, awaited in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
            if hasattr(coroutine, kind):
                frame, below = getattr(coroutine, kind), getattr(coroutine, awaited)
        if frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            found = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        coroutine = below
    return found
