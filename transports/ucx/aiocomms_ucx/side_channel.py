"""The side channel: ranks of a lost communicator send each other notes over their control connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiocomms_ucx.transport import UcxTransport


class UcxSideChannel:
    """See :class:`aiocomms.transport.SideChannel`."""

    def __init__(self, transport: UcxTransport) -> None:
        self._transport = transport

    def say(self, rank: int, note: bytes) -> None:
        """See :meth:`aiocomms.transport.SideChannel.say`."""
        self._transport.leave_note(rank, note)

    def note_of(self, rank: int) -> bytes | None:
        """See :meth:`aiocomms.transport.SideChannel.note_of`."""
        return self._transport.notes.get(rank)

    def gone(self, rank: int) -> bool:
        """See :meth:`aiocomms.transport.SideChannel.gone`."""
        return rank in self._transport.gone

    def far(self, rank: int) -> bool:
        """See :meth:`aiocomms.transport.SideChannel.far`."""
        return self._transport.far(rank)
