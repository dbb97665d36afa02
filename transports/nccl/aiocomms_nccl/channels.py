"""The channels, which run the collectives of lanes. Each channel is one NCCL communicator of all ranks.

A lane is an independent sequence of operations. Each channel has its own CUDA stream, so that collectives of different
lanes can run at the same time. The sequencer's log lists the collectives of all lanes in launch order. The ranks form
the channels when the log gets its first entry, because all ranks then wait for the collective of this entry. A lane's
number determines the lane's channel. So the collectives of a lane run one after the other, and ranks need not agree on
the channel. Each rank launches the collectives of all channels in the order of the log. CUDA has fewer queues than
streams, so a collective of one channel may wait for a collective of another channel. Because all ranks use the same
order, the later of the two collectives waits for the earlier one on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from aiocomms import ops
from aiocomms.errors import CommError
from aiocomms.transport import Completion
from aiocomms_nccl.calls import CallPlan
from aiocomms_nccl.collectives import CommStream
from aiocomms_nccl.direction import AT_ONCE, Forming

CHANNELS: Final = 4
"""The number of channels. At most this number of lanes run at the same time.

Each channel needs the memory of one NCCL communicator.
"""


class PostedInLane:
    """A collective that this rank has called in a lane."""

    __slots__ = ("after", "end", "error", "lane", "op", "plan", "work")

    def __init__(self, op: ops.Op, lane: int, work: Completion, plan: CallPlan, after: Any) -> None:
        self.op = op
        self.lane = lane
        self.work = work
        self.plan = plan
        self.after = after
        """The position in the caller's stream after which the collective starts."""
        self.end: Any = None
        """The end of the collective, as an object for which CUDA streams can wait. It is None before the launch."""
        self.error: CommError | None = None
        """The error with which the collective ends, if its lane was aborted."""


class LaneChannel:
    """One formed channel."""

    __slots__ = ("comm_stream", "under_way")

    def __init__(self, comm_stream: CommStream) -> None:
        self.comm_stream = comm_stream
        self.under_way = 0


class ChannelsOwner(Forming, Protocol):
    """The interface through which the channels use their transport."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""


class LaneChannels:
    """All channels of one rank. Methods run on the loop's thread, unless their docstrings say otherwise."""

    def __init__(self, owner: ChannelsOwner, ended: Callable[[PostedInLane], object]) -> None:
        """Create an object whose channels are not formed yet.

        :param ended: the function that gets each collective that the GPU has finished.
        """
        self.begun = False
        """True after this rank has begun to form the channels."""
        self._owner = owner
        self._ended = ended
        self._channels: list[LaneChannel] = []
        self._ordered: deque[PostedInLane] = deque()

    def comm_streams(self, *, busy: bool = False) -> list[CommStream]:
        """Return the communicators that are formed. Any thread may call this method.

        :param busy: whether to return only communicators with running collectives.
        """
        return [it.comm_stream for it in list(self._channels) if it.under_way or not busy]

    def add(self, posted: PostedInLane) -> None:
        """Launch a collective of the sequencer's log, after all earlier collectives of the log."""
        self._ordered.append(posted)
        self._flush()

    def clear(self) -> None:
        """Drop the collectives that were not launched. The transport calls this method at the end of its close."""
        self._ordered.clear()

    def form(self, unique_ids: Callable[[], Sequence[bytes]]) -> None:
        """Join the communicators in a thread. The thread first calls ``unique_ids`` to get the communicators' ids."""
        self.begun = True
        self._owner.spawn(partial(self._join, unique_ids), self._formed)

    def _join(self, unique_ids: Callable[[], Sequence[bytes]]) -> list[CommStream]:
        owner, joined = self._owner, list[CommStream]()
        try:
            for unique_id in unique_ids():
                comm = owner.library.communicator(owner.size, unique_id, owner.rank)
                joined.append(owner.comm_stream(comm, owner.rank, owner.size))
                joined[-1].warm()
        except BaseException:
            for comm_stream in joined:
                comm_stream.comm.abort()
            raise
        return joined

    def _formed(self, comm_streams: Sequence[CommStream]) -> None:
        for comm_stream in comm_streams:
            self._owner.launcher.adopt(comm_stream)
        self._channels = [LaneChannel(comm_stream) for comm_stream in comm_streams]
        self._flush()

    def _flush(self) -> None:
        """Launch collectives in the order of the log.

        Stop when the next collective's channel has ``AT_ONCE`` unfinished collectives, because CUDA could block the
        thread.
        """
        channels, ordered, launcher = self._channels, self._ordered, self._owner.launcher
        while channels and ordered:
            posted = ordered[0]
            channel = channels[posted.lane % CHANNELS]
            if channel.under_way >= AT_ONCE:
                return
            ordered.popleft()
            then = partial(self._finish, channel, posted)
            posted.end = launcher.launch(channel.comm_stream, posted.op.name, posted.plan, posted.after, then)
            if posted.end is None:
                return
            channel.under_way += 1

    def _finish(self, channel: LaneChannel, posted: PostedInLane) -> None:
        channel.under_way -= 1
        if not self._owner.aborted:  # after an abort, the event may have fired because NCCL has stopped
            self._ended(posted)
            self._flush()
