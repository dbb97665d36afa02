"""Reports of a rank's fatal exception to torchrun, which then names the rank that failed first.

torchrun takes the first failure for the cause, by the times in its error files or, without a file, by when it sees that
a process has ended; of the same second the lowest rank's. As soon as one process has ended, torchrun ends the others. A
rank that hears of an error is often the first, for the one at fault still closes what it has. So a rank whose error
names another rank leaves later, and says so.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from types import TracebackType
from typing import Final

from aiocomms.lowlevel import clock
from aiocomms.lowlevel.failures import is_caused

PATIENCE: Final = 2.0
"""Seconds in which the rank that is at fault ends; torchrun ends this one then, and else it ends by itself."""
_FILE: Final = "TORCHELASTIC_ERROR_FILE"


def tell_torchrun() -> None:
    """Tell torchrun, if it has started this process, of an exception that ends the process from now on."""
    if _FILE in os.environ and sys.excepthook is not _told:
        global _before
        _before, sys.excepthook = sys.excepthook, _told


_before = sys.excepthook


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _before(kind, error, trace)
    if not isinstance(error, Exception):  # torch tells nothing of those, either
        return
    caused = is_caused(error)
    _write(os.environ[_FILE], error, math.ceil(clock.wall() + PATIENCE) if caused else int(clock.wall()), again=caused)
    if caused:
        sys.stderr.flush()
        clock.sleep(PATIENCE)


def _write(path: str, error: BaseException, at: int, *, again: bool) -> None:
    """Write an error file as torch does. What torch's ``record`` has written stays, unless ``again``."""
    lines = "".join(traceback.format_exception(error))
    extra = {"py_callstack": lines, "timestamp": str(at)}
    try:
        with open(path, "w" if again else "x") as file:  # noqa: PTH123 - torch opens it so, too.
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
    except OSError:  # The file is there, or cannot be written: torchrun says what it sees.
        pass
