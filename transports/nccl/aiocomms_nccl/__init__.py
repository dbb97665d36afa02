"""Transport ``nccl``: NCCL through CuPy, for tensors on CUDA devices."""

from aiocomms_nccl.transport import NcclTransport

__all__ = ["NcclTransport"]
