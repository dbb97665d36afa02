"""The page about Ray and the example run as their users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = 600.0  # seconds after which a program hangs, however slow the machine

pytestmark = [pytest.mark.real, pytest.mark.timeout(2 * HANGS)]


@pytest.fixture(autouse=True)
def there(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray write its files to the folder of the fixture."""
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder))


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "project"))
    import test_docs

    page = ROOT / "docs" / "ray.md"
    session = test_docs.Session(page, tmp_path)
    for block in test_docs.blocks_of(page):
        session.run(block)


def test_the_example():
    """Every vector is right, also after a stage was killed and Ray has restarted it."""
    run = subprocess.run(
        [sys.executable, "-m", "ray_pipeline"], cwd=ROOT / "examples", capture_output=True, text=True, timeout=HANGS,
        check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^2 stages on 1 nodes: max difference \d\.\de-\d\d$", run.stdout, re.MULTILINE), run.stdout
    assert re.search(r"^all vectors again after .* s: max difference \d\.\de-\d\d$", run.stdout, re.MULTILINE), (
        run.stdout
    )
    assert "ended in good order: stages 0, 1\n" in run.stdout
