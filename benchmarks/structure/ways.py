"""The ways of an op and of a failure through a checkout's code, each measured in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

WAYS = {
    "all_reduce": "an awaited all_reduce of 2 ranks, `local`",
    "alone": "an awaited all_reduce that ends within the call, `ucx`",
    "cancel": "a cancelled recv, `local`",
    "c10d": "a peer's death, `c10d`",
    "ucx": "a peer's death, `ucx`",
}
DEATHS = 3
"""How often a table's death is measured: what other threads do in the meantime differs a little."""

_NATIVE = {"alone", "ucx"}
_PROBE = Path(__file__).with_name("probe.py")
_LIMIT = 60.0
"""Seconds after which a way's processes are ended: a hang has no figures."""


class Walk(NamedTuple):
    """What one way takes."""

    functions: list[str]
    """What was called, in order."""
    files: int
    changes: int

    def __str__(self) -> str:
        return f"{len(self.functions)} / {self.files} / {self.changes}"

    def listing(self) -> list[str]:
        """What was called, repeats in one line."""
        counted = ((name, len(list(same))) for name, same in groupby(self.functions))
        return [name if times == 1 else f"{name} x{times}" for name, times in counted]


def middle_walk(root: Path, way: str) -> Walk | None:
    """Of several, if they may differ."""
    walks = [walk(root, way) for _ in range(DEATHS if way in {"c10d", "ucx"} else 1)]
    found = [walked for walked in walks if walked is not None]
    middle = statistics.median_low(len(walked.functions) for walked in found) if found else 0
    return next((walked for walked in found if len(walked.functions) == middle), None)


def walk(root: Path, way: str) -> Walk | None:
    """Go one way once; None: the checkout has no engine that could."""
    command = [sys.executable, "-P", str(_PROBE), way, str(root.resolve())]
    if way in _NATIVE:
        engine = find_engine(root)
        if engine is None:
            return None
        command.append(str(engine.resolve()))
    places = [root.resolve(), *sorted(root.resolve().glob("transports/*/"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True, text=True)
    try:
        output, _ = process.communicate(timeout=_LIMIT)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # all have ended
            pass
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} has failed")
    return Walk(**json.loads(output))


def find_engine(root: Path) -> Path | None:
    """The native engine that was built from a checkout."""
    places = ("transports/ucx/build/*", ".venv/lib/python*/site-packages/aiocomms_ucx")
    return next((path for place in places for path in sorted(root.glob(f"{place}/_engine*.so"))), None)
