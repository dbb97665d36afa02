"""The output of the ranks. The supervisor prints each line with the rank as prefix, and can write lines to files."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

import anyio
from anyio import to_thread

from aiocomms.errors import CommError
from aiocomms.lowlevel import run_in_thread

LONGEST: Final = 2**16
"""The maximum length of a line in bytes. The supervisor prints a longer line as several lines."""
_COLOURS: Final = (36, 33, 32, 35, 34, 31)
_OUT, _ERR = 1, 2
_LAST: Final = 5.0
"""The largest number of seconds for printing the remaining output after all ranks have ended."""
_PAUSE: Final = 0.1
"""The seconds before the next attempt to print, if the system had no free thread or file descriptor."""


class LineSplitter:
    """An object that receives the data of a stream in pieces, and returns whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add a piece, and return the lines that are complete now, without line ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > LONGEST:
            lines.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        return lines

    def end(self) -> list[bytes]:
        """Return the data after the last line end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def prefixes(size: int, *, coloured: bool) -> list[bytes]:
    """Return the prefix of each rank's lines."""
    plain = [f"[{rank}]" for rank in range(size)]
    if coloured:
        plain = [f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m" for rank, text in enumerate(plain)]
    return [f"{text} ".encode() for text in plain]


def is_coloured(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Return True if the descriptor is a terminal, NO_COLOR is not set, and TERM is not "dumb"."""
    return os.isatty(descriptor) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Printer:
    """The printer of all ranks' output lines.

    If a terminal or pipe is blocked, the ranks block when they print, but the supervisor does not block.

    :param size: the number of ranks.
    :param folder: the folder in which each process gets a file of its output lines without prefixes; None: no files.
    """

    def __init__(self, size: int, folder: Path | None, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._say, self._sentences = anyio.create_memory_object_stream[str](math.inf)
        self._ends = math.inf
        self._prints: set[anyio.CancelScope] = set()
        self._locks = {descriptor: anyio.Lock() for descriptor in (_OUT, _ERR)}
        self._prefixes = {
            descriptor: prefixes(size, coloured=is_coloured(descriptor, environ)) for descriptor in self._locks
        }

    def log(self, rank: int, incarnation: int) -> BinaryIO | None:
        """Open the output file of a process.

        :raises OSError: the file cannot be opened.
        """
        if self._folder is None:
            return None
        return (self._folder / f"rank{rank}.{incarnation}.log").open("wb", buffering=0)

    async def lines(self, rank: int, descriptor: int, lines: list[bytes], log: BinaryIO | None) -> None:
        """Print lines of a rank.

        :param descriptor: the descriptor, 1 or 2, on which the rank has written the lines, and on which this process
            prints them.
        """
        before = self._prefixes[descriptor][rank]
        await self._print(descriptor, b"".join(before + line + b"\n" for line in lines))
        if log is not None:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(_write, log.fileno(), b"".join(line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """Queue a sentence that the supervisor prints on stderr."""
        self._say.send_nowait(text)

    async def print_sentences(self) -> None:
        """Print the supervisor's sentences until :meth:`end` is called. A cancellation does not end this call."""
        with anyio.CancelScope(shield=True), self._sentences:
            async for text in self._sentences:
                await self._print(_ERR, f"aiocomms run: {text}\n".encode())

    def end(self) -> None:
        """End :meth:`print_sentences` when all queued sentences are printed."""
        self._say.close()

    def limit(self) -> None:
        """Limit the time for the remaining output after the end of all ranks.

        After the limit, discard output that was not printed.
        """
        self._ends = min(self._ends, anyio.current_time() + _LAST)
        for scope in self._prints:
            scope.deadline = self._ends

    async def _print(self, descriptor: int, data: bytes) -> None:
        """Print data, even if the caller's task is cancelled."""
        with anyio.CancelScope(shield=True, deadline=self._ends) as scope:
            self._prints.add(scope)
            async with self._locks[descriptor]:
                while True:
                    try:
                        # The thread may block without end, so the interpreter's exit must not wait for it.
                        await run_in_thread(lambda: _write(descriptor, data))
                        break
                    except CommError:  # There is no thread or no descriptor now.
                        await anyio.sleep(_PAUSE)
        self._prints.discard(scope)


def _write(descriptor: int, data: bytes) -> None:
    """Write all data. If the pipe is closed, discard the data."""
    with contextlib.suppress(OSError):
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
