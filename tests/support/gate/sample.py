"""The tests of each tier: `check` runs no real ones, `test` runs the first parameter of each real test function.

``check`` runs on asyncio and the transport ``local`` alone, and leaves tests marked ``slow`` to ``test``.

A real test is dear, and may fail by chance. Its other parameters (transports, victims, delays, sizes) belong to ``make
search``. A test marked ``every_case`` has parameters that are tests in their own right, and a tier runs all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from gate.kinds import REAL, SUITE, kind_of


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what ``make search`` runs and a tier does not, when all have been found to have a kind."""
    tier = config.getoption("--tier")
    if not tier:
        return
    seen: set[str] = set()
    kept, left = [], []
    for item in items:
        function = item.nodeid.split("[")[0]
        if item.get_closest_marker("search"):
            wanted = False
        elif kind_of(item) == REAL:
            every = item.nodeid.startswith(SUITE) or item.get_closest_marker("every_case")
            wanted = tier == "test" and (every or function not in seen)
        else:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            wanted = tier == "test" or is_quick([mark.name for mark in item.iter_markers()], params)
        if wanted:
            seen.add(function)  # not by one that is left to the search: the next of its parameters is the first then
        (kept if wanted else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def is_quick(marks: Collection[str], params: Mapping[str, object]) -> bool:
    """Return whether ``check`` runs a deterministic test: on asyncio, on ``local``, and not marked ``slow``."""
    usual = params.get("loop", "asyncio") == "asyncio" and params.get("transport", "local") == "local"
    return usual and "slow" not in marks
