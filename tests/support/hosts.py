"""Hosts that are network namespaces of this machine: their processes reach each other over virtual cables alone."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

NETWORKS = {"net0": "10.77.0", "net1": "10.78.0"}
"""Every host's interfaces, and the first three numbers of their addresses."""
_CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_MNT_DETACH = 2
_numbers = itertools.count()
# /sys shows the interfaces of the network that it is mounted in, and has the control groups that slurmd wants.
_ENTER = """
hostname "$0" && mount --bind "$1" /etc/hosts && shift && mount --rbind /sys/fs/cgroup /mnt &&
mount -t sysfs sysfs /sys && mount --rbind /mnt /sys/fs/cgroup && exec "$@"
"""


def address(host: int, network: str = "net0") -> str:
    return f"{NETWORKS[network]}.{host + 1}"


def kernel_address(host: int, network: str = "net0") -> str:
    """The same as /proc/net/tcp has it."""
    return "".join(f"{int(part):02X}" for part in reversed(address(host, network).split(".")))


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Make hosts on two networks, and give their names; skips the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the command ip (iproute2)")
    mark = f"aiocomms-{os.getpid()}-{next(_numbers)}"
    switch, *names = (f"{mark}-{i}" for i in range(count + 1))
    try:
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        _connect(switch, names)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _connect(switch: str, names: Sequence[str]) -> None:
    for network in NETWORKS:
        ip("-n", switch, "link", "add", network, "type", "bridge")
        ip("-n", switch, "link", "set", network, "up")
    for host, name in enumerate(names):
        ip("-n", name, "link", "set", "lo", "up")
        for network in NETWORKS:
            plug = f"{network}-{host}"
            ip("link", "add", network, "netns", name, "type", "veth", "peer", "name", plug, "netns", switch)
            ip("-n", switch, "link", "set", plug, "master", network, "up")
            ip("-n", name, "address", "add", f"{address(host, network)}/24", "dev", network)
            ip("-n", name, "link", "set", network, "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


def inside(namespace: str, hostname: str, known: Path, *command: str) -> list[str]:
    """A command that runs another on a host, with a name and processes of its own; these end when it does.

    :param known: a file that is the host's /etc/hosts.
    """
    unshared = ["unshare", "--mount", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
    return ["nsenter", f"--net=/run/netns/{namespace}", *unshared, "sh", "-c", _ENTER, hostname, str(known), *command]


class Enter:
    """Moves a rank's process to its host, with some environment variables; called there before anything else."""

    def __init__(self, names: Sequence[str], layout: str, **variables: str) -> None:
        """Begin.

        :param layout: the host of each rank, as a digit.
        """
        self.names = [names[int(digit)] for digit in layout]
        self.variables: Mapping[str, str] = {"AIOCOMMS_TOKEN": "of ranks on several hosts", **variables}

    def __call__(self, rank: int) -> None:
        with Path(f"/run/netns/{self.names[rank]}").open() as namespace:
            call("setns", namespace.fileno(), CLONE_NEWNET)
        # /sys still shows the interfaces of the network that it was mounted in.
        call("unshare", _CLONE_NEWNS)
        call("mount", b"", b"/", b"none", _MS_REC | _MS_SLAVE, None)
        call("umount2", b"/sys", _MNT_DETACH)
        call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
        os.environ.update(self.variables)


def call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
