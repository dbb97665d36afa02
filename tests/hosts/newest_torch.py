"""The registry of one-sided transports of a newer torch from the package index, for the installed torch.

The registry is pure Python. HTTP range requests fetch some 20 KB of a wheel of half a gigabyte into the environment.
``python tests/hosts/newest_torch.py`` fetches them, otherwise the first test does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version
from remotezip import RemoteZip

FOLDER = "torch/distributed/_transport/"
KEPT = Path(sys.prefix) / "newest-torch"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
PINNED = "2.15.0"
"""The version that the tests use. NEWEST_TORCH in the environment replaces it, to try a newer version."""
JSON = "application/vnd.pypi.simple.v1+json"


def fetched() -> Path:
    """Return the folder of a package ``torch`` that has only the registry; fetch it if it is missing.

    :raises RuntimeError: the index is unreachable or lacks this torch, or this torch has no registry.
    """
    if not KEPT.is_dir():
        try:
            version, url = newest()
            fetch(url, KEPT)
        except OSError as error:  # urllib and requests raise it
            raise RuntimeError(f"the newest torch cannot be fetched from {INDEX}: {error}") from error
        (KEPT / "version").write_text(str(version))
    return KEPT


def newest() -> tuple[Version, str]:
    """Return the version of torch to use, and the URL of one of its wheels: all have the same Python code."""
    request = urllib.request.Request(f"{INDEX.rstrip('/')}/torch/", headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    wheels = {
        parse_wheel_filename(file["filename"])[1]: file["url"]
        for file in files
        if file["filename"].endswith(".whl") and not file.get("yanked")
    }
    version = Version(os.environ.get("NEWEST_TORCH", PINNED))
    if version not in wheels:
        raise RuntimeError(f"{INDEX} has no wheel of torch {version}")
    return version, wheels[version]


def fetch(url: str, where: Path) -> None:
    """Extract the registry from a wheel."""
    where.parent.mkdir(parents=True, exist_ok=True)
    with RemoteZip(url) as wheel, tempfile.TemporaryDirectory(dir=where.parent) as folder:
        names = [name for name in wheel.namelist() if name.startswith(FOLDER) and name.endswith(".py")]
        if not names:
            raise RuntimeError(f"{url} has no {FOLDER}: was it renamed? See docs/torch-transports.md")
        for name in names:
            wheel.extract(name, Path(folder) / "new")
        if not where.is_dir():
            shutil.move(Path(folder) / "new", where)


def use(folder: str | Path) -> None:
    """Make this process import the registry from a folder, if the installed torch has none."""
    from torch import distributed

    if find_spec("torch.distributed._transport") is None:
        distributed.__path__.append(str(Path(folder) / "torch" / "distributed"))


if __name__ == "__main__":
    fetched()
    print(f"torch {(KEPT / 'version').read_text()}: {KEPT}")
