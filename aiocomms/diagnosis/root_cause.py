"""Reports of a rank's fatal exception to torchrun, so that torchrun names the rank that failed first.

torchrun assumes that the first failure is the cause. torchrun compares the times in the ranks' error files. For a rank
without a file, torchrun uses the time at which it notices the end of the process. Among failures in the same second,
torchrun chooses the lowest rank. When one process has ended, torchrun ends the other processes.

Suppose that rank 1 fails because rank 0 has failed. The process of rank 1 then often ends before the process of rank 0,
because rank 0 must still close its resources. So if a rank's error names another rank as the cause, the rank reports a
later time to torchrun, and waits before its process ends.
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
"""The seconds for which this process waits before it ends, if its error names another rank as the cause.

During the wait, the process of the other rank can end, and torchrun may end this process.
"""
_FILE: Final = "TORCHELASTIC_ERROR_FILE"


def tell_torchrun() -> None:
    """Make this process report its fatal exceptions to torchrun, if torchrun has started this process."""
    if _FILE in os.environ and sys.excepthook is not _told:
        global _before
        _before, sys.excepthook = sys.excepthook, _told


_before = sys.excepthook


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _before(kind, error, trace)
    if not isinstance(error, Exception):  # torch does not report these exceptions either.
        return
    caused = is_caused(error)
    _write(os.environ[_FILE], error, math.ceil(clock.wall() + PATIENCE) if caused else int(clock.wall()), again=caused)
    if caused:
        sys.stderr.flush()
        clock.sleep(PATIENCE)


def _write(path: str, error: BaseException, at: int, *, again: bool) -> None:
    """Write an error file as torch does.

    If torch's ``record`` has already written an error file, replace this file only if ``again`` is true.
    """
    lines = "".join(traceback.format_exception(error))
    extra = {"py_callstack": lines, "timestamp": str(at)}
    try:
        with open(path, "w" if again else "x") as file:  # noqa: PTH123 - torch opens the file in this way, too.
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
    except OSError:  # The file exists or cannot be written, and torchrun works without this report.
        pass
