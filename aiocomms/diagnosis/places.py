"""Where in the program something was called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller() -> Place:
    """The innermost line that is not this library's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)
