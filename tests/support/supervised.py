"""A server of the examples under its launcher, as its users start it, and what it prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import httpx

EXAMPLES = Path(__file__).parents[2] / "examples"
HANGS = (
    600.0  # seconds after which a test hangs, however slow the machine; nothing else of these tests is bounded by time
)
WHOLE_LINES = {"PYTHONUNBUFFERED": ""}
"""The variable that a test clears.

Where a user has set it, print() writes a line's end by itself, and another process may write in between.
"""


class Supervised:
    """The server, in a session of its own.

    :param command: what Python is told.
    :param environment: in which it runs, beside that of the test.
    """

    def __init__(self, *command: str, **environment: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=EXAMPLES,
            env=os.environ | WHOLE_LINES | environment,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )
        self.news = threading.Condition()
        """Notified when a process has started."""
        self.url: Future[str] = Future()
        self.http: httpx.Client | None = None
        self.reader = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self.reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        sys.stderr.write(self.errors())
        self.log.close()
        if self.http is not None:
            self.http.close()

    def _read(self) -> None:
        for printed in self.process.stdout:
            line = re.sub(r"^\[\d+\] ", "", printed)  # The launcher says which rank has printed it.
            if line.startswith("serving on ") and not self.url.done():
                self.url.set_result(line.split()[-1])
            else:
                self.heard(line)
        if not self.url.done():
            self.url.set_exception(EOFError("it never served"))

    def heard(self, line: str) -> None:
        """Take note of what it has printed."""

    def errors(self) -> str:
        """Return the complaints of its processes."""
        self.log.seek(0)
        return self.log.read()
