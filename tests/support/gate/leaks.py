"""No test leaves a file open.

Sockets, threads, tasks and shared memory are counted where they belong to: by the conformance suite after each check,
and by the oracle of the fault tests. Libraries keep some of these for later tests: here they would be false alarms.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

OF_OTHERS = ("/dev/", "/proc/", "/sys/", os.path.realpath(sys.prefix))
"""The places of files that libraries open for good."""
PATIENCE = 10.0
"""Seconds in which what is written in the background must be closed."""
_sleep = time.sleep  # time.sleep itself raises in a deterministic test


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors of this process that are of files, and their paths."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            path = str(link.readlink())
        except OSError:
            continue  # the descriptor that lists the folder
        # An anonymous temporary file warns by itself when it is thrown away.
        if path.startswith("/") and not path.startswith(OF_OTHERS) and not path.endswith(" (deleted)"):
            found.add((link.name, path))
    return found


@pytest.fixture(autouse=True)
def _files_are_closed() -> Iterator[None]:
    """Fail a test that leaves a file open."""
    before = open_files()
    yield
    ends = time.monotonic() + PATIENCE
    while left := open_files() - before:
        if time.monotonic() > ends:
            pytest.fail(f"the test has left open, and so leaked: {sorted(left)}", pytrace=False)
        gc.collect()
        _sleep(0.01)
