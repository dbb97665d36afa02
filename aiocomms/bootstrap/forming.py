"""Failure notices while a communicator forms: if one rank cannot form its part, all others stop waiting.

Ranks that form a communicator first wait for each other in the store. Then each transport waits for connections. If a
rank fails between these two waits, no connection shows its failure while its process lives.

If a new communicator replaces another one, the ranks use the new one only after all ranks of the new one, including
newcomers, have reported that they formed it. So an attempt has the same result on all ranks. The result that is
recorded first counts: carried out, or given up.
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
"""The seconds between two looks for a failure of another rank; less if the timeout is short."""
_ANSWERS: Final = 2.0
"""The seconds in which a store must answer why a rank has closed its connections. A slower store counts as lost.

A rank that no longer needs a lost store continues to connect for these seconds, but at most for a quarter of its
timeout. A rank that still needs the store has failed, and cannot report its failure.
"""
_PARTS: Final = 16
"""The least number of looks within the timeout, because recovery waits only a quarter of it for late ranks."""
_LOOKS: Final = 1000
"""The largest number of looks per second of all ranks of a communicator together."""
_KNOWN: Final = (CommAbortedError, CommTimeoutError, PeerDiedError, ProtocolError, StoreLostError)
"""The errors that this rank does not report, because the other ranks notice them, or have reported them."""
FORMS_AGAIN: Final = (CommAbortedError, CommTimeoutError, PeerDiedError)
"""The errors of an attempt after which the surviving ranks make another attempt."""
_END: Final = "end"
_CARRIED_OUT: Final = b""
_FORMED: Final = "formed"
_REASONS: Final = ControlCodec[Reason](Reason, "why a rank has failed")

Transports = dict[ops.Family, Transport]
Missing = Callable[[], CommError | None]
"""A function that returns the error of an attempt that cannot succeed any more, or None. A thread calls it."""


async def formed(
    rendezvous: StoreRendezvous, opening: Awaitable[Transports], missing: Missing = lambda: None
) -> Transports:
    """Await the opening of this rank's transports, and give up if another rank has given up.

    :param missing: a function that is called from time to time. If it returns an error, this rank gives up.
    :raises CommAbortedError: the forming has failed on another rank, or was cancelled there.
    """
    if rendezvous.store is None or rendezvous.size == 1:
        return await opening
    opened: Transports = {}
    heard: list[CommError] = []
    ended: list[BaseException] = []
    try:
        await _open(rendezvous, opening, missing, opened, heard, ended)
    except BaseExceptionGroup as group:  # The task group wraps the exception that was raised.
        failure = heard.pop() if heard else group.exceptions[0]
    except BaseException as error:
        failure = error
    else:
        if opened:
            return opened
        if heard:
            ended.clear()
            raise heard.pop()  # The error refers to this frame, which must not refer to the error.
        failure = ended.pop()  # A scope took a cancellation for its own, and the group has dropped it.
    ended.clear()
    try:
        failure = await _break_off(rendezvous, opened, failure)
        raise failure
    finally:
        del failure  # This error also refers to this frame.


async def _open(
    rendezvous: StoreRendezvous, opening: Awaitable[Transports], missing: Missing,
    opened: Transports, heard: list[CommError], ended: list[BaseException],
) -> None:  # fmt: skip
    """Await the opening while :func:`_hear` runs.

    :param opened: a dict that gets the transports.
    :param ended: a list that gets the opening's exception, because the task group may drop it.
    """
    # The listening task has a separate scope. A cancellation of the whole group would also reach this task, and CPython
    # 3.11 then loses the reference to its awaiter.
    hearing = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_hear, rendezvous, missing, heard, hearing, tasks.cancel_scope)
        try:
            opened |= await opening
        except BaseException as error:
            ended.append(error)
            raise
        finally:
            hearing.cancel()


async def _break_off(rendezvous: StoreRendezvous, opened: Transports, failure: BaseException) -> BaseException:
    """Tell the other ranks why this rank has failed, or read the reason from them; return the error to raise."""
    with anyio.CancelScope(shield=True):
        if isinstance(failure, PeerDiedError):
            failure = await _explained(rendezvous, failure)
        elif not isinstance(failure, _KNOWN):
            await tell(rendezvous, failure)
        # Transports are open here only if this rank was cancelled at the last moment.
        await close_transports({*opened.values()})
    return failure


async def _explained(rendezvous: StoreRendezvous, failure: PeerDiedError) -> CommError:
    """Return the reason why a rank closed its connections while it formed a communicator.

    The rank may still be alive: a rank that gives up also closes its connections.
    """
    if rendezvous.store is None:
        return failure
    with anyio.move_on_after(_ANSWERS):
        try:
            told = await run_in_thread(partial(rendezvous.decided, _END))
        except StoreLostError as error:
            return error
        return _REASONS.decode(told).to_error() if told else failure
    return StoreLostError(f"the rendezvous store has not answered within {_ANSWERS:g} s", comm=rendezvous.name)


async def tell(rendezvous: StoreRendezvous, failure: BaseException) -> None:
    """Tell the ranks that still form a communicator why this rank has failed, if the store answers at once."""
    with anyio.move_on_after(PROBE), contextlib.suppress(CommError):
        await run_in_thread(partial(give_up, rendezvous, rendezvous.rank, failure))


def give_up(board: Board, rank: int, failure: BaseException) -> bool:
    """Report on a communicator's board that a rank cannot form the communicator. Blocks.

    :returns: False if it is too late, because all ranks have formed the communicator.
    :raises StoreLostError: the store is gone.
    """
    why = failure.message if isinstance(failure, CommError) else "its call was cancelled"
    reason = Reason.of(CommAbortedError(f"rank {rank} could not form the communicator: {why}"), rank)
    return board.decide(_END, _REASONS.encode(reason)) != _CARRIED_OUT


def given_up(board: Board) -> CommError | None:
    """Return the reason why a rank cannot form a communicator; None if no rank has given up. Blocks.

    :raises StoreLostError: the store is gone.
    """
    end = board.decided(_END)
    return _REASONS.decode(end).to_error() if end else None


async def kept(rendezvous: StoreRendezvous, transports: Transports) -> bool:
    """Return whether all ranks have formed the communicator; close this rank's transports if not.

    :raises StoreLostError: the store is gone before this rank knows the outcome, and another rank has closed its
        connections.
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
        return False  # This process may have been stopped, and the others have gone on.
    except StoreLostError:
        await anyio.sleep(PROBE)
        if any(transport.early_failure for transport in transports.values()):
            raise
        return True  # The others keep their connections, so they have formed the communicator.
    finally:
        stop.set()


def _wait_for_end(rendezvous: StoreRendezvous, transports: Transports, stop: clock.ThreadEvent) -> bool:
    """Report that this rank has formed its part, and wait for the decision or make it. Runs in a thread."""
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
            return not give_up(rendezvous, rendezvous.rank, CommAbortedError(f"ranks {sorted(forming)} could not"))
    raise AssertionError


def broken_off(error: BaseException, members: Sequence[int]) -> CommError:
    """Return the error that tells the other ranks, which wait for this rank, that the split failed here.

    :param members: the new communicator's ranks, as ranks of the communicator that is split.
    """
    if isinstance(error, CommError):
        # An error without an op comes from forming, and names ranks of the new communicator.
        return renumbered(error, members, "the communicator that is split") if error.op is None else error
    if isinstance(error, Exception):
        return CommError(f"split failed: {type(error).__name__}: {error}")
    return CommAbortedError("split was cancelled")


def renumbered(error: CommError, members: Sequence[int], old_one: str) -> CommError:
    """Return an error of a new communicator, with its ranks numbered as in the communicator that it comes from.

    :param members: the new communicator's ranks, as ranks of the old communicator.
    :param old_one: the old communicator, in words.
    """
    copy = error.about()
    late = error.late if isinstance(error, CommTimeoutError) else ()
    named = late or (() if error.peer is None else (error.peer,))
    old = [members[rank] for rank in named]
    if old != list(named):
        copy.message += f"; these are ranks {old} of {old_one}"
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
    """Watch for failures of other ranks until ``hearing`` is cancelled. After a failure, cancel ``forming``."""

    def look() -> CommError | None:
        told = rendezvous.decided(_END)
        return missing() if told is None else _REASONS.decode(told).to_error()

    grace, answered = min(_ANSWERS, rendezvous.timeout / 4), clock.now()
    with hearing:
        while not heard:
            await anyio.sleep(max(min(_PAUSE, rendezvous.timeout / _PARTS), rendezvous.size / _LOOKS))
            try:
                failure = await rendezvous.run("looking whether a rank has failed", look)
                answered = clock.now()
                if failure is not None:
                    heard.append(failure)
            except StoreLostError as error:
                if clock.now() - answered > grace:
                    heard.append(error)
            except CommError:  # The forming task gets the same error, and raises it.
                pass
        forming.cancel()
