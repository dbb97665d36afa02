"""The side channel: the ranks of a lost communicator exchange notes over connections that are still open."""

from __future__ import annotations

from aiocomms_ucx.member import Member


class UcxSideChannel:
    """See :class:`aiocomms.transport.SideChannel`."""

    def __init__(self, transport: Member) -> None:
        self._transport = transport

    def gone(self, rank: int) -> bool:
        """See :meth:`aiocomms.transport.SideChannel.gone`."""
        return rank in self._transport.gone

    def far(self, rank: int) -> bool:
        """See :meth:`aiocomms.transport.SideChannel.far`."""
        return self._transport.far(rank)
