"""The registration of functions that run when the interpreter ends, after all exit handlers of the program."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

_register_first: Any = getattr(threading, "_register_atexit", None)
"""A function of Python that registers a call for the end of the interpreter. The call runs before any exit handler.

``concurrent.futures`` also uses this function.
"""
_handlers: Any = atexit
_calls = contextlib.ExitStack()


def at_end(call: Callable[[], object]) -> None:
    """Register a function to be called after every exit handler of the program has run.

    The function that was registered last is called first.

    ``atexit`` alone would call the function before the handlers that the program has registered earlier. These handlers
    may still send messages and close communicators.
    """
    _calls.callback(call)


def _take_the_lead() -> None:
    """Register the exit handler that Python calls first, so that this handler can run the other handlers."""
    atexit.register(_end, _handlers._ncallbacks() + 1)


def _end(known: int) -> None:
    # The handlers would run twice from Python 3.14 on, or if another handler was registered later and has already run.
    if sys.version_info < (3, 14) and _handlers._ncallbacks() == known:
        atexit.unregister(_end)
        _handlers._run_exitfuncs()
    _calls.close()


try:
    _register_first(_take_the_lead)
except (RuntimeError, TypeError):  # The interpreter is already ending, or has no such function.
    _take_the_lead()
