"""The supervisor's side of the fork server: it starts it, sends it messages, and hears of births and deaths."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio

from aiocomms.errors import CommError
from aiocomms.launching.forkserver import LARGEST
from aiocomms.lowlevel import run_in_thread

_CODE: Final = "import sys; from aiocomms.launching.forkserver import main; main(int(sys.argv[1]))"


class ForkServer:
    """A fork server that runs. It belongs to the supervisor's loop.

    :param settings: its first message: ``program``, ``preload`` and ``grace``.
    :param environment: of the fork server, which the ranks inherit.
    """

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, *flags, "-c", _CODE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, env=dict(environment), pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._socket.send(json.dumps(settings).encode())
        self._socket.setblocking(False)

    async def start(self, key: str, environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
        """Have a process started.

        :param key: its name in messages.
        :param descriptors: stdout, stderr, the line, perhaps a listening socket. They remain the caller's.
        """
        await self._send(["start", key, dict(environment)], descriptors)

    async def signal(self, key: str, number: int) -> None:
        """Have a signal sent to a process; nothing happens if it has ended."""
        await self._send(["signal", key, number], [])

    async def _send(self, message: object, descriptors: Sequence[int]) -> None:
        data = json.dumps(message).encode()
        if len(data) > LARGEST:
            raise CommError(f"a rank's environment has {len(data)} bytes, wanted at most {LARGEST}")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # hear() finds out.
            while True:
                try:
                    socket.send_fds(self._socket, [data], descriptors)
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
                else:
                    return

    async def hear(self) -> list[Any] | None:
        """Wait for the next message: ``ready``; ``failed`` and why; ``started``, ``refused`` or ``ended`` with a key.

        :returns: None: the fork server has ended.
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
            return message

    async def aclose(self) -> None:
        """Have it end, with all its processes, and wait for that; :meth:`hear` tells of their ends meanwhile."""
        with contextlib.suppress(OSError):  # The fork server has ended, or hears no more.
            self._socket.shutdown(socket.SHUT_WR)
        with anyio.CancelScope(shield=True):
            await run_in_thread(self._process.wait)

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()
