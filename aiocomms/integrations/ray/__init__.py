"""aiocomms between the actors of Ray: communicators without a store to start by hand, and a transport of tensors.

>>> comm = await aiocomms.integrations.ray.rendezvous("pipeline", rank=rank, size=3)  # in a method of an async actor
>>> @ray.method(tensor_transport="aiocomms")  # what it returns goes from actor to actor

To import it registers the tensor transport, for the actors that this process makes from then on. It needs Ray 2.60, as
``pip install "aiocomms[ray]"`` brings it; the tensor transport also needs a transport that has endpoints, such as that
of ``pip install "aiocomms[ucx]"``.
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

if NAME not in transport_manager_info:  # Ray itself may have registered it, in an actor
    register_tensor_transport(NAME, ["cpu"], RayTransport, torch.Tensor)
