"""herd7, a simulator of memory models: the system's, or Debian's, unpacked into a folder without root.

The package ``herdtools7`` is in no stable release of Debian yet. It is taken from ``sid``, with the C library there.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from debian import KEYRING, unpack


def command(where: Path) -> list[str]:
    """Return the command that starts the herd7 of :func:`fetch`."""
    unpacked = where / "usr"
    if not unpacked.exists():
        return ["herd7"]
    (loader,) = {found.resolve() for found in unpacked.glob("lib/*/ld-linux-*.so.*")}
    models = unpacked / "share" / "herdtools7" / "herd"
    return [str(loader), "--library-path", str(loader.parent), str(unpacked / "bin/herd7"), "-set-libdir", str(models)]


def fetch(where: Path) -> None:
    """Unpack herd7 into a folder, if the system has none.

    :raises SystemExit: herd7 cannot be unpacked here; the message says how to install it.
    """
    if shutil.which("herd7"):
        return
    if not (shutil.which("apt-get") and KEYRING.exists()):
        sys.exit("make litmus needs herd7 (Debian sid: apt-get install herdtools7; elsewhere: opam install herdtools7)")
    unpack(where, "sid", "herdtools7")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]).resolve())
