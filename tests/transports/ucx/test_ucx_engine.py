"""The UCX transport's engine, several in one process, under sanitizers: `transports/ucx/tests/engine_test.cpp`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import SUITE_HANGS
from programs import PROGRAMS, run_sanitized

pytestmark = [pytest.mark.real, pytest.mark.search]

SECONDS = os.environ.get("AIOCOMMS_ENGINE_TEST_SECONDS", "0")
"""The time that each sanitizer goes on with other seeds; 0: each world once."""


@pytest.mark.fault(65, 68, 86, 87, transport="ucx")
@pytest.mark.timeout(2 * SUITE_HANGS)  # compiling takes minutes where others compute, too
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_engines_of_one_process_pass_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    run_sanitized(tmp_path, sanitizer, PROGRAMS["engine"], SECONDS)
