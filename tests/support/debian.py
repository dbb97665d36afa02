"""Packages of Debian, unpacked into a folder: without root, and without a trace in the system.

apt runs with lists, a cache and a list of what is installed, nothing, of its own, in the folder ``apt`` there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""The keys with which Debian signs; where they are missing, the system is another one."""


def unpack(where: Path, suite: str, *packages: str, architecture: str = "") -> None:
    """Unpack some packages of a release, and all that they depend on.

    :param architecture: as Debian calls it; "": this machine's.
    """
    apt = where / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} {suite} main\n")
    own = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": apt / "lists",
        "Dir::State::Status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    if architecture:
        own |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
    command = ["apt-get", "-qq", *(f"--option={name}={value}" for name, value in own.items())]
    subprocess.run([*command, "update"], check=True)
    subprocess.run([*command, "--yes", "--no-install-recommends", "--download-only", "install", *packages], check=True)
    for name in ("bin", "lib", "sbin"):  # every Debian of today links these likewise
        (where / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (where / name).is_symlink():
            (where / name).symlink_to(f"usr/{name}")
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as files:
            subprocess.run(
                ["tar", "--extract", "--keep-directory-symlink", "--directory", where], stdin=files.stdout, check=True
            )
        assert files.returncode == 0, package


def _mirror() -> str:
    """The mirror that this system uses."""
    described = ["--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]
    found = subprocess.run(["apt-get", "indextargets", *described], capture_output=True, text=True, check=True)
    return found.stdout.split("\n")[0]
