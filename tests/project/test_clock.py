"""Code reads a clock and waits in a thread by ``aiocomms.lowlevel.clock``, which a simulation replaces."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layers import CORE, ROOT, TRANSPORTS, holds_for, imports, parse

pytestmark = pytest.mark.deterministic

REPLACED = {"event", "now", "simulation", "wall"}
"""Names that a simulation replaces in the module, which a name of one's own would not see."""
FORMATS = {"gmtime", "strftime"}
"""Functions of ``time`` that write a given time."""
OUTSIDE = {
    "aiocomms/lowlevel/clock.py": "the seam itself",
    "aiocomms/bootstrap/casualties.py": "the time since a machine's boot, which tells the lives of its processes apart",
    "aiocomms/cli/": "programs of their own, which measure and watch real processes",
    "aiocomms/diagnosis/live.py": "a real thread that waits for programs of this machine",
    "aiocomms/testing/conformance/": "tests, which have real processes and measure them",
}
"""The files and folders for which the rule does not hold, and why."""


def breaches(path: Path) -> Iterator[tuple[int, str]]:
    """Find the lines that go by no seam: by clocks, sleeps and events of Python's, or by a name of what is replaced."""
    for line, name in imports(path):
        module, _, what = name.rpartition(".")
        if (module == "time" and what not in FORMATS) or (module == "threading" and what == "Event"):
            yield line, f"imports {name}"
        if module == "aiocomms.lowlevel.clock" and what in REPLACED:
            yield line, f"imports {name}: a simulation replaces it in the module"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute):
            used = ast.unparse(node)
            if used == "threading.Event" or (used.startswith("time.") and node.attr not in FORMATS):
                yield node.lineno, used


@holds_for(CORE, *TRANSPORTS)
def test_clocks_and_waits_go_by_the_seam(path):
    if not str(path.relative_to(ROOT)).startswith(tuple(OUTSIDE)):
        yield from breaches(path)


def test_every_exception_is_needed():
    for place in OUTSIDE:
        paths = [path for path in (ROOT / place).parent.rglob("*.py") if str(path.relative_to(ROOT)).startswith(place)]
        assert any(any(breaches(path)) for path in paths), place


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\nbegan = time.monotonic()", ["time.monotonic"]),
        ("import time\nread = time.perf_counter", ["time.perf_counter"]),
        ("def pause():\n    import time\n    time.sleep(1)", ["time.sleep"]),
        ("from time import monotonic as now", ["imports time.monotonic"]),
        ("import threading\nover: threading.Event", ["threading.Event"]),
        ("from threading import Event", ["imports threading.Event"]),
        (
            "from aiocomms.lowlevel.clock import now",
            ["imports aiocomms.lowlevel.clock.now: a simulation replaces it in the module"],
        ),
        ("from aiocomms.lowlevel import clock\nclock.now(), clock.event().wait()", []),
        ("from aiocomms.lowlevel.clock import Reply", []),
        ("import time, threading\ntime.strftime('%Y', time.gmtime(0)), threading.Lock()", []),
        ("self.time.monotonic", []),
    ],
)
def test_breaches_are_found_in_each_form(tmp_path, source, found):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [what for _, what in breaches(path)] == found
