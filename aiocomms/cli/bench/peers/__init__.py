"""Other libraries that move tensors between processes, measured beside ours with ``--vs``.

A module here is a peer by the name of the module, and ``PEER`` is its class. Every other name is that of a backend of
``torch.distributed``, or such a name with a way to await it: ``gloo:executor``.
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
"""The module of the backends, which is no peer's."""


class BenchPeer(Contender, Protocol):
    """One of these libraries, on this rank."""

    def missing(self) -> str | None:
        """Return why it cannot be used here; None: it can."""

    async def open(self, comm: Communicator, host: str) -> None:
        """Meet the other ranks, by what ``comm`` tells them; ``host`` is a name or address of that of rank 0."""

    async def aclose(self) -> None:
        """Part from them."""


def known() -> list[str]:
    """Their names."""
    backends = [name for name in Backend.backend_list if name != Backend.UNDEFINED]
    return [*_modules(), *backends, *(f"{name}:{way}" for name in backends for way in WAYS)]


def launcher(names: Sequence[str], ranks: int) -> list[str]:
    """Return the command that must start the ranks because one of the peers wants it; empty: any may."""
    wanted = (import_module(f"{__name__}.{name}") for name in names if name in _modules())
    return next((module.launcher(ranks) for module in wanted if hasattr(module, "launcher")), [])


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != _BASE]


def make(name: str) -> BenchPeer:
    """Return the peer of that name, which may be missing."""
    if name in _modules():
        return cast("BenchPeer", import_module(f"{__name__}.{name}").PEER())
    return TorchPeer(name)
