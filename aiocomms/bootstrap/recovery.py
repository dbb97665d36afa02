"""The ranks that are left of a communicator, lost or not, agree on who they are, and form a new one.

They meet in a store, as :mod:`aiocomms.bootstrap.meeting` says. There each says that it has come, and the lowest
proposes: the first proposal is the decision, for the store takes no second one. A rank that is not in it is excluded.

A decision ends in one of two ways, and what is said of it first counts. It is carried out when all survivors have said
that they have formed the new communicator: until then none of them uses it. It is spent when one of them could not form
it. Then all meet at the next board, also those that come later.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
from torch.distributed import Store

from aiocomms import arguments, ops
from aiocomms.arguments import as_int
from aiocomms.bootstrap.board import Board
from aiocomms.bootstrap.forming import formed, tell
from aiocomms.bootstrap.meeting import Meeting, Predecessor
from aiocomms.bootstrap.newcomers import Claims, Invitation
from aiocomms.bootstrap.records import pauses
from aiocomms.bootstrap.registry import Selection, close_transports, open_transports
from aiocomms.bootstrap.rendezvous import PROBE, StoreRendezvous
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommClosedError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerDiedError,
    StoreLostError,
)
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.stores import admitting
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import membership
from aiocomms.transport import Transport

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator

_TURN: Final = 0.5
"""Seconds after which the next higher rank proposes, if no rank below it has."""
_HERE: Final = b"1"
_GONE: Final = b"0"
_CARRIED_OUT: Final = b"carried out"
_SPENT: Final = b"spent"


class Decision(msgspec.Struct, array_like=True):
    """The decision of the ranks who forms the new communicator."""

    key: str
    """The key that tells it from all others."""
    old: dict[int, int]
    """Survivors: the new rank, and the old one."""
    joins: dict[int, str]
    """Newcomers: the new rank, and the claim to it."""

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.old) + len(self.joins)


_DECISIONS = ControlCodec[Decision](Decision, "what the ranks have decided")


Formed = tuple[StoreRendezvous, Selection, Mapping[ops.Family, Transport]]
"""The parts that a communicator is made of."""


async def form_again(
    before: Predecessor, ranks: Sequence[int] | None, size: int | None, timeout: float | timedelta
) -> Formed:
    """Form the communicator that takes another one's place; see :meth:`aiocomms.Communicator.reconfigure`."""
    old = before.rendezvous
    try:
        seconds = arguments.seconds("timeout", timeout)
        async with admitting(old.root):
            return await Recovery(before, ranks, as_int(size), seconds).run()
    except CommError as error:
        raise error.about(comm=old.name, op="reconfigure", rank=old.rank) from error.__cause__
    except OSError as error:
        raise CommError(f"no store can be served: {error}", comm=old.name, op="reconfigure", rank=old.rank) from error


async def replace(old: Communicator, new: Communicator) -> Communicator:
    """Close the communicator in whose place is another one."""
    try:
        await old.aclose()
    except BaseException as error:
        # This caller will not have the new communicator, and the other ranks have it already.
        new.abort(error)
        await new.aclose()
        raise
    return new


class Recovery:
    """The part of one rank in a recovery."""

    def __init__(self, before: Predecessor, ranks: Sequence[int] | None, size: int | None, seconds: float) -> None:
        """Begin; see :func:`form_again`.

        :raises ArgumentError: an argument is wrong.
        """
        self._before = before
        self._old = before.rendezvous
        self._ranks = None if ranks is None else sorted(membership.members(ranks, self._old, "reconfigure"))
        self._wanted = size
        self._seconds = seconds
        _check(before, self._ranks, size)
        self._meeting = Meeting(before, self._ranks, size, seconds)
        self._free: list[int] = []
        """The ranks that nobody has claimed, when this rank last looked."""
        self._cut = False  # True if this rank may be cut off from ranks on other hosts.

    async def run(self) -> Formed:
        """Agree and form it; once more, as long as there is time, if a rank or the store goes missing meanwhile."""
        while True:
            root, store = await self._meeting.place()
            try:
                return await self._meet(root, store)
            except StoreLostError:
                if self._meeting.line is None or self._cut or self._meeting.left() < _TURN:
                    raise

    async def _meet(self, root: Store, store: Store | None) -> Formed:
        old = self._old
        for attempt in itertools.count():
            board = old.child(f"again{attempt}", old.name, old.rank, old.size, store)
            decision = await self._agree(board, root)
            if decision is None:
                continue
            rendezvous = self._successor(decision, root)
            try:
                async with admitting(root):  # The store may be a new one.
                    parts = await self._form(rendezvous)
            except BaseException as error:
                self._before.notes.tried.add(decision.key)
                if isinstance(error, CommError):
                    await self._give_up(board, decision)
                    await tell(rendezvous, error)
                if (
                    not isinstance(error, CommTimeoutError | PeerDiedError | CommAbortedError)
                    or self._meeting.left() < _TURN
                ):
                    raise
            else:
                if await self._kept(board, decision, parts):
                    return parts
                await tell(rendezvous, CommAbortedError("another rank could not"))
        raise AssertionError

    def _successor(self, decision: Decision, root: Store) -> StoreRendezvous:
        old = self._old
        rank = next(new for new, before in decision.old.items() if before == old.rank)
        # The time is half of what is left, so that there is time for another attempt.
        seconds = max(1.0, self._meeting.left() / 2)
        return old.successor(root, decision.key, old.epoch + 1, rank, decision.size, seconds)

    async def _form(self, rendezvous: StoreRendezvous) -> Formed:
        plan = self._before.plan
        options = {name: value for name, value in plan.options.items() if name != "adopt"}
        opening = open_transports(plan, lambda cls, _: cls.open(rendezvous, options))
        transports = await formed(rendezvous, opening)
        rendezvous.timeout = self._before.timeout
        return rendezvous, msgspec.structs.replace(plan, options=options), transports

    # --------------------------------------------------------------------------------------------- and who they are

    async def _agree(self, board: Board, root: Store) -> Decision | None:
        """Return what the ranks have decided; None: it is spent."""
        given_up, came = clock.event(), {self._old.rank}
        try:
            return await self._meeting.off_loop(
                "", functools.partial(self._vote, board, root, came, given_up), more=PROBE
            )
        except CommTimeoutError:
            hoped = set(range(self._old.size)) if self._ranks is None else set(self._ranks)
            absent = sorted(rank for rank in hoped - came if self._ranks or not self._meeting.dead(rank))
            who = [f"ranks {absent} had not come"] if absent else []
            who += [f"nobody came to take the free ranks {self._free}"] if self._free else []
            late = f"the ranks could not agree within {self._seconds:g} s{': ' if who else ''}{', and '.join(who)}"
            raise CommTimeoutError(late, late=absent or self._free) from None
        finally:
            given_up.set()

    def _vote(self, board: Board, root: Store, came: set[int], given_up: clock.ThreadEvent) -> Decision | None:
        """Say that this rank has come, and wait for the decision or make it; in a thread."""
        rank, began, complete, pause = self._old.rank, clock.now(), None, pauses(self._old.size)
        while self._meeting.left() > 0 and not given_up.wait(next(pause)):
            record = board.decided("decision")
            if record is None:
                self._look(board, came)
                now = clock.now()
                proposal = self._proposal(root, came, now - began)
                complete = now if complete is None and proposal else complete
                if proposal is None or complete is None or now - complete < sorted(came).index(rank) * _TURN:
                    continue
                if not self._all_wait(board, came):
                    complete = None
                    continue
                record = board.decide("decision", _DECISIONS.encode(proposal))
            decision = _DECISIONS.decode(record)
            if self._spent(board, decision):
                return None
            self._accept(decision)
            invitation = Invitation(self._old.epoch + 1, decision.size, decision.key)
            for new, claim in decision.joins.items():  # Each rank says so, for the one that proposed may be gone.
                Claims(self._old, root).answer(new, claim, invitation)
            return decision
        board.tell("came", _GONE)
        raise CommTimeoutError("it has taken too long, or nobody waits for it any more")

    def _look(self, board: Board, came: set[int]) -> None:
        """Say that this rank is here, if an earlier call has just taken it back, and look who else is."""
        rank = self._old.rank
        if board.told("came", rank) != _HERE:
            board.tell("came", _HERE)
        came |= {it for it in range(self._old.size) if it not in came and board.told("came", it) == _HERE}

    def _all_wait(self, board: Board, came: set[int]) -> bool:
        """Return whether all that have come are still here; a rank that is not is taken out."""
        gone = {rank for rank in came if board.told("came", rank) != _HERE}
        came -= gone
        return not gone

    def _spent(self, board: Board, decision: Decision) -> bool:
        """Return whether a decision has failed: on another rank, or on this one, which says so.

        :raises CommAbortedError: it has failed on this rank, and another one has carried it out before.
        """
        tried = decision.key in self._before.notes.tried
        end = board.decide("end", _SPENT) if tried else board.decided("end")
        if tried and end == _CARRIED_OUT:
            raise CommAbortedError(
                "this rank is excluded: the others have formed the new communicator, and this failed"
            )
        return end == _SPENT

    async def _kept(self, board: Board, decision: Decision, parts: Formed) -> bool:
        """Return whether what was formed counts, and close it if not."""
        kept = False
        try:
            kept = await self._carried_out(board, decision, parts)
        finally:
            if not kept:
                with anyio.CancelScope(shield=True):
                    await close_transports({*parts[2].values()})
        return kept

    async def _carried_out(self, board: Board, decision: Decision, parts: Formed) -> bool:
        """Return whether all survivors have formed what this rank has; False if that is not known in time."""
        left, given_up = max(0.0, parts[0].left()), clock.event()
        try:
            with anyio.move_on_after(left + PROBE):
                return await run_in_thread(functools.partial(self._end, board, decision, parts, left, given_up))
            return False  # This rank may have stood still, and the others have gone on.
        except StoreLostError:
            return True  # The others hear of no end, either.
        finally:
            given_up.set()

    def _end(
        self, board: Board, decision: Decision, parts: Formed, seconds: float, given_up: clock.ThreadEvent
    ) -> bool:
        """Say that this rank has formed it, and wait for the end of the decision or bring it about; in a thread."""
        ends, forming, pause = clock.now() + seconds, set(decision.old.values()), pauses(decision.size)
        board.tell("formed", _HERE)
        while (end := board.decided("end")) is None:
            forming = {rank for rank in forming if board.told("formed", rank) != _HERE}
            lost = any(transport.early_failure for transport in parts[2].values())
            if not forming or lost or clock.now() > ends or given_up.wait(next(pause)):
                end = board.decide("end", _SPENT if forming else _CARRIED_OUT)
        return end == _CARRIED_OUT

    async def _give_up(self, board: Board, decision: Decision) -> None:
        """Say that a decision is spent, if the store answers at once; this rank's next call does it else.

        :raises CommAbortedError: another rank has carried it out.
        """
        with anyio.move_on_after(PROBE), contextlib.suppress(StoreLostError):
            await run_in_thread(functools.partial(self._spent, board, decision))

    def _proposal(self, root: Store, came: set[int], waited: float) -> Decision | None:
        """Return what this rank would propose, if it is time for that."""
        if self._ranks is None:
            late = [r for r in range(self._old.size) if r not in came and not self._meeting.dead(r)]
            if late and waited < self._seconds / 4:
                return None
            old = sorted(came)
            self._check_quorum(old)
        else:
            old = self._ranks
            if not came.issuperset(old):
                return None
        if self._wanted is None:
            return Decision(secrets.token_hex(16), dict(enumerate(old)), {})
        claims = Claims(self._old, root)
        joins = {new: claims.newest(new) for new in range(self._wanted) if new not in old}
        self._free = [new for new, claim in joins.items() if not claim]
        return Decision(secrets.token_hex(16), {r: r for r in old}, joins) if not self._free else None

    def _check_quorum(self, old: Sequence[int]) -> None:
        """Check that a part of a divided network does not take itself for all: the old store allows one decision."""
        line, size = self._meeting.line, self._old.size
        if self._meeting.moved and line is not None and 2 * len(old) <= size:
            away = [rank for rank in range(size) if rank not in old and line.far(rank)]
            if away:
                self._cut = True
                raise StoreLostError(
                    f"the store is gone, and of {size} ranks only {list(old)} are left: whether ranks {away}, on other "
                    "hosts, are dead or cut off cannot be told. If they are dead, name those that are left in ranks"
                )

    def _accept(self, decision: Decision) -> None:
        """Check that this rank can go along with what was decided."""
        old = sorted(decision.old.values())
        if self._old.rank not in old:
            raise CommAbortedError(f"this rank is excluded: ranks {old} go on without it")
        if self._ranks is not None and self._ranks != old:
            raise MismatchError(f"ranks is {self._ranks}, and the others have agreed on {old}")
        if decision.joins if self._wanted is None else decision.size != self._wanted:
            raise MismatchError(f"size is {self._wanted}, and the others have agreed on {decision.size} ranks")


def _check(before: Predecessor, ranks: Sequence[int] | None, size: int | None) -> None:
    """Check that it is not closed, and that this rank is not out."""
    reason, rank = before.reason, before.rendezvous.rank
    if before.closed:
        raise CommClosedError("it was closed on this rank: its ranks are found over what it still holds")
    if ranks is not None and not ranks:
        raise ArgumentError("ranks is empty, wanted this rank and others")
    if size is not None and (type(size) is not int or not rank < size):
        raise ArgumentError(f"size is {size!r}, wanted an int above this rank's number, {rank}")
    if reason is not None and isinstance(reason.__cause__, PeerDiedError) and reason.__cause__.peer == rank:
        raise CommAbortedError(reason.message)
