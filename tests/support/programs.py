"""Test programs in C++: built from sources of the UCX transport, with a sanitizer or for another processor, and run."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

UCX = Path(__file__).parents[2] / "transports" / "ucx"
# -g1 keeps only the debugging information that shows a line where a sanitizer stops:
# the rest takes half of the build's time.
FLAGS = "-std=c++20 -g1 -fno-omit-frame-pointer -ffp-contract=off -pthread -Wall -Wextra -Werror"
AT_ONCE = 2
"""Sources that are compiled at a time."""


@dataclass(frozen=True)
class Program:
    """One program: its sources, without ``.cpp`` and relative to the transport's folder, and how it is linked."""

    sources: tuple[str, ...]
    flags: str = ""
    """The compiler's further flags."""
    wrapped: tuple[str, ...] = ()
    """Functions in whose place the program's own are called."""


def _named(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


_TESTED_PARTS = ("parts", "board", "filling", "pacer", "inbox", "offers", "pool", "speeds", "windows")
_MESSAGES = ("message_reduce", "message_moving", "reduce")
_HIERARCHICAL = ("hierarchical_moving", "hierarchical_reduce", "pipeline", "pool", "segment", "shared_collectives")
_ENGINE = sorted(
    f"src/{source.parent.name}/{source.stem}"
    for source in UCX.glob("src/*/*.cpp")
    if source.parent.name not in ("bindings", "launcher", "words")
)

PROGRAMS = {
    "parts": Program(
        (
            *_named("tests", *(f"{name}_test" for name in _TESTED_PARTS)),
            *_named("src/collectives", "board", "pool", "segment"),
            *_named("src/engine", "closing", "groups", "inbox", "offers", "reports", "request"),
            *_named("src", "net/speeds", "windows/windows"),
        )
    ),
    "schedules": Program((*_named("tests", "schedules_test"), *_named("src/collectives", *_MESSAGES))),
    "hierarchical": Program(
        (*_named("tests", "hierarchical_test"), *_named("src/collectives", *_HIERARCHICAL, "reduce", "shared"))
    ),
    "critical_path": Program(
        (
            *_named("tests", "critical_path_test", "critical_path"),
            *_named("src/collectives", *_HIERARCHICAL, *_MESSAGES),
        ),
        flags="-fno-builtin-memcpy",
        # The functions that copy and reduce, in which the simulation sees what a rank does.
        wrapped=(
            "memcpy",
            "_ZN8aiocomms6reduceERKNS_9ReductionEPvPKPKvim",
            "_ZN8aiocomms4foldERKNS_9ReductionEPvPKPKvim",
            "_ZN8aiocomms4liftERKNS_9ReductionEPvPKvm",
            "_ZN8aiocomms7combineERKNS_9ReductionEPvPKvm",
            "_ZN8aiocomms5lowerERKNS_9ReductionEPvPKvmi",
        ),
    ),
    "launcher": Program((*_named("tests", "launcher_test"), *_named("src/launcher", "launcher", "launch_threads"))),
    "engine": Program((*_named("tests", "engine_test"), *_ENGINE)),
}
"""All programs of ``transports/ucx/tests``."""


def libucx() -> Path:
    """The folder with UCX's headers and libraries; without it, the test is skipped."""
    found = importlib.util.find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no libucx, with UCX's headers and libraries")
    return Path(found.submodule_search_locations[0])


def run_sanitized(where: Path, sanitizer: str, program: Program, *arguments: str) -> None:
    """Build a program, and run it. It says at its end how many of its checks failed.

    :param where: an empty folder.
    :param sanitizer: what ``-fsanitize`` takes.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        pytest.skip("no C++ compiler")
    build(where, [*compiler, "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover"], program, libucx())
    fixed = ["setarch", "-R"] if sanitizer == "thread" and _may_fix_addresses() else []
    run_program(*fixed, "./program", *arguments, where=where)


def build(where: Path, compiler: Sequence[str], program: Program, ucx: Path, *sources: Path) -> None:
    """Build a program, as ``program`` in an empty folder.

    :param ucx: the folder with the headers and libraries of UCX, for the compiler's processor.
    :param sources: what the program consists of besides.
    """
    folders = [f"-I{UCX / 'src'}", f"-I{UCX / 'tests'}", "-isystem", str(ucx / "include")]
    command = [*compiler, *FLAGS.split(), *program.flags.split(), *folders]
    all_sources = [*(UCX / f"{source}.cpp" for source in program.sources), *sources]
    waiting, running = list(all_sources), list[subprocess.Popen[str]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            compiling = [*command, "-c", str(waiting.pop(0))]
            running.append(subprocess.Popen(compiling, cwd=where, stderr=subprocess.PIPE, text=True))
        errors = running[0].communicate()[1]
        assert running.pop(0).returncode == 0, errors
    objects = [f"{source.stem}.o" for source in all_sources]
    _run(*command, *objects, "-o", "program", *_linked(program, ucx / "lib"), where=where)


def run_program(*command: str, where: Path) -> None:
    """Run a program, which says at its end how many of its checks failed."""
    printed = _run(*command, where=where)
    assert ", 0 failures" in printed, printed


def _linked(program: Program, lib: Path) -> Iterator[str]:
    yield from (f"-Wl,--wrap={name}" for name in program.wrapped)
    # Only the whole engine calls UCX, and, where the compiler sees who overrides what, the parts, too.
    yield from (
        "-Wl,--as-needed",
        f"{lib}/libucp.so",
        f"{lib}/libucs.so",
        f"-Wl,-rpath,{lib}",
        f"-Wl,-rpath-link,{lib}",
    )


def _run(*command: str, where: Path) -> str:
    done = subprocess.run(command, cwd=where, env=_environment(), stdout=-1, stderr=-2, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}"
    return done.stdout


def _environment() -> dict[str, str]:
    """Return the variables that ThreadSanitizer needs, as `transports/ucx/tests/sanitized/run.sh` says."""
    return os.environ | {
        "UCX_MEM_EVENTS": "no",
        "UCX_MEM_MMAP_HOOK_MODE": "none",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 intercept_tls_get_addr=0",
    }


def _may_fix_addresses() -> bool:
    """Return whether programs may run at fixed addresses, which not every container allows."""
    return bool(shutil.which("setarch")) and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
