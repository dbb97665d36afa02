"""A Python for aarch64 with torch, aiocomms and its ucx transport, in a folder: ``python system.py FOLDER``.

Python is Debian's, torch the newest on PyPI that comes for aarch64 without CUDA, and the engine is compiled here. Start
programs in it by ``qemu-aarch64 -L FOLDER/root``, with ``PYTHONPATH=FOLDER/packages``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nanobind
from debian import unpack
from look import COMPILER

ROOT = Path(__file__).parents[2]
UCX = ROOT / "transports" / "ucx"
PYTHON = "python3.11"
SUITE = "bookworm"
"""The Debian release with this Python."""
TORCH = "torch==2.9.1"
# pip would choose the dependencies for this machine's processor, so they are listed here.
PACKAGES = (
    *(TORCH, "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions"),
    *("anyio", "idna", "msgspec", "numpy", "sniffio"),
    *("iniconfig", "packaging", "pluggy", "pygments", "pytest", "pytest-asyncio", "pytest-timeout"),
)


def make(where: Path) -> None:
    """Install all of it into a folder whose ``packages`` has ``libucx``."""
    root, packages = where / "root", where / "packages"
    unpack(root, SUITE, PYTHON, f"lib{PYTHON}-dev", "libgomp1", "libstdc++6", architecture="arm64")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    others = ["--platform=manylinux_2_28_aarch64", "--python-version=3.11", "--only-binary=:all:"]
    subprocess.run([*pip, "--target", packages, *others, *PACKAGES], check=True)
    subprocess.run([*pip, "--target", packages, ROOT], check=True)
    make_transport(root, packages)


def make_transport(root: Path, packages: Path) -> None:
    """Compile the engine, and install the transport as a wheel would be."""
    of_nanobind, ucx = Path(nanobind.__file__).parent, packages / "libucx"
    package, described = packages / "aiocomms_ucx", packages / "aiocomms_ucx-0.dist-info"
    for folder in (package, described):
        folder.mkdir(exist_ok=True)
    for source in (UCX / "aiocomms_ucx").glob("*.py"):
        (package / source.name).write_bytes(source.read_bytes())
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: aiocomms-ucx\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[aiocomms.transports]\nucx = aiocomms_ucx:UcxTransport\n")
    includes = [UCX / "src", ucx / "include", *(of_nanobind / each for each in ("include", "ext/robin_map/include"))]
    includes.append(root / "usr" / "include" / PYTHON)
    command = [COMPILER, "-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]
    command += [f"-I{each}" for each in includes] + ["-idirafter", str(root / "usr" / "include")]
    sources = [source for source in UCX.glob("src/*/*.cpp") if source.parent.name not in {"launcher", "words"}]
    sources = [*sources, of_nanobind / "src" / "nb_combined.cpp"]
    libraries = [ucx / "lib" / "libucp.so", ucx / "lib" / "libucs.so", f"-Wl,-rpath-link,{ucx / 'lib'}"]
    module = package / "_engine.cpython-311-aarch64-linux-gnu.so"
    subprocess.run([*command, *sources, "-o", module, *libraries], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
