"""Fixtures of the tests of the backend of torch.distributed."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["ucx", "c10d"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return each transport between processes; a test may choose one."""
    name: str = request.param
    return name
