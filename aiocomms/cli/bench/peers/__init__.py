"""Other libraries that move tensors between processes, which ``--vs`` measures in comparison with aiocomms.

Each module of this package describes one library, which is called a *peer* and has the module's name. The attribute
``PEER`` of the module is the class of the peer. Every other name in ``--vs`` is a backend of ``torch.distributed``,
possibly with a method of waiting, such as ``gloo:executor``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from torch.distributed import Backend

from aiocomms.cli.bench.ours import Contender
from aiocomms.cli.bench.peers.torch_backend import WAYS, TorchPeer
from aiocomms.communicator.communicator import Communicator

_BASE = "torch_backend"
"""The name of the module for torch's backends. This name itself is not the name of a peer."""


class BenchPeer(Contender, Protocol):
    """One of the libraries for comparison, on this rank."""

    def missing(self) -> str | None:
        """Return the reason why this process cannot use the library; None if this process can use the library."""

    async def open(self, comm: Communicator, host: str) -> None:
        """Connect the library's ranks.

        The ranks exchange messages over ``comm`` for this purpose. ``host`` is the name or address of rank 0's host.
        """

    async def aclose(self) -> None:
        """Disconnect the ranks."""


def known() -> list[str]:
    """Return the names of all peers."""
    backends = [name for name in Backend.backend_list if name != Backend.UNDEFINED]
    return [*_modules(), *backends, *(f"{name}:{way}" for name in backends for way in WAYS)]


def launcher(names: Sequence[str], ranks: int) -> list[str]:
    """Return the launcher command that one of the peers needs; an empty list if any launcher can start the ranks."""
    wanted = (import_module(f"{__name__}.{name}") for name in names if name in _modules())
    return next((module.launcher(ranks) for module in wanted if hasattr(module, "launcher")), [])


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != _BASE]


def make(name: str) -> BenchPeer:
    """Return the peer of this name, even if its library is missing on this host."""
    if name in _modules():
        return cast("BenchPeer", import_module(f"{__name__}.{name}").PEER())
    return TorchPeer(name)
