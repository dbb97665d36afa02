"""The registration of calls for the interpreter's end, after all exit handlers of the program."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

_register_first: Any = getattr(threading, "_register_atexit", None)
"""The function that registers a call for the beginning of Python's end, before any exit handler.

``concurrent.futures`` uses it, too."""
_handlers: Any = atexit
_calls = contextlib.ExitStack()


def at_end(call: Callable[[], object]) -> None:
    """Call a function when every exit handler of the program has run; the last one to be registered here comes first.

    ``atexit`` alone calls it before those handlers that the program has registered earlier. They may still send
    something, and close in order.
    """
    _calls.callback(call)


def _take_the_lead() -> None:
    """Be the exit handler that Python calls first, and so have the others called before one's own work."""
    atexit.register(_end, _handlers._ncallbacks() + 1)


def _end(known: int) -> None:
    # From Python 3.14 on, or where another handler was registered since and has run already, they would run twice.
    if sys.version_info < (3, 14) and _handlers._ncallbacks() == known:
        atexit.unregister(_end)
        _handlers._run_exitfuncs()
    _calls.close()


try:
    _register_first(_take_the_lead)
except (RuntimeError, TypeError):  # the interpreter is ending already, or has no such function
    _take_the_lead()
