"""Fixtures of the tests of the backend of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Run, runner


@pytest.fixture(params=["ucx", "c10d"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """Runs a body in a process for each rank, over each transport that processes have."""
    with runner(request.param, tmp_path) as run:
        yield run


@pytest.fixture
def ucx(tmp_path: Path) -> Iterator[Run]:
    """The same over one transport."""
    with runner("ucx", tmp_path) as run:
        yield run
