"""The tests of the example package pass, and they fail when the package has a defect."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SUITE_HANGS

EXAMPLE = Path(__file__).parents[2] / "examples" / "testing_a_server"

pytestmark = [pytest.mark.real, pytest.mark.timeout(2 * SUITE_HANGS)]


def suite(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder, and leave no cache files there."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *args],
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_HANGS,
        check=False,
    )


def test_tests_of_the_example_pass():
    run = suite(EXAMPLE)
    assert run.returncode == 0, run.stdout
    assert re.search(r"^\d+ passed in", run.stdout, re.MULTILINE), run.stdout


@pytest.mark.search
@pytest.mark.parametrize(
    ("right", "wrong", "noticed"),
    [
        ("rank != dead", "rank not in (dead, 1)", "test_after_a_lost_reply_all_go_on"),
        ("del self._members[reason.peer]", "del self._members[-1]", "test_a_holder_dies_while_it_answers"),
        ("answer.missing.append(shard)", "pass", "test_an_answer_says_what_is_missing"),
        ("return row % shards, row // shards", "return row % shards, 0", "test_rows_are_those_of_the_table"),
    ],
)
def test_tests_of_the_example_catch_each_defect(tmp_path, right, wrong, noticed):
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    module = tmp_path / "sharded_lookup.py"
    source = module.read_text()
    assert source.count(right) == 1
    module.write_text(source.replace(right, wrong))
    run = suite(tmp_path, "-k", f"{noticed} and asyncio")
    assert run.returncode == 1, run.stdout
    assert re.search(rf"^FAILED test_sharded_lookup.py::{noticed}", run.stdout, re.MULTILINE), run.stdout
