"""The UCX transport's collectives on a simulated network, of ranks that share memory and of such that do not.

The programs are `transports/ucx/tests/schedules_test.cpp`, `hierarchical_test.cpp` and `critical_path_test.cpp`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SUITE_HANGS
from programs import PROGRAMS, run_sanitized

pytestmark = [pytest.mark.real, pytest.mark.timeout(SUITE_HANGS)]  # compiling takes minutes where others compute, too


@pytest.mark.search
def test_schedules_on_a_simulated_network_pass_under_sanitizers(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "address,undefined", PROGRAMS["schedules"])


@pytest.mark.search
def test_hierarchical_schedules_on_simulated_hosts_pass_under_sanitizers(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "address,undefined", PROGRAMS["hierarchical"])


@pytest.mark.search
def test_critical_path_on_simulated_hosts_is_bounded(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "undefined", PROGRAMS["critical_path"])
