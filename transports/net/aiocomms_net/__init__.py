"""Transport ``net``: the ranks are simulated processes, and a simulated network connects them.

The transport carries only sends and receives. The library expresses collectives, windows and lanes as messages. The
network may delay messages, cut connections, or lose messages with their rank.
"""

from __future__ import annotations

from aiocomms_net.transport import NetTransport

__all__ = ["NetTransport"]
