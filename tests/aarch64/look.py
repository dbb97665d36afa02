"""Is there what ``make test-aarch64`` needs of the system? Without any package: asked before anything is fetched."""

from __future__ import annotations

import shutil
import sys

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
"""The Debian packages with the commands."""


def why_not() -> str:
    """What is missing, as a sentence; "" if nothing is."""
    missing = [package for command, package in PACKAGES.items() if not shutil.which(command)]
    return f"test-aarch64 needs: apt-get install {' '.join(missing)}" if missing else ""


if __name__ == "__main__":
    sys.exit(why_not() or 0)
