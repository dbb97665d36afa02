"""The UCX transport's collectives over messages, on a simulated network: `transports/ucx/tests/schedules_test.cpp`."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import UCX, run_sanitized

PARTS = ("message_reduce", "message_moving", "reduce")
SOURCES = [UCX / "tests" / "schedules_test.cpp", *(UCX / "src" / "collectives" / f"{part}.cpp" for part in PARTS)]


@pytest.mark.long
def test_schedules_of_messages_on_a_simulated_network(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "address,undefined", SOURCES)
