"""``make release``, in a clone: ``make test-shipping``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANGS

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
VERSIONED = ["aiocomms/__init__.py", "pyproject.toml", "transports/ucx/pyproject.toml"]
AUTHOR = {f"GIT_{who}_{what}": "nobody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Clone:
    """A clone of what is committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", "--no-tags", str(ROOT), str(folder)], check=True, timeout=HANGS)

    def run(self, *command: str, fails: bool = False) -> str:
        ran = subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | AUTHOR,
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )
        assert bool(ran.returncode) is fails, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def make(self, *command: str, fails: bool = False) -> str:
        """With the environment that is there, which must not be turned to this clone."""
        environment = Path(sys.executable).parents[1]
        old = [f"--assume-old={environment}/{stamp}.stamp" for stamp in ("release", "setup")]
        return self.run("make", *old, f"VENV={environment}", *command, fails=fails)

    def shown(self, commit: str, path: str) -> str:
        return self.run("git", "show", f"{commit}:{path}")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


def test_a_release_is_three_commits_and_a_tag(clone: Clone) -> None:
    before = clone.run("git", "rev-parse", "HEAD").strip()
    clone.make("release", "VERSION=0.1.0")
    assert clone.run("git", "tag").split() == ["v0.1.0"]
    assert clone.run("git", "log", "--format=%s", f"{before}..HEAD").splitlines() == [
        "Version 0.2.0.dev0",
        "Version 0.1.0",
        "Changes of 0.1.0",
    ]
    assert clone.run("git", "rev-parse", "v0.1.0^{commit}") == clone.run("git", "rev-parse", "HEAD~1")
    for path in VERSIONED:
        assert '"0.1.0"' in clone.shown("v0.1.0", path)
        assert '"0.1.0.dev0"' not in clone.shown("v0.1.0", path)
        assert '"0.2.0.dev0"' in clone.shown("HEAD", path)
    assert clone.run("git", "status", "--porcelain") == ""
    assert "\n## 0.1.0 (" in clone.shown("v0.1.0", "CHANGELOG.md")
    left = clone.run("git", "ls-tree", "--name-only", "v0.1.0", "changes/").split()
    assert left == ["changes/README.md", "changes/template.md.jinja"]


def test_the_next_release_takes_what_came_after(clone: Clone) -> None:
    clone.make("release", "VERSION=0.1.0")
    (clone.folder / "changes" / "90.after.feature.md").write_text("What came after.\n")
    clone.run("git", "add", "changes")
    clone.run("git", "commit", "--message", "A change")
    clone.make("release", "VERSION=0.1.1", "NEXT=0.2.0.dev0")
    log = clone.shown("v0.1.1", "CHANGELOG.md")
    assert log.index("## 0.1.1 (") < log.index("What came after.") < log.index("## 0.1.0 (")


def test_a_release_refuses_what_is_not_committed(clone: Clone) -> None:
    (clone.folder / "new.txt").touch()
    assert "commit or remove" in clone.make("release", "VERSION=0.1.0", fails=True)
    assert clone.run("git", "tag") == ""


def test_a_release_asks_for_its_version(clone: Clone) -> None:
    assert "make release VERSION=" in clone.make("release", fails=True)
