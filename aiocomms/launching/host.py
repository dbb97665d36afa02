"""The code that starts and ends the processes of one host, and reads their reports and output."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final

import anyio
from anyio.abc import TaskGroup

from aiocomms.bootstrap.supervised import ENDS
from aiocomms.errors import CommError
from aiocomms.launching.forking import ForkServer
from aiocomms.launching.output import LineSplitter, Printer
from aiocomms.launching.supervision import Start

_PIECE: Final = 2**16
_KILLED: Final = -9
_CLOSED: Final = -1

Event = tuple[Any, ...]
"""An event about a rank or the job, in one of these forms: ``("ended", rank, incarnation, code)``,
``("formed", rank, incarnation, name, epoch)``, ``("lost", rank, name, epoch)``, ``("leaves", rank, incarnation)``,
``("stop", why)``, ``("replace",)``."""


class RankProcess:
    """The process of a rank, and the supervisor's ends of its pipes."""

    def __init__(self, rank: int, incarnation: int, log: BinaryIO | None) -> None:
        self.rank, self.incarnation, self.log = rank, incarnation, log
        self.key = f"{rank}.{incarnation}"
        self.pid: int | None = None
        self.formed = False
        self.pipes: list[int] = []
        """The supervisor's ends of three channels: stdout, stderr and the *line*.

        The line is a socket for reports of the rank, and for announcements to the rank.
        """
        self.theirs: list[int] = []
        line = socket.socketpair()
        for mine, its in (os.pipe(), os.pipe(), (line[0].detach(), line[1].detach())):
            self.pipes.append(mine)
            self.theirs.append(its)
            os.set_blocking(mine, False)
        os.set_blocking(self.theirs[2], False)  # A report never blocks a rank.
        self.reports = LineSplitter()
        # A cancellation of the supervisor does not end these tasks. The end of the process does.
        self.scopes = [anyio.CancelScope(shield=True) for _ in range(3)]
        self.pumping = 2

    def announce(self, what: str) -> None:
        """Tell the process the reason of the signal that the process gets next; see ``bootstrap/supervised.py``."""
        if self.pipes[2] != _CLOSED:
            with contextlib.suppress(OSError):  # The process may just have ended.
                os.write(self.pipes[2], f"{what}\n".encode())


class HostProcesses:
    """The ranks of this host, as child processes of one fork server. A new fork server replaces a killed fork server.

    :param settings: the fork server's first message.
    :param environment: the environment that the ranks inherit.
    :param listener: the listening socket for rank 0.
    :param tell: the function to call with each event.
    :param tasks: the task group of the tasks that read the ranks' output. These tasks end with the ranks.
    """

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str], listener: socket.socket | None,
        printer: Printer, tell: Callable[[Event], None], tasks: TaskGroup,
    ) -> None:  # fmt: skip
        self._settings, self._environment, self._listener = settings, environment, listener
        self._printer, self._tell, self._tasks = printer, tell, tasks
        self._server: ForkServer | None = None
        self.processes: dict[int, RankProcess] = {}
        """The running processes, by rank."""

    async def start(self, deed: Start, variables: Mapping[str, str]) -> None:
        """Start the process of a rank."""
        if self._server is None:
            self._server = ForkServer(self._settings, self._environment)
            self._tasks.start_soon(self._hear, self._server)
        log = self._printer.log(deed.rank, deed.incarnation)
        process = self.processes[deed.rank] = RankProcess(deed.rank, deed.incarnation, log)
        descriptors = list(process.theirs)
        if deed.rank == 0 and self._listener is not None:
            descriptors.append(self._listener.fileno())
        await self._server.start(process.key, variables, descriptors)
        for descriptor in process.theirs:
            os.close(descriptor)
        for stream in (1, 2):
            self._tasks.start_soon(self._pump, process, stream)
        self._tasks.start_soon(self._hear_reports, process)

    async def signal(self, rank: int, number: int, announcement: str = "") -> None:
        """Send a signal to the process of a rank, if the rank has a process.

        :param announcement: the reason of the signal, which the process gets before the signal; see
            ``bootstrap/supervised.py``. If the text is empty, no announcement is sent.
        """
        process = self.processes.get(rank)
        if process is not None and self._server is not None:
            if announcement:
                process.announce(announcement)
            await self._server.signal(process.key, number)

    def refuse_connections(self) -> None:
        """Close the listening socket, because no rank will accept connections any more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def aclose(self) -> None:
        """End all processes and the fork server, and wait until they have ended."""
        server, self._server = self._server, None
        for process in self.processes.values():
            process.announce(ENDS)
        if server is not None:
            await server.aclose()
        for process in list(self.processes.values()):
            self._end(process)

    async def _hear(self, server: ForkServer) -> None:
        """Handle the fork server's messages until the fork server has ended."""
        with anyio.CancelScope(shield=True):
            try:
                await self._follow(server)
            finally:
                server.close()
            if self._server is server:
                await self._lose()

    async def _follow(self, server: ForkServer) -> None:
        while (message := await server.hear()) is not None:
            match message:
                case ["failed", why]:
                    raise CommError(why)
                case ["started", key, pid]:
                    if (process := self._of(key)) is not None:
                        process.pid = pid
                case ["refused", key, why]:
                    raise CommError(f"no process can be started: {why}")
                case ["ended", key, code]:
                    if (process := self._of(key)) is not None:
                        self._end(process)
                        self._tell(("ended", process.rank, process.incarnation, code))

    async def _lose(self) -> None:
        """Record that the fork server and all its child processes were killed."""
        server, self._server = self._server, None
        assert server is not None
        early = not server.ready and not server.killed
        await server.aclose()
        if early:
            raise CommError("the process that imports torch for the ranks has ended before the imports were done")
        self._printer.say("the fork server was killed, and all ranks with it")
        for process in list(self.processes.values()):
            self._end(process)
            self._tell(("ended", process.rank, process.incarnation, _KILLED))

    def _of(self, key: str) -> RankProcess | None:
        """Return the process with a given :attr:`RankProcess.key`; None if the process is no longer running."""
        process = self.processes.get(int(key.partition(".")[0]))
        return process if process is not None and process.key == key else None

    def _end(self, process: RankProcess) -> None:
        """Read the last reports of an ended process. The process's tasks read the rest of its output, and then end."""
        del self.processes[process.rank]
        self._read_reports(process)
        for scope in process.scopes:
            scope.cancel()

    async def _hear_reports(self, process: RankProcess) -> None:
        pipe = process.pipes[2]
        try:
            with process.scopes[2]:
                await anyio.wait_readable(pipe)
                while self._read_reports(process):
                    await anyio.wait_readable(pipe)
        finally:
            process.pipes[2] = _CLOSED
            os.close(pipe)

    def _read_reports(self, process: RankProcess) -> bool:
        """Read the available reports from the rank's socket. Return False if the rank has closed the socket."""
        if process.pipes[2] == _CLOSED:
            return False
        data = _read(process.pipes[2])
        for line in process.reports.feed(data or b""):
            match line.decode(errors="replace").split(" ", 3):
                case ["formed", epoch, *name] if epoch.isdecimal():
                    process.formed = True
                    self._tell(("formed", process.rank, process.incarnation, " ".join(name), int(epoch)))
                case ["lost", rank, epoch, name] if rank.isdecimal() and epoch.isdecimal():
                    self._tell(("lost", int(rank), name, int(epoch)))
                case ["leaves"]:
                    self._tell(("leaves", process.rank, process.incarnation))
        return data != b""

    async def _pump(self, process: RankProcess, stream: int) -> None:
        """Print the output of a process until it has ended."""
        pipe, splitter = process.pipes[stream - 1], LineSplitter()
        try:
            with process.scopes[stream - 1]:
                while True:
                    await anyio.wait_readable(pipe)
                    data = _read(pipe)
                    if data == b"":
                        break
                    await self._print(process, stream, splitter.feed(data or b""))
            while data := _read(pipe):  # The process has ended, but others may still hold the pipe open.
                await self._print(process, stream, splitter.feed(data))
            await self._print(process, stream, splitter.end())
        finally:
            os.close(pipe)
            process.pumping -= 1
            if process.log is not None and not process.pumping:
                process.log.close()

    async def _print(self, process: RankProcess, stream: int, lines: list[bytes]) -> None:
        if lines:
            await self._printer.lines(process.rank, stream, lines, process.log)


def _read(pipe: int) -> bytes | None:
    """Return the available data of a pipe.

    Return None if there is no data yet, and empty bytes if the pipe was closed.
    """
    try:
        return os.read(pipe, _PIECE)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # The process has ended before it read all messages.
        return b""
