"""The recovery of a communicator: its surviving ranks agree on the members of a new communicator, and form it.

The old communicator may be lost or not. The ranks meet in a store, see :mod:`aiocomms.bootstrap.meeting`. Each rank
reports its arrival there, and the lowest rank proposes the members. The first proposal is the decision, because the
store does not accept a second proposal. A rank that the decision does not name is excluded.

A decision is carried out when all of its ranks have formed the new communicator, see :mod:`aiocomms.bootstrap.forming`.
A decision is *spent*, and has no effect, if one of its ranks fails or is gone. Then all ranks, including late ones,
meet at another part of the store.
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import msgspec
from torch.distributed import Store

from aiocomms import arguments
from aiocomms.arguments import as_int
from aiocomms.bootstrap.board import ANYBODY, Board
from aiocomms.bootstrap.forming import FORMS_AGAIN, Transports, formed, give_up, given_up, kept, renumbered
from aiocomms.bootstrap.meeting import Meeting, Predecessor
from aiocomms.bootstrap.newcomers import Claims, Invitation
from aiocomms.bootstrap.records import pauses
from aiocomms.bootstrap.registry import Selection, open_transports
from aiocomms.bootstrap.rendezvous import PROBE, StoreRendezvous
from aiocomms.diagnosis.hang_report import numbered
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerDiedError,
    StoreLostError,
)
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.stores import admitting
from aiocomms.ops import membership

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator

_TURN: Final = 0.5
"""The seconds after which the next higher rank proposes the members, if no lower rank has proposed them."""
_AGAIN: Final = 0.25
"""The seconds after which a waiting rank reports again that it is present, because other ranks may believe it dead."""
_MOST_FREE: Final = 16
"""The largest number of free ranks (ranks without a process) that an error names.

The number is limited, because a wrong ``size`` may be very large.
"""
_GONE: Final = b"0"


class Decision(msgspec.Struct, array_like=True):
    """The decision on the members of the new communicator."""

    key: str
    """The key that distinguishes this decision from all other decisions."""
    old: dict[int, int]
    """A mapping from the new rank of each survivor to its old rank."""
    joins: dict[int, str]
    """A mapping from the new rank of each newcomer to its claim."""

    @property
    def size(self) -> int:
        """The number of ranks of the new communicator."""
        return len(self.old) + len(self.joins)

    @property
    def members(self) -> list[int]:
        """The ranks in the old communicator, in the order of the new ranks.

        The entry for a newcomer is the rank whose place the newcomer takes.
        """
        return [self.old.get(rank, rank) for rank in range(self.size)]


_DECISIONS = ControlCodec[Decision](Decision, "what the ranks have decided")


Formed = tuple[StoreRendezvous, Selection, Transports]
"""The parts of a communicator."""


async def form_again(
    before: Predecessor, ranks: Sequence[int] | None, size: int | None, timeout: float | timedelta
) -> Formed:
    """Form a communicator that replaces another communicator; see :meth:`aiocomms.Communicator.reconfigure`."""
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
    """Close the old communicator, and return the new communicator that replaces it."""
    try:
        await old.aclose()
    except BaseException as error:
        # This caller will not get the new communicator, which the other ranks already use.
        new.abort(error)
        await new.aclose()
        raise
    return new


class Recovery:
    """One rank's part in a recovery."""

    def __init__(self, before: Predecessor, ranks: Sequence[int] | None, size: int | None, seconds: float) -> None:
        """Create this rank's part; see :func:`form_again`.

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
        """The lowest free ranks that no newcomer had claimed when this rank last read the claims."""
        line = self._meeting.line if before.reason is None else None
        self._closed = {rank for rank in range(self._old.size) if line is not None and line.gone(rank)}
        """The ranks that closed the communicator before the recovery.

        These ranks have not died: the death of a rank would have made the communicator lost.
        """
        self._cut = False  # True if this rank may be cut off from ranks on other hosts.
        self._failed = ""
        """The end of an error's message: the reason why the last attempt failed; empty if no attempt has failed."""
        self._claims: Claims | None = None
        self._claimed: dict[int, str] = {}
        """The last claim to each rank at the time when this rank first voted, by rank.

        The value is an empty text if there was no claim to the rank, or if that claim had no answer yet.
        """

    async def run(self) -> Formed:
        """Agree on the new communicator and form it. If a rank or the store is lost, retry while there is time."""
        while True:
            root, store = await self._meeting.place()
            try:
                return await self._meet(root, store)
            except StoreLostError:
                if self._meeting.line is None or self._cut or self._meeting.left() < _TURN:
                    raise

    async def _meet(self, root: Store, store: Store | None) -> Formed:
        old = self._old
        self._claims = None if self._wanted is None else Claims(old, root)
        for attempt in itertools.count():
            board = old.child(f"again{attempt}", old.name, old.rank, old.size, store)
            decision = await self._agree(board, root)
            if decision is None:
                continue
            try:
                parts = await self._carry_out(decision, root)
            except CommError as error:
                raise renumbered(error, decision.members, "the old communicator") from error.__cause__
            if parts is not None:
                return parts
        raise AssertionError

    async def _carry_out(self, decision: Decision, root: Store) -> Formed | None:
        """Form the new communicator; return None if the attempt has failed and there is time for another attempt.

        :raises CommError: the attempt has failed. The error contains rank numbers of the new communicator.
        """
        # An attempt gets half of the time that is left, so that another attempt is possible.
        rendezvous = self._successor(decision, root, max(1.0, self._meeting.left() / 2))
        failure: CommError = CommAbortedError("another rank could not form it, or this rank was too slow")
        try:
            async with admitting(root):  # The store may be a new one.
                rendezvous, selection, transports = await self._form(rendezvous, decision)
            if await kept(rendezvous, transports):
                rendezvous.timeout = self._before.timeout
                return rendezvous, selection, transports
        except FORMS_AGAIN as error:
            failure = error
        finally:
            self._before.notes.tried.add(decision.key)
        # This rank must ask whether the others have formed the new communicator. Otherwise two processes could have the
        # same rank.
        give = functools.partial(give_up, rendezvous, rendezvous.rank, failure)
        if not await self._meeting.off_loop("giving an attempt up", give, more=PROBE):
            raise _excluded()
        if self._meeting.left() < _TURN:
            raise failure
        self._note(failure, decision)
        return None

    def _note(self, failure: CommError, decision: Decision) -> None:
        failed = renumbered(failure, decision.members, "the old communicator")
        self._failed = f"; the last attempt failed: {failed.message}"

    def _successor(self, decision: Decision, root: Store, seconds: float) -> StoreRendezvous:
        old = self._old
        rank = next((new for new, before in decision.old.items() if before == old.rank), ANYBODY)
        return old.successor(root, decision.key, old.epoch + 1, rank, decision.size, seconds)

    async def _form(self, rendezvous: StoreRendezvous, decision: Decision) -> Formed:
        plan = self._before.plan
        options = {name: value for name, value in plan.options.items() if name != "adopt"}
        opening = open_transports(plan, lambda cls, _: cls.open(rendezvous, options))
        before = frozenset(filter(self._meeting.dead, decision.old.values()))
        missing = functools.partial(self._missing, decision, before)
        transports = await formed(rendezvous, opening, missing)
        return rendezvous, msgspec.structs.replace(plan, options=options), transports

    def _missing(self, decision: Decision, before: Iterable[int]) -> CommError | None:
        """Return an error if one of a decision's ranks is gone, because the decision must then fail. Runs in a thread.

        The error names the new rank, like each error of an attempt to form a communicator.

        :param before: the ranks of the decision that this rank already believed to be dead when the forming began.
            These ranks have reported that they are present.
        """
        gone = [new for new, rank in decision.old.items() if rank not in before and self._dead(rank)]
        gone += [rank for rank, claim in decision.joins.items() if self._claims and self._claims.last(rank) != claim]
        return PeerDiedError(f"rank {gone[0]} has died or was cut off", peer=gone[0]) if gone else None

    def _will_not_come(self, rank: int, *, lesser: bool) -> bool:
        """Return whether an absent rank is dead for certain, or a newcomer claims it.

        :param lesser: whether fewer than half of the ranks are present. The absent ranks may be alive, but cut off from
            the store. In that case, the absent ranks continue with a new store. So the smaller part of the ranks waits
            for the absent ranks at the old store.
        """
        if self._claims is not None and self._claims.newest(rank):
            return True
        line = self._meeting.line
        return self._dead(rank) and not (lesser and line is not None and line.far(rank))

    def _dead(self, rank: int) -> bool:
        """Return whether this rank knows that a rank is gone.

        The rank is gone if a connection shows its death, or if another process claims the rank.
        """
        if self._meeting.line is not None or self._claims is None or rank == self._old.rank:
            return self._meeting.dead(rank)
        return self._claims.last(rank) != self._claimed.get(rank) or self._meeting.dead(rank)

    # ------------------------------------------------------------------------------------- the agreement on the members

    async def _agree(self, board: Board, root: Store) -> Decision | None:
        """Return the decision of the ranks; None if the decision has failed."""
        stop, came = clock.event(), {self._old.rank}
        try:
            return await self._meeting.off_loop("", functools.partial(self._vote, board, root, came, stop), more=PROBE)
        except CommTimeoutError:
            hoped = set(range(self._old.size)) if self._ranks is None else set(self._ranks)
            absent = sorted(rank for rank in hoped - came if self._ranks or not self._meeting.dead(rank))
            who = [f"ranks {absent} had not joined"] if absent else []
            who += [f"no process joined as the free ranks {self._free}{self._why_free()}"] if self._free else []
            late = f"the ranks could not agree within {self._seconds:g} s{': ' if who else ''}{', and '.join(who)}"
            raise CommTimeoutError(f"{late}{self._failed}", late=absent or self._free) from None
        finally:
            stop.set()

    def _why_free(self) -> str:
        """Return a text with the reason why ranks are free; empty if this rank does not know the reason."""
        reason = self._before.reason
        if reason is not None:
            return f" ({reason.message})" if reason.peer in self._free else ""
        closed = sorted(self._closed.intersection(self._free))
        return f" ({numbered(closed)} had closed the communicator)" if closed else ""

    def _vote(self, board: Board, root: Store, came: set[int], stop: clock.ThreadEvent) -> Decision | None:
        """Report that this rank is present, and wait for the decision.

        This rank may make the decision itself. Runs in a thread.
        """
        rank, began, complete, pause = self._old.rank, clock.now(), None, pauses(self._old.size)
        present = Presence(board, self._old.size, self._dead)
        if self._claims is not None and not self._claimed:
            self._claimed = {it: self._claims.answered(it) for it in range(self._old.size)}
        while self._meeting.left() > 0 and not stop.wait(next(pause)):
            record = board.decided("decision")
            if record is None:
                present.look(came)
                now = clock.now()
                proposal = self._proposal(came, now - began)
                complete = now if complete is None and proposal else complete
                if proposal is None or complete is None or now - complete < sorted(came).index(rank) * _TURN:
                    continue
                if not present.all_wait(came):
                    complete = None
                    continue
                record = board.decide("decision", _DECISIONS.encode(proposal))
            decision = _DECISIONS.decode(record)
            successor = self._successor(decision, root, 0.0)
            if self._spent(successor, decision):
                return None
            self._accept(decision, successor)
            if self._claims is not None:
                invitation = Invitation(self._old.epoch + 1, decision.size, decision.key)
                for new, claim in decision.joins.items():  # Each rank answers, because the proposer may be gone.
                    self._claims.answer(new, claim, invitation)
            return decision
        present.withdraw()
        raise CommTimeoutError("the attempt took too long, or no rank waits for it any more")

    def _spent(self, board: Board, decision: Decision) -> bool:
        """Return whether a decision has failed on this rank or on another rank.

        If the decision failed on this rank, report the failure to the other ranks.

        :param board: the new communicator's board.
        :raises CommAbortedError: the decision failed on this rank, but the other ranks have carried it out.
        """
        if decision.key not in self._before.notes.tried:
            failure = given_up(board)
            if failure is not None:
                self._note(failure, decision)
            return failure is not None
        if not give_up(board, board.rank, CommAbortedError("an earlier attempt on this rank has failed")):
            raise _excluded()
        return True

    def _proposal(self, came: set[int], waited: float) -> Decision | None:
        """Return the proposal of this rank; None if it is too early for a proposal."""
        if self._ranks is None:
            absent = [r for r in range(self._old.size) if r not in came]
            late = [r for r in absent if not self._will_not_come(r, lesser=len(absent) > len(came))]
            if late and waited < self._seconds / 4:
                return None
            old = sorted(came)
            self._check_quorum(old)
        else:
            old = self._ranks
            if not came.issuperset(old):
                return None
        if self._wanted is None or self._claims is None:
            return Decision(secrets.token_hex(16), dict(enumerate(old)), {})
        joins, free = dict[int, str](), list[int]()
        for new in range(self._wanted):
            if new not in old:
                joins[new] = self._claims.newest(new)
                free += [] if joins[new] else [new]
            if len(free) == _MOST_FREE:
                break
        self._free = free
        return None if free else Decision(secrets.token_hex(16), {r: r for r in old}, joins)

    def _check_quorum(self, old: Sequence[int]) -> None:
        """Check that the ranks ``old`` are a majority if they meet at a new store: the network may be divided.

        The old store allows one decision only, so the check is not needed there.

        :raises StoreLostError: the ranks ``old`` are at most half of all ranks, and some missing ranks are on other
            hosts.
        """
        line, size = self._meeting.line, self._old.size
        if self._meeting.moved and line is not None and 2 * len(old) <= size:
            away = [rank for rank in range(size) if rank not in old and line.far(rank)]
            if away:
                self._cut = True
                raise StoreLostError(
                    f"the store is lost, and of {size} ranks only {list(old)} are left: whether ranks {away}, on other "
                    "hosts, are dead or cut off cannot be told. If they are dead, name those that are left in ranks"
                )

    def _accept(self, decision: Decision, board: Board) -> None:
        """Check that a decision agrees with this rank's arguments.

        If the decision does not agree, report that to the ranks that form the new communicator.

        :param board: the new communicator's board.
        :raises CommAbortedError: the decision excludes this rank.
        :raises MismatchError: the decision has other ranks or another size than the arguments.
        """
        old = sorted(decision.old.values())
        if self._old.rank not in old:
            raise CommAbortedError(f"this rank is excluded: ranks {old} go on without it")
        wrong = None
        if self._ranks is not None and self._ranks != old:
            wrong = MismatchError(f"ranks is {self._ranks}, and the others have agreed on {old}")
        elif decision.joins if self._wanted is None else decision.size != self._wanted:
            wrong = MismatchError(f"size is {self._wanted}, and the others have agreed on {decision.size} ranks")
        if wrong is not None:
            give_up(board, board.rank, wrong)
            raise wrong


class Presence:
    """The ranks that wait for a decision, as far as this rank knows.

    A rank that this rank believes to be dead may only have been silent, or may have died after its arrival. Such a rank
    counts as present only after it has reported its presence again.

    :param dead: a function that returns whether this rank believes the rank in the argument to be dead.
    """

    def __init__(self, board: Board, size: int, dead: Callable[[int], bool]) -> None:
        self._board, self._size, self._dead = board, size, dead
        self._said: dict[int, bytes] = {}
        """The report of each rank that was in the store when this rank first believed that rank to be dead, by rank."""
        self._times, self._last = 0, -math.inf

    def look(self, came: set[int]) -> None:
        """Report that this rank is present, even after :meth:`withdraw`, and add the present ranks to ``came``."""
        rank, now = self._board.rank, clock.now()
        if now - self._last >= _AGAIN or self._board.told("came", rank) == _GONE:
            self._times, self._last = self._times + 1, now
            self._board.tell("came", b"%d" % self._times)
        came |= {it for it in range(self._size) if it not in came and self._waits(it)}

    def all_wait(self, came: set[int]) -> bool:
        """Return whether all ranks in ``came`` still wait. Remove the ranks that do not wait from ``came``."""
        gone = {rank for rank in came if not self._waits(rank)}
        came -= gone
        return not gone

    def withdraw(self) -> None:
        """Report that this rank does not wait any more."""
        self._board.tell("came", _GONE)

    def _waits(self, rank: int) -> bool:
        said = self._board.told("came", rank)
        if said is None or said == _GONE:
            return False
        return not self._dead(rank) or said != self._said.setdefault(rank, said)


def _excluded() -> CommAbortedError:
    return CommAbortedError("this rank is excluded: the others have formed the new communicator without it")


def _check(before: Predecessor, ranks: Sequence[int] | None, size: int | None) -> None:
    """Check the arguments of a recovery, and check that the other ranks do not believe this rank to be dead.

    :raises ArgumentError: an argument is wrong.
    :raises CommAbortedError: the other ranks believe this rank to be dead.
    """
    reason, rank = before.reason, before.rendezvous.rank
    if ranks is not None and not ranks:
        raise ArgumentError("ranks is empty, wanted this rank and others")
    if size is not None and (type(size) is not int or not rank < size):
        raise ArgumentError(f"size is {size!r}, wanted an int above this rank's number, {rank}")
    if reason is not None and isinstance(reason.__cause__, PeerDiedError) and reason.__cause__.peer == rank:
        raise CommAbortedError(reason.message)
