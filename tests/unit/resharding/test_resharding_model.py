"""A model check of the protocol of a move: every reachable state is right, and the checker finds each mutation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from resharding_model import Model

from aiocomms.resharding.protocol import SourceLeader, SourceRank, TargetLeader, TargetRank
from aiocomms.resharding.words import Withdraw, Written

pytestmark = [pytest.mark.deterministic, pytest.mark.slow]

Mutation = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        ((0, 1, 1), 10_000),
        ((1, 0, 1), 300_000),
        ((0, 0, 0, 1), 50_000),
        pytest.param((0, 2, 2), 300_000, marks=pytest.mark.search),
        pytest.param((0, 0, 1, 1), 400_000, marks=pytest.mark.search),
        pytest.param((1, 1, 1), 3_000_000, marks=[pytest.mark.search, pytest.mark.timeout(3600)]),
    ],
)
def test_moves_reach_no_wrong_or_stuck_state(bounds: tuple[int, ...], least: int) -> None:
    """No state is wrong or stuck.

    A process dies, a connection is cut, a source rank gives up, or a rank is closed.
    """
    states = Model(*bounds).explore()
    print(f"{states} states")
    assert states > least, "the model is not what it was"


def overwrites_what_is_read(patch: pytest.MonkeyPatch) -> None:
    """A target rank offers a buffer that a step reads."""
    patch.setattr(TargetRank, "use", lambda self, version, step: self._counted(version, 0, int(step)))
    patch.setattr(TargetRank, "release", lambda self, version: self._offered())


def forgets_steps_to_come(patch: pytest.MonkeyPatch) -> None:
    """A target rank offers a buffer that it needs for a step which rank 0 has begun."""
    patch.setattr(TargetRank, "clear", lambda self, word, clear=TargetRank.clear: clear(self, at_no_step(word)))


def at_no_step(word: Any) -> Any:
    return type(word)(word.move, word.source, word.version, word.keep, 0, word.writers)


def uses_buffer_of_a_lost_move(patch: pytest.MonkeyPatch) -> None:
    """A target rank offers the buffer of a move that was given up, to which a lost source rank may still write."""
    clear = TargetRank.clear

    def mutant(self: TargetRank, word: Any) -> Any:
        current = any(it.buffer == self.filling and it.version == word.keep for it in self.held)
        kept = () if self.filling is None or current else (self.filling,)
        return clear(self._replace(free=kept + self.free), word)

    patch.setattr(TargetRank, "clear", mutant)


def takes_words_of_an_earlier_move(patch: pytest.MonkeyPatch) -> None:
    """A target rank counts the writes of an abandoned move as writes of the next one."""

    def mutant(self: TargetRank, writer: int, word: Any, written: Any = TargetRank.written) -> Any:
        return written(self, writer, word if self.move is None else Written(self.move.move))

    patch.setattr(TargetRank, "written", mutant)


def switches_at_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """Target rank 0 does not wait for all ranks."""

    def mutant(self: TargetLeader, rank: int, word: Any, whole_on: Any = TargetLeader.whole_on) -> Any:
        return whole_on(self._replace(whole=frozenset({0, 1})), rank, word)

    patch.setattr(TargetLeader, "whole_on", mutant)


def hides_a_lost_source_rank(patch: pytest.MonkeyPatch) -> None:
    """A target rank does not say that it has lost a source rank."""
    patch.setattr(TargetRank, "lose", lambda self, writer, why: (self, []))


def forgets_the_end_of_a_later_call(patch: pytest.MonkeyPatch) -> None:
    """A source rank forgets the end of a call that it has not made yet."""

    def mutant(self: SourceRank, word: Any, settled: Any = SourceRank.settled) -> Any:
        return (self, []) if word.call > self.call else settled(self, word)

    patch.setattr(SourceRank, "settled", mutant)


def switches_what_was_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """Target rank 0 says that a version is given up, and switches to it later."""

    def mutant(self: TargetLeader, word: Any, withdraw: Any = TargetLeader.withdraw) -> Any:
        return self, withdraw(self, word)[1]

    patch.setattr(TargetLeader, "withdraw", mutant)


def gives_up_without_asking(patch: pytest.MonkeyPatch) -> None:
    """Source rank 0 says that a version is given up before the target does."""

    def mutant(self: SourceLeader, word: Any, falter: Any = SourceLeader.falter) -> Any:
        after, actions = falter(self, word)
        if not any(isinstance(getattr(it, "word", None), Withdraw) for it in actions):
            return after, actions
        settled, more = after._settle(word.kind, word.why)
        return settled, actions + more

    patch.setattr(SourceLeader, "falter", mutant)


def ignores_a_closed_rank(patch: pytest.MonkeyPatch) -> None:
    """Source rank 0 waits for the call of a closed rank."""
    patch.setattr(SourceLeader, "closed_by", lambda self, rank: (self, []))


@pytest.mark.parametrize(
    ("mutation", "bounds", "found"),
    [
        (overwrites_what_is_read, (0, 0, 1), "reads what it does not hold"),
        (forgets_steps_to_come, (0, 0, 1), "which is gone"),
        (uses_buffer_of_a_lost_move, (1, 0, 0), "holds what is written"),
        (takes_words_of_an_earlier_move, (0, 1, 0), "holds what is written|holds half of it"),
        (switches_at_the_first_rank, (0, 0, 1), "which is gone|was told that it is not|is not current"),
        (hides_a_lost_source_rank, (1, 0, 0), "waits for ever"),
        (forgets_the_end_of_a_later_call, (0, 1, 0), "waits for ever"),
        (switches_what_was_withdrawn, (0, 1, 0), "was told that it is not|is current"),
        (gives_up_without_asking, (0, 1, 0), "was told that it is not|is current"),
        (ignores_a_closed_rank, (0, 0, 0, 1), "waits for ever"),
    ],
)
def test_checker_finds_what_is_wrong(
    mutation: Mutation, bounds: tuple[int, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change to the protocol leads to a wrong state, or to one in which a rank waits for ever."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        Model(*bounds).explore()
