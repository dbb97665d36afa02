"""A running server of the examples, for the demonstrations: its launcher and its output."""

from __future__ import annotations

import re
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import TYPE_CHECKING

import anyio
from anyio.streams.text import TextReceiveStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from anyio.abc import Process

EXAMPLES = Path(__file__).parents[1]


class Job:
    """The running server and the output of its processes.

    :param process: the launcher
    """

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self.process = process
        self.output = ""
        self._stdout = TextReceiveStream(process.stdout)

    async def read_until(self, pattern: str) -> str:
        """Read until the output matches a pattern, and return the pattern's first group.

        :raises anyio.EndOfStream: every process ended before the match
        """
        while not (found := re.search(pattern, self.output)):
            self.output += await self._stdout.receive()
        return found[1]

    async def read_to_end(self) -> None:
        """Read the output until every process has ended."""
        async for text in self._stdout:
            self.output += text

    async def check_end(self, ranks: int) -> None:
        """Wait for the end of all processes.

        :raises SystemExit: a rank has not ended with exit code 0
        """
        await self.read_to_end()
        ends = "; ".join(f"rank {rank}: exit code 0" for rank in range(ranks))
        if await self.process.wait() or ends not in self.output:
            raise SystemExit("not all ranks have ended in good order")


@asynccontextmanager
async def launched(ranks: int, preload: Iterable[str], module: str, *options: str) -> AsyncIterator[Job]:
    """Start a server on a free port. Print the output of its processes if the block fails.

    :param preload: the modules that are imported once for all ranks
    """
    launcher = ["aiocomms", "run", f"-n{ranks}", "--restart=on-failure", "--listen=127.0.0.1:0"]
    imports = [f"--preload={name}" for name in preload]
    command = [sys.executable, "-m", *launcher, *imports, "-m", module, *options]
    async with await anyio.open_process(
        command, stdin=DEVNULL, stderr=STDOUT, cwd=EXAMPLES, start_new_session=True
    ) as process:
        job = Job(process)
        try:
            yield job
        except BaseException:
            print(job.output, file=sys.stderr)
            raise
        finally:
            with suppress(ProcessLookupError):
                process.terminate()  # the launcher ends the other processes
