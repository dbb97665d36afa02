"""The loading of UCX, to which the engine links.

UCX reads its settings from the environment once, during the loading.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Final

from aiocomms.lowlevel import load_libraries

try:
    import libucx
except ImportError:
    raise ImportError(
        "UCX itself is missing: pip install libucx-cu13 (or libucx-cu12; both work without CUDA)"
    ) from None

_NO_SIGNALS: Final = {"UCX_DEBUG_SIGNO": "0", "UCX_HANDLE_ERRORS": "none"}
"""The settings with which UCX handles no signals.

Without these settings, a process with UCX would not end at SIGHUP.
"""
_NO_HOOKS: Final = {"UCX_MEM_MMAP_HOOK_MODE": "none"}
"""The setting with which UCX does not change libc.

Without this setting, UCX replaces the code of ``mmap`` and seven other functions. With these replacements, UCX notices
the release of memory that is registered with a device. For each function, UCX 1.22 spins for 50 ms, because another
thread may be executing the function.
"""
_REGISTER_NOTHING: Final = ("libuct_cma", "libucx_perftest", "libucx_perftest_cuda")
"""The UCX modules that register no memory with a device. The code that is built into UCX also registers no memory."""
_OF_CUDA: Final = ("libuct_cuda", "libucm_cuda")
"""The UCX modules that cannot be loaded without the library of CUDA's driver."""
_LIBRARIES: Final = ("libucs", "libucs_signal", "libuct", "libucp")
"""The libraries of UCX that the wheel loads, in the order in which the wheel loads them."""
_SYSTEM: Final = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
_CHOSEN: Final = (_SYSTEM, "UCX_MODULE_DIR")
"""The environment variables by which a user can make UCX load modules that are not in the wheel."""


def load_ucx() -> None:
    """Load UCX with settings that stop UCX from handling signals.

    If the user has set UCX's variables for signals, these variables have precedence.

    If there is no device with which UCX could register memory, UCX also leaves the functions of libc unchanged.
    """
    settings = _NO_SIGNALS if _registers_memory() else _NO_SIGNALS | _NO_HOOKS
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        if not os.environ.get(_SYSTEM):
            load_libraries(lib / f"{name}.so" for lib in _own() for name in _LIBRARIES)
        libucx.load_library()
    finally:
        for name in ours:
            del os.environ[name]
    load_libraries(Path(__file__).parent.glob("_engine*.so"))


def no_cuda_in_ucx() -> str | None:
    """Return the reason why this UCX does not support CUDA; None if this UCX may support CUDA."""
    own = _own()
    if not own or any((lib / "ucx" / "libuct_cuda.so").exists() for lib in own):
        return None  # the opening of the system's UCX shows its support
    return "this libucx has no modules for CUDA: install the wheel libucx-cu12 or libucx-cu13"


def _own() -> list[Path]:
    """Return a list with the folder of the wheel's UCX. The list is empty if there is no such folder."""
    found = importlib.util.find_spec("libucx")
    folders = found.submodule_search_locations if found is not None and found.submodule_search_locations else []
    return [Path(folder, "lib") for folder in folders if Path(folder, "lib", "libucp.so").exists()]


def _registers_memory() -> bool:
    """Return whether this UCX may register memory with a GPU or a network device."""
    own = _own()
    if not own or any(name in os.environ for name in _CHOSEN):
        return True
    modules = {file.name.partition(".")[0] for lib in own for file in lib.glob("ucx/*.so*")}
    modules.difference_update(_REGISTER_NOTHING)
    if modules.issubset(_OF_CUDA):
        return bool(modules) and _has_driver()
    return True


def _has_driver() -> bool:
    """Return whether CUDA's driver is installed. UCX's modules for CUDA link to the driver's library."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
