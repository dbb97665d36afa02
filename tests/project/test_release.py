"""The parts of a release: one version, and fragments that the change log can be made of."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import HANGS

import aiocomms

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_is_the_same_everywhere() -> None:
    engine = tomllib.loads((ROOT / "transports" / "ucx" / "pyproject.toml").read_text())
    versions = {
        "aiocomms": aiocomms.__version__,
        "pyproject.toml": PROJECT["project"]["version"],
        "transports/ucx": engine["project"]["version"],
        "bumpversion": PROJECT["tool"]["bumpversion"]["current_version"],
        "installed": importlib.metadata.version("aiocomms"),
    }
    assert len(set(versions.values())) == 1, versions


@pytest.mark.real
def test_changelog_builds_from_every_fragment() -> None:
    """A name that is no fragment's is an error; every fragment but those that no user notices is in the log."""
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS, check=False)
    assert run.returncode == 0, run.stderr
    shown = re.sub(r"\s+", " ", run.stdout)
    for fragment in (ROOT / "changes").glob("[0-9]*.md"):
        text = re.sub(r"\s+", " ", fragment.read_text()).strip()
        assert text, fragment.name
        assert (text in shown) is not fragment.name.endswith(".misc.md"), fragment.name
