"""The files of flight recorders, written at the loss of a communicator, on a signal, or on request.

A file contains JSON lines: first a header, then the ops. Only the file's owner can read it (mode 0600). A write never
replaces an existing file, and never follows a link. A file does not contain the values of tensors. The number of files
is limited. A failed write is logged once, and affects no op.
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
"""The maximum number of files of one process, and the maximum number of files in the default folder.

If a new file would exceed a limit, the oldest file is deleted.
"""
LARGEST = 8 << 20
"""The maximum size of a file, in bytes. If the ops do not fit, the file omits the oldest ops."""

SUFFIX = ".aiocomms.jsonl"
RECORDERS, RECORDS = "recorders", "records"
"""The keys of a list of recorders and a list of :class:`Record` objects in the state of a simulated process.

After a simulated run has failed, the simulation writes the ops in both lists to files.
"""

_log = logging.getLogger("aiocomms")
_counter = itertools.count(1)
_complained: list[str] = []
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def register(recorder: Recorder) -> None:
    """Add a recorder. The signal handler writes the ops of all added recorders to files.

    Install the signal handler if an earlier attempt could not install it.
    """
    if clock.simulation is not None:
        clock.state().setdefault(RECORDERS, []).append(recorder)
        return
    _recorders.add(recorder)
    if not on_signal.dump_if_asked():
        complain("AIOCOMMS_RECORDER_SIGNAL: only the main thread can install a handler; call dump_on_signal there")


def dump_all(reason: str) -> list[Path]:
    """Write the recorders of all open communicators of this process to files.

    Any thread or signal handler may call this function.
    """
    # This starts no thread: the start takes a lock that the code interrupted by the signal may hold.
    paths = [try_write(recorder.snapshot(reason)) for recorder in list(_recorders) if recorder.open]
    return [path for path in paths if path is not None]


on_signal.listen(dump_all)


def in_background(call: Callable[[], object]) -> bool:
    """Call a function in a thread. The exit of the interpreter waits for this thread for at most 1 s.

    :returns: False if the system cannot start a thread.
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
    """Log a warning, but only once for each text."""
    if message not in _complained and len(_complained) < 100:
        _complained.append(message)
        _log.warning("%s", message)


def wanted() -> bool:
    """Return whether to write files of flight recorders."""
    return clock.simulation is None and os.environ.get("AIOCOMMS_RECORDER_DIR") != ""


def try_write(snapshot: Snapshot) -> Path | None:
    """Write a recorder's content to a file in ``AIOCOMMS_RECORDER_DIR``, or in the default folder. Return the path.

    Return None if files are switched off, or if the write fails. A failure is logged once.
    """
    if not wanted():
        return None
    try:
        return write(snapshot)
    except OSError as error:
        complain(f"the flight recorder cannot be written: {error}; set AIOCOMMS_RECORDER_DIR to another folder")
        return None


def write(snapshot: Snapshot, folder: str | os.PathLike[str] | None = None) -> Path:
    """Write the content of a flight recorder to a new file.

    :param folder: the target folder; None: ``AIOCOMMS_RECORDER_DIR``, or the default folder.
    :returns: the path of the file.
    :raises OSError: the file cannot be written, or the default folder is not safe.
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
    """The ops of a lost communicator, copied at the loss.

    The ops are written to a file after the tasks that wait for the ops have resumed.
    """

    def __init__(self, recorder: Recorder, flying: list[Flying], reason: str) -> None:
        """Copy the ops. Any thread or signal handler may create the object.

        :param flying: the works that were pending at the loss.
        """
        self.recorder = recorder
        self._reason = reason
        self._look: Look | None = None
        self.shot: Snapshot | None = None
        """The result of :meth:`snapshot` in a simulated process; always None outside a simulation.

        If the simulated run fails, the simulation writes this result to a file.
        """
        if clock.simulation is not None:
            clock.state().setdefault(RECORDS, []).append(self)
        with self._complaining():
            self._look = recorder.look(flying)

    def snapshot(self) -> Snapshot | None:
        """Describe the ops in the first call. Return None in every later call, or if the recorder fails (logged once).

        After the first call this object refers to no works or tensors, so a slow write does not keep works or tensors
        alive.
        """
        look, self._look = self._look, None
        with self._complaining():
            if look is not None:
                shot = self.recorder.describe(look, self._reason)
                self.shot = shot if clock.simulation is not None else None
                return shot
        return None

    def write_later(self) -> None:
        """Write the ops to a file in a background thread, unless files are switched off."""
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
        except Exception as error:  # The communicator must end in spite of any exception.
            complain(f"the flight recorder: {type(error).__name__}: {error}")


def encode(snapshot: Snapshot) -> bytes:
    """Encode the content of a flight recorder as the content of a file."""
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
        raise PermissionError(f"{folder} is open to other users, or is no folder: set AIOCOMMS_RECORDER_DIR to another")
    return folder


def _default() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "aiocomms"
    return Path(tempfile.gettempdir()) / f"aiocomms-{os.getuid()}"


def _prune(folder: Path, name: str, default: bool) -> None:
    """Delete the oldest files, so that the number of files will not exceed the limits when one new file is written.

    If the user has chosen the folder, delete only files of this process.
    """
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
