"""asyncio-native communication for PyTorch tensors: each operation is a call that returns an awaitable :class:`Work`.

>>> comm = await aiocomms.new_comm("auto")
>>> t = await comm.all_reduce(t, aiocomms.ReduceOp.SUM)

The import of this package does not import torch, an event-loop library or a transport. The first access to a name of
this package imports the module that defines the name, unless this module is already imported. The import installs a
signal handler only if ``AIOCOMMS_RECORDER_SIGNAL`` is set. If a launcher has started this process as a rank, the import
wraps ``sys.excepthook``. An exception may end this rank before all ranks are connected to each other. In that case the
wrapper reports this exception to the other ranks.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiocomms import blocking, cuda, errors, functional, launching, ops, resharding, serving, testing
    from aiocomms.arguments import COMM_TIMEOUT
    from aiocomms.communicator.communicator import Communicator
    from aiocomms.communicator.formation import get_comm
    from aiocomms.communicator.lane import Lane
    from aiocomms.communicator.opening import from_process_group, new_comm
    from aiocomms.communicator.portal.portal import Portal
    from aiocomms.communicator.portal.works import BlockingWork
    from aiocomms.communicator.rma import Window
    from aiocomms.communicator.streams import ItemStream, TensorStream
    from aiocomms.diagnosis.on_signal import dump_on_signal
    from aiocomms.endpoints.endpoint import Endpoint
    from aiocomms.endpoints.handed import HandedLease
    from aiocomms.endpoints.opening import open_endpoint
    from aiocomms.endpoints.peer import Peer
    from aiocomms.endpoints.pools import Lease, Pool
    from aiocomms.endpoints.regions import Region, RemoteRegion
    from aiocomms.errors import CommError
    from aiocomms.live.group import LiveGroup
    from aiocomms.live.lane import LiveLane
    from aiocomms.live.opening import live_group
    from aiocomms.ops import Message, Received, TensorLike
    from aiocomms.ops.reductions import ReduceOp
    from aiocomms.progress.work import Work
    from aiocomms.transport import Capabilities, Transport

__version__ = "0.2.0.dev0"

__all__ = [
    "COMM_TIMEOUT",
    "BlockingWork",
    "Capabilities",
    "CommError",
    "Communicator",
    "Endpoint",
    "HandedLease",
    "ItemStream",
    "Lane",
    "Lease",
    "LiveGroup",
    "LiveLane",
    "Message",
    "Peer",
    "Pool",
    "Portal",
    "Received",
    "ReduceOp",
    "Region",
    "RemoteRegion",
    "TensorLike",
    "TensorStream",
    "Transport",
    "Window",
    "Work",
    "blocking",
    "cuda",
    "dump_on_signal",
    "errors",
    "from_process_group",
    "functional",
    "get_comm",
    "launching",
    "live_group",
    "new_comm",
    "open_endpoint",
    "ops",
    "resharding",
    "serving",
    "testing",
]

# Type checkers and editors read the imports above. A test checks that this table agrees with them.
_HOME = {
    "BlockingWork": "communicator.portal.works",
    "COMM_TIMEOUT": "arguments",
    "Capabilities": "transport",
    "CommError": "errors",
    "Communicator": "communicator.communicator",
    "Endpoint": "endpoints.endpoint",
    "HandedLease": "endpoints.handed",
    "Lane": "communicator.lane",
    "Lease": "endpoints.pools",
    "LiveGroup": "live.group",
    "LiveLane": "live.lane",
    "Message": "ops",
    "Peer": "endpoints.peer",
    "Pool": "endpoints.pools",
    "Portal": "communicator.portal.portal",
    "Received": "ops",
    "ReduceOp": "ops.reductions",
    "Region": "endpoints.regions",
    "RemoteRegion": "endpoints.regions",
    "ItemStream": "communicator.streams",
    "TensorLike": "ops",
    "TensorStream": "communicator.streams",
    "Transport": "transport",
    "Window": "communicator.rma",
    "Work": "progress.work",
    "dump_on_signal": "diagnosis.on_signal",
    "from_process_group": "communicator.opening",
    "get_comm": "communicator.formation",
    "live_group": "live.opening",
    "new_comm": "communicator.opening",
    "open_endpoint": "endpoints.opening",
}
_MODULES = frozenset(
    {"blocking", "cuda", "errors", "functional", "launching", "ops", "resharding", "serving", "testing"}
)


_MARKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
if not os.environ.keys().isdisjoint(_MARKS):  # a launcher has started this process as a rank, which may fail at once
    importlib.import_module("aiocomms.bootstrap.early").watch()
if os.environ.get("AIOCOMMS_RECORDER_SIGNAL"):  # a signal may come before anything else is loaded
    importlib.import_module("aiocomms.diagnosis.on_signal").dump_if_asked()


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"aiocomms.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'aiocomms' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"aiocomms.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


importlib.import_module("aiocomms.communicator.opening")  # A program may call new_comm first on its event loop.
