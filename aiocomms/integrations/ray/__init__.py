"""Communication between Ray actors: communicators that need no ``store`` argument, and a tensor transport.

>>> comm = await aiocomms.integrations.ray.rendezvous("pipeline", rank=rank, size=3)  # in a method of an async actor
>>> @ray.method(tensor_transport="aiocomms")  # the returned tensors move from actor to actor

The import of this package registers the tensor transport for the actors that this process creates later. The package
needs Ray 2.60, which ``pip install "aiocomms[ray]"`` installs. The tensor transport also needs an aiocomms transport
with endpoints, such as ``ucx`` (``pip install "aiocomms[ucx]"``).
"""

from __future__ import annotations

import torch

try:
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.util import transport_manager_info
except ImportError as _error:
    raise ImportError(
        f"aiocomms.integrations.ray needs Ray 2.60 or later, pip install 'aiocomms[ray]': {_error}"
    ) from _error

from aiocomms.integrations.ray.awaiting import get
from aiocomms.integrations.ray.rendezvous import rendezvous
from aiocomms.integrations.ray.transport import NAME, RayTransport

__all__ = ["RayTransport", "get", "rendezvous"]

if NAME not in transport_manager_info:  # In an actor Ray itself may have registered it.
    register_tensor_transport(NAME, ["cpu"], RayTransport, torch.Tensor)
