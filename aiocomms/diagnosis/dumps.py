"""The files of flight recorders: they are written when a communicator is lost, on a signal, and when asked.

A file is JSON lines: a header, then the ops. It is its owner's alone (0600), never replaces or follows anything, holds
no contents of tensors, and there are few of them. What goes wrong is said once in the log and is no op's business.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from aiocomms.diagnosis import on_signal
from aiocomms.diagnosis.recorder import Look, Recorder, Snapshot
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.threads import start_awaited
from aiocomms.progress.inflight import Flying

PER_PROCESS, PER_FOLDER = 16, 256
"""Files that a process keeps, and that the default folder keeps; the oldest are deleted."""
LARGEST = 8 << 20
"""Bytes of a file; the oldest ops are left out."""

SUFFIX = ".aiocomms.jsonl"
RECORDERS, RECORDS = "recorders", "records"
"""The state that a simulated process keeps of its communicators, to be written down when its history has failed."""

_log = logging.getLogger("aiocomms")
_counter = itertools.count(1)
_complained: list[str] = []
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def register(recorder: Recorder) -> None:
    """Write this one too when a signal asks. With the first, install the handler if importing could not."""
    if clock.simulation is not None:
        clock.state().setdefault(RECORDERS, []).append(recorder)
        return
    _recorders.add(recorder)
    if not on_signal.dump_if_asked():
        complain("AIOCOMMS_RECORDER_SIGNAL: only the main thread can install a handler; call dump_on_signal there")


def dump_all(reason: str) -> list[Path]:
    """Write the recorder of every communicator of this process that is open. Any thread or signal handler."""
    # No thread is started here: that takes a lock that the code which a signal has interrupted may hold.
    paths = [try_write(recorder.snapshot(reason)) for recorder in list(_recorders) if recorder.open]
    return [path for path in paths if path is not None]


on_signal.listen(dump_all)


def in_background(call: Callable[[], object]) -> bool:
    """Do something in a thread for which only the interpreter's end waits, for a moment.

    :returns: False: no thread can be had.
    """

    def run() -> None:
        try:
            call()
        except Exception as error:
            complain(f"the flight recorder: {type(error).__name__}: {error}")

    try:
        start_awaited(run)
    except RuntimeError:
        return False
    return True


def complain(message: str) -> None:
    """Say something once."""
    if message not in _complained and len(_complained) < 100:
        _complained.append(message)
        _log.warning("%s", message)


def wanted() -> bool:
    """Return whether files are to be written at all."""
    return clock.simulation is None and os.environ.get("AIOCOMMS_RECORDER_DIR") != ""


def try_write(snapshot: Snapshot) -> Path | None:
    """Write a file to the usual folder; None if that is not wanted, or does not succeed, which is said once."""
    if not wanted():
        return None
    try:
        return write(snapshot)
    except OSError as error:
        complain(f"the flight recorder cannot be written: {error}; set AIOCOMMS_RECORDER_DIR to another folder")
        return None


def write(snapshot: Snapshot, folder: str | os.PathLike[str] | None = None) -> Path:
    """Write a file.

    :param folder: where to; None: the usual folder.
    :returns: its path.
    :raises OSError: it cannot be written, or the default folder is not safe.
    """
    header = snapshot.header
    where = Path(folder) if folder is not None else _usual()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", header.comm, flags=re.ASCII)[:40]
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(header.wall))
    path = where / f"{name}.rank{header.rank}.{when}.{os.getpid()}-{next(_counter)}{SUFFIX}"
    _prune(where, path.name, default=folder is None and where == _default())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(encode(snapshot))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return path


class Record:
    """The ops of a lost communicator, noted at once and written down when its tasks go on."""

    def __init__(self, recorder: Recorder, flying: list[Flying], reason: str) -> None:
        """Note it. On any thread or signal handler.

        :param flying: the works that were pending when it was lost.
        """
        self.recorder = recorder
        self._reason = reason
        self._look: Look | None = None
        self.shot: Snapshot | None = None
        """The words, kept for a simulated history that fails."""
        if clock.simulation is not None:
            clock.state().setdefault(RECORDS, []).append(self)
        with self._complaining():
            self._look = recorder.look(flying)

    def snapshot(self) -> Snapshot | None:
        """Put it into words, once; None where the flight recorder has failed, which is said once.

        Afterwards it has no work any more, and with it no tensor: to write the words down may take for ever.
        """
        look, self._look = self._look, None
        with self._complaining():
            if look is not None:
                shot = self.recorder.describe(look, self._reason)
                self.shot = shot if clock.simulation is not None else None
                return shot
        return None

    def write_later(self) -> None:
        """Write it down in the background, if that is wanted."""
        if wanted():
            in_background(self._write)

    def _write(self) -> None:
        snapshot = self.snapshot()
        if snapshot is not None:
            try_write(snapshot)

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # The communicator must come to its end, whatever is raised.
            complain(f"the flight recorder: {type(error).__name__}: {error}")


def encode(snapshot: Snapshot) -> bytes:
    """Return the content of a file."""
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(item) for item in snapshot.items()]
    room = LARGEST - sum(map(len, lines)) - len(lines)
    while room < 0:
        room += len(lines.pop(0)) + 1
    return b"\n".join((encoder.encode(snapshot.header), *lines, b""))


def _usual() -> Path:
    said = os.environ.get("AIOCOMMS_RECORDER_DIR")
    if said:
        return Path(said)
    folder = _default()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's alone")
    return folder


def _default() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "aiocomms"
    return Path(tempfile.gettempdir()) / f"aiocomms-{os.getuid()}"


def _prune(folder: Path, name: str, default: bool) -> None:
    """Delete what is too much, before one more is written; of a folder that was given, only what is this process's."""
    mine = f".{os.getpid()}-"
    known: list[tuple[float, Path]] = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            known.append((path.lstat().st_mtime, path))
    known.sort()
    own = [path for _, path in known if mine in path.name]
    surplus = own[: max(0, len(own) - PER_PROCESS + 1)]
    if default:
        surplus += [path for _, path in known[: max(0, len(known) - PER_FOLDER + 1)]]
    for path in surplus:
        path.unlink(missing_ok=True)
