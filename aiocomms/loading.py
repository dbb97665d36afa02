"""The loading of modules in a thread, so that the event loop is not blocked. An import can take a second.

The program may first import aiocomms, and with it this module, while its event loop runs. So this module imports only
the standard library.
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
"""The modules that no other module imports, and that a program may use after it has opened a communicator."""
_OF_ANYIO: Final = (
    *("BrokenResourceError", "CancelScope", "ClosedResourceError", "EndOfStream", "Event", "Lock", "Semaphore", "abc"),
    *("create_task_group", "current_effective_deadline", "get_cancelled_exc_class", "lowlevel", "move_on_after"),
    *("sleep", "to_thread", "wait_readable"),
)
"""The names of anyio that this package uses. anyio loads each of them at its first use."""

_loaded: set[str] = set()
_lock = threading.Lock()


async def loaded(name: str) -> None:
    """Import a module, and the modules of ``_WITH``, in a thread, unless they are loaded.

    The call ignores errors, because the caller imports the module afterwards, and then gets the error.
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
    """Import a module and the modules of ``_WITH``, for use with asyncio. Call this on a thread that has no loop."""
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
    """Run a call in a daemon thread, and await its end on an asyncio loop. A cancelled wait does not end the call."""
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
