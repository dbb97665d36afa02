"""A Chromium of this machine, and a folder that it is shown; nothing is asked of another host."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from processes import HANGS


def absent(*needed: str, by: str) -> str:
    """Say which of the needed things are missing beside the system's Chromium; empty: none.

    :param needed: modules.
    :param by: the command that installs them.
    """
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: {by}"
    return "" if _chromium() else "no Chromium on this machine: apt-get install chromium, say"


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def page_of(
    folder: Path, width: int, height: int, files: Mapping[str, Path] | None = None
) -> Iterator[tuple[Any, str]]:
    """A page of a browser, and the address at which it finds a folder.

    :param width: pixels, as ``height``.
    :param files: by paths of addresses, what is not in the folder.
    """
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with _served(folder, files or {}) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=sandbox)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.route("**", lambda route: route.continue_() if route.request.url.startswith(base) else route.abort())
            page.set_default_timeout(HANGS * 1000)
            yield page, base
        finally:
            browser.close()


@contextlib.contextmanager
def _served(folder: Path, files: Mapping[str, Path]) -> Iterator[str]:
    """The files, at an address of this host."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(files.get(path.partition("?")[0]) or super().translate_path(path))

        def log_message(self, *_: Any) -> None:
            """Drop the message, which no test reads."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
