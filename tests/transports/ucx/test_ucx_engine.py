"""The UCX transport's engine, several in one process, under sanitizers: `transports/ucx/tests/engine_test.cpp`."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

UCX = Path(__file__).parents[3] / "transports" / "ucx"
PYTHON = set(UCX.glob("src/bindings/*.cpp"))
SOURCES = [UCX / "tests" / "engine_test.cpp", *sorted(set(UCX.glob("src/*/*.cpp")) - PYTHON)]
# Of the debugging information only what shows a line where a sanitizer stops: the rest takes half of the build's time.
FLAGS = "-std=c++20 -O1 -g1 -fno-omit-frame-pointer -ffp-contract=off -pthread -Wall -Wextra -Werror"
SECONDS = os.environ.get("AIOCOMMS_ENGINE_TEST_SECONDS", "0")
"""How long each sanitizer goes on with other seeds; 0: each world once."""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(), stdout=-1, stderr=-2, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}"
    return done.stdout


def environment() -> dict[str, str]:
    """What ThreadSanitizer needs, as `transports/ucx/tests/sanitized/run.sh` says."""
    return os.environ | {
        "UCX_MEM_EVENTS": "no",
        "UCX_MEM_MMAP_HOOK_MODE": "none",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 intercept_tls_get_addr=0",
    }


def build(compiler: list[str], sanitizer: str, libucx: Path, where: Path) -> None:
    """`where/engine_test`, from all sources, two at a time."""
    flags = [*FLAGS.split(), f"-fsanitize={sanitizer}", f"-I{UCX / 'src'}", "-isystem", str(libucx / "include")]
    waiting, running = list(SOURCES), list[subprocess.Popen[str]]()
    while waiting or running:
        while waiting and len(running) < 2:
            command = [*compiler, *flags, "-c", str(waiting.pop(0))]
            running.append(subprocess.Popen(command, cwd=where, stderr=subprocess.PIPE, text=True))
        errors = running[0].communicate()[1]
        assert running.pop(0).returncode == 0, errors
    objects = [f"{source.stem}.o" for source in SOURCES]
    lib = f"{libucx}/lib"
    libraries = [f"{lib}/libucp.so", f"{lib}/libucs.so", f"-Wl,-rpath,{lib}"]
    run(*compiler, *flags, *objects, "-o", "engine_test", *libraries, cwd=where)


@pytest.mark.fault(65, 68, transport="ucx")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_engines_of_one_process(sanitizer: str, tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        pytest.skip("no C++ compiler")
    found = importlib.util.find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no libucx, with UCX's headers and libraries")
    build(compiler, sanitizer, Path(found.submodule_search_locations[0]), tmp_path)
    fixed = ["setarch", "-R"] if sanitizer == "thread" and may_fix_addresses() else []
    assert ", 0 failures" in run(*fixed, "./engine_test", SECONDS, cwd=tmp_path)


def may_fix_addresses() -> bool:
    """Whether programs may run at fixed addresses, which not every container allows."""
    return bool(shutil.which("setarch")) and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
