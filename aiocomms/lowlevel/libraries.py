"""Functions that load shared libraries without blocking the event loop, and optional native code."""

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
    """Load shared libraries without holding the interpreter's lock, and ignore failures. Call this in a thread.

    An import and ``ctypes.CDLL`` hold that lock until a library is read from the disk and linked, and so block the
    event loop. After this call, the library is loaded, so an import is fast. If this call failed, the import raises the
    error.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for path in paths:
        dlopen(os.fsencode(path), os.RTLD_NOW)
