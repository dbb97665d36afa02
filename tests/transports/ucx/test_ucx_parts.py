"""The parts of the UCX transport's engine, each without the engine: `transports/ucx/tests/parts_test.cpp`."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

UCX = Path(__file__).parents[3] / "transports" / "ucx"
PARTS = ("closing", "groups", "inbox", "offers", "reports", "request")
SOURCES = [
    UCX / "tests" / "parts_test.cpp",
    *(UCX / "src" / "engine" / f"{part}.cpp" for part in PARTS),
    UCX / "src" / "windows" / "windows.cpp",
    UCX / "src" / "collectives" / "segment.cpp",
]
# Of the debugging information only what shows a line where a sanitizer stops: the rest takes half of the build's time.
FLAGS = "-std=c++20 -O1 -g1 -fno-omit-frame-pointer -ffp-contract=off -pthread -Wall -Wextra -Werror"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_parts_of_the_engine(sanitizer: str, tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        pytest.skip("no C++ compiler")
    found = importlib.util.find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no libucx, with UCX's headers")
    headers = Path(found.submodule_search_locations[0]) / "include"
    flags = [*FLAGS.split(), f"-fsanitize={sanitizer}", f"-I{UCX / 'src'}", "-isystem", str(headers)]
    run(*compiler, *flags, *map(str, SOURCES), "-o", "parts_test", cwd=tmp_path)
    fixed = ["setarch", "-R"] if sanitizer == "thread" and may_fix_addresses() else []
    assert ", 0 failures" in run(*fixed, "./parts_test", cwd=tmp_path)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=-1, stderr=-2, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}"
    return done.stdout


def may_fix_addresses() -> bool:
    """Whether programs may run at fixed addresses, which not every container allows."""
    return bool(shutil.which("setarch")) and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
