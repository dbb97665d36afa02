"""Runs one way through a checkout's code and counts the calls: the program that :mod:`benchmarks.structure.ways` runs.

``python -P probe.py WAY ROOT [ENGINE]`` prints the counts as JSON. It is started with ``-P`` and by its path, so that
``PYTHONPATH`` alone says which checkout's ``aiocomms`` it imports.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch.distributed import FileStore

import aiocomms
from aiocomms.errors import PeerDiedError
from aiocomms.testing import local_world

RESUMING = ("Waiters.wake", "Loop.unpark")
"""What lets a suspended task go on; the second in checkouts of before November 2026."""
ROUNDS = 19
"""Before what is counted: so many times an ``all_reduce`` and a message, which the flight recorder remembers."""


class Counter:
    """Follows the profiler's events on all threads, between :meth:`begin` and :meth:`end`."""

    def __init__(self, root: str) -> None:
        self._mine = (f"{root}/aiocomms/", f"{root}/transports/")
        self._counting = False
        self._last: tuple[str, ...] = ()
        self._functions: list[str] = []
        self._files: list[str] = []  # where each event leads
        sys.setprofile(self._event)
        threading.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if not self._counting or not frame.f_code.co_filename.startswith(self._mine):
            return
        if event == "call":
            if frame.f_code.co_qualname.endswith(self._last):
                self._counting = False
            self._functions.append(f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}")
            self._files.append(frame.f_code.co_filename)
        elif event == "return":
            back = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            self._files.append(back if back.startswith(self._mine) else "")

    async def begin(self, last: tuple[str, ...] = ()) -> None:
        """Count from now on, once some turns of the loop have passed in which nothing was called.

        :param last: the ends of the names of functions; the first call of one is the last that counts.
        """
        self._last = last
        self._counting = True
        while True:
            self._functions.clear()
            self._files.clear()
            for _ in range(10):
                await asyncio.sleep(0)
            if not self._functions:
                return

    def end(self) -> None:
        """Count no more."""
        self._counting = False

    def figures(self) -> dict[str, Any]:
        """What was called, in how many files, and how often the file changed."""
        changes = sum(a != b for a, b in pairwise(self._files))
        return {"functions": self._functions, "files": len(set(self._files) - {""}), "changes": changes}


class EngineFinder(importlib.abc.MetaPathFinder):
    """Finds the engine where it was built, which is not where the Python sources are."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See :class:`importlib.abc.MetaPathFinder`."""
        return importlib.util.spec_from_file_location(name, self._path) if name == "aiocomms_ucx._engine" else None


async def exchange(comm: aiocomms.Communicator) -> None:
    """The rounds before what is counted."""
    tensor = torch.zeros(2)
    for _ in range(ROUNDS):
        await comm.all_reduce(tensor)
        if comm.size == 2:
            await (comm.recv(tensor, 1) if comm.rank == 0 else comm.send(tensor, 0))


async def all_reduce(counter: Counter) -> None:
    """The other rank has called it; this one completes it."""
    async with local_world(2) as comms:
        await asyncio.gather(*map(exchange, comms))
        other = comms[0].all_reduce(torch.zeros(2))
        tensor = torch.zeros(2)
        await counter.begin()
        await comms[1].all_reduce(tensor)
        counter.end()
        await other


async def alone(counter: Counter) -> None:
    """Nobody else takes part, so it ends within the call, as on a rank that the others have waited for."""
    async with aiocomms.new_comm("ucx") as comm:
        await exchange(comm)
        tensor = torch.zeros(2)
        await counter.begin()
        await comm.all_reduce(tensor)
        counter.end()


async def cancel(counter: Counter) -> None:
    """A task awaits a recv that nothing matches, and is cancelled."""

    async def receive() -> None:
        try:
            await comms[0].recv(torch.zeros(2), 1)
        finally:
            counter.end()

    async with local_world(2) as comms:
        await asyncio.gather(*map(exchange, comms))
        task = asyncio.ensure_future(receive())
        await counter.begin()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task


async def death(counter: Counter, transport: str, rank: int, folder: str, peer: int) -> None:
    """Two processes; rank 0 awaits a recv of the other, and kills it."""
    comm = await aiocomms.new_comm(transport, store=FileStore(f"{folder}/store", 2), rank=rank, size=2, timeout=60)
    await exchange(comm)
    if rank == 1:
        await asyncio.Event().wait()

    async def receive() -> None:
        try:
            await comm.recv(torch.zeros(2), 1)
        except PeerDiedError:
            counter.end()
            return
        raise AssertionError("the recv of a dead rank's message ended without PeerDiedError")

    task = asyncio.ensure_future(receive())
    await counter.begin(RESUMING)
    os.kill(peer, signal.SIGKILL)
    await task


def main(way: str, root: str, engine: str = "") -> None:
    """Go one way, and print what it took."""
    # An editable install's finder would load another checkout's transport.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable_" not in type(finder).__module__]
    if engine:
        sys.meta_path.insert(0, EngineFinder(engine))
    if way in {"c10d", "ucx"}:
        # What writes the flight recorder may still be at it.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ["AIOCOMMS_RECORDER_DIR"] = folder
            peer = os.fork()
            counter = Counter(root)
            asyncio.run(death(counter, way, 0 if peer else 1, folder, peer))
    else:
        counter = Counter(root)
        asyncio.run({"all_reduce": all_reduce, "alone": alone, "cancel": cancel}[way](counter))
    print(json.dumps(counter.figures()), flush=True)
    os._exit(0)  # a lost communicator's threads have nothing to say


if __name__ == "__main__":
    main(*sys.argv[1:])
