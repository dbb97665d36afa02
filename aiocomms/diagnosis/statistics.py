"""The statistics of a communicator. The core keeps these counts for its own use, so statistics do not slow down ops."""

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
    """The rank that the error names as the cause; None if the error names no rank."""
    count: int


class WindowStatistics(msgspec.Struct, frozen=True):
    """The size of a window that is open on this rank, or of a region of a connection between endpoints."""

    name: str
    """The name in reports: ``window 2``, or ``region 3`` for endpoints."""
    bytes: int
    """The size of the window on this rank, in bytes."""
    peer_bytes: int
    """The sum of the window's sizes on all other ranks, in bytes."""


class Statistics(msgspec.Struct, frozen=True):
    """The statistics of a communicator on one rank.

    The statistics cover this rank's ops since the communicator was formed.

    An op counts as done if it has ended without an error. The counts include the ops that the library itself calls for
    a split, a stream or the opening of a window.
    """

    name: str
    """The communicator's name, without the numbers that reconfigurations append.

    A reconfiguration may append a number to this communicator's name, or to the name of the communicator from which
    this communicator was split.
    """
    generation: int
    """The number of reconfigurations that led to this communicator, plus 1."""
    transports: Mapping[str, str]
    """The name of the transport for each family of operations, as in :attr:`Communicator.transports`."""
    issued: int
    """The number of ops that this rank has called."""
    collectives: int
    """The number of collectives called outside lanes.

    Ranks that have called the same collectives have the same number.
    """
    in_lanes: int
    """The number of ops called in lanes."""
    done: int
    """The number of ops that have ended without an error."""
    failed: Sequence[Failures]
    """The numbers of failed ops, one for each reason; the most frequent reason is first.

    Ops that failed because the communicator was lost or closed are included.
    """
    withdrawn: int
    """The number of receives, probes and waits for signals that were withdrawn before a match."""
    refused: int
    """The number of ops that could not start. The call of such an op raised an error, and sent nothing."""
    pending: int
    """The number of pending ops, without the receives that ``standing`` counts."""
    pending_bytes: int
    """The total size of the pending ops' tensors, in bytes."""
    pending_lanes: int
    """The number of lanes with pending ops."""
    oldest: float | None
    """The seconds since the call of the oldest pending op that ``pending`` counts; None if ``pending`` is 0."""
    silence: Mapping[int, float]
    """The seconds since the last sign of life from each other rank, by rank.

    The heartbeat measures these times about once a second, and only while ops are pending. The mapping is empty if no
    op was pending recently, or if no transport has a heartbeat.
    """
    shared_memory: int | None
    """The size of the memory that the transports share with other processes of this host, in bytes; None if unknown."""
    streams: Sequence[StreamStatistics] = ()
    """The streams that are open at this end."""
    standing: int = 0
    """The number of pending receives that this library itself has posted for messages that may never arrive.

    For example, an idle stream has such a receive.
    """
    plans: Mapping[int, float] = {}
    """The seconds since the start of each running plan, by the plan's number in its service.

    A worker lists the plans that still run on this rank. Rank 0 lists the plans that still run on at least one rank.
    """
    windows: Sequence[WindowStatistics] = ()
    """The open windows, in the order of their names."""


def statistics_of(core: Core, transports: Mapping[str, str]) -> Statistics:
    """Return a communicator's statistics, without a lock or an op. Thread-safe."""
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
