"""The placement of tests on the workers of pytest-xdist: tests of one module, or of one conformance world, together.

Tests that share a fixture of their module, or the ranks of a world, stay on one worker. Parts of one long test share
nothing, so any worker takes any of them. Long groups come first, so that no worker has a long one to itself at the end:
``tests/seconds.json`` says how long they took.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gate.kinds import SUITE

SECONDS = Path(__file__).parents[2] / "seconds.json"
"""The file of each tier's groups that take long, with their seconds; ``make seconds`` writes the last run's."""
LONG = 2.0
"""Seconds from which on a group stands there."""


def group_of(nodeid: str) -> str:
    """Return the name of the group of a test: its module, its world of the conformance suite, or itself if a part."""
    module, _, rest = nodeid.partition("::")
    if "[part " in rest:
        return nodeid
    if module.startswith(SUITE) and (found := re.search(r"\[([\w+@]+-\w+-\d+)\b", rest)):
        return found[1]
    return module


def seconds_of(tier: str) -> dict[str, dict[str, float]]:
    """Return the seconds, ``wall`` and ``cpu``, of the long groups of a tier on the machine of the budget."""
    return json.loads(SECONDS.read_text()).get(tier, {}) if SECONDS.exists() else {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests by group, long groups first; within a group they keep their order."""
    known = {name: took["wall"] for name, took in seconds_of(config.getoption("--tier")).items()}
    items.sort(key=lambda item: -known.get(group_of(item.nodeid), 0.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have workers take whole groups, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)
