"""Failure notices while a communicator forms: if one rank cannot form its part, all other ranks stop waiting.

Ranks that form a communicator first wait for each other in the store. Then each transport waits for connections. If a
rank fails between these two waits, but its process lives, no connection shows the failure.

A new communicator may replace another communicator. Then the ranks use the new communicator only after all of its
ranks, including newcomers, have reported that they formed it. So an attempt to form a communicator has the same result
on all ranks. The first result that a rank records is the result for all ranks: the communicator is formed, or the
attempt is given up.
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
from aiocomms.progress.driver import LoopDriver
from aiocomms.transport import Transport

_PAUSE: Final = 0.1
"""The seconds between two checks whether another rank has failed; fewer seconds if the timeout is short."""
_ANSWERS: Final = 2.0
"""The seconds within which the store must answer a rank's question why another rank has closed its connections.

A slower store counts as lost. A rank that no longer needs the store then continues to connect for these seconds, or for
a quarter of its timeout if that is shorter. A rank that still needs the lost store fails, and cannot report its
failure.
"""
_PARTS: Final = 16
"""The smallest number of checks for failed ranks within the timeout.

Recovery waits for late ranks only for a quarter of the timeout, so the checks must be frequent.
"""
_LOOKS: Final = 1000
"""The largest number of checks for failed ranks per second, by all ranks of a communicator together."""
_KNOWN: Final = (CommAbortedError, CommTimeoutError, PeerDiedError, ProtocolError, StoreLostError)
"""The errors that this rank does not report, because the other ranks notice them, or have reported them."""
FORMS_AGAIN: Final = (CommAbortedError, CommTimeoutError, PeerDiedError)
"""The errors after which the surviving ranks try again to form a communicator."""
_END: Final = "end"
_CARRIED_OUT: Final = b""
_FORMED: Final = "formed"
_REASONS: Final = ControlCodec[Reason](Reason, "why a rank has failed")

Transports = dict[ops.Family, Transport]
Missing = Callable[[], CommError | None]
"""A function that returns an error if the ranks can no longer form the communicator, and None if they can.

A worker thread calls the function.
"""


async def formed(
    rendezvous: StoreRendezvous, opening: Awaitable[Transports], missing: Missing = lambda: None
) -> Transports:
    """Wait until this rank's transports are open, and return the transports; give up if another rank has given up.

    :param missing: a function that this rank calls from time to time. If the function returns an error, this rank gives
        up.
    :raises CommAbortedError: another rank could not form its part, or was cancelled while it formed its part.
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
    """Open the transports while :func:`_hear` watches the other ranks.

    :param opened: a dict to which the open transports are added.
    :param ended: a list to which an exception of ``opening`` is added, because the task group may drop the exception.
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
    """Report the failure of this rank to the other ranks, or read the failure that another rank has reported.

    Return the error to raise.
    """
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
    """Return whether all ranks have formed the communicator; if not, close this rank's transports.

    :raises StoreLostError: the store was lost before this rank knew the outcome, and another rank has closed its
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
    stop, driver, served = clock.event(), LoopDriver.current(), dict.fromkeys(transports.values())
    for transport in served:  # Some transports find out only in progress() that a rank has died.
        driver.attach(transport)
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
        for transport in served:
            driver.detach(transport)


def _wait_for_end(rendezvous: StoreRendezvous, transports: Transports, stop: clock.ThreadEvent) -> bool:
    """Report that this rank has formed its part, and return whether all ranks have formed their parts.

    The rank waits for the decision of another rank, or makes the decision. Runs in a thread.
    """
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
    """Return the error that tells the other ranks that the split failed on this rank.

    :param members: the ranks of the new communicator, numbered as in the communicator that is split.
    """
    if isinstance(error, CommError):
        # An error without an op comes from forming, and names ranks of the new communicator.
        return renumbered(error, members, "the communicator that is split") if error.op is None else error
    if isinstance(error, Exception):
        return CommError(f"split failed: {type(error).__name__}: {error}")
    return CommAbortedError("split was cancelled")


def renumbered(error: CommError, members: Sequence[int], old_one: str) -> CommError:
    """Return a copy of a new communicator's error, with the rank numbers of the old communicator.

    :param members: the ranks of the new communicator, numbered as in the old communicator.
    :param old_one: a phrase for the old communicator, for the error's message.
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
    """Watch for failures of other ranks until the scope ``hearing`` is cancelled.

    After a failure, cancel the scope ``forming``.
    """

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
