"""The search beside the gate: what it runs next, what it reads, and what it says of a failure."""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

import search

pytestmark = pytest.mark.deterministic

QUICK = search.Campaign("quick", "Looks for wrong sums.", ("true", "{seed}"), estimate=1, seeds=2)
SLOW = search.Campaign("slow", "Looks for wrong products.", ("pytest", "slow"), estimate=100)
TABLE = (SLOW, QUICK)
TODAY = dt.date(2026, 11, 27)


def state_of(**when: float) -> dict[str, object]:
    """Return a state in which campaigns had their last turn at these times."""
    state = {"cycle": 0.0, "repeated": [], "campaigns": {}}
    for campaign in TABLE:
        search.numbers(state, campaign)["when"] = when.get(campaign.name, 0.0)
    return state


def test_new_campaigns_come_first_and_of_these_the_quickest() -> None:
    assert search.choose(TABLE, state_of(), 1000) is QUICK
    assert search.choose(TABLE, state_of(quick=5.0), 1000) is SLOW


def test_campaign_run_longest_ago_is_next() -> None:
    assert search.choose(TABLE, state_of(quick=5.0, slow=6.0), 1000) is QUICK
    assert search.choose(TABLE, state_of(quick=7.0, slow=6.0), 1000) is SLOW


def test_campaign_that_cannot_end_in_time_is_not_begun() -> None:
    assert search.choose(TABLE, state_of(quick=7.0, slow=6.0), 99) is QUICK
    assert search.choose(TABLE, state_of(quick=7.0, slow=6.0), 0.5) is QUICK


def test_run_that_was_cut_off_counts_only_as_longer() -> None:
    state = state_of()
    search.count(state, search.Run(SLOW, None, search.CUT_OFF, "", 300.0, ""))
    assert search.numbers(state, SLOW)["took"] == 300.0
    assert search.numbers(state, SLOW)["runs"] == search.numbers(state, SLOW)["when"] == 0
    search.count(state, search.Run(SLOW, None, search.FAILED, "exit status 1", 200.0, ""))
    found = search.numbers(state, SLOW)
    assert (found["took"], found["runs"], found["failures"], found["seconds"]) == (200.0, 1, 1, 200.0)


def test_seeds_are_read_with_blank_lines_and_comments() -> None:
    text = "# what has found something\n\nquick 12  # 2026-11-27 a wrong sum\n  quick 0\n"
    assert search.read_seeds(text, TABLE) == [(QUICK, 12), (QUICK, 0)]


@pytest.mark.parametrize("line", ["quick", "quick x", "quick -1", "quick 1 2", "unknown 1", "slow 1"])
def test_wrong_line_of_the_seeds_is_named(line: str) -> None:
    wanted = "wanted '<campaign> <seed>  # <date> <what failed>', with a campaign that has seeds: quick"
    with pytest.raises(ValueError, match="line 2") as caught:
        search.read_seeds(f"quick 1\n{line}\n", TABLE)
    assert str(caught.value) == f"tests/seeds.txt, line 2: got {line!r}, {wanted}"


def test_repeat_command_is_quoted_for_a_shell() -> None:
    campaign = QUICK._replace(
        command=("pytest", "-m", "a and b", "--seed={seed}"), environment={"A": "{seconds}", "B": "c d"}
    )
    line = search.repeat_command(campaign, 7)
    assert line == "A=60 B='c d' pytest -m 'a and b' --seed=7"
    assert shlex.split(line)[2:] == search.filled(campaign, 7)[0]


@pytest.mark.parametrize(
    ("status", "cut_off", "outcome", "why"),
    [
        (0, False, search.PASSED, ""),
        (1, True, search.FAILED, "exit status 1"),
        (-9, False, search.FAILED, "exit status -9"),
        (5, False, search.FAILED, "the campaign is defined wrongly: pytest collected no tests, exit status 5"),
        (None, True, search.CUT_OFF, ""),
        (None, False, search.FAILED, "it took more than its limit of 3600 s"),
    ],
)
def test_judge_tells_passed_failed_and_cut_off_runs_apart(
    status: int | None, cut_off: bool, outcome: str, why: str
) -> None:
    assert search.judge(SLOW, status, cut_off) == (outcome, why)


def test_summary_lists_passed_failed_and_skipped_campaigns() -> None:
    state = state_of()
    runs = [
        search.Run(QUICK, 11, search.PASSED, "", 2.0, ""),
        search.Run(QUICK, 12, search.FAILED, "exit status 1", 4.0, "1 + 1 is 3"),
        search.Run(SLOW, None, search.CUT_OFF, "", 50.0, ""),
    ]
    for run in runs:
        search.count(state, run)
    text = search.summary(runs, {"other": "needs srun"}, state, TODAY)
    assert "| quick | 2 | 1 | 0 | 6 | 20.0 | 2 | 1 |\n| slow | 0 | 0 | 1 | 50 |  | 0 | 0 |\n" in text
    assert "Not run: other: needs srun.\n" in text
    assert "**quick, seed 12: exit status 1.** Looks for wrong sums." in text
    assert "```\n1 + 1 is 3\n```\n\nThis repeats it:\n\n```\ntrue 12\n```\n" in text
    assert "`quick 12  # 2026-11-27 exit status 1`" in text


def searching(folder: Path, monkeypatch: pytest.MonkeyPatch, ends: str = search.PASSED) -> tuple[search.Search, list]:
    """Return a search that runs no process, and the list of the runs that it would have started."""
    begun: list[tuple[str, int | None]] = []

    def run(self: search.Search, campaign: search.Campaign, seed: int | None) -> str:
        begun.append((campaign.name, seed))
        return ends

    monkeypatch.setattr(search.Search, "run", run)
    return search.Search(TABLE, [(QUICK, 12)], folder), begun


def test_cycle_begins_with_the_known_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it, begun = searching(tmp_path, monkeypatch)
    it.go_on(3600, 2)
    names = [name for name, _ in begun]
    assert names == ["quick", "quick", "quick", "slow"] * 2
    assert begun[0] == begun[4] == ("quick", 12)
    assert len({seed for name, seed in begun if name == "quick"}) == 5, "new seeds differ"
    assert ("slow", None) in begun


def test_failed_campaign_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it, begun = searching(tmp_path, monkeypatch, search.FAILED)
    it.go_on(3600, 100)
    assert [name for name, _ in begun] == ["quick", "quick", "slow"]


def test_search_resumes_where_the_last_call_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state_of(quick=5.0) | {"cycle": 4.0, "repeated": ["quick 12"]}))
    it, begun = searching(tmp_path, monkeypatch)
    it.go_on(3600, 1)
    assert begun == [("slow", None)]
    it.save()
    assert search.read_state(tmp_path / "state.json") == it.state
    assert it.state["repeated"] == [], "the next cycle begins"


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_invalid_state_file_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "build" / "search" / "state.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert search.main([], TABLE, tmp_path) == 2
    assert f"{path}: got " in capsys.readouterr().err


def test_second_search_in_one_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "build" / "search"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert search.main([], TABLE, tmp_path) == 2
    assert "another search writes into" in capsys.readouterr().err


def test_campaign_with_missing_needs_is_not_run_and_names_them(tmp_path: Path) -> None:
    campaign = QUICK._replace(needs=("make test-hosts", "make no-target", "no-program", "no-program|python3"))
    it = search.Search([campaign, SLOW], [(campaign, 1)], tmp_path)
    assert it.not_run == {"quick": "needs make no-target, no-program"}
    assert it.live == [SLOW]
    assert it.seeds == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--minutes", "0"], "argument --minutes: got 0.0, wanted a number above 0"),
        (["--minutes", "nan"], "argument --minutes: got nan, wanted a number above 0"),
        (["--minutes", "long"], "argument --minutes: invalid float value: 'long'"),
        (["--cycles", "0"], "argument --cycles: got 0, wanted a number above 0"),
        (["--campaigns", "quick,x,"], "argument --campaigns: got 'x', '', wanted some of slow,quick"),
    ],
)
def test_wrong_arguments_of_search_are_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        search.main(given, TABLE)
    assert said in capsys.readouterr().err


def test_campaign_table_has_unique_names_and_valid_commands() -> None:
    names = [campaign.name for campaign in search.CAMPAIGNS]
    assert len(set(names)) == len(names)
    for campaign in search.CAMPAIGNS:
        assert ("{seed}" in repr((campaign.command, campaign.environment))) == (campaign.seeds > 0), campaign.name
        search.repeat_command(campaign, 1)
        targets = [need for need in campaign.needs if need.startswith("make ")]
        assert all(map(search.has, targets)), campaign.name


@pytest.mark.real
def test_search_runs_commands_and_exits_with_1_if_one_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails = (sys.executable, "-c", "raise SystemExit(int('{seed}') and 1)")
    passes = (sys.executable, "-c", "import os; assert os.environ['A'] == 'b c'")
    table = (
        search.Campaign("passes", "Looks for nothing.", passes, 2, environment={"A": "b c"}),
        search.Campaign("fails", "Looks for failures.", fails, 1, seeds=1),
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "seeds.txt").write_text("fails 0  # 2026-11-27 it did once\n")
    assert search.main(["--minutes=5", "--cycles=1"], table, tmp_path) == 1
    out = capfd.readouterr().out
    state = search.read_state(tmp_path / "build" / "search" / "state.json")
    seed = search.numbers(state, table[1])["seed"]
    assert search.repeat_command(table[1], seed) in out
    assert (tmp_path / "build" / "search" / "summary.md").read_text() in out
    assert (tmp_path / "build" / "search" / f"fails-{seed}.log").exists()
    assert [search.numbers(state, it)["failures"] for it in table] == [0, 1]
    assert "fails-0: passed" in out
