"""The fork server: a process that has imported the modules of the ranks, and forks to start each rank.

The supervisor starts the fork server with one end of a socket pair. The fork server imports torch, aiocomms and the
user's ``preload`` modules. Then it forks once for each start message, so a new rank starts immediately. The fork server
has one thread, waits for its children, and reports the exit code of each child.

If the supervisor ends, the socket closes. Then the fork server sends SIGTERM to the ranks and, after the grace time,
SIGKILL. If the fork server itself is killed, the kernel kills the ranks (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from aiocomms.lowlevel import clock

LARGEST: Final = 2**18
"""The largest message in bytes. The longest part of a message is a rank's environment."""
PRELOADED: Final = ("torch", "torch.distributed", "aiocomms.communicator.formation", "aiocomms.serving")
LISTENING: Final = 3
"""The file descriptor of a program's first listening socket, as systemd defines it (SD_LISTEN_FDS_START)."""
_HIGH: Final = 64  # The fork server's own descriptors are above those that programs expect.
_PR_SET_PDEATHSIG: Final = 1
_INT: Final = array.array("i").itemsize


class Birth(NamedTuple):
    """The program and the environment of a forked process."""

    program: Sequence[str]
    environment: Mapping[str, str]


def main(descriptor: int) -> NoReturn:
    """Execute the supervisor's orders until the supervisor has ended. In a forked process, run the program."""
    _die_with_parent(os.getppid())  # During the imports the process cannot read the socket.
    control = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH))
    os.close(descriptor)
    _reserve(LISTENING)
    settings = json.loads(control.recv(LARGEST))
    program = settings["program"]
    _set_path(program)
    try:
        for name in (*PRELOADED, *settings["preload"]):
            importlib.import_module(name)
    except BaseException as error:
        _send(control, "failed", f"{name} cannot be imported: {type(error).__name__}: {error}")
        raise SystemExit(1) from None
    gc.collect()
    gc.freeze()  # Garbage collection in a rank does not write to the memory that the forks share.
    _prctl(_PR_SET_PDEATHSIG, 0)
    _send(control, "ready")
    birth = _Server(control, program, settings["grace"]).serve()
    if birth is not None:
        _run(birth)
    raise SystemExit(0)


class _Server:
    """The loop of the fork server."""

    def __init__(self, control: socket.socket, program: Sequence[str], grace: float) -> None:
        self._control = control
        self._program = program
        self._grace = grace
        self._children: dict[str, int] = {}
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def serve(self) -> Birth | None:
        """Execute the supervisor's orders until the supervisor has ended.

        In a forked process, return the program and the environment.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            poll.poll()
            self._reap()
            message, descriptors = self._next()
            match message:
                case ["start", key, environment]:
                    birth = self._fork(key, environment, descriptors)
                    if birth is not None:
                        return birth
                case ["signal", key, number]:
                    self._signal(key, number)
                case ["end"]:
                    self._end()
                    return None

    def _next(self) -> tuple[list[Any], list[int]]:
        """Return the next message and its file descriptors. If there is no message yet, return two empty lists."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            # socket.recv_fds drops the flags.
            data, ancillary, _, _ = self._control.recvmsg(LARGEST, socket.CMSG_LEN(8 * _INT), flags)
        except BlockingIOError:
            return [], []
        except ConnectionError:
            return ["end"], []
        received = array.array("i")
        for _, _, content in ancillary:
            received.frombytes(content[: len(content) - len(content) % _INT])
        return (json.loads(data) if data else ["end"]), list(received)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for key, pid in list(self._children.items()):
            # The kernel may reuse the pid of a reaped rank, so the rest of its process group is killed before.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                del self._children[key]
                with contextlib.suppress(OSError):  # The supervisor may have ended.
                    _send(self._control, "ended", key, os.waitstatus_to_exitcode(status))

    def _signal(self, key: str, number: int) -> None:
        pid = self._children.get(key)
        if pid is not None:
            os.kill(pid, number)
            if number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):  # The child may have no group of its own yet.
                    os.killpg(pid, number)

    def _end(self) -> None:
        """End all children, and wait until they have ended."""
        ends = clock.now() + self._grace
        for key in self._children:
            self._signal(key, signal.SIGTERM)
        while self._children:
            left = ends - clock.now()
            if left <= 0:
                for key in self._children:
                    self._signal(key, signal.SIGKILL)
            select.select([self._woken], [], [], left if left > 0 else None)
            self._reap()

    def _fork(self, key: str, environment: dict[str, str], descriptors: list[int]) -> Birth | None:
        """Fork. Return the program and the environment in the child process, and None in the parent process."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            _send(self._control, "refused", key, str(error))
            pid = -1
        if pid == 0:
            _die_with_parent(parent)
            _part(int(environment["LOCAL_WORLD_SIZE"]))
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._woken, self._waker, self._control):
                end.close()
            return Birth(self._program, environment | _take(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._children[key] = pid
            _send(self._control, "started", key, pid)
        return None


def _part(ranks: int) -> None:
    """Leave the process group of the fork server.

    If each rank can have its own core, also leave the session of the fork server.

    Linux first divides the CPU time among sessions (autogroup). So a rank in a separate session gets more CPU time
    while other programs run. Ranks that share a core are slower in separate sessions, because sessions interrupt each
    other. See docs/benchmarks/serve.md.

    :param ranks: the number of ranks on this host.
    """
    if ranks > len(os.sched_getaffinity(0)):
        os.setpgid(0, 0)
    else:
        os.setsid()


def _take(descriptors: list[int]) -> dict[str, str]:
    """Install a rank's file descriptors: stdout, stderr, the socket to the supervisor, and maybe a listening socket.

    :returns: the environment variables that tell the program the numbers of these descriptors.
    """
    out, err, reports, *listeners = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    kept = fcntl.fcntl(reports, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    variables = {"AIOCOMMS_SUPERVISOR": f"{kept}:{os.getpid()}"}
    os.close(LISTENING)
    if listeners:
        # This is systemd's protocol (sd_listen_fds), which uvicorn, gunicorn and others support.
        spare = fcntl.fcntl(listeners[0], fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.dup2(spare, LISTENING)
        os.close(spare)
        variables |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
    for descriptor in descriptors:
        if descriptor != LISTENING:
            os.close(descriptor)
    return variables


def _run(birth: Birth) -> NoReturn:
    """Run the program as ``python`` does."""
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    os.environ.update(birth.environment)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy" in sys.modules:  # Without a new seed all forks would draw the same numbers.
        sys.modules["numpy"].random.seed()
    importlib.import_module("aiocomms.bootstrap.early").watch()
    importlib.import_module("aiocomms.diagnosis.on_signal").dump_if_asked()
    program = birth.program
    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _show(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        _show(error)
        raise SystemExit(1) from None
    raise SystemExit(0)


def _show(error: BaseException) -> None:
    """Print an error as the interpreter does, without the frames of this module and of runpy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    if trace is not None:  # There is no such frame if, for example, the program was not found.
        error.__traceback__ = trace
    sys.excepthook(type(error), error, error.__traceback__)


def _set_path(program: Sequence[str]) -> None:
    """Set ``sys.path[0]`` as ``python FILE.py`` or ``python -m MODULE`` does."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))  # noqa: PTH109, PTH120


def _reserve(descriptor: int) -> None:
    """Open the null device with a given file descriptor, so that no other file gets the same descriptor."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def _send(control: socket.socket, *message: object) -> None:
    control.send(json.dumps(message).encode())


def _die_with_parent(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)


_libc = ctypes.CDLL(None)
