"""The parts of the UCX transport's engine, each without the engine: `transports/ucx/tests/parts_test.cpp`."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SUITE_HANGS
from programs import PROGRAMS, run_sanitized

pytestmark = pytest.mark.real


@pytest.mark.fault(86, 87, transport="ucx")
@pytest.mark.search
@pytest.mark.timeout(SUITE_HANGS)  # compiling takes minutes where others compute, too
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_parts_of_the_engine_pass_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    run_sanitized(tmp_path, sanitizer, PROGRAMS["parts"])
