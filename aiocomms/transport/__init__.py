"""The contract of transport plug-ins. Authors of transports import the contract's names from here."""

from __future__ import annotations

from aiocomms.transport.contract import (
    OP_RESULT,
    Capabilities,
    Completion,
    OpTypes,
    Rendezvous,
    SideChannel,
    Transport,
    conclude,
)
from aiocomms.transport.lanes import LaneTransport
from aiocomms.transport.native import NativeTransport

__all__ = [
    "OP_RESULT",
    "Capabilities",
    "Completion",
    "LaneTransport",
    "NativeTransport",
    "OpTypes",
    "Rendezvous",
    "SideChannel",
    "Transport",
    "conclude",
]
