"""The transport ``local``, whose ranks are tasks of one process. This transport defines the meaning of every operation.

The code is short and readable. :mod:`~aiocomms_local.semantics` defines the effect of each collective on the ranks'
tensors. :mod:`~aiocomms_local.matching` matches the operations that the ranks call. :mod:`~aiocomms_local.transport` is
the plug-in.
"""

from __future__ import annotations

from aiocomms_local.transport import LocalTransport

__all__ = ["LocalTransport"]
