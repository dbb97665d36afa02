"""On ``PYTHONPATH``: every process, forked ones too, is a host of its own to NCCL, so that several may share a GPU.

For NCCL below 2.30; see ``benchmarks/gpu/onegpu.py``.
"""

import os


def _own_host() -> None:
    os.environ["NCCL_HOSTID"] = f"aiocomms-test-{os.getpid()}"


_own_host()
os.register_at_fork(after_in_child=_own_host)
