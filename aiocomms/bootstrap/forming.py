"""Failure notices while a communicator forms: if one rank cannot form its part, all others stop waiting.

Ranks wait for each other while they form: in the store, and in a transport for connections. One that has failed in
between comes nowhere any more, and as long as its process lives no connection says so.

A communicator that takes another one's place is used once all its ranks, newcomers too, have said that they have formed
it. So the attempt has one end for all ranks, and what is said of it first counts: it is carried out, or given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import anyio

from aiocomms import ops
from aiocomms.bootstrap.board import Board
from aiocomms.bootstrap.records import pauses
from aiocomms.bootstrap.registry import close_transports
from aiocomms.bootstrap.rendezvous import PROBE, StoreRendezvous
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, PeerDiedError, ProtocolError, StoreLostError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.failures import Reason
from aiocomms.lowlevel.shielding import shielded
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.transport import Transport

_PAUSE: Final = 0.1
"""Seconds between the looks whether another rank has failed; less if the time is short."""
_ANSWERS: Final = 2.0
"""Seconds in which a store says why a rank has closed its connections; else it is taken for lost."""
_PARTS: Final = 16
"""Looks at least in the time that a communicator has to form: ranks that recover wait for no late one for a quarter."""
_LOOKS: Final = 1000
"""Looks per second that all ranks of a communicator together take at most."""
_KNOWN: Final = (CommAbortedError, CommTimeoutError, PeerDiedError, ProtocolError, StoreLostError)
"""The errors that the other ranks find out by themselves, or have said."""
FORMS_AGAIN: Final = (CommAbortedError, CommTimeoutError, PeerDiedError)
"""The errors of an attempt after which the ranks that are left make another one."""
_END: Final = "end"
_CARRIED_OUT: Final = b""
_FORMED: Final = "formed"
_REASONS: Final = ControlCodec[Reason](Reason, "why a rank has failed")

Transports = dict[ops.Family, Transport]
Missing = Callable[[], CommError | None]
"""A function that returns why an attempt is in vain; None: it is not. It is called in a thread."""


async def formed(
    rendezvous: StoreRendezvous, opening: Awaitable[Transports], missing: Missing = lambda: None
) -> Transports:
    """Await what opens this rank's transports, and give up if another rank has.

    :param missing: is called from time to time.
    :raises CommAbortedError: it has failed on another rank, or was cancelled there.
    """
    if rendezvous.store is None or rendezvous.size == 1:
        return await opening
    opened: Transports = {}
    heard: list[CommError] = []
    # The task that hears has a scope of its own. To cancel the whole group would throw into this task, too, and CPython
    # 3.11 then forgets who has awaited it.
    hearing = anyio.CancelScope()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_hear, rendezvous, missing, heard, hearing, tasks.cancel_scope)
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
        failure = await _break_off(rendezvous, opened, failure)
        raise failure
    finally:
        del failure  # The error holds this frame, too.


async def _break_off(rendezvous: StoreRendezvous, opened: Transports, failure: BaseException) -> BaseException:
    """Tell the others why this rank has failed, or hear it from them; return the error that says so."""
    with anyio.CancelScope(shield=True):
        if isinstance(failure, PeerDiedError):
            failure = await explained(rendezvous, failure)
        elif not isinstance(failure, _KNOWN):
            await tell(rendezvous, failure)
        # There are some here only if this rank was cancelled at the last moment.
        await close_transports({*opened.values()})
    return failure


async def explained(rendezvous: StoreRendezvous, failure: PeerDiedError) -> CommError:
    """Return why a rank has closed its connections while it formed a communicator: it may live, and have given up."""
    if rendezvous.store is None:
        return failure
    with anyio.move_on_after(_ANSWERS):
        try:
            told = await run_in_thread(partial(rendezvous.decided, _END))
        except StoreLostError as error:
            return error
        return _REASONS.decode(told).to_error() if told else failure
    return StoreLostError(f"the store has not answered within {_ANSWERS:g} s", comm=rendezvous.name)


async def tell(rendezvous: StoreRendezvous, failure: BaseException) -> None:
    """Tell the ranks that still form a communicator why this one has failed, if the store answers at once."""
    with anyio.move_on_after(PROBE), contextlib.suppress(CommError):
        await run_in_thread(partial(give_up, rendezvous, rendezvous.rank, failure))


def give_up(board: Board, rank: int, failure: BaseException) -> bool:
    """Say that a rank cannot form a communicator, on that one's board. Blocks.

    :returns: False: it is too late, for the communicator has been formed by all.
    :raises StoreLostError: the store is gone.
    """
    why = failure.message if isinstance(failure, CommError) else "it was cancelled"
    reason = Reason.of(CommAbortedError(f"rank {rank} could not form it: {why}"), rank)
    return board.decide(_END, _REASONS.encode(reason)) != _CARRIED_OUT


def given_up(board: Board) -> bool:
    """Return whether a rank has said that a communicator cannot be formed. Blocks.

    :raises StoreLostError: the store is gone.
    """
    return board.decided(_END) not in (None, _CARRIED_OUT)


async def kept(rendezvous: StoreRendezvous, transports: Transports) -> bool:
    """Return whether what this rank has formed is carried out, by all ranks; close it if not.

    :raises StoreLostError: the store is gone before this rank knows, and another one has closed its connections.
    """
    done = False
    try:
        done = await _carried_out(rendezvous, transports)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await tell(rendezvous, error)
        raise
    finally:
        if not done:
            await shielded(lambda: close_transports({*transports.values()}))
    return done


async def _carried_out(rendezvous: StoreRendezvous, transports: Transports) -> bool:
    stop = clock.event()
    try:
        with anyio.move_on_after(max(0.0, rendezvous.left()) + PROBE):
            return await run_in_thread(partial(_wait_for_end, rendezvous, transports, stop))
        return False  # This rank may have stood still, and the others have gone on.
    except StoreLostError:
        await anyio.sleep(PROBE)
        if any(transport.early_failure for transport in transports.values()):
            raise
        return True  # The others keep their connections, as ranks do that have formed it.
    finally:
        stop.set()


def _wait_for_end(rendezvous: StoreRendezvous, transports: Transports, stop: clock.ThreadEvent) -> bool:
    """Say that this rank has formed it, and wait for the end or bring it about; in a thread."""
    forming = set(range(rendezvous.size))
    rendezvous.tell(_FORMED, b"1")
    for pause in pauses(rendezvous.size):
        if (end := rendezvous.decided(_END)) is not None:
            return end == _CARRIED_OUT
        forming = {rank for rank in forming if rendezvous.told(_FORMED, rank) is None}
        if not forming:
            return rendezvous.decide(_END, _CARRIED_OUT) == _CARRIED_OUT
        lost = any(transport.early_failure for transport in transports.values())
        if lost or rendezvous.left() < 0 or stop.wait(pause):
            return not give_up(rendezvous, rendezvous.rank, CommAbortedError(f"ranks {sorted(forming)} have not"))
    raise AssertionError


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
    rendezvous: StoreRendezvous,
    missing: Missing,
    heard: list[CommError],
    hearing: anyio.CancelScope,
    forming: anyio.CancelScope,
) -> None:
    """Cancel what forms this rank's part when another rank has failed; until that is formed."""

    def look() -> CommError | None:
        told = rendezvous.decided(_END)
        return missing() if told is None else _REASONS.decode(told).to_error()

    with hearing:
        while not heard:
            await anyio.sleep(max(min(_PAUSE, rendezvous.timeout / _PARTS), rendezvous.size / _LOOKS))
            with contextlib.suppress(CommError):  # The task that forms meets the same error, and raises it.
                failure = await rendezvous.run("looking whether a rank has failed", look)
                if failure is not None:
                    heard.append(failure)
        forming.cancel()
