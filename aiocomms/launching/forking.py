"""The supervisor's side of the fork server.

This side starts the fork server, and exchanges messages with the fork server.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from signal import SIGKILL
from typing import Any, Final

import anyio

from aiocomms.errors import CommError
from aiocomms.launching.forkserver import LARGEST
from aiocomms.lowlevel import run_in_thread

_CODE: Final = "import sys; from aiocomms.launching.forkserver import main; main(int(sys.argv[1]))"
_MARGIN: Final = 10.0
"""The seconds after the grace time until the supervisor sends SIGKILL to a fork server that has not ended."""


class ForkServer:
    """A running fork server. Its methods run on the supervisor's event loop.

    :param settings: the first message to the fork server, with ``program``, ``preload`` and ``grace``.
    :param environment: the environment of the fork server, which the ranks inherit.
    :raises CommError: the settings are too long. No process was started.
    """

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.ready = self.killed = False
        """``ready`` is True once the fork server has imported all modules.

        ``killed`` is True once this object has killed the fork server.
        """
        self._grace = float(settings["grace"])
        first = _encoded(settings, "the program's arguments have")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Linux's default would limit a message to 208 KiB.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, *flags, "-c", _CODE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, env=dict(environment), pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._socket.send(first)
        self._socket.setblocking(False)

    async def start(self, key: str, environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
        """Tell the fork server to start a process.

        :param key: the name of the process in the messages of the fork server.
        :param descriptors: the file descriptors of stdout, stderr, the socket to the supervisor, and possibly a
            listening socket. The caller must close these descriptors after the call.
        """
        await self._send(["start", key, dict(environment)], descriptors)

    async def signal(self, key: str, number: int) -> None:
        """Tell the fork server to send a signal to a process. A process that has ended gets no signal.

        During its imports, the fork server reads no messages and has no child processes. So during the imports, a
        SIGKILL goes to the fork server itself.
        """
        if number == SIGKILL and not self.ready:
            self._kill()
        else:
            await self._send(["signal", key, number], [])

    async def _send(self, message: object, descriptors: Sequence[int]) -> None:
        data = _encoded(message, "a rank's environment has")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # hear() notices the end.
            while True:
                try:
                    socket.send_fds(self._socket, [data], descriptors)
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
                else:
                    return

    async def hear(self) -> list[Any] | None:
        """Wait for the next message of the fork server.

        :returns: the message, or None if the fork server has ended. The first element is ``ready``, ``failed``,
            ``started``, ``refused`` or ``ended``. The element after ``failed`` is the reason of the failure. The
            element after ``started``, ``refused`` or ``ended`` is the key of the process.
        """
        while True:
            await anyio.wait_readable(self._socket)
            try:
                data = self._socket.recv(LARGEST)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return None
            message: list[Any] | None = json.loads(data) if data else None
            self.ready = self.ready or message == ["ready"]
            return message

    async def aclose(self) -> None:
        """End the fork server and all its processes, and wait until they have ended.

        Meanwhile, :meth:`hear` returns the messages about the ends of processes.
        """
        with contextlib.suppress(OSError):  # The fork server may have ended.
            self._socket.shutdown(socket.SHUT_WR)
        with anyio.CancelScope(shield=True):
            if self.ready:
                with anyio.move_on_after(self._grace + _MARGIN):
                    await run_in_thread(self._process.wait)
                    return
            self._kill()
            await run_in_thread(self._process.wait)

    def _kill(self) -> None:
        """Kill the fork server. The kernel then also kills the child processes of the fork server."""
        self.killed = True
        self._process.kill()

    def close(self) -> None:
        """Close the connection to the fork server."""
        self._socket.close()


def _encoded(message: object, what: str) -> bytes:
    data = json.dumps(message).encode()
    if len(data) > LARGEST:
        raise CommError(f"{what} {len(data)} bytes, wanted at most {LARGEST}")
    return data
