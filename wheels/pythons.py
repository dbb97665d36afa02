"""The interpreters that wheels are built and tried with: on PATH, or pyenv's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_SAY = "import sys; print(sys.executable, *sys.version_info[:2])"


class Python(NamedTuple):
    """An interpreter."""

    path: str
    version: tuple[int, int]

    def __str__(self) -> str:
        return "Python " + ".".join(map(str, self.version))


def find(wanted: str) -> Python | None:
    """Return an interpreter, or None where there is none.

    :param wanted: a version, such as ``3.12``, or the path of an interpreter.
    """
    for candidate in [wanted] if "/" in wanted else [f"python{wanted}", *_of_pyenv(wanted)]:
        try:
            said = subprocess.run([candidate, "-c", _SAY], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):  # so does a shim of pyenv's, of a version that is not chosen
            continue
        path, major, minor = said.rsplit(maxsplit=2)
        return Python(path, (int(major), int(minor)))
    return None


def find_all(wanted: list[str]) -> list[Python]:
    """Return those that there are, and say which are not."""
    found = {name: find(name) for name in wanted}
    for name, python in found.items():
        if python is None:
            print(f"no Python {name} on PATH or in pyenv: it is left out", flush=True)
    return [python for python in found.values() if python is not None]


def _of_pyenv(version: str) -> list[str]:
    """Pyenv's interpreters of a version, newest first."""
    if shutil.which("pyenv") is None:
        return []
    root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
    there = [path for path in (Path(root) / "versions").glob(f"{version}.*") if path.name.split(".")[2].isdigit()]
    return [str(path / "bin" / "python") for path in sorted(there, key=_patch, reverse=True)]


def _patch(path: Path) -> int:
    return int(path.name.split(".")[2])
