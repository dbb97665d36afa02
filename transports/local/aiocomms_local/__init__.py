"""Transport ``local``: the ranks are tasks of one process. The reference for what every operation means.

It is written to be read: :mod:`~aiocomms_local.semantics` says what each collective does to the ranks' tensors, in a
few lines each; :mod:`~aiocomms_local.matching` matches what the ranks ask for; :mod:`~aiocomms_local.transport` is the
plug-in itself.
"""

from __future__ import annotations

from aiocomms_local.transport import LocalTransport

__all__ = ["LocalTransport"]
