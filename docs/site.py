"""Makes the site, in site/: a folder for each minor version that was released, ``dev``, and what leads to them.

``make docs`` runs it. It is strict: a link that leads nowhere, a name that is not there, or any other warning ends it
with 1.
``DOCS_URL`` says where the site will be, with a slash at the end, if that is not the root of a host.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
HOME = """<!doctype html>
<meta charset="utf-8">
<title>aiocomms</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<a href="{0}/index.html">The documentation of aiocomms</a>
"""


def releases() -> dict[str, str]:
    """The newest tag of each minor version, newest version first."""
    tags = git("tag", "--list", "v*", "--sort=-version:refname").split()
    newest: dict[str, str] = {}
    for tag in tags:
        newest.setdefault(".".join(tag.removeprefix("v").split(".")[:2]), tag)
    return newest


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def build(source: Path, version: str) -> None:
    """Make the pages of a version, by its own docstrings."""
    shutil.rmtree(SITE / version, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--jobs", "auto", "--quiet"]
    strict = ["--fail-on-warning", "--keep-going"]
    cache = ["--doctree-dir", str(ROOT / "build" / "doctrees" / version)]
    run = subprocess.run(
        [*command, *strict, *cache, str(source / "docs"), str(SITE / version)],
        cwd=source,  # from where `-m` imports first, whatever is installed
        check=False,
    )
    if run.returncode:
        sys.exit(f"the pages of {version} are not as they must be: see above")


def main() -> None:
    newest = releases()
    for version, tag in newest.items():
        built = SITE / version / ".tag"
        if not built.is_file() or built.read_text() != tag:
            with tempfile.TemporaryDirectory() as folder:
                git("worktree", "add", "--detach", folder, tag)
                try:
                    build(Path(folder), version)
                finally:
                    git("worktree", "remove", "--force", folder)
            built.write_text(tag)
    build(ROOT, "dev")
    url = os.environ.get("DOCS_URL", "/")
    entries = [{"name": "development", "version": "dev", "url": f"{url}dev/"}]
    for place, version in enumerate(newest):
        entries.append({"name": version, "version": version, "url": f"{url}{version}/", "preferred": place == 0})
    (SITE / "switcher.json").write_text(json.dumps(entries, indent=2) + "\n")
    (SITE / "index.html").write_text(HOME.format(next(iter(newest), "dev")))
    (SITE / ".nojekyll").touch()  # else GitHub's pages leave out what begins with an underscore
    sys.stdout.write(f"{SITE / 'index.html'}\n")


if __name__ == "__main__":
    main()
