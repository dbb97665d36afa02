"""The parts of the UCX transport's engine, each without the engine: `transports/ucx/tests/parts_test.cpp`."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import UCX, run_sanitized

TESTS = ("parts", "board", "pacer", "inbox", "offers", "pool", "speeds", "windows")
PARTS = (
    *(f"collectives/{part}" for part in ("board", "pool", "segment")),
    *(f"engine/{part}" for part in ("closing", "groups", "inbox", "offers", "reports", "request")),
    *("net/speeds", "windows/windows"),
)
SOURCES = [
    *(UCX / "tests" / f"{name}_test.cpp" for name in TESTS),
    *(UCX / "src" / f"{part}.cpp" for part in PARTS),
]


@pytest.mark.fault(86, 87, transport="ucx")
@pytest.mark.long
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_parts_of_the_engine(sanitizer: str, tmp_path: Path) -> None:
    run_sanitized(tmp_path, sanitizer, SOURCES)
