"""``make chaos`` in short: each disturbance once on each transport, with a fixed seed."""

from __future__ import annotations

import chaos_rank
import disturbances
import pytest
from processes import Run

pytestmark = [pytest.mark.real, pytest.mark.search]


@pytest.fixture(params=["local", "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("what", disturbances.NAMES)
def test_random_faults_never_hang_or_corrupt_data(ranks: Run, transport: str, what: str) -> None:
    ranks(1 if transport == "local" else chaos_rank.SIZE, chaos_rank.play, what, 1, 10)
