"""The lines of a simulated program where its tasks wait, or where it makes a call that the simulation refuses."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any


def of_program(frame: FrameType) -> bool:
    """Return whether a frame belongs to the program.

    Frames of this library, the standard library and installed packages do not belong to the program.
    """
    path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
    ours = module == "aiocomms" or module.startswith(("aiocomms.", "aiocomms_"))
    return not ours and not path.startswith("<") and "/lib/python" not in path


def line(frame: FrameType) -> str:
    """Return a text that names the file, the line number and the function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def waits_at(coroutine: Any) -> str:
    """Return the innermost line of the program at which a suspended coroutine waits.

    If the coroutine has no line of the program, return the innermost line of any code, or an empty text.
    """
    frames = list(_frames(coroutine))
    own = [frame for frame in frames if of_program(frame)]
    return line((own or frames)[-1]) if frames else ""


def in_program(coroutine: Any) -> bool:
    """Return whether a suspended coroutine has a frame of the program."""
    return any(map(of_program, _frames(coroutine)))


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of the coroutines that it awaits, the outermost first."""
    while coroutine is not None:
        below = None
        for kind, awaited in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
            if hasattr(coroutine, kind):
                if (frame := getattr(coroutine, kind)) is not None:
                    yield frame
                below = getattr(coroutine, awaited)
        coroutine = below
