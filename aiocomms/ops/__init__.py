"""The records of operations. Each operation has one record type, which checks the arguments and makes the result.

A record describes one operation and its arguments. Transports and ``aiocomms.lowering`` execute the operation. Record
types with the same ``kind`` move the same data. They differ only in the layout of their tensors. For example,
``all_gather``, ``all_gather_v`` and ``all_gather_single`` are all of kind ``"all_gather"``, with one output chunk per
rank. So a transport that implements all kinds implements all operations.
"""

from __future__ import annotations

from aiocomms.ops._arrivals import Message, Probe, ProbeAny, Received, RecvAny, RecvMessage, Take
from aiocomms.ops._base import (
    COLLECTIVE,
    OBJECT,
    OBJECT_DATA,
    RMA_DATA,
    RMA_REPLY,
    RMA_REQUEST,
    STREAM,
    STREAM_DATA,
    USER,
    Family,
    Op,
    TensorLike,
    size_of,
    tensor_of,
)
from aiocomms.ops._batch import CollectiveBatch
from aiocomms.ops._moving import (
    AllGather,
    AllGatherSingle,
    AllGatherV,
    AllToAll,
    AllToAllSingle,
    AllToAllVSingle,
    Gather,
    GatherSingle,
    Scatter,
)
from aiocomms.ops._p2p import Batch, Recv, Send
from aiocomms.ops._reducing import (
    AllReduce,
    Barrier,
    Broadcast,
    Exscan,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    ReduceScatterV,
    Scan,
)
from aiocomms.ops._rma import (
    CompareSwap,
    FetchAdd,
    Flush,
    Get,
    GetV,
    MapRemoteTensor,
    Put,
    PutSignal,
    PutV,
    Signal,
    WaitSignal,
    WindowClose,
    WindowInfo,
    WindowOpen,
    places,
)

ARRIVALS: frozenset[type[Op]] = frozenset({Probe, Take})
"""The ops for probes and for receives from any rank. A transport must implement these ops in addition to ``P2P``."""
P2P: frozenset[type[Op]] = frozenset({Send, Recv, Batch})
COLLECTIVES: frozenset[type[Op]] = frozenset(
    {
        AllGather,
        AllGatherSingle,
        AllGatherV,
        AllReduce,
        AllToAll,
        AllToAllSingle,
        AllToAllVSingle,
        Barrier,
        Broadcast,
        Gather,
        GatherSingle,
        Reduce,
        ReduceScatter,
        ReduceScatterSingle,
        ReduceScatterV,
        Scatter,
    }
)
SCANS: frozenset[type[Op]] = frozenset({Scan, Exscan})
"""The collectives that a transport may omit, because the core can implement these collectives by messages."""
BATCHES: frozenset[type[Op]] = frozenset({CollectiveBatch})
"""Batches of collectives. A transport may omit these ops, because the core can start the collectives one by one."""
RMA: frozenset[type[Op]] = frozenset(
    {
        CompareSwap,
        FetchAdd,
        Flush,
        Get,
        MapRemoteTensor,
        Put,
        PutSignal,
        Signal,
        WaitSignal,
        WindowClose,
        WindowOpen,
    }
)
RUNS: frozenset[type[Op]] = frozenset({PutV, GetV})
"""Puts and gets of runs of elements. A transport may omit these ops, because the core can start one op per run."""

__all__ = [
    "ARRIVALS",
    "BATCHES",
    "COLLECTIVE",
    "COLLECTIVES",
    "OBJECT",
    "OBJECT_DATA",
    "P2P",
    "RMA",
    "RMA_DATA",
    "RMA_REPLY",
    "RMA_REQUEST",
    "RUNS",
    "SCANS",
    "STREAM",
    "STREAM_DATA",
    "USER",
    "AllGather",
    "AllGatherSingle",
    "AllGatherV",
    "AllReduce",
    "AllToAll",
    "AllToAllSingle",
    "AllToAllVSingle",
    "Barrier",
    "Batch",
    "Broadcast",
    "CollectiveBatch",
    "CompareSwap",
    "Exscan",
    "Family",
    "FetchAdd",
    "Flush",
    "Gather",
    "GatherSingle",
    "Get",
    "GetV",
    "MapRemoteTensor",
    "Message",
    "Op",
    "Probe",
    "ProbeAny",
    "Put",
    "PutSignal",
    "PutV",
    "Received",
    "Recv",
    "RecvAny",
    "RecvMessage",
    "Reduce",
    "ReduceScatter",
    "ReduceScatterSingle",
    "ReduceScatterV",
    "Scan",
    "Scatter",
    "Send",
    "Signal",
    "Take",
    "TensorLike",
    "WaitSignal",
    "WindowClose",
    "WindowInfo",
    "WindowOpen",
    "places",
    "size_of",
    "tensor_of",
]
