"""Transport ``ucx``: a native engine over UCX, and shared memory between the ranks of one host."""

try:
    import libucx
except ImportError:
    raise ImportError(
        "UCX itself is missing: pip install libucx-cu13 (or libucx-cu12; both work without CUDA)"
    ) from None

libucx.load_library()  # the engine links to the libraries that this loads

from aiocomms_ucx.transport import UcxTransport  # noqa: E402 - the engine cannot be loaded before UCX

__all__ = ["UcxTransport"]
