"""The UCX transport's collectives over messages, on a simulated network: `transports/ucx/tests/schedules_test.cpp`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

UCX = Path(__file__).parents[3] / "transports" / "ucx"
PARTS = ("message_reduce.cpp", "message_moving.cpp", "reduce.cpp")
SOURCES = ["tests/schedules_test.cpp", *(f"src/collectives/{part}" for part in PARTS)]
# Of the debugging information only what shows a line where a sanitizer stops: the rest takes half of the build's time.
FLAGS = "-std=c++20 -O1 -g1 -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover -Wall -Wextra -Werror"


def test_schedules_of_messages_on_a_simulated_network(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        pytest.skip("no C++ compiler")
    builds = [
        subprocess.Popen(
            [*compiler, *FLAGS.split(), f"-I{UCX / 'src'}", "-c", UCX / source],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for source in SOURCES
    ]
    for build in builds:
        errors = build.communicate()[1]
        assert build.returncode == 0, errors
    objects = [f"{Path(source).stem}.o" for source in SOURCES]
    subprocess.run([*compiler, "-fsanitize=address,undefined", *objects, "-o", "test"], cwd=tmp_path, check=True)
    done = subprocess.run(["./test"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout
