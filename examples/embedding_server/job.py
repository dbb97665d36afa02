"""A server of the examples as a demonstration sees it: a supervisor that it starts, and what that prints."""

from __future__ import annotations

import re
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING

import anyio
from anyio.streams.text import TextReceiveStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import Process

EXAMPLES = Path(__file__).parents[1]


class Job:
    """The running server, and what its processes have printed.

    :param process: the supervisor
    """

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self.process = process
        self.output = ""
        self._stdout = TextReceiveStream(process.stdout)

    async def read_until(self, pattern: str) -> str:
        """Read until something was printed; return its first group.

        :raises anyio.EndOfStream: if every process ended before that
        """
        while not (found := re.search(pattern, self.output)):
            self.output += await self._stdout.receive()
        return found[1]

    async def read_to_end(self) -> None:
        """Read what is still printed, until every process has ended."""
        async for text in self._stdout:
            self.output += text


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
