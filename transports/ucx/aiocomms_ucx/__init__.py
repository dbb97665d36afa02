"""Transport ``ucx``: a native engine over UCX, and shared memory between the ranks of one host."""

import os

import aiocomms

__version__ = "0.1.0.dev0"

if aiocomms.__version__ != __version__:
    raise ImportError(
        f"aiocomms-ucx {__version__} works with aiocomms {__version__} alone, and aiocomms {aiocomms.__version__} is "
        f"installed: pip install 'aiocomms[ucx]=={aiocomms.__version__}'"
    )

try:
    import libucx
except ImportError:
    raise ImportError(
        "UCX itself is missing: pip install libucx-cu13 (or libucx-cu12; both work without CUDA)"
    ) from None

_NO_SIGNALS = {"UCX_DEBUG_SIGNO": "0", "UCX_HANDLE_ERRORS": "none"}
"""UCX's settings with which it handles no signal. Without them a process survives SIGHUP once UCX is loaded."""


def _load_ucx() -> None:
    """Load UCX, to which the engine links. It handles those signals that the user's own settings name, and no other.

    UCX installs its handlers while it is loaded, and reads what they are to be from the environment alone.
    """
    ours = {name: value for name, value in _NO_SIGNALS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        libucx.load_library()
    finally:
        for name in ours:
            del os.environ[name]


_load_ucx()

from aiocomms_ucx.transport import UcxTransport  # noqa: E402 - the engine cannot be loaded before UCX

__all__ = ["UcxTransport"]
