"""The life of a hand-over of blocks, as two state machines: one of the blocks' owner, and one of their borrower.

::

    owner     lent --recall--> recalled           borrower     open --end--> ending --settle--> settling --say--> over
                |                  |                              |             |                   |
                +--returned--------+--> over                      +--cut--------+--> cut --quiet----+--> over
                |                  |
                +--cut-------------+--> cut --quiet--> over, or held --freed--> over

A transition is a pure function from a state and an event to the next state and the actions that it asks for;
:mod:`aiocomms.endpoints.handovers` runs these. ``tests/unit/test_lending_model.py`` visits every state that the two
reach together, whatever is cancelled, late, lost or dead.

An owner never waits for a borrower without an end. A borrower that may still write into its blocks, because its process
maps them and has not said that it let go, keeps them out of circulation. A read is of no harm to the owner; the reader
finds out by itself (:attr:`aiocomms.endpoints.pools.LeaseLedger.words`).
"""

from __future__ import annotations

import enum

import msgspec


class Out(enum.Enum):
    """The state of a hand-over at its owner."""

    LENT = enum.auto()
    RECALLED = enum.auto()
    """The borrower was told to let go, and has not said yet that it did."""
    CUT = enum.auto()
    """The connection is over, and this end of it is not closed yet."""
    HELD = enum.auto()
    """The hand-over is over, and the borrower may still write into the blocks."""
    OVER = enum.auto()


class Do(enum.Enum):
    """An action of the owner."""

    RECALL = "the borrower is told to let go"
    LOSE = "the connection is given up"
    END = "the hand-over ends on this side, and what is read from now on is refused"
    ASK = "the borrower is told to let go, if it is connected again"
    FREE = "blocks that were held go back to their pool"


class Lent(msgspec.Struct, frozen=True):
    """A hand-over as its owner sees it."""

    lasting: bool
    """True if the borrower may write, and may go on to do so when the connection is over."""
    state: Out = Out.LENT

    @property
    def ended(self) -> bool:
        """True once the program goes on behind the hand-over."""
        return self.state in (Out.HELD, Out.OVER)


LentStep = tuple[Lent, tuple[Do, ...]]


def _to(lent: Lent, state: Out, *actions: Do) -> LentStep:
    return Lent(lent.lasting, state), actions


def recall(lent: Lent) -> LentStep:
    """Take it back: the program was cancelled, a deadline has passed, or the lease ends."""
    return _to(lent, Out.RECALLED, Do.RECALL) if lent.state is Out.LENT else (lent, ())


def overdue(lent: Lent) -> LentStep:
    """Give up on a borrower that does not let go."""
    return (lent, (Do.LOSE,)) if lent.state is Out.RECALLED else (lent, ())


def returned(lent: Lent) -> LentStep:
    """Note that the borrower has let go: all that it has written is there, and it writes nothing more."""
    match lent.state:
        case Out.LENT | Out.RECALLED | Out.CUT:
            return _to(lent, Out.OVER, Do.END)
        case Out.HELD:
            return _to(lent, Out.OVER, Do.FREE)
    return lent, ()


def parted(lent: Lent) -> LentStep:
    """Note that the borrower has let go because it knows that the connection is over.

    Where this end does not know yet, it will: then the hand-over ends for that reason.
    """
    if lent.state in (Out.LENT, Out.RECALLED):
        return Lent(False, lent.state), ()
    return returned(lent)


def cut(lent: Lent, *, in_order: bool) -> LentStep:
    """Note that the connection is over.

    :param in_order: the borrower has closed it, and so has let go before.
    """
    if lent.state not in (Out.LENT, Out.RECALLED):
        return lent, ()
    return returned(lent) if in_order else _to(lent, Out.CUT)


def quiet(lent: Lent) -> LentStep:
    """Note that this end of the connection is closed: nothing reaches the blocks any more by way of this process."""
    if lent.state is not Out.CUT:
        return lent, ()
    return _to(lent, Out.HELD, Do.END, Do.ASK) if lent.lasting else _to(lent, Out.OVER, Do.END)


def died(lent: Lent) -> LentStep:
    """Note that the borrower's process has ended."""
    return _to(lent, Out.OVER, Do.FREE) if lent.state is Out.HELD else (lent, ())


# ------------------------------------------------------------------------------------------------------- the borrower


class Borrowing(enum.Enum):
    """The state of a hand-over at its borrower."""

    OPEN = enum.auto()
    ENDING = enum.auto()
    """Nothing new is begun, and something is under way."""
    SETTLING = enum.auto()
    """All has ended, and what was written may still be on its way."""
    CUT = enum.auto()
    """The connection is over, and something may be under way."""
    OVER = enum.auto()


class Act(enum.Enum):
    """An action of the borrower."""

    FLUSH = "what was written is waited for, until it is visible to the owner"
    SAY = "the owner is told that this side has let go"
    PART = "the same, on a connection that is over"


class Borrowed(msgspec.Struct, frozen=True):
    """A hand-over as its borrower sees it."""

    busy: int = 0
    """The operations under way."""
    wrote: bool = False
    state: Borrowing = Borrowing.OPEN


BorrowedStep = tuple[Borrowed, tuple[Act, ...]]


def begin(borrowed: Borrowed, *, write: bool) -> Borrowed:
    """Begin an operation. The state must be :attr:`Borrowing.OPEN`."""
    assert borrowed.state is Borrowing.OPEN
    return Borrowed(borrowed.busy + 1, borrowed.wrote or write)


def done(borrowed: Borrowed) -> BorrowedStep:
    """Note that an operation has ended, well or not."""
    return _settle(Borrowed(borrowed.busy - 1, borrowed.wrote, borrowed.state))


def end(borrowed: Borrowed) -> BorrowedStep:
    """Let go: the program gives the blocks back or drops them, or the owner takes them back."""
    if borrowed.state is not Borrowing.OPEN:
        return borrowed, ()
    return _settle(Borrowed(borrowed.busy, borrowed.wrote, Borrowing.ENDING))


def flushed(borrowed: Borrowed) -> BorrowedStep:
    """Note that all that was written is visible to the owner."""
    if borrowed.state is not Borrowing.SETTLING:
        return borrowed, ()
    return Borrowed(0, borrowed.wrote, Borrowing.OVER), (Act.SAY,)


def lose(borrowed: Borrowed) -> BorrowedStep:
    """Note that the connection is over."""
    if borrowed.state is Borrowing.OVER:
        return borrowed, ()
    return Borrowed(borrowed.busy, borrowed.wrote, Borrowing.CUT), ()


def hush(borrowed: Borrowed) -> BorrowedStep:
    """Note that nothing of a connection that is over moves any more on this side."""
    if borrowed.state is not Borrowing.CUT:
        return borrowed, ()
    return Borrowed(0, borrowed.wrote, Borrowing.OVER), (Act.PART,)


def _settle(borrowed: Borrowed) -> BorrowedStep:
    if borrowed.state is not Borrowing.ENDING or borrowed.busy:
        return borrowed, ()
    if borrowed.wrote:
        return Borrowed(0, True, Borrowing.SETTLING), (Act.FLUSH,)
    return Borrowed(0, False, Borrowing.OVER), (Act.SAY,)
