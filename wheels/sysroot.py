"""The C library that wheels are built against: an old one, so that they run where this machine's would be too new.

A program that is linked with one glibc needs that or a newer one. So where this machine's is newer than 2.28, the
compiler is given Debian 11's instead, its headers and libraries without a system around them, from Debian's packages;
apt-get fetches them, and no root is needed. That one is 2.31: whether the symbols that the engine takes from it are
older ones, `auditwheel` says. The C++ library is Debian 11's as well, and becomes part of the engine: users may have an
older one. What unwinds the stack, libgcc_s, does not: all of a process must have the same.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

GLIBC = (2, 28)
"""The oldest one that wheels run with: that of the tag manylinux_2_28, and of torch's wheels."""
_DEBIAN, _GCC = "bullseye", "10"  # its compiler is too old, its C++ library is not
_PACKAGES = ["libc6", "libc6-dev", "linux-libc-dev", "libgcc-s1", "libstdc++6", f"libstdc++-{_GCC}-dev"]
_LACKING = Path(__file__).with_name("libstdcxx_10.hpp")
_EXPORTED = Path(__file__).with_name("exported.map")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MIRROR = "http://deb.debian.org/debian"
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def flags(folder: Path) -> dict[str, str]:
    """Return the environment in which CMake builds for old C libraries; it fills ``folder`` where that is needed."""
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) <= GLIBC:
        return {}
    if not (folder / "complete").exists():
        _fill(folder)
    root, triple = folder / "root", f"{platform.machine()}-linux-gnu"
    let_in_pythons(root, Path("/usr/include", triple))
    headers = [root / "usr/include/c++" / _GCC, root / "usr/include" / triple / "c++" / _GCC]
    libraries = [root / "usr/lib/gcc" / triple / _GCC, root / "usr/lib" / triple]
    return {
        "CXX": os.environ.get("CXX", "g++"),
        "CXXFLAGS": " ".join(
            [f"--sysroot={root} -nostdinc++", *(f"-isystem {path}" for path in headers), f"-include {_LACKING}"]
        ),
        "LDFLAGS": " ".join(
            [
                f"--sysroot={root} -B{libraries[-1]}",
                *(f"-L{path}" for path in libraries),
                f"-static-libstdc++ -Wl,--version-script={_EXPORTED}",  # nobody else may find its symbols here
            ]
        ),
    }


def _fill(folder: Path) -> None:
    """Get the packages, and lay out what is in them."""
    for part in ("lists/partial", "archives/partial", "root"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(f"deb [signed-by={_KEYS}] {_MIRROR} {_DEBIAN} main\n")
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder,
        "APT::Architecture": _ARCHITECTURES[platform.machine()],
        "APT::Sandbox::User": "root",  # or it warns that its own user cannot write here
    }
    apt = ["apt-get", "--quiet", "--quiet", *(f"--option={name}={value}" for name, value in settings.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *_PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "root"], check=True)
    _stay_inside(folder / "root")
    (folder / "complete").touch()


def let_in_pythons(root: Path, headers: Path) -> None:
    """Debian's own interpreters have what they know of this machine beside the C library's headers: ``pyconfig.h``."""
    for python in headers.glob("python3*"):
        inside = root / python.relative_to("/")
        if not inside.is_symlink():
            inside.symlink_to(python)


def _stay_inside(root: Path) -> None:
    """Links within the packages lead to this machine's own files, as if the root were ``/``."""
    for path in root.rglob("*"):
        if path.is_symlink() and (target := path.readlink()).is_absolute():
            path.unlink()
            path.symlink_to(root / target.relative_to("/"))
