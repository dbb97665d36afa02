"""The loading of shared libraries while the event loop goes on, and of native code that an installation may have."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterable
from typing import Any

from aiocomms.lowlevel import clock


def native() -> Any:
    """Return the module of what needs native code; None: this installation has none, or this is a simulation."""
    if clock.simulation is not None:
        return None
    try:
        return importlib.import_module("aiocomms_words")
    except ImportError:
        return None


def load_libraries(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Load those of some shared libraries that can be loaded, without the interpreter's lock. For a thread.

    An import, and ``ctypes.CDLL``, holds that lock until a library is read from the disk and linked, and so holds
    the event loop. After this call, the import finds the library loaded, or raises the error.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for path in paths:
        dlopen(os.fsencode(path), os.RTLD_NOW)
