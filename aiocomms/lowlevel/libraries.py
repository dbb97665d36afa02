"""Functions that load shared libraries without blocking the event loop, or load the package of native code."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterable
from typing import Any

from aiocomms.lowlevel import clock


def native() -> Any:
    """Return the module of native code; None in a simulation, or if the module is not installed."""
    if clock.simulation is not None:
        return None
    try:
        return importlib.import_module("aiocomms_words")
    except ImportError:
        return None


def load_libraries(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Load shared libraries without holding the interpreter's lock, and ignore failures.

    Call this function in a thread.

    An import or ``ctypes.CDLL`` holds the interpreter's lock until a library is read from the disk and linked.
    Meanwhile the event loop is blocked. After a call of this function, the library is loaded, so an import of the
    library is fast. If the library cannot be loaded, the later import raises the error.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for path in paths:
        dlopen(os.fsencode(path), os.RTLD_NOW)
