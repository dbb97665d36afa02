"""The plug-in contract, in parts; authors of transports import from here."""

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

__all__ = [
    "OP_RESULT",
    "Capabilities",
    "Completion",
    "OpTypes",
    "Rendezvous",
    "SideChannel",
    "Transport",
    "conclude",
]
