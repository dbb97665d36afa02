"""Failure notices while a communicator forms: if one rank cannot form its part, all others stop waiting.

Ranks wait for each other while they form: in the store, and in a transport for connections. One that has failed in
between comes nowhere any more, and as long as its process lives no connection says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Final

import anyio

from aiocomms import ops
from aiocomms.bootstrap.registry import close_transports
from aiocomms.bootstrap.rendezvous import PROBE, StoreRendezvous
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, PeerDiedError, ProtocolError, StoreLostError
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.failures import Reason
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.transport import Transport

_PAUSE: Final = 1.0
"""Seconds between the looks whether another rank has failed; less if the time is short."""
_PARTS: Final = 16
"""Looks at least in the time that a communicator has to form: ranks that recover wait for no late one for a quarter."""
_LOOKS: Final = 1000
"""Looks per second that all ranks of a communicator together take at most."""
_KNOWN: Final = (CommAbortedError, CommTimeoutError, PeerDiedError, ProtocolError, StoreLostError)
"""The errors that the other ranks find out by themselves, or have said."""
_KEY: Final = "failed"
_REASONS: Final = ControlCodec[Reason](Reason, "why a rank has failed")

_Transports = dict[ops.Family, Transport]


async def formed(rendezvous: StoreRendezvous, opening: Awaitable[_Transports]) -> _Transports:
    """Await what opens this rank's transports, and give up if another rank has.

    :raises CommAbortedError: it has failed on another rank, or was cancelled there.
    """
    if rendezvous.store is None or rendezvous.size == 1:
        return await opening
    opened: _Transports = {}
    heard: list[CommError] = []
    # The task that hears has a scope of its own. To cancel the whole group would throw into this task, too, and CPython
    # 3.11 then forgets who has awaited it.
    hearing = anyio.CancelScope()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_hear, rendezvous, heard, hearing, tasks.cancel_scope)
            try:
                opened = await opening
            finally:
                hearing.cancel()
    except BaseExceptionGroup as group:  # The group is around the exception that was raised.
        failure = heard.pop() if heard else group.exceptions[0]
    except BaseException as error:
        failure = error
    else:
        if opened:
            return opened
        raise heard.pop()  # The error holds this frame, which must not hold the error.
    try:
        with anyio.CancelScope(shield=True):
            if not isinstance(failure, _KNOWN):
                await tell(rendezvous, failure)
            # There are some here only if this rank was cancelled at the last moment.
            await close_transports({*opened.values()})
        raise failure
    finally:
        del failure  # The error holds this frame, too.


async def tell(rendezvous: StoreRendezvous, failure: BaseException) -> None:
    """Tell the ranks that still form a communicator why this one has failed, if the store answers at once."""
    why = failure.message if isinstance(failure, CommError) else "it was cancelled"
    reason = Reason.of(CommAbortedError(f"rank {rendezvous.rank} could not form it: {why}"), rendezvous.rank)
    with anyio.move_on_after(PROBE), contextlib.suppress(CommError):
        await run_in_thread(partial(rendezvous.decide, _KEY, _REASONS.encode(reason)))


def broken_off(error: BaseException, members: Sequence[int]) -> CommError:
    """Return why a split ends on this rank: the others would wait for it until their time is up.

    :param members: the new communicator's ranks, as ranks of the one that is split.
    """
    if isinstance(error, CommError):
        # An error without an op comes from forming, and names ranks of the new communicator.
        return _renumbered(error, members) if error.op is None else error
    if isinstance(error, Exception):
        return CommError(f"split failed: {type(error).__name__}: {error}")
    return CommAbortedError("split was cancelled")


def _renumbered(error: CommError, members: Sequence[int]) -> CommError:
    """Return an error of a new communicator with the ranks of the one that is split."""
    copy = error.about()
    late = error.late if isinstance(error, CommTimeoutError) else ()
    named = late or (() if error.peer is None else (error.peer,))
    old = [members[rank] for rank in named]
    if old != list(named):
        copy.message += f"; these are ranks {old} of the communicator that is split"
        copy.args = (copy.message,)
    copy.comm, copy.rank, copy.peer = None, None, old[0] if len(old) == 1 else None
    if isinstance(copy, CommTimeoutError):
        copy.late = tuple(sorted(old)) if late else ()
        copy.teller = None if copy.teller is None else members[copy.teller]
    return copy


async def _hear(
    rendezvous: StoreRendezvous, heard: list[CommError], hearing: anyio.CancelScope, forming: anyio.CancelScope
) -> None:
    """Cancel what forms this rank's part when another rank has failed; until that is formed."""
    with hearing:
        while not heard:
            await anyio.sleep(max(min(_PAUSE, rendezvous.timeout / _PARTS), rendezvous.size / _LOOKS))
            with contextlib.suppress(CommError):  # The task that forms meets the same error, and raises it.
                told = await rendezvous.run("looking whether a rank has failed", partial(rendezvous.decided, _KEY))
                if told is not None:
                    heard.append(_REASONS.decode(told).to_error())
        forming.cancel()
