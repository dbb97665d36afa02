"""The decisions of ``aiocomms run``; each test plays the processes and the clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from aiocomms.launching.supervision import (
    ENDING,
    FIRST_PAUSE,
    LINGER,
    PATIENCE,
    SILENCE,
    WINDOW,
    Deed,
    Say,
    Start,
    Supervision,
    Tell,
)

pytestmark = pytest.mark.deterministic

TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Stage:
    """The supervision of a job, for which a test plays the processes and the clock."""

    def __init__(self, size: int, *, restart: bool = True, most: int = 8, grace: float = 30.0) -> None:
        self.supervision = Supervision(size, restart=restart, most=most, grace=grace)
        self.now = 0.0
        self.said: list[str] = []
        self.deeds: list[Deed] = []
        self._take(self.supervision.begin(self.now))

    def _take(self, deeds: Sequence[Deed]) -> None:
        self.said += [deed.text for deed in deeds if isinstance(deed, Say)]
        self.deeds += [deed for deed in deeds if not isinstance(deed, Say)]

    def form(self, *ranks: int, epoch: int = 1) -> None:
        for rank in ranks:
            incarnation = self.supervision.ranks[rank].incarnation
            self._take(self.supervision.formed(rank, incarnation, "world", epoch, self.now))

    def end(self, rank: int, code: int) -> None:
        self._take(self.supervision.ended(rank, self.supervision.ranks[rank].incarnation, code, self.now))

    def lose(self, rank: int, epoch: int = 1) -> None:
        self._take(self.supervision.lost(rank, "world", epoch, self.now))

    def leave(self, rank: int) -> None:
        self._take(self.supervision.leaves(rank, self.supervision.ranks[rank].incarnation, self.now))

    def miss(self, *ranks: int) -> None:
        self._take(self.supervision.miss(ranks, self.now))

    def stop(self) -> None:
        self._take(self.supervision.stop("SIGTERM", self.now))

    def replace(self) -> None:
        self._take(self.supervision.replace_all(self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.supervision.tick(self.now))

    def new(self) -> list[Deed]:
        """Return the actions that the supervision has asked for since the last call."""
        deeds, self.deeds = self.deeds, []
        return deeds


def formed(size: int = 3, **options: object) -> Stage:
    """Return a job whose ranks have formed their communicator."""
    stage = Stage(size, **options)  # type: ignore[arg-type]
    stage.form(*range(size))
    stage.new()
    return stage


def test_all_ranks_start_in_the_first_generation_without_restarts():
    assert Stage(2).new() == [Start(0, 0, 0, 0), Start(1, 0, 0, 0)]


def test_job_whose_ranks_all_end_well_is_over_with_exit_code_0():
    stage = formed(2)
    stage.end(0, 0)
    assert not stage.supervision.over
    stage.end(1, 0)
    assert stage.supervision.over
    assert stage.supervision.code() == 0
    assert stage.supervision.summary() == ["2 ranks, 0 restarts; rank 0: exit code 0; rank 1: exit code 0"]
    assert stage.new() == []


def test_death_without_restarts_ends_the_others_with_its_exit_code():
    stage = formed(3, restart=False)
    stage.end(1, -11)
    assert stage.new() == [Tell(0, TERM), Tell(2, TERM)]
    stage.end(0, -15)
    stage.end(2, 7)
    assert stage.supervision.over
    assert stage.supervision.code() == 128 + 11
    assert stage.supervision.summary()[1] == "rank 1 failed first: SIGSEGV"


def test_dead_rank_is_restarted_at_once_as_a_newcomer_the_first_time():
    stage = formed()
    stage.end(1, 1)
    assert stage.new() == [Start(1, 1, 0, 1)]
    assert not stage.supervision.ready
    stage.form(1, epoch=2)
    assert stage.supervision.ready


def test_pauses_before_restarts_double_and_the_window_forgets_them():
    stage = formed()
    for restarts, pause in enumerate((0.0, FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE), 1):
        stage.form(1)
        stage.end(1, 1)
        if pause:
            stage.wait(0.9 * pause)
            assert stage.new() == []
            stage.wait(0.2 * pause)
        assert stage.new() == [Start(1, restarts, 0, restarts)]
    stage.form(1)
    stage.wait(WINDOW + 1)
    stage.end(1, 1)
    assert stage.new() == [Start(1, 5, 0, 5)]


def test_rank_that_dies_too_often_ends_the_job_with_its_code():
    stage = formed(2, most=2)
    for _ in range(2):
        stage.end(1, 3)
        stage.wait(1)
    stage.new()
    stage.end(1, 3)
    assert stage.new() == [Tell(0, TERM)]
    assert "giving up" in stage.said[-1]
    stage.end(0, 0)
    assert stage.supervision.over
    assert stage.supervision.code() == 3


def test_deaths_of_many_ranks_are_counted_by_rank():
    stage = formed(6, most=1)
    for rank in range(5):
        stage.end(rank, 1)
        assert stage.new() == [Start(rank, 1, 0, 1)]
        stage.form(rank, epoch=rank + 2)


def test_all_start_anew_when_no_rank_is_left_that_has_formed():
    stage = formed(2)
    stage.end(1, 1)
    stage.end(0, 1)
    assert stage.new() == [Start(1, 1, 0, 1), Tell(1, KILL)]
    stage.end(1, -9)
    assert stage.new() == [Start(0, 1, 1, 0), Start(1, 2, 1, 0)]
    assert stage.supervision.first == (1, 1)


def test_process_of_a_generation_that_cannot_go_on_is_killed_when_it_does_not_end():
    stage = Stage(2)
    stage.new()
    stage.end(0, 1)
    assert stage.new() == [Tell(1, TERM)]
    stage.wait(ENDING)
    assert stage.new() == [Tell(1, KILL)]
    stage.end(1, -9)
    assert [deed.generation for deed in stage.new()] == [1, 1]


def test_newcomer_whom_no_rank_can_take_in_ends_when_the_others_have_ended_well():
    stage = formed(2)
    stage.end(1, 9)
    stage.new()
    stage.end(0, 0)
    assert stage.new() == [Tell(1, TERM)]
    stage.end(1, -15)
    assert stage.supervision.over
    assert stage.supervision.code() == 9


def test_lost_process_that_does_not_end_is_killed_and_replaced():
    stage = formed()
    stage.lose(2)
    stage.wait(0.9 * LINGER)
    assert stage.new() == []
    stage.wait(0.2 * LINGER)
    assert stage.new() == [Tell(2, KILL)]
    stage.end(2, -9)
    assert stage.new() == [Start(2, 1, 0, 1)]


def test_lost_process_is_killed_once_and_not_after_it_has_joined_again():
    stage = formed()
    for epoch in (1, 2):
        stage.lose(2, epoch)
        stage.lose(2, epoch)
        stage.form(2, epoch=epoch + 1)
        stage.wait(LINGER)
        assert stage.new() == []
    stage.lose(2, epoch=3)
    stage.lose(2, epoch=3)
    stage.wait(LINGER)
    assert stage.new() == [Tell(2, KILL)]
    assert len(stage.said) == 1


def test_late_report_of_a_loss_does_not_kill_the_successor():
    stage = formed()
    stage.lose(2)
    stage.end(2, -9)
    stage.lose(2)  # The newcomer has formed nothing yet.
    stage.form(2, epoch=2)
    stage.lose(2)
    stage.new()
    stage.wait(10 * LINGER)
    assert stage.new() == []
    stage.lose(2, epoch=2)
    stage.wait(LINGER)
    assert stage.new() == [Tell(2, KILL)]


def test_job_ends_when_a_host_fails():
    """Ranks 2 and 3 are on this host. A process of rank 3 is about to be started."""
    stage = formed(4)
    for _ in range(2):
        stage.end(3, 1)
    stage.new()
    stage.miss(2, 3)
    assert stage.said[-1] == "the host of rank 2 does not answer: giving up"
    assert Tell(0, TERM) in stage.new()
    stage.end(0, -15)
    stage.end(1, -15)
    assert stage.supervision.over
    assert stage.supervision.code() == 137


def test_stop_does_not_wait_for_ranks_of_a_host_that_has_failed():
    stage = formed(2)
    stage.stop()
    stage.miss(1)
    stage.end(0, -15)
    assert stage.supervision.over


def test_loss_of_a_rank_that_is_none_is_ignored():
    stage = formed(2)
    stage.lose(7)
    stage.wait(10 * LINGER)
    assert stage.new() == []


def test_stop_tells_all_once_waits_and_then_kills():
    stage = formed(2, grace=5.0)
    stage.stop()
    assert stage.new() == [Tell(0, TERM), Tell(1, TERM)]
    stage.end(0, 0)
    stage.wait(5.0)
    assert stage.new() == [Tell(1, KILL)]
    stage.end(1, -9)
    assert stage.supervision.over
    assert stage.supervision.code() == 137


def test_second_stop_kills_at_once():
    stage = formed(2)
    stage.stop()
    stage.new()
    stage.stop()
    assert stage.new() == [Tell(0, KILL), Tell(1, KILL)]


def test_stop_during_a_pause_starts_nothing():
    stage = formed(2)
    for _ in range(2):
        stage.end(1, 1)
    stage.new()
    stage.stop()
    stage.end(0, 0)
    stage.wait(WINDOW)
    assert Tell(0, TERM) in stage.deeds
    assert not any(isinstance(deed, Start) for deed in stage.new())
    assert stage.supervision.over


def test_replacement_goes_from_the_highest_rank_to_0_each_after_the_last_has_formed():
    stage = formed(3, restart=False)
    stage.replace()
    for epoch, rank in enumerate((2, 1, 0), 2):
        assert stage.new() == [Tell(rank, TERM, replaced=True)]
        stage.end(rank, 0)
        assert stage.new() == [Start(rank, 1, 0, 1)]
        stage.form(*({0, 1, 2} - {rank}), epoch=epoch)
        assert stage.new() == []
        stage.form(rank, epoch=epoch)
    assert stage.new() == []
    assert stage.said[-1] == "all ranks have been replaced"
    assert stage.supervision.ready
    assert stage.supervision.first is None


def test_replaced_rank_that_the_others_lose_is_given_its_grace():
    stage = formed(2, grace=9.0)
    stage.replace()
    stage.new()
    stage.lose(1)
    stage.wait(8.0)
    assert stage.new() == []
    stage.wait(1.0)
    assert stage.new() == [Tell(1, KILL)]
    stage.end(1, -9)
    assert stage.new() == [Start(1, 1, 0, 1)]


def test_replacement_goes_on_when_the_successor_dies_before_it_has_formed():
    stage = formed(2)
    stage.replace()
    stage.end(1, 0)
    stage.end(1, 1)
    stage.new()
    stage.form(1, epoch=2)
    assert stage.new() == [Tell(0, TERM, replaced=True)]


@pytest.mark.parametrize("restart", [False, True])
def test_rank_that_leaves_is_replaced_although_it_ends_with_0(restart):
    stage = formed(restart=restart)
    stage.leave(1)
    assert stage.new() == []
    stage.end(1, 0)
    assert stage.new() == [Start(1, 1, 0, 1)]
    stage.form(0, 1, 2, epoch=2)
    assert stage.supervision.ready
    stage.end(1, 0)  # This process has not said that it leaves.
    assert stage.new() == []


def test_rank_that_leaves_and_does_not_end_is_killed_after_its_grace():
    """Other ranks may report its loss before or after its own report, which does not shorten the time."""
    stage = formed(grace=9.0)
    stage.lose(2)
    stage.leave(2)
    stage.lose(2)
    stage.leave(2)
    stage.wait(8.0)
    assert stage.new() == []
    stage.wait(1.0)
    assert stage.new() == [Tell(2, KILL)]
    stage.end(2, -9)
    assert stage.new() == [Start(2, 1, 0, 1)]


def test_rank_that_leaves_again_and_again_is_replaced_after_pauses_and_ends_no_job():
    stage = formed(2, most=1)
    for incarnation, pause in enumerate((0.0, FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE), 1):
        stage.form(1, epoch=incarnation)
        stage.leave(1)
        stage.end(1, 0)
        if pause:
            stage.wait(0.9 * pause)
            assert stage.new() == []
            stage.wait(0.2 * pause)
        assert stage.new() == [Start(1, incarnation, 0, incarnation)]
    assert stage.supervision.stopping is None


def test_rank_that_leaves_while_all_are_to_end_is_not_replaced():
    stage = formed(2, grace=5.0)
    stage.leave(1)
    stage.stop()
    stage.leave(0)
    assert stage.new() == [Tell(0, TERM), Tell(1, TERM)]
    stage.end(0, 0)
    stage.end(1, 0)
    assert stage.supervision.over
    assert stage.supervision.code() == 0
    assert stage.new() == []


def test_rank_that_leaves_with_the_last_that_could_take_it_in_is_started_anew_with_all():
    stage = formed(2)
    stage.leave(1)
    stage.end(0, 1)
    stage.end(1, 0)
    assert stage.new() == [Start(0, 1, 0, 1), Tell(0, KILL)]
    stage.end(0, -9)
    assert stage.new() == [Start(0, 2, 1, 0), Start(1, 1, 1, 0)]


def test_roll_goes_on_over_a_rank_that_leaves_of_itself():
    stage = formed(3)
    stage.leave(1)
    stage.replace()
    stage.leave(2)  # The process says that it does as it was told.
    stage.end(2, 0)
    stage.end(1, 0)
    assert stage.new() == [Tell(2, TERM, replaced=True), Start(2, 1, 0, 1), Start(1, 1, 0, 1)]
    for rank in (1, 0):
        stage.form(0, 1, 2, epoch=2)
        assert stage.new() == [Tell(rank, TERM, replaced=True)]
        stage.leave(rank)
        stage.end(rank, 0)
        assert stage.new() == [Start(rank, 2 if rank else 1, 0, 2 if rank else 1)]


def test_word_of_an_earlier_process_that_it_leaves_is_not_taken_for_its_successors():
    stage = formed(2)
    stage.end(1, 1)
    stage.form(1, epoch=2)
    stage.new()
    stage._take(stage.supervision.leaves(1, 0, stage.now))
    stage.end(1, 0)
    assert stage.new() == []


def test_only_rank_is_replaced_by_a_new_generation():
    stage = formed(1)
    stage.replace()
    stage.end(0, 0)
    assert stage.new() == [Tell(0, TERM, replaced=True), Start(0, 1, 1, 0)]


def test_all_start_anew_when_the_others_end_with_the_rank_that_is_replaced():
    stage = formed(2)
    stage.replace()
    stage.end(1, 0)
    stage.form(0, epoch=2)
    stage.form(1, epoch=2)
    stage.new()
    stage.end(0, 0)
    assert stage.new() == [Start(0, 1, 0, 1)]
    stage.end(1, 0)
    assert stage.new() == [Tell(0, KILL)]
    stage.end(0, -9)
    assert stage.new() == [Start(0, 2, 1, 0), Start(1, 2, 1, 0)]
    assert stage.supervision.stopping is None


def test_replacement_is_refused_before_all_ranks_have_formed():
    stage = Stage(2)
    stage.form(0)
    stage.new()
    stage.replace()
    assert stage.new() == []
    assert "not all have formed" in stage.said[-1]


def test_ranks_that_do_not_form_are_named_once():
    stage = Stage(3)
    stage.form(0)
    stage.wait(PATIENCE)
    stage.wait(PATIENCE)
    assert stage.said == ["ranks 1, 2 have not formed a communicator after 60 s"]


def test_report_of_an_earlier_incarnation_is_ignored():
    stage = formed(2)
    stage.end(1, 1)
    stage._take(stage.supervision.formed(1, 0, "world", 1, stage.now))
    assert not stage.supervision.ready


def test_nothing_waits_for_the_time_once_all_have_formed():
    stage = formed(2)
    stage.wait(PATIENCE)
    assert stage.supervision.deadline is None


def test_killed_rank_whose_host_does_not_answer_ends_the_job():
    stage = formed(2, grace=3.0)
    stage.lose(1)
    stage.wait(LINGER)
    stage.new()
    stage.wait(SILENCE)
    assert stage.new() == [Tell(0, TERM)]
    assert "the host of rank 1 does not answer" in stage.said[-1]
    stage.end(0, 0)
    assert stage.supervision.over
    assert stage.supervision.code() == 137
