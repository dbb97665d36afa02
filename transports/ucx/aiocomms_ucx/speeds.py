"""The speeds of copies by this host's processor and kernel.

The speeds are measured when the first engine starts, and are stored in a file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from aiocomms_ucx._engine import MEASURED_BYTES, measure_speeds

_DISTRIBUTION: Final = "aiocomms-ucx"
_AS_IT_IS = os.O_NOFOLLOW | os.O_NONBLOCK
"""The flags with which ``open`` follows no symbolic link, and does not block on a pipe that has no writer."""
_LONGEST: Final = 4096
"""The largest number of bytes that are read from ``/proc/cpuinfo`` or from the file of speeds.

The file of speeds has about 200 bytes.
"""
_HARDLY_SLOWER: Final = 1.25
"""Ranks read directly if a direct read takes at most this multiple of the time of two copies.

Otherwise, ranks copy through slots of shared memory. The value is greater than 1 because a direct read needs no rounds
of slots, and the processor's cache may already contain the part.
"""

_Nanoseconds = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class Speeds(msgspec.Struct, frozen=True):
    """The times of two ways to move ``MEASURED_BYTES`` from one process to another, and the measured system."""

    processor: str
    system: str
    version: str
    """The version of this package. Another version may measure other times."""
    read: _Nanoseconds
    """The time, in nanoseconds, in which the kernel reads the bytes directly from the other process."""
    copied: _Nanoseconds
    """The time, in nanoseconds, of two copies: into a slot of shared memory, and out of the slot."""

    @property
    def reads_in_place(self) -> bool:
        """True if ranks read large parts directly from other ranks' tensors, and do not use slots."""
        return self.read <= _HARDLY_SLOWER * self.copied


class Found(NamedTuple):
    """The speeds of this host and their origin.

    ``speeds`` is None if no process may read the memory of other processes.
    """

    speeds: Speeds | None
    origin: str


@functools.cache
def find() -> Found:
    """Return the stored speeds, or measure and store them.

    This function blocks. If a core is free, the function takes less than 1 ms.
    """
    return _find(_path(), measure_speeds)


def describe() -> dict[str, str]:
    """Return the lines with which ``aiocomms info`` describes the speeds."""
    speeds, origin = find()
    what = f"parts of {MEASURED_BYTES // 1024} KiB"
    if speeds is None:
        return {what: f"through slots: {origin}"}
    way = "read in place" if speeds.reads_in_place else "through slots"
    times = f"the kernel reads one in {speeds.read / 1e3:.1f} µs, two copies take {speeds.copied / 1e3:.1f} µs"
    return {what: f"{way}: {times} ({origin}; {speeds.processor})"}


def _find(path: Path | None, measure: Callable[[], tuple[int, int]]) -> Found:
    if path is not None and (kept := _kept(path)) is not None:
        return Found(kept, f"kept in {path}")
    read, copied = measure()
    if read == 0:
        return Found(None, "the kernel lets no process read another's memory")
    speeds = Speeds(*_place(), read, max(1, copied))
    kept_now = path is not None and _keep(path, speeds)
    return Found(speeds, f"measured now, kept in {path}" if kept_now else "measured now")


def _path(cpuinfo: Path = Path("/proc/cpuinfo")) -> Path | None:
    """Return the path of the file with this host's speeds; None if the user has no home folder.

    Different kinds of hosts that share the folder have different files.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = folder if folder.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    key = hashlib.blake2b("\0".join(_place(cpuinfo)).encode(), digest_size=8).hexdigest()
    return folder / "aiocomms" / f"ucx-{key}.json"


def _place(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, str, str]:
    """Return a description of the measured system: the processor's name, the kernel and this package's version."""
    about = ""
    with contextlib.suppress(OSError), cpuinfo.open("rb") as file:
        about = file.read(_LONGEST).decode(errors="replace")
    named = dict(re.findall(r"^(model name|CPU (?:implementer|variant|part))\s*:\s*(.+?)\s*$", about, re.MULTILINE))
    processor = " ".join((*named.values(), platform.machine()))
    return processor, f"{platform.system()} {platform.release()}", version(_DISTRIBUTION)


def _kept(path: Path) -> Speeds | None:
    """Return the speeds in a file, or None.

    The result is None if the file is not readable or complete, or belongs to another user or another system.
    """
    try:
        # Unlike os.fdopen, open() closes the descriptor if it is a folder's.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AS_IT_IS)) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
                return None
            speeds = msgspec.json.decode(file.read(_LONGEST), type=Speeds)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    return speeds if (speeds.processor, speeds.system, speeds.version) == _place() else None


def _keep(path: Path, speeds: Speeds) -> bool:
    """Write a file, atomically and only for this user. Return whether the write succeeded."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=path.parent)
    except OSError:
        return False
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(speeds))
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        return False
    return True
