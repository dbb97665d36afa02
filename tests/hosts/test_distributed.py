"""Torch's own tests of torch.distributed end over the backend as they do over gloo, except for the listed ones."""

from __future__ import annotations

import pytest
from upstream import names, outcome

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

GLOO_ALONE = "torch has dist.monitored_barrier for gloo alone before 2.15; the group's own monitored_barrier is there"
DIFFERENCES = {
    "test_monitored_barrier_failure_order": GLOO_ALONE,
    "test_monitored_barrier_gloo": GLOO_ALONE,
    "test_monitored_barrier_gloo_subgroup": GLOO_ALONE,
    "test_monitored_barrier_wait_all_ranks": GLOO_ALONE,
}
"""The tests that pass over gloo and fail here, with the reasons."""
GLOO = names("gloo")
MPI = [name for name in names("mpi") if name not in GLOO]
"""The tests that torch runs over MPI and not over gloo: all-to-all."""


def test_they_are_there() -> None:
    """The documentation states these numbers of tests."""
    assert (len(GLOO), len(MPI)) == (115, 12)
    assert DIFFERENCES.keys() <= set(GLOO)


@pytest.mark.parametrize("name", GLOO)
def test_it_ends_as_over_gloo(name: str) -> None:
    ours, why = outcome("gloo", "aiocomms", name)
    if name in DIFFERENCES:
        assert ours == "failed"
        assert outcome("gloo", "gloo", name)[0] == "passed"
    elif ours != "passed":
        theirs, _ = outcome("gloo", "gloo", name)
        assert ours == theirs, f"over gloo it has {theirs}; here it has {ours}:\n{why}"


@pytest.mark.parametrize("name", MPI)
def test_what_torch_tests_over_mpi(name: str) -> None:
    assert outcome("mpi", "aiocomms", name) == ("passed", "")
