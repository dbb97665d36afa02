"""Several NCCL ranks on one GPU, for tests: what has to be in the environment of each process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

SWITCH = (2, 30)
"""The NCCL that knows ``NCCL_MULTI_RANK_GPU_ENABLE``; the ones before take two ranks on a GPU for a mistake."""


def environment(nccl: tuple[int, ...], rank: int) -> Mapping[str, str]:
    """Variables for the process of one rank.

    NCCL leaves it to its user that the kernels of all ranks fit on the GPU at the same time, so each gets one block.
    CUDA loads a kernel when it is first used, and may wait for all others to do so, even for one that waits for a rank.
    Below 2.30 each process says that it is a host of its own; NCCL then goes through sockets, which is slow, but works.

    :param nccl: the version of the library that is loaded, such as (2, 29, 7)
    """
    shared = {"NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0", "CUDA_MODULE_LOADING": "EAGER"}
    if nccl >= SWITCH:
        return shared | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return shared | {"NCCL_HOSTID": f"aiocomms-test-{os.getpid()}-{rank}"}


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that this process has loaded, with torch for example; () where there is none.

    ``torch.cuda.nccl.version()`` is that of the headers which torch was compiled with.
    """
    code = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    except OSError:
        return ()
    return code.value // 10_000, code.value // 100 % 100, code.value % 100  # NCCL_VERSION, since 2.9
