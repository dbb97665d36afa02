"""The statistics of a communicator. The core keeps their counts anyway, so they do not slow down ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from aiocomms.diagnosis.stream_counts import StreamStatistics
from aiocomms.errors import WorkCancelledError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.threads import copied
from aiocomms.ops import WindowInfo, size_of
from aiocomms.progress.guard import guarded
from aiocomms.progress.inflight import LaneWork
from aiocomms.transport import Transport

if TYPE_CHECKING:
    from aiocomms.core.core import Core

_WITHDRAWN = WorkCancelledError.__name__


class Failures(msgspec.Struct, frozen=True):
    """The number of ops of a communicator that have failed on this rank for one reason."""

    error: str
    """The name of the error's class, such as ``"CommTimeoutError"``."""
    peer: int | None
    """The rank at fault that the error names; None: it names no rank."""
    count: int


class WindowStatistics(msgspec.Struct, frozen=True):
    """A window that is open on this rank, or a region of a connection of endpoints."""

    name: str
    """The name in reports: ``window 2``, or ``region 3`` for endpoints."""
    bytes: int
    """The bytes of this rank's part."""
    peer_bytes: int
    """The bytes of all other ranks' parts."""


class Statistics(msgspec.Struct, frozen=True):
    """One rank's view of a communicator at one time. Counts are of this rank's ops since the communicator was formed.

    An op counts as done if it has ended without an error. The counts include the ops that a split, a stream or the
    opening of a window calls.
    """

    name: str
    """The communicator's name, without the numbers that reconfigurations append to it or to its parent's name."""
    generation: int
    """The number of the communicator: 1, and one more after each reconfiguration."""
    transports: Mapping[str, str]
    """The name of each family's transport, as in :attr:`Communicator.transports`."""
    issued: int
    """Ops called."""
    collectives: int
    """Collectives called outside lanes. The number is the same on all ranks once they have made the same calls."""
    in_lanes: int
    """Ops called in lanes."""
    done: int
    """Ops that have ended without an error."""
    failed: Sequence[Failures]
    """Ops that have failed, or were abandoned with the communicator, by reason; the most frequent first."""
    withdrawn: int
    """Receives and waits that were withdrawn before a match."""
    refused: int
    """Ops that could not be posted. Their callers got the error, and no byte was sent."""
    pending: int
    """Ops under way, except standing receives."""
    pending_bytes: int
    """Bytes of the pending ops' tensors."""
    pending_lanes: int
    """Lanes with pending ops."""
    oldest: float | None
    """Seconds for which the oldest pending op, except standing receives, has been under way; None: there is none."""
    silence: Mapping[int, float]
    """Seconds without a sign of life of each other rank. The heartbeat measures them only while ops are pending, about
    once a second. The mapping is empty if no op was pending recently, or no transport can measure."""
    shared_memory: int | None
    """Bytes of memory that the transports share with other processes of this host; None: unknown."""
    streams: Sequence[StreamStatistics] = ()
    """The streams that are open at this end."""
    standing: int = 0
    """Standing receives of this library for messages that may come, such as those of an idle stream."""
    plans: Mapping[int, float] = {}
    """The seconds since the start of each plan that this rank has not ended, by the plan's number in its service. On
    rank 0 these are the plans that any rank has not ended."""
    windows: Sequence[WindowStatistics] = ()
    """The open windows, in the order of their names."""


def statistics_of(core: Core, transports: Mapping[str, str]) -> Statistics:
    """Return a communicator's statistics, without a lock or an op. Any thread may call this at any time."""
    # This reads the failures before it counts the ops, so that no op is missing below.
    failures, refused = dict(core.failures), core.refusals
    flying, now = core.in_flight.look(), clock.now()
    busy = [one for one in flying if not one.idle]
    ledger, issued = core.ledger, core.ledger.issued
    withdrawn = sum(count for (error, _), count in failures.items() if error == _WITHDRAWN)
    failed = [Failures(*key, count) for key, count in failures.items() if key[0] != _WITHDRAWN]
    return Statistics(
        name=core.label,
        generation=core.generation,
        transports=transports,
        issued=issued,
        collectives=ledger.calls,
        in_lanes=ledger.laned,
        done=max(0, issued - len(flying) - sum(failures.values()) - refused),
        failed=sorted(failed, key=lambda each: -each.count),
        withdrawn=withdrawn,
        refused=refused,
        pending=len(busy),
        pending_bytes=sum(size_of(one.work.op) for one in busy),
        pending_lanes=len({one.work.number for one in busy if isinstance(one.work, LaneWork)}),
        oldest=max((now - one.posted for one in busy), default=None),
        silence={rank: silent for rank, silent in core.in_flight.heartbeat.silence(now).items() if rank != core.rank},
        shared_memory=_shared_memory(core.transports),
        streams=core.recorder.streams.statistics(),
        standing=len(flying) - len(busy),
        plans={number: now - plan.called for number, plan in copied(core.recorder.plans.items())},
        windows=_windows(core.recorder.windows),
    )


def _windows(known: Iterable[WindowInfo]) -> list[WindowStatistics]:
    found = []
    for each in copied(known):
        if each.name and not each.closed:
            mine = each.tensor.nbytes
            every = sum(each.sizes) * each.tensor.element_size()
            found.append(WindowStatistics(each.name, mine, every - mine))
    return sorted(found, key=lambda each: (len(each.name), each.name))


def _shared_memory(transports: Sequence[Transport]) -> int | None:
    known = [said for each in transports if (said := guarded(None, each.shared_memory)) is not None]
    return sum(known) if known else None
