"""Probes and non-blocking receives on the engine."""

from __future__ import annotations

from aiocomms import ops
from aiocomms.transport import Completion
from aiocomms_ucx.member import Member
from aiocomms_ucx.status import found


def post_arrival(transport: Member, op: ops.Probe | ops.Take, work: Completion) -> None:
    """Pass a probe or a non-blocking receive to the engine.

    Complete the op if the engine reports at once that the op is done.
    """
    engine, ticket, group = transport.engine, id(work), transport.group
    if isinstance(op, ops.Probe):
        seen = engine.probe(ticket, group, op.src, op.channel, op.tag, not op.more)
        if seen is None:
            transport.follow(work, done=False)
        else:
            work.complete(found(op, *seen))
    else:
        done = engine.take(ticket, group, op.result(), op.src, op.channel, op.tag)
        if done is None:
            work.complete(False)
        else:
            transport.follow(work, done)
