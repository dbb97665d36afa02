"""Fixtures of the tests of the backend of torch.distributed."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["ucx", "c10d"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport that processes have; a test may name one."""
    name: str = request.param
    return name
