"""Look for the commands that ``make test-aarch64`` needs, without any package, before the first download."""

from __future__ import annotations

import shutil
import sys

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
"""The Debian packages with the commands."""


def why_not() -> str:
    """Return a sentence that names the missing packages; "" if none is missing."""
    missing = [package for command, package in PACKAGES.items() if not shutil.which(command)]
    return f"test-aarch64 needs: apt-get install {' '.join(missing)}" if missing else ""


if __name__ == "__main__":
    sys.exit(why_not() or 0)
