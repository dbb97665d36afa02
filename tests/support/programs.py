"""Test programs in C++: built with a sanitizer from sources of the UCX transport, and run."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

UCX = Path(__file__).parents[2] / "transports" / "ucx"
# Of the debugging information only what shows a line where a sanitizer stops: the rest takes half of the build's time.
FLAGS = "-std=c++20 -O1 -g1 -fno-omit-frame-pointer -ffp-contract=off -pthread -Wall -Wextra -Werror"
AT_ONCE = 2
"""Sources that are compiled at a time."""


def libucx() -> Path:
    """The folder with UCX's headers and libraries; without it, the test is skipped."""
    found = importlib.util.find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no libucx, with UCX's headers and libraries")
    return Path(found.submodule_search_locations[0])


def run_sanitized(
    where: Path,
    sanitizer: str,
    sources: Sequence[Path],
    *arguments: str,
    flags: str = "",
    libraries: Sequence[str] = (),
) -> None:
    """Build a program from all sources, and run it. It says at its end how many of its checks failed.

    :param where: an empty folder.
    :param sanitizer: what ``-fsanitize`` takes.
    :param flags: what the compiler is told besides.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        pytest.skip("no C++ compiler")
    folders = [f"-I{UCX / 'src'}", f"-I{UCX / 'tests'}", "-isystem", str(libucx() / "include")]
    command = [*compiler, *FLAGS.split(), *flags.split(), f"-fsanitize={sanitizer}", "-fno-sanitize-recover", *folders]
    waiting, running = list(sources), list[subprocess.Popen[str]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            compiling = [*command, "-c", str(waiting.pop(0))]
            running.append(subprocess.Popen(compiling, cwd=where, stderr=subprocess.PIPE, text=True))
        errors = running[0].communicate()[1]
        assert running.pop(0).returncode == 0, errors
    objects = [f"{source.stem}.o" for source in sources]
    _run(*command, *objects, "-o", "program", *libraries, where=where)
    fixed = ["setarch", "-R"] if sanitizer == "thread" and _may_fix_addresses() else []
    printed = _run(*fixed, "./program", *arguments, where=where)
    assert ", 0 failures" in printed, printed


def _run(*command: str, where: Path) -> str:
    done = subprocess.run(command, cwd=where, env=_environment(), stdout=-1, stderr=-2, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}"
    return done.stdout


def _environment() -> dict[str, str]:
    """What ThreadSanitizer needs, as `transports/ucx/tests/sanitized/run.sh` says."""
    return os.environ | {
        "UCX_MEM_EVENTS": "no",
        "UCX_MEM_MMAP_HOOK_MODE": "none",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 intercept_tls_get_addr=0",
    }


def _may_fix_addresses() -> bool:
    """Whether programs may run at fixed addresses, which not every container allows."""
    return bool(shutil.which("setarch")) and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
