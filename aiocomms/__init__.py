"""asyncio-native communication for PyTorch tensors: every operation returns at once an awaitable :class:`Work`.

>>> comm = await aiocomms.new_comm("auto")
>>> t = await comm.all_reduce(t, aiocomms.ReduceOp.SUM)

Importing this package loads neither torch nor a loop library nor a transport; names are loaded when they are first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiocomms import cuda, errors, functional, ops, testing
    from aiocomms.communicator import Communicator
    from aiocomms.dumps import dump_on_signal
    from aiocomms.errors import CommError
    from aiocomms.groups import get as get_comm
    from aiocomms.reductions import ReduceOp
    from aiocomms.rendezvous import from_process_group, new_comm
    from aiocomms.rma import Window
    from aiocomms.streams import TensorStream
    from aiocomms.transport import Capabilities, Transport
    from aiocomms.work import Work

__version__ = "0.1.0.dev0"

__all__ = [
    "Capabilities",
    "CommError",
    "Communicator",
    "ReduceOp",
    "TensorStream",
    "Transport",
    "Window",
    "Work",
    "cuda",
    "dump_on_signal",
    "errors",
    "from_process_group",
    "functional",
    "get_comm",
    "new_comm",
    "ops",
    "testing",
]

# Beside the imports above, which type checkers and editors read; a test keeps the two in step.
_HOME = {
    "Capabilities": "transport",
    "CommError": "errors",
    "Communicator": "communicator",
    "ReduceOp": "reductions",
    "TensorStream": "streams",
    "Transport": "transport",
    "Window": "rma",
    "Work": "work",
    "dump_on_signal": "dumps",
    "from_process_group": "rendezvous",
    "get_comm": "groups:get",
    "new_comm": "rendezvous",
}
_MODULES = frozenset({"cuda", "errors", "functional", "ops", "testing"})


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"aiocomms.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'aiocomms' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(f"aiocomms.{module}"), attribute or name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
