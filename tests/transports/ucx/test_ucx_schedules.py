"""The UCX transport's collectives on a simulated network, of ranks that share memory and of such that do not.

The programs are `transports/ucx/tests/schedules_test.cpp`, `hierarchical_test.cpp` and `critical_path_test.cpp`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import UCX, run_sanitized

MESSAGES = ("message_reduce", "message_moving", "reduce")
HIERARCHICAL = ("hierarchical_moving", "hierarchical_reduce", "pipeline", "pool", "segment", "shared_collectives")
WRAPPED = (
    "memcpy",
    "_ZN8aiocomms6reduceERKNS_9ReductionEPvPKPKvim",
    "_ZN8aiocomms4foldERKNS_9ReductionEPvPKPKvim",
    "_ZN8aiocomms4liftERKNS_9ReductionEPvPKvm",
    "_ZN8aiocomms7combineERKNS_9ReductionEPvPKvm",
    "_ZN8aiocomms5lowerERKNS_9ReductionEPvPKvmi",
)
"""What copies and reduces, in which the simulation sees what a rank does."""


def sources(tests: tuple[str, ...], parts: tuple[str, ...]) -> list[Path]:
    names = [f"tests/{name}" for name in tests] + [f"src/collectives/{part}" for part in parts]
    return [UCX / f"{name}.cpp" for name in names]


@pytest.mark.long
def test_schedules_of_messages_on_a_simulated_network(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "address,undefined", sources(("schedules_test",), MESSAGES))


@pytest.mark.long
def test_schedules_of_several_hosts_on_a_simulated_network(tmp_path: Path) -> None:
    parts = (*HIERARCHICAL, "reduce", "shared")
    run_sanitized(tmp_path, "address,undefined", sources(("hierarchical_test",), parts))


@pytest.mark.long
def test_the_critical_path_on_simulated_hosts(tmp_path: Path) -> None:
    program = sources(("critical_path_test", "critical_path"), (*HIERARCHICAL, *MESSAGES))
    wrap = [f"-Wl,--wrap={name}" for name in WRAPPED]
    run_sanitized(tmp_path, "undefined", program, flags="-fno-builtin-memcpy", libraries=wrap)
