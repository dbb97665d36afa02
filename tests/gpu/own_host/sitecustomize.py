"""An NCCL host ID for each process that has this folder on ``PYTHONPATH``, so that several may share a GPU.

Each process, also a forked one, is a host of its own to NCCL. Only NCCL below 2.30 needs this; see
``benchmarks/gpu/onegpu.py``.
"""

import os


def _own_host() -> None:
    os.environ["NCCL_HOSTID"] = f"aiocomms-test-{os.getpid()}"


_own_host()
os.register_at_fork(after_in_child=_own_host)
