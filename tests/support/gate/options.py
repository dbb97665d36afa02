"""The options of the gate."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("the gate of aiocomms")
    group.addoption(
        "--tier", default="", metavar="NAME",
        help="run real tests again that fail, keep the ledger tests/flaky.jsonl, hold the run to its tests/budget.toml",
    )  # fmt: skip
