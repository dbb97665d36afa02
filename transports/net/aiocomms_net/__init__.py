"""Transport ``net``: the ranks are processes of a simulated world, and its network is between them.

It carries sends and receives alone, so that all else is lowered to them: collectives, windows and lanes are those of
the library, over messages that are late, cut off, or lost with their rank.
"""

from __future__ import annotations

from aiocomms_net.transport import NetTransport

__all__ = ["NetTransport"]
