"""A model of a hand-over: its owner, its borrower and all that is on its way, checked in every state they can come to.

The two state machines are those of :mod:`aiocomms.endpoints.lending`, as they are. Words come in the order in which
they were said, at any later time. A connection is aborted, and then still carries words until its owner's end is
closed; or it is cut, and the last words are lost. The owner takes the blocks back, at any time; the borrower reads or
writes them, gives them back, closes the connection, stands still, goes on, or dies. A write arrives at any time between
its call and the end of the flush behind it, and a read sees one half of the blocks before the other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from aiocomms.endpoints import lending
from aiocomms.endpoints.lending import Act, Borrowed, Borrowing, Do, Lent, Out

pytestmark = [pytest.mark.deterministic, pytest.mark.slow]

LEND, RECALL, BACK, PART, BYE = "lend", "recall", "back", "part", "bye"
UP, ABORTED, BROKEN = "up", "aborted", "broken"


class Move(NamedTuple):
    """A read or a write under way on the borrower's side."""

    write: bool
    halves: int = 0
    """The halves of the blocks that a read has seen, or that a write has reached."""
    foreign: bool = False
    """True if the read has seen another lease's bytes."""
    called: bool = True
    """True until the operation has ended."""


class State(NamedTuple):
    lent: Lent
    borrowed: Borrowed | None = None
    """None: the borrower has not heard of the lease."""
    move: Move | None = None
    moves: int = 1
    """The number of moves that the borrower's program still begins."""
    to_borrower: tuple[str, ...] = (LEND,)
    to_owner: tuple[str, ...] = ()
    link: str = UP
    owner_closed: bool = False
    noticed: bool = False
    """True once the borrower knows that the connection is over."""
    hushed: bool = False
    """True once nothing of the earlier connection moves on the borrower's side any more."""
    ended: int = 0
    """The number of times that the hand-over has ended for the owner's program."""
    vouched: bool = True
    leased: bool = True
    """True until the owner's program has left the block of the lease."""
    freed: int = 0
    owns: bool = True
    """True while the owner's process lives."""
    alive: bool = True
    """True while the borrower's process lives."""
    stopped: bool = False
    again: bool = False
    """True once the two are connected again."""


class Model:
    """The protocol.

    :param writes: the borrower writes, and does not read.
    :param maps: the borrower maps the memory of the blocks, and so reaches it without the owner's end of the
        connection.
    :param lasting: whether the owner believes that writes may outlast the connection; None: the truth.
    """

    def __init__(self, writes: bool, maps: bool, lasting: bool | None = None) -> None:
        self.writes, self.maps = writes, maps
        self.start = State(Lent(writes and maps if lasting is None else lasting))

    def explore(self) -> int:
        """Visit every state, and count them.

        :raises AssertionError: a step found that the protocol is wrong, or a program waits for ever.
        """
        seen, left = {self.start}, [self.start]
        while left:
            state = left.pop()
            steps = [step for step in self.steps(state) if step != state]
            if not steps:
                self.check_end(state)
            # In the order of the steps, so that a mutant's first finding is the same with every hash seed.
            following = [step for step in dict.fromkeys([*steps, *self.faults(state)]) if step not in seen]
            left += following
            seen.update(following)
        return len(seen)

    def check_end(self, state: State) -> None:
        """Check that no program waits where nothing happens by itself any more."""
        if state.alive and not state.stopped and state.link != UP:
            assert state.borrowed is None or state.borrowed.state is Borrowing.OVER, (
                f"the borrower waits for ever: {state}"
            )
        if not state.owns:
            return
        waits = state.stopped and state.link == UP and state.lent.state is Out.LENT  # The owner has no deadline.
        program = state.borrowed is not None and state.borrowed.state is Borrowing.OPEN and state.link == UP
        if waits or (program and state.alive):
            return  # The borrower's program may go on; that is among the faults.
        assert state.ended == 1, f"the owner waits for ever: {state}"
        held = state.lent.state is Out.HELD
        assert state.freed == (0 if held else 1), f"blocks are lost: {state}"
        if held:
            assert state.alive, f"a dead borrower holds blocks: {state}"
            assert not state.again or state.stopped, f"a borrower that is there again holds blocks: {state}"
            assert self.maps, f"a borrower holds blocks that it cannot reach: {state}"

    # ------------------------------------------------------------------------------------------------------ the owner

    def owner(self, state: State, step: lending.LentStep) -> State:
        """Take a step of the owner, as :class:`HandOvers` does."""
        lent, actions = step
        state = state._replace(lent=lent)
        for do in actions:
            if do is Do.RECALL:
                state = self.said(state, to_borrower=RECALL)
            elif do is Do.LOSE:
                state = state._replace(link=ABORTED) if state.link == UP else state
            elif do is Do.END:
                assert not state.ended, f"it ends twice: {state}"
                state = state._replace(ended=1, vouched=False)
            elif do is Do.ASK:
                state = self.said(state, to_borrower=RECALL) if state.again else state
            else:
                assert state.ended, f"blocks are freed before the hand-over has ended: {state}"
                state = self.freed(state) if not state.leased else state
        return state

    def freed(self, state: State) -> State:
        state = state._replace(freed=state.freed + 1)
        assert state.freed == 1, f"blocks are freed twice: {state}"
        return state

    def said(self, state: State, **words: str) -> State:
        """Send words, if the connection still carries them."""
        carries = state.link == UP or state.again or (state.link == ABORTED and not state.owner_closed)
        return state._replace(**{to: (*getattr(state, to), word) for to, word in words.items()}) if carries else state

    def steps(self, state: State) -> Iterator[State]:
        """Yield all states that follow sooner or later, without a fault."""
        if state.owns:
            yield from self.owner_steps(state)
        elif state.link == UP:
            yield state._replace(link=BROKEN)
        if state.alive and not state.stopped:
            yield from self.borrower_steps(state)

    def owner_steps(self, state: State) -> Iterator[State]:
        lent = state.lent
        if state.to_owner and (not state.owner_closed or state.again):
            word, rest = state.to_owner[0], state.to_owner[1:]
            after = state._replace(to_owner=rest)
            hear = {BACK: lending.returned, PART: lending.parted, BYE: lambda it: lending.cut(it, in_order=True)}[word]
            yield self.owner(after, hear(lent))
        if lent.state is Out.RECALLED:
            yield self.owner(state, lending.overdue(lent))
        if not state.alive and state.link == UP:
            yield self.lost(state, BROKEN)
        if state.link != UP:
            yield self.owner(state, lending.cut(lent, in_order=False))
            if lent.state not in (Out.LENT, Out.RECALLED) and not state.owner_closed:
                yield self.owner(state._replace(owner_closed=True), lending.quiet(lent))
        if not state.alive:
            yield self.owner(state, lending.died(lent))
        if state.ended and state.leased:
            after = state._replace(leased=False)
            yield self.freed(after) if lent.state is Out.OVER else after

    # --------------------------------------------------------------------------------------------------- the borrower

    def borrower(self, state: State, step: lending.BorrowedStep) -> State:
        """Take a step of the borrower, as :class:`Incoming` does."""
        borrowed, actions = step
        state = state._replace(borrowed=borrowed)
        for act in actions:
            if act is Act.FLUSH:
                continue
            assert not self.may_arrive(state), f"it says that it let go, and writes: {state}"
            state = self.said(state, to_owner=BACK if act is Act.SAY else PART)
        return state

    def may_arrive(self, state: State) -> bool:
        return state.move is not None and state.move.write and state.move.halves < 2 and not state.hushed

    def borrower_steps(self, state: State) -> Iterator[State]:
        borrowed, move = state.borrowed, state.move
        if state.to_borrower and (state.link != BROKEN or state.again or not state.hushed):
            yield from self.hear(state._replace(to_borrower=state.to_borrower[1:]), state.to_borrower[0])
        if (
            borrowed is not None
            and borrowed.state is Borrowing.SETTLING
            and state.link == UP
            and not self.may_arrive(state)
        ):
            yield self.borrower(state, lending.flushed(borrowed))
        if state.link != UP and not state.noticed:
            yield self.lose(state)
        if state.noticed and not state.hushed:
            yield self.hush(state)
        if move is not None and not state.hushed:
            yield from self.moving(state, move)
        if move is not None and move.called and (move.halves == 2 or (move.write and not self.maps)):
            after = state._replace(move=move._replace(called=False))
            yield self.borrower(self.accepted(after, move), lending.done(borrowed))

    def moving(self, state: State, move: Move) -> Iterator[State]:
        """Read or write half of the blocks."""
        reaches = self.maps or not state.owner_closed
        if move.halves == 2 or not reaches:
            return
        if move.write:
            assert not state.freed, f"blocks are written that may be another lease's: {state}"
        yield state._replace(move=move._replace(halves=move.halves + 1, foreign=move.foreign or state.freed > 0))

    def accepted(self, state: State, move: Move) -> State:
        """Give the program the bytes of a read, if the owner vouches for them."""
        if not move.write and state.vouched:
            assert not move.foreign, f"another lease's bytes are taken for this one's: {state}"
        return state

    def lose(self, state: State) -> State:
        state = state._replace(noticed=True)
        return state if state.borrowed is None else self.borrower(state, lending.lose(state.borrowed))

    def hush(self, state: State) -> State:
        state = state._replace(hushed=True)
        return state if state.borrowed is None else self.borrower(state, lending.hush(state.borrowed))

    def hear(self, state: State, word: str) -> Iterator[State]:
        borrowed = state.borrowed
        if word == LEND:
            yield state if state.noticed else state._replace(borrowed=Borrowed())
        elif state.noticed and not state.again:
            yield state
        elif borrowed is not None and borrowed.state in (
            Borrowing.OPEN,
            Borrowing.ENDING,
            Borrowing.SETTLING,
            Borrowing.CUT,
        ):
            yield self.borrower(state, lending.end(borrowed))
        elif state.hushed or not state.again:
            yield self.said(state, to_owner=BACK)
        # Otherwise the answer waits for the end of the earlier connection.

    # ---------------------------------------------------------------------------------------------------------- faults

    def faults(self, state: State) -> Iterator[State]:
        """Yield the faults: events that may happen, and that no program can wait for."""
        lent, borrowed = state.lent, state.borrowed
        if state.owns:
            yield self.owner(state, lending.recall(lent))
            yield state._replace(owns=False)
        if state.link == UP and state.owns:
            yield self.lost(state, ABORTED)
            yield from self.cut_off(state)
        if not state.alive:
            return
        yield state._replace(alive=False)
        yield state._replace(stopped=not state.stopped)
        if state.stopped:
            return
        if state.noticed and state.link != UP and state.owns and not state.again:
            carries = state.link == ABORTED and not state.owner_closed
            after = state._replace(again=True, to_borrower=(), to_owner=state.to_owner if carries else ())
            yield self.said(after, to_borrower=RECALL) if lent.state is Out.HELD else after
        if borrowed is not None and borrowed.state is Borrowing.OPEN:
            if state.moves and state.move is None:
                begun = lending.begin(borrowed, write=self.writes)
                yield state._replace(borrowed=begun, move=Move(self.writes), moves=state.moves - 1)
            yield self.borrower(state, lending.end(borrowed))
            quiet_here = not self.may_arrive(state) and (state.move is None or not state.move.called)
            if state.link == UP and quiet_here:
                yield self.lose(self.said(state, to_owner=BYE))

    def lost(self, state: State, link: str) -> State:
        return state._replace(link=link)

    def cut_off(self, state: State) -> Iterator[State]:
        """Break the connection, and lose any number of the last words of each side."""
        for here in range(len(state.to_borrower) + 1):
            for there in range(len(state.to_owner) + 1):
                yield self.lost(state, BROKEN)._replace(
                    to_borrower=state.to_borrower[:here], to_owner=state.to_owner[:there]
                )


CASES = [(False, True), (False, False), (True, True), (True, False)]


@pytest.mark.parametrize(("writes", "maps"), CASES)
def test_lending_model_reaches_no_wrong_or_stuck_state(writes: bool, maps: bool) -> None:
    states = Model(writes, maps).explore()
    print(f"{states} states")
    assert states > 5000, "the model is not what it was"


def test_checker_finds_blocks_that_are_not_held() -> None:
    with pytest.raises(AssertionError, match="blocks are written that may be another lease's"):
        Model(writes=True, maps=True, lasting=False).explore()


def freed_when_cut(lent: Lent, *, in_order: bool) -> lending.LentStep:
    return lending.returned(lent) if lent.state in (Out.LENT, Out.RECALLED) else (lent, ())


def returned_twice(lent: Lent) -> lending.LentStep:
    return (lent, (Do.FREE,)) if lent.state is Out.OVER else RETURNED(lent)


def ended_at_once(borrowed: Borrowed) -> lending.BorrowedStep:
    return Borrowed(0, borrowed.wrote, Borrowing.OVER), (Act.SAY,)


def never_quiet(lent: Lent) -> lending.LentStep:
    return lent, ()


def not_asked(lent: Lent) -> lending.LentStep:
    after, actions = QUIET(lent)
    return after, tuple(do for do in actions if do is not Do.ASK)


RETURNED, QUIET = lending.returned, lending.quiet


@pytest.mark.parametrize(
    ("name", "mutant", "case", "finding"),
    [
        ("cut", freed_when_cut, (True, False), "blocks are written that may be another lease's"),
        ("returned", returned_twice, (True, True), "blocks are freed"),
        ("end", ended_at_once, (True, True), "it says that it let go, and writes"),
        ("quiet", never_quiet, (False, True), "the owner waits for ever"),
        ("quiet", not_asked, (True, True), "a borrower that is there again holds blocks"),
        ("hush", lambda borrowed: (borrowed, ()), (True, True), "the borrower waits for ever"),
        ("overdue", never_quiet, (True, True), "the owner waits for ever"),
        ("died", never_quiet, (True, True), "a dead borrower holds blocks"),
        ("recall", lambda lent: (Lent(lent.lasting, Out.RECALLED), ()), (False, True), "blocks are lost"),
    ],
)
def test_checker_finds_each_wrong_step(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Any, case: tuple[bool, bool], finding: str
) -> None:
    monkeypatch.setattr(lending, name, mutant)
    with pytest.raises(AssertionError, match=finding):
        Model(*case).explore()


def test_checker_finds_a_read_that_no_word_vouches_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "_replace", lambda state, **more: REPLACE(state, **more | {"vouched": True}))
    with pytest.raises(AssertionError, match="another lease's bytes are taken for this one's"):
        Model(writes=False, maps=True).explore()


REPLACE = State._replace
