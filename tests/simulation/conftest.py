"""Set up what all tests of simulated programs share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks take others for dead as they do by default: other deterministic tests have no clock for that."""
    monkeypatch.delenv("AIOCOMMS_HEARTBEAT", raising=False)
