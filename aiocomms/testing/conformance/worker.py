"""The main function of a rank's process: it receives requests, runs the checks and returns their outcomes."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import torch
from torch.distributed import FileStore

from aiocomms.progress.loops import running_loop
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import CaseBoard, Outcome, Place
from aiocomms.testing.conformance.rank import Rank, Reports, Request, other_tasks, with_leftovers
from aiocomms.testing.conformance.world import BACKENDS


def work(place: Place, rank: int, pipe: Connection, dump: str) -> None:
    """Run the process of one rank.

    :param pipe: the pipe through which requests come and outcomes go.
    :param dump: the file into which the stacks of all threads are written on SIGUSR1 and after a crash.
    """
    torch.set_num_threads(1)  # several ranks share the processors
    backend, options = BACKENDS[place.loop]
    with Path(dump).open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        anyio.run(_Worker(place, rank, pipe).main, backend=backend, backend_options=options)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


class _Worker:
    def __init__(self, place: Place, rank: int, pipe: Connection) -> None:
        self._place = place
        self._index = rank
        self._pipe = pipe
        self._messages: deque[tuple[Any, ...]] = deque()

    async def main(self) -> None:
        """Serve requests until the request to close."""
        self._loop = running_loop()
        self._came = anyio.Event()
        self._reports = Reports()
        self._reports.install()
        self._rank: Rank | None = None
        self._board = CaseBoard()
        threading.Thread(target=self._listen, name="conformance requests", daemon=True).start()
        while True:
            while self._messages:
                kind, *message = self._messages.popleft()
                if kind == "close":
                    await self._close()
                    data.verify()
                    return
                self._pipe.send(("done", await self._run(*message)))
            self._came = anyio.Event()
            await self._came.wait()

    def _listen(self) -> None:
        """Read the pipe. This method runs in a separate thread, which can read while the loop is busy."""
        try:
            while True:
                self._loop.call_threadsafe(self._take, self._pipe.recv())
        except (EOFError, OSError):
            os._exit(1)  # the suite is gone

    def _take(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "note":
            self._board.hear(*rest)
        elif kind == "stop":
            if self._rank is not None:
                self._rank.stop()
        else:
            if kind == "run":
                self._board = CaseBoard(lambda rank, note: self._pipe.send(("note", note)))
            self._messages.append(message)
            self._came.set()

    async def _run(self, request: Request, path: str, fresh: bool) -> Outcome:
        store = FileStore(path, self._place.size)
        store.set_timeout(timedelta(seconds=self._place.deadline))
        if fresh:
            await self._close()
        if self._rank is None:
            self._rank = Rank(self._place, self._index, store, self._board, self._reports)
        self._rank.prepare(store, self._board)
        before = other_tasks()
        outcome = await self._rank.run(request)
        data.forget()
        return with_leftovers([outcome], other_tasks() - before, self._reports.take())[0]

    async def _close(self) -> None:
        if self._rank is not None:
            rank, self._rank = self._rank, None
            await rank.close()
