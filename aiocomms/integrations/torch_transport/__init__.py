"""A one-sided transport of torch (``torch.distributed.transports``, torch 2.15 and later) over endpoints.

>>> from torch.distributed._transport import new_transport
>>> transport = new_transport("aiocomms", "cpu")

torch finds this package through an entry point. No other module of aiocomms imports this package, because the package
needs torch 2.15.
"""

from __future__ import annotations

from aiocomms.integrations.torch_transport.memory import Memory, MemoryView, MutableMemoryView, RemoteBuffer
from aiocomms.integrations.torch_transport.transport import EndpointTransport
from aiocomms.integrations.torch_transport.works import TransferWork

__all__ = ["EndpointTransport", "Memory", "MemoryView", "MutableMemoryView", "RemoteBuffer", "TransferWork"]
