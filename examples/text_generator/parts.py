"""What the supervisor of the text generator needs: signals, sockets, ends."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from subprocess import DEVNULL

import anyio
import uvicorn
from embedding_server.job import EXAMPLES, Job

SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNKNOWN = 255  # the exit code of a rank whose fork server is gone, and which may live


def make_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of what all command lines of a server have in common."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="0 picks a free one (default: %(default)s)")
    return parser


def end_at_once_on_signals() -> None:
    """End on Ctrl-C and SIGTERM until the event loop takes them over: there is nothing to tidy up before that.

    The imports take seconds, and an exception in the middle of one would not always get through.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise SystemExit(f"cannot listen on {host} port {port}: {error}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it each answer takes 40 ms
    return listener


def kill(process: ForkServerProcess) -> None:
    """Kill a process, even if only the fork server is gone."""
    if process.exitcode in (None, UNKNOWN):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


@contextmanager
def exiting_by(kind: type[Exception], who: str = "") -> Iterator[None]:
    """End the process by an error of a kind that the block raises, by the first if they are several.

    :param who: ends, with a colon and a space behind it
    :raises SystemExit: with a sentence that says why
    """
    failure: BaseException | None = None
    try:
        yield
    except* kind as errors:
        failure = errors
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        raise SystemExit(f"{who}{type(failure).__name__}: {failure}")


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal is for the whole process."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def close_half_requests(server: uvicorn.Server) -> None:
    """Close connections whose requests have not come to their end; uvicorn closes the others when they are answered."""
    for connection in server.server_state.connections:
        if connection.cycle is not None and connection.cycle.more_body:
            connection.transport.close()


@asynccontextmanager
async def supervised(supervisor: str, *options: str) -> AsyncIterator[Job]:
    """Start a server on a free port; show what its processes complained of if the block fails.

    :param supervisor: the module of its supervisor
    """
    command = [sys.executable, "-m", supervisor, "--port=0", *options]
    with tempfile.TemporaryFile() as log:
        async with await anyio.open_process(
            command, stdin=DEVNULL, stderr=log, cwd=EXAMPLES, start_new_session=True
        ) as process:
            try:
                yield Job(process)
            except BaseException:
                log.seek(0)
                print(log.read().decode(), file=sys.stderr)
                raise
            finally:
                with suppress(ProcessLookupError):
                    process.terminate()  # the supervisor ends the others
