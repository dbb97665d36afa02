"""Tests of ``make release`` in a clone: ``make test-shipping``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANGS

import aiocomms

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
UCX = "transports/ucx"
VERSIONED = ["aiocomms/__init__.py", "pyproject.toml", f"{UCX}/pyproject.toml", f"{UCX}/aiocomms_ucx/__init__.py"]
AUTHOR = {f"GIT_{who}_{what}": "nobody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
NOT_FOUND = 1
"""The exit code of a `git grep` that finds nothing."""


class Clone:
    """A clone of the last commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", "--no-tags", str(ROOT), str(folder)], check=True, timeout=HANGS)

    def run(self, *command: str, code: int = 0) -> str:
        ran = subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | AUTHOR,
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def make(self, *command: str, code: int = 0) -> str:
        """Run make with the existing virtual environment, without installing the clone into it."""
        environment = Path(sys.executable).parents[1]
        old = [f"--assume-old={environment}/{stamp}.stamp" for stamp in ("release", "setup")]
        return self.run("make", *old, f"VENV={environment}", *command, code=code)

    def add_fragment(self, text: str) -> None:
        (self.folder / "changes" / "90.test.feature.md").write_text(f"{text}\n")
        self.run("git", "add", "changes")
        self.run("git", "commit", "--message", "A change")

    def shown(self, commit: str, path: str) -> str:
        return self.run("git", "show", f"{commit}:{path}")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


def test_a_release_is_three_commits_and_a_tag(clone: Clone) -> None:
    clone.add_fragment("One change.")
    before = clone.run("git", "rev-parse", "HEAD").strip()
    clone.make("release", "VERSION=90.7.0")
    assert clone.run("git", "tag").split() == ["v90.7.0"]
    assert clone.run("git", "log", "--format=%s", f"{before}..HEAD").splitlines() == [
        "Version 90.8.0.dev0",
        "Version 90.7.0",
        "Changes of 90.7.0",
    ]
    assert clone.run("git", "rev-parse", "v90.7.0^{commit}") == clone.run("git", "rev-parse", "HEAD~1")
    for path in VERSIONED:
        assert "90.7.0" in clone.shown("v90.7.0", path)
        assert "90.8.0.dev0" in clone.shown("HEAD", path)
    # No file has the old version.
    clone.run("git", "grep", "--fixed-strings", aiocomms.__version__, "v90.7.0", code=NOT_FOUND)
    clone.run("git", "grep", "--word-regexp", "--fixed-strings", "90.7.0", "HEAD", "--", *VERSIONED, code=NOT_FOUND)
    assert clone.run("git", "status", "--porcelain") == ""
    log = clone.shown("v90.7.0", "CHANGELOG.md")
    assert log.index("\n## 90.7.0 (") < log.index("One change.")
    left = clone.run("git", "ls-tree", "--name-only", "v90.7.0", "changes/").split()
    assert left == ["changes/README.md", "changes/template.md.jinja"]


def test_the_next_release_takes_what_came_after(clone: Clone) -> None:
    clone.add_fragment("One change.")
    clone.make("release", "VERSION=90.7.0")
    clone.add_fragment("What came after.")
    clone.make("release", "VERSION=90.7.1", "NEXT=90.8.0.dev0")
    log = clone.shown("v90.7.1", "CHANGELOG.md")
    assert log.index("## 90.7.1 (") < log.index("What came after.") < log.index("## 90.7.0 (")


def test_a_release_refuses_what_is_not_committed(clone: Clone) -> None:
    (clone.folder / "new.txt").touch()
    assert "commit or remove" in clone.make("release", "VERSION=90.7.0", code=2)
    assert clone.run("git", "tag") == ""


def test_a_release_asks_for_its_version(clone: Clone) -> None:
    assert "make release VERSION=" in clone.make("release", code=2)
