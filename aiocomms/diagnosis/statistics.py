"""The statistics of a communicator: a record of counts that the core keeps anyway, so that no op pays for it."""

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
    """The class of the error, as ``"CommTimeoutError"``."""
    peer: int | None
    """The rank at fault, as the error names it; None: it names none."""
    count: int


class WindowStatistics(msgspec.Struct, frozen=True):
    """A window that is open on this rank; of a connection of endpoints, a region that one has opened to the other."""

    name: str
    """Its name in reports: ``window 2``, or ``region 3`` of endpoints."""
    bytes: int
    """The bytes of this rank's part."""
    peer_bytes: int
    """The bytes of all other ranks' parts."""


class Statistics(msgspec.Struct, frozen=True):
    """One rank's view of a communicator at one time. Counts are of this rank's ops since the communicator was formed.

    An op is done that has ended without an error; what a split, a stream or the opening of a window consists of is
    counted with the ops that they call.
    """

    name: str
    """The communicator's, as it was before any reconfiguration."""
    generation: int
    """The number of the communicator: 1, and one more with each reconfiguration."""
    transports: Mapping[str, str]
    """The name of the transport that carries each family; as :attr:`Communicator.transports`."""
    issued: int
    """Ops called."""
    collectives: int
    """Collectives called, but those of lanes: the same on all ranks once all have called as many."""
    in_lanes: int
    """Ops of lanes called."""
    done: int
    failed: Sequence[Failures]
    """Ops that have failed, or were given up with the communicator, by reason; the most frequent first."""
    withdrawn: int
    """Receives and waits that were withdrawn before anything matched them."""
    refused: int
    """Ops that could not be posted: their callers have the error, and nothing was sent."""
    pending: int
    """Ops under way, but those that stand ready."""
    pending_bytes: int
    """Bytes of the tensors that the pending ops are about."""
    pending_lanes: int
    """Lanes in which something is pending."""
    oldest: float | None
    """Seconds for which the oldest pending op that is waited for has been under way; None: there is none."""
    silence: Mapping[int, float]
    """Seconds for which each other rank has given no sign of life, as the heartbeat measures them. It asks while ops
    are pending only, about every 0.4 s; empty where nothing was pending of late, or no transport can ask."""
    shared_memory: int | None
    """Bytes of the memory that the transports share with other processes of this host; None: they cannot say."""
    streams: Sequence[StreamStatistics] = ()
    """The streams that are open at this end."""
    standing: int = 0
    """Receives of this library's that stand ready for what may come, such as those of an idle stream."""
    plans: Mapping[int, float] = {}
    """The plans of its service that this rank has not ended, by their numbers, and for how many seconds it has had
    them; on rank 0 those that any rank has not ended."""
    windows: Sequence[WindowStatistics] = ()
    """The windows that are open, in the order of their names."""


def statistics_of(core: Core, transports: Mapping[str, str]) -> Statistics:
    """Look at a communicator; on any thread, whatever its loop is doing. It locks nothing and posts nothing."""
    # These are read before the ops are counted, so that no op is missing below.
    failures, refused = dict(core.failures), core.refusals
    flying, now = core.in_flight.look(), clock.now()
    busy = [one for one in flying if not one.idle]
    ledger, issued = core.ledger, core.ledger.issued
    withdrawn = sum(count for (error, _), count in failures.items() if error == _WITHDRAWN)
    failed = [Failures(*key, count) for key, count in failures.items() if key[0] != _WITHDRAWN]
    return Statistics(
        name=core.base,
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
