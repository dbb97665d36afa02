"""The transport ``net`` between simulated processes, which a simulated network connects. Each process is a rank.

The transport supports only sends and receives. The core of aiocomms implements collectives, windows and lanes with
messages. The network may delay messages and cut connections. When a rank dies, its messages may be lost.
"""

from __future__ import annotations

from aiocomms_net.transport import NetTransport

__all__ = ["NetTransport"]
