"""Transport ``ucx``: a native engine over UCX, and shared memory between the ranks of one host."""

import aiocomms

__version__ = "0.2.0.dev0"

if aiocomms.__version__ != __version__:
    raise ImportError(
        f"aiocomms-ucx {__version__} works with aiocomms {__version__} alone, and aiocomms {aiocomms.__version__} is "
        f"installed: pip install 'aiocomms[ucx]=={aiocomms.__version__}'"
    )

from aiocomms_ucx.loading import load_ucx

load_ucx()

from aiocomms_ucx.transport import UcxTransport  # noqa: E402 - the engine cannot be loaded before UCX


def _for_gpu() -> type[UcxTransport]:
    from aiocomms_ucx.cuda_transport import CudaUcxTransport  # CUDA's runtime is loaded where it is needed

    return CudaUcxTransport


UcxTransport.for_gpu = staticmethod(_for_gpu)

__all__ = ["UcxTransport"]
