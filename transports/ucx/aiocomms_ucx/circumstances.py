"""The circumstances that may prevent UCX from working, and the cores that a process may use.

The circumstances are environment variables, limits of the process, and a lack of shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path
from typing import Final

_FEW: Final = 32
"""The number of free descriptors below which a lack of descriptors may be the reason for a failure.

UCX needs some tens of descriptors.
"""
_PR_GET_DUMPABLE: Final = 3
_SHM: Final = "/dev/shm"  # noqa: S108 - The code only reads the folder's free space.
_LITTLE: Final = 64 * 2**20
"""The number of free bytes of shared memory below which a lack of memory may be the reason for a failure.

UCX takes some megabytes for each rank.
"""


def circumstances() -> str:
    """Return the possible reasons for a failure on this rank, as the end of an error text."""
    found = hindrances()
    return f" ({'; '.join(found)})" if found else ""


def hindrances() -> list[str]:
    """Return the possible reasons for a failure in this process."""
    found = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("UCX_")]
    if ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0:
        found.append("PR_SET_DUMPABLE 0: no other process may open its descriptors or read its memory")
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (left := most - _next_descriptor(most)) < _FEW:
        found.append(f"RLIMIT_NOFILE {most} ({max(0, left)} left)")
    for name in ("RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_DATA"):
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY:
            found.append(f"{name} {limit}")
    with contextlib.suppress(OSError):
        state = os.statvfs(_SHM)
        if (free := state.f_bavail * state.f_frsize) < _LITTLE:
            found.append(f"{free} bytes left in {_SHM}")
    return found


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the cores that this process may use, limited to the CPU time of its cgroups (``cpu.max``).

    All ranks of one container get the same cores. So the number of distinct cores of these ranks is the number of cores
    that the container may use.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = float(len(cores))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in own.read_text().splitlines() if line.startswith("0::"))
        place = cgroups / line.removeprefix("0::").lstrip("/")
        for group in (place, *place.parents):
            if group.is_relative_to(cgroups):
                share = min(share, _cores_worth(group / "cpu.max"))
    return cores[: max(1, int(share))]


def _cores_worth(limit: Path) -> float:
    """Return a cgroup's limit of CPU time, as a number of cores; infinity if there is no limit."""
    try:
        quota, period = limit.read_text().split()
    except OSError:
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _next_descriptor(most: int) -> int:
    """Return the number of the next descriptor, which is the lowest free number."""
    try:
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return most
    os.close(fd)
    return fd
