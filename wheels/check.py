"""``python -m wheels.check 3.11 3.12``: the wheels of ``dist/`` on each Python, in an empty environment and folder.

What is typed is what README.md says; then the conformance suite and the embedding server's demonstration run. Nothing
of this checkout is on the path; of its files, examples/ alone is copied, which is in no wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from wheels import pythons
from wheels.build import ROOT

BLOCK = re.compile(r"^<!-- (run|wheels|file: \S+) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""The blocks of README.md that are typed, as test_docs.py has them, and those for which wheels are needed."""
TRANSPORTS = ("local", "c10d", "ucx")
LIMIT = 1500.0
"""Seconds after which a command hangs."""


class Place:
    """An environment with nothing in it, and a folder."""

    def __init__(self, python: pythons.Python, folder: Path, dist: Path, torch: str) -> None:
        self.python = python
        self.folder = folder / "empty"
        self.folder.mkdir()
        self.bin = folder / "env" / "bin"
        constraints = folder / "constraints.txt"
        constraints.write_text(f"{torch}\n")
        others = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.environment = others | {
            "PATH": os.pathsep.join((str(self.bin), os.environ["PATH"])),
            "PIP_FIND_LINKS": " ".join((dist.as_uri(), os.environ.get("PIP_FIND_LINKS", ""))),
            "PIP_CONSTRAINT": str(constraints),
            "PIP_QUIET": "1",
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run([python.path, "-m", "venv", folder / "env"], check=True)

    def type(self, command: str, folder: Path | None = None) -> str:
        """Run a line as a user would, and return its standard output; it ends this program if it fails."""
        print(f"$ {command}", end="", flush=True)
        began = time.monotonic()
        ran = subprocess.run(
            shlex.split(command), cwd=folder or self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
        print(f"    # {time.monotonic() - began:.0f} s", flush=True)
        if ran.returncode != 0:
            sys.exit(f"{ran.stdout}\n{ran.stderr}\nit ended with {ran.returncode} on {self.python}")
        return ran.stdout

    def type_block(self, text: str) -> None:
        """Type the commands of a block, and look for the lines below each in what it prints."""
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *wanted = part.splitlines()
            printed = self.type(command.partition("  #")[0])
            for line in wanted:
                if line not in printed:
                    sys.exit(f"{command!r} did not print {line!r}, but\n{printed}")


def read_me(place: Place) -> None:
    """Do what README.md says: install, measure, run its example on two processes."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    for mark, text in blocks:
        if mark.startswith("file: "):
            (place.folder / mark.removeprefix("file: ")).write_text(text)
    for kind in ("wheels", "run"):  # what is installed comes first, wherever it stands
        for mark, text in blocks:
            if mark == kind:
                place.type_block(text)


def smoke(place: Place, dist: Path) -> None:
    """What is installed is what was built, and all transports for the CPU are available."""
    site = Path(place.type("python -c 'import sysconfig; print(sysconfig.get_path(\"platlib\"))'").strip())
    tag = "cp" + "".join(map(str, place.python.version))
    engine = next(dist.glob(f"aiocomms_ucx-*-{tag}-{tag}-*.whl"))
    for wheel in (next(dist.glob("aiocomms-*.whl")), engine):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".dist-info/" in name or name.endswith("/"):  # which pip writes, and folders
                    continue
                if archive.read(name) != (site / name).read_bytes():
                    sys.exit(f"{name} is not that of {wheel.name}")
    said = json.loads(place.type("aiocomms info --json"))["transports"]
    for transport in TRANSPORTS:
        if not said[f"{transport} on cpu"].startswith("available"):
            sys.exit(f"{transport}: {said[f'{transport} on cpu']}")


def cuda_12(place: Place) -> None:
    """The engine takes UCX from whichever wheel has it."""
    place.type("pip uninstall --yes libucx-cu13")
    place.type("pip install 'aiocomms[ucx-cu12]'")
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    place.type_block(next(text for mark, text in blocks if mark == "run"))


def conformance(place: Place) -> None:
    """The suite that comes in the wheel, with what it imports of aiocomms[test]."""
    place.type("pip install numpy pytest pytest-timeout")
    suite = "python -m pytest -q -rs --pyargs aiocomms.testing.conformance --deadline=100 --loops=asyncio"
    printed = place.type(f"{suite} --transport=local --transport=ucx").splitlines()
    print(*(line for line in printed if line.startswith("SKIPPED")), printed[-1], sep="\n")


def demo(place: Place) -> None:
    """What `make demo` runs."""
    place.type("pip install 'aiocomms[demo]'")
    examples = place.folder / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("__pycache__"))
    print(place.type("python -m embedding_server.demo", examples))


def main() -> None:
    """Try the wheels on every Python that is named and found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="+", help="versions, or paths of interpreters")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels are (dist)")
    parser.add_argument("--torch", default="torch", help="which torch (torch)")
    args = parser.parse_args()
    found = pythons.find_all(args.python)
    if not found:
        sys.exit("there is no Python to try the wheels with")
    for python in found:
        print(f"\n{python}, {python.path}", flush=True)
        with tempfile.TemporaryDirectory(prefix="aiocomms-wheels-") as name:
            place = Place(python, Path(name), args.dist.resolve(), args.torch)
            read_me(place)
            smoke(place, args.dist)
            conformance(place)
            demo(place)
            cuda_12(place)
    print(f"\nthe wheels work on {', '.join(map(str, found))}")


if __name__ == "__main__":
    main()
