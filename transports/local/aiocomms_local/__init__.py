"""Transport ``local``: the ranks are tasks of one process. It is the reference for what every operation means.

It is written to be read. :mod:`~aiocomms_local.semantics` says in a few lines what each collective does to the ranks'
tensors. :mod:`~aiocomms_local.matching` matches the operations that the ranks call. :mod:`~aiocomms_local.transport`
is the plug-in itself.
"""

from __future__ import annotations

from aiocomms_local.transport import LocalTransport

__all__ = ["LocalTransport"]
