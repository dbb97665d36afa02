"""The native launcher: its C++ tests under sanitizers, and what Python sees of it."""

from __future__ import annotations

from pathlib import Path

import aiocomms_launcher
import pytest
from aiocomms_nccl import calls, native
from processes import SUITE_HANGS
from programs import PROGRAMS, run_sanitized

import aiocomms

SECONDS = "1"
"""The time that each sanitizer goes on with other seeds."""


@pytest.mark.real
@pytest.mark.search
@pytest.mark.timeout(2 * SUITE_HANGS)  # compiling takes long where others compute, too
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_the_launcher_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    run_sanitized(tmp_path, sanitizer, PROGRAMS["launcher"], SECONDS)


@pytest.mark.deterministic
def test_both_sides_count_alike() -> None:
    kinds = ("COPY", "ALL_REDUCE", "REDUCE", "BROADCAST", "ALL_GATHER", "REDUCE_SCATTER", "SEND", "RECV")
    assert [getattr(aiocomms_launcher, name) for name in kinds] == [getattr(calls, name) for name in kinds]
    ends = ("DONE", "NCCL_FAILED", "CUDA_FAILED", "DROPPED", "ASLEEP")
    assert [getattr(aiocomms_launcher, name) for name in ends] == [getattr(native, name) for name in ends]
    assert aiocomms_launcher.version() == aiocomms.__version__
