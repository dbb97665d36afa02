"""State machines of a hand-over of blocks: one for the blocks' owner, and one for their borrower.

::

    owner     lent --recall--> recalled           borrower     open --end--> ending --settle--> settling --say--> over
                |                  |                              |             |                   |
                +--returned--------+--> over                      +--cut--------+--> cut --quiet----+--> over
                |                  |
                +--cut-------------+--> cut --quiet--> over, or held --freed--> over

A transition is a pure function: it takes a state and an event, and returns the next state and the actions to carry out.
:mod:`aiocomms.endpoints.handovers` runs the actions. ``tests/unit/test_lending_model.py`` visits every state
that both machines reach together under cancellations, delays, losses and deaths.

An owner waits for a borrower only for a bounded time. If the borrower's process maps the blocks, the borrower may write
into the blocks until the borrower releases them. Until the release, no lease gets these blocks. A read after the end of
the hand-over does not harm the owner. The borrower detects such a read with
:attr:`aiocomms.endpoints.pools.LeaseLedger.words`.
"""

from __future__ import annotations

import enum

import msgspec


class Out(enum.Enum):
    """The state of a hand-over at its owner."""

    LENT = enum.auto()
    RECALLED = enum.auto()
    """The owner has recalled the blocks, but the borrower has not released them yet."""
    CUT = enum.auto()
    """The connection is over, but this end of the connection is not closed yet."""
    HELD = enum.auto()
    """The hand-over is over, but the borrower may still write into the blocks."""
    OVER = enum.auto()


class Do(enum.Enum):
    """An action of the owner."""

    RECALL = "the borrower is told to let go"
    LOSE = "the connection is given up"
    END = "the hand-over ends on this side, and what is read from now on is refused"
    ASK = "the borrower is told to let go, if it is connected again"
    FREE = "blocks that were held go back to their pool"


class Lent(msgspec.Struct, frozen=True):
    """The data that the owner keeps about a hand-over."""

    lasting: bool
    """True if the borrower may still write into the blocks after the connection is over."""
    state: Out = Out.LENT

    @property
    def ended(self) -> bool:
        """True once the hand-over has ended. If the connection was lost, the borrower may still use the blocks."""
        return self.state in (Out.HELD, Out.OVER)


LentStep = tuple[Lent, tuple[Do, ...]]


def _to(lent: Lent, state: Out, *actions: Do) -> LentStep:
    return Lent(lent.lasting, state), actions


def recall(lent: Lent) -> LentStep:
    """Recall the blocks, because the program's call was cancelled, its deadline has passed, or the lease ends."""
    return _to(lent, Out.RECALLED, Do.RECALL) if lent.state is Out.LENT else (lent, ())


def overdue(lent: Lent) -> LentStep:
    """Treat the connection as lost, because the borrower does not release the blocks."""
    return (lent, (Do.LOSE,)) if lent.state is Out.RECALLED else (lent, ())


def returned(lent: Lent) -> LentStep:
    """Record that the borrower has released the blocks: all its writes are visible, and it writes nothing more."""
    match lent.state:
        case Out.LENT | Out.RECALLED | Out.CUT:
            return _to(lent, Out.OVER, Do.END)
        case Out.HELD:
            return _to(lent, Out.OVER, Do.FREE)
    return lent, ()


def parted(lent: Lent) -> LentStep:
    """Record that the borrower has released the blocks because it knows that the connection is over.

    If this end has not noticed the loss yet, the hand-over ends when this end notices the loss. The loss is then the
    reason for the end of the hand-over.
    """
    if lent.state in (Out.LENT, Out.RECALLED):
        return Lent(False, lent.state), ()
    return returned(lent)


def cut(lent: Lent, *, in_order: bool) -> LentStep:
    """Record that the connection is over.

    :param in_order: True if the borrower closed the connection. The borrower released the blocks before it closed the
        connection.
    """
    if lent.state not in (Out.LENT, Out.RECALLED):
        return lent, ()
    return returned(lent) if in_order else _to(lent, Out.CUT)


def quiet(lent: Lent) -> LentStep:
    """Record that this end of the connection is closed: this process writes no more received data into the blocks."""
    if lent.state is not Out.CUT:
        return lent, ()
    return _to(lent, Out.HELD, Do.END, Do.ASK) if lent.lasting else _to(lent, Out.OVER, Do.END)


def died(lent: Lent) -> LentStep:
    """Record that the borrower's process has ended."""
    return _to(lent, Out.OVER, Do.FREE) if lent.state is Out.HELD else (lent, ())


# ------------------------------------------------------------------------------------------------------- the borrower


class Borrowing(enum.Enum):
    """The state of a hand-over at its borrower."""

    OPEN = enum.auto()
    ENDING = enum.auto()
    """The program has released the blocks, but operations are still pending."""
    SETTLING = enum.auto()
    """All operations have ended, but some of their writes may not be visible to the owner yet."""
    CUT = enum.auto()
    """The connection is over, but operations may still be pending."""
    OVER = enum.auto()


class Act(enum.Enum):
    """An action of the borrower."""

    FLUSH = "what was written is waited for, until it is visible to the owner"
    SAY = "the owner is told that this side has let go"
    PART = "the same, on a connection that is over"


class Borrowed(msgspec.Struct, frozen=True):
    """The data that the borrower keeps about a hand-over."""

    busy: int = 0
    """The number of pending operations."""
    wrote: bool = False
    state: Borrowing = Borrowing.OPEN


BorrowedStep = tuple[Borrowed, tuple[Act, ...]]


def begin(borrowed: Borrowed, *, write: bool) -> Borrowed:
    """Begin an operation. The state must be :attr:`Borrowing.OPEN`."""
    assert borrowed.state is Borrowing.OPEN
    return Borrowed(borrowed.busy + 1, borrowed.wrote or write)


def done(borrowed: Borrowed) -> BorrowedStep:
    """Record that an operation has ended, successfully or not."""
    return _settle(Borrowed(borrowed.busy - 1, borrowed.wrote, borrowed.state))


def end(borrowed: Borrowed) -> BorrowedStep:
    """Release the blocks at the end of the hand-over.

    The program gives the blocks back or releases them without an answer, or the owner takes them back.
    """
    if borrowed.state is not Borrowing.OPEN:
        return borrowed, ()
    return _settle(Borrowed(borrowed.busy, borrowed.wrote, Borrowing.ENDING))


def flushed(borrowed: Borrowed) -> BorrowedStep:
    """Record that all writes are visible to the owner."""
    if borrowed.state is not Borrowing.SETTLING:
        return borrowed, ()
    return Borrowed(0, borrowed.wrote, Borrowing.OVER), (Act.SAY,)


def lose(borrowed: Borrowed) -> BorrowedStep:
    """Record that the connection is over."""
    if borrowed.state is Borrowing.OVER:
        return borrowed, ()
    return Borrowed(borrowed.busy, borrowed.wrote, Borrowing.CUT), ()


def hush(borrowed: Borrowed) -> BorrowedStep:
    """Record that no operation of the lost connection moves data on this side any more."""
    if borrowed.state is not Borrowing.CUT:
        return borrowed, ()
    return Borrowed(0, borrowed.wrote, Borrowing.OVER), (Act.PART,)


def _settle(borrowed: Borrowed) -> BorrowedStep:
    if borrowed.state is not Borrowing.ENDING or borrowed.busy:
        return borrowed, ()
    if borrowed.wrote:
        return Borrowed(0, True, Borrowing.SETTLING), (Act.FLUSH,)
    return Borrowed(0, False, Borrowing.OVER), (Act.SAY,)
