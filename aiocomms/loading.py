"""Functions that import modules in a thread, so that the import does not block the event loop.

An import can take a second.

A program may import aiocomms for the first time while its event loop runs. That import also imports this module.
Therefore this module imports only the standard library.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

_WITH: Final = ("aiocomms.functional", "aiocomms.serving")
"""The modules of aiocomms that no other module imports.

A program may import them after it has opened a communicator.
"""
_OF_ANYIO: Final = (
    *("BrokenResourceError", "CancelScope", "ClosedResourceError", "EndOfStream", "Event", "Lock", "Semaphore", "abc"),
    *("create_task_group", "current_effective_deadline", "get_cancelled_exc_class", "lowlevel", "move_on_after"),
    *("sleep", "to_thread", "wait_readable"),
)
"""The names of anyio that this package uses. anyio imports the module of a name at the first use of the name."""

_loaded: set[str] = set()
_lock = threading.Lock()


async def loaded(name: str) -> None:
    """Import a module, and the modules in ``_WITH``, in a thread. Do nothing if all these modules are imported.

    This function ignores errors. The caller later imports the module itself, and then the import raises the error.
    """
    trio: Any = sys.modules.get("trio")
    of_trio = trio is not None and trio.lowlevel.in_trio_run()
    backend = "trio" if of_trio else "asyncio"
    if {name, backend} <= _loaded:
        return

    def load() -> None:
        with _lock:  # Two threads that import each other's packages would wait for each other.
            _load([name, *_WITH], backend)

    if of_trio:
        await trio.to_thread.run_sync(load, abandon_on_cancel=True)
    else:
        await _in_thread(load)


def load_now(name: str) -> None:
    """Import a module and the modules in ``_WITH``, and load the parts of anyio that work with asyncio.

    Call this function on a thread that has no event loop.
    """
    if not {name, "asyncio"} <= _loaded:
        _load([name, *_WITH], "asyncio")


def _load(names: Sequence[str], backend: str) -> None:
    with contextlib.suppress(Exception):
        for name in names:
            importlib.import_module(name)
        anyio = importlib.import_module("anyio")
        importlib.import_module(f"anyio._backends._{backend}")
        for name in _OF_ANYIO:
            getattr(anyio, name)
        _loaded.update(names, [backend])


async def _in_thread(call: Callable[[], None]) -> None:
    """Run a call in a daemon thread, and await its end on an asyncio loop.

    If the wait is cancelled, the call continues.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def run() -> None:
        call()
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(end)

    try:
        _thread.start_new_thread(run, ())  # ``Thread.start`` would block the loop until the thread runs.
    except RuntimeError:  # No thread can be started.
        call()
    else:
        await over
