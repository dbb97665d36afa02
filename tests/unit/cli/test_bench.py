"""``aiocomms bench``: its figures, its checks, its ranks, and its errors for bad arguments."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401 - on a new machine this starts a process, which no deterministic test may
import pytest
import torch
from processes import HANGS

from aiocomms.cli import main
from aiocomms.cli.bench import arguments, measure, turns
from aiocomms.cli.bench.cases import BenchCase
from aiocomms.cli.bench.machine import neighbours
from aiocomms.cli.bench.measure import lateness, percentile
from aiocomms.cli.bench.operations import OPERATIONS
from aiocomms.cli.bench.report import Missing, Report, Row
from aiocomms.communicator.collectives import Collectives
from aiocomms.communicator.reducing import Reducing
from aiocomms.communicator.rma import OneSided
from aiocomms.errors import UnsupportedOperation

pytestmark = pytest.mark.real

SUPPORT = Path(__file__).parents[2] / "support"
HERE = ["bench", "--in-process", "--transport", "local", "--iters", "10", "--warmup", "1"]
SMALL = ["-b", "8", "-e", "64", "-f", "8"]
QUICK = ["--iters", "10", "--warmup", "1", "-e", "8"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the time for which the loop is watched, and restore torch's number of threads."""
    before = torch.get_num_threads()
    for module in (measure, turns):
        monkeypatch.setattr(module, "BEATING", 0.005)
    yield
    torch.set_num_threads(before)


def document(capsys: pytest.CaptureFixture[str], *given: str, status: int = 0) -> dict[str, Any]:
    """Return the document that the command prints with ``--json``, in this process."""
    assert main([*HERE, "--json", *given]) == status
    return json.loads(capsys.readouterr().out)


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANGS, check=False)


def bench(*given: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "aiocomms", "bench", *given, env=env)


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.deterministic
def test_every_collective_but_scans_can_be_measured():
    methods = vars(Collectives) | vars(Reducing)
    collectives = {name for name, value in methods.items() if callable(value) and not name.startswith("_")}
    assert set(OPERATIONS) == collectives - {"scan", "exscan"} | {"send", "send_burst", "put", "put_signal", "get"}


@pytest.mark.deterministic
def test_bench_measures_all_operations_between_two_tasks(capsys):
    found = document(capsys, *OPERATIONS, *SMALL)
    assert (found["schema"], found["ranks"], found["in_process"], found["missing"]) == (1, 2, True, [])
    assert set(found["idle_late_p99_us"]) == {"local"}
    sizes = [(row["op"], row["bytes"], row["count"]) for row in found["rows"]]
    assert sizes == [(op, size, size // 4) for op in OPERATIONS for size in ((8, 64) if op != "barrier" else (0,))]
    for row in found["rows"]:
        assert (row["by"], row["transport"], row["wrong"], row["ratio"]) == ("local", "local", 0, 1.0)
        assert row["iterations"] == 10
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["cpu_us"] > 0
        assert all(loop > 0 and trip == 0 for loop, trip in row["states"])  # one process: no memory is shared


@pytest.mark.search
def test_bench_bandwidths_match_those_of_nccl_tests(capsys):
    ops = ["all_reduce", "reduce", "all_gather_single", "all_to_all_single", "gather"]
    rows = document(capsys, *ops, "--ranks", "4", "-b", "64K", "-e", "64K")["rows"]
    factors = {row["op"]: row["busbw_gbs"] / row["algbw_gbs"] for row in rows}
    assert factors == pytest.approx(dict(zip(ops, (1.5, 1, 0.75, 0.75, 0.75), strict=True)), rel=1e-3)
    assert all(row["algbw_gbs"] == pytest.approx(65536 / row["p50_us"] / 1e3, rel=1e-2) for row in rows)


@pytest.mark.search
def test_bench_gives_each_rank_at_least_one_element(capsys):
    (row,) = document(capsys, "scatter", "--ranks", "3", "-b", "4", "-e", "4")["rows"]
    assert (row["bytes"], row["count"]) == (12, 3)


@pytest.mark.search
def test_blocking_call_counts_as_loop_lateness():
    def block() -> None:
        ends = time.perf_counter() + 0.02
        while time.perf_counter() < ends:
            pass

    assert asyncio.run(lateness(block, True, 3)) > 0.015


@pytest.mark.deterministic
def test_percentiles_are_observed_values():
    assert [percentile(range(1, 201), which) for which in (1, 50, 99, 100)] == [2, 100, 198, 200]
    assert percentile([7.0], 99) == 7.0


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.deterministic
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "barrier"])
def test_operation_that_was_not_done_counts_as_wrong(op):
    cases = [BenchCase(op, 64, rank, 2) for rank in range(2)]
    for case in cases:
        case.fill()
    assert sum(case.wrong() for case in cases) > 0


@pytest.mark.search
@pytest.mark.parametrize(
    ("mutant", "op", "size"),
    [("wrong_rank_order", "all_gather_single", "8"), ("end_of_large_messages_is_lost", "send", "1M")],
)
def test_bench_counts_wrong_results_and_fails(mutant, op, size):
    script = f"import sys, mutants; mutants.MUTANTS[{mutant!r}](); from aiocomms.cli import main; sys.exit(main())"
    given = [*HERE, op, "-b", size, "-e", size, "--json"]
    done = run(sys.executable, "-c", script, *given, env={"PYTHONPATH": str(SUPPORT)})
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["wrong"] > 0


@pytest.mark.search
def test_check_0_skips_the_verification(capsys):
    (row,) = document(capsys, "-b", "8", "-e", "8", "--check", "0")["rows"]
    assert row["wrong"] is None


# -------------------------------------------------------------------------------------------------------------- output


@pytest.mark.search
def test_bench_prints_a_table_of_its_rows(capsys):
    assert main([*HERE, "send", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# 2 ranks in one process")
    assert "# send by local" in lines
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [("8", "2", "local", "0"), ("64", "16", "local", "0")]
    assert lines[-2] == "# wrong: 0"
    assert re.fullmatch(r"# a step of an empty loop took [0-9.]+ to [0-9.]+ ns", lines[-1])


@pytest.mark.search
def test_bench_shows_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*HERE, "send", *SMALL]) == 0
    shown = capsys.readouterr()
    assert "local send" in shown.err
    assert "2/2" in shown.err
    assert "# wrong: 0" in shown.out


@pytest.mark.search
def test_plot_writes_a_png(capsys, tmp_path):
    picture = tmp_path / "picture.png"
    assert main([*HERE, "all_reduce", "barrier", *SMALL, "--plot", str(picture)]) == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > height > 300  # one row of two panels: a barrier has no size


# --------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.search
def test_unsupported_operation_is_listed_as_missing_and_the_rest_runs(capsys, monkeypatch):
    async def refuse(*_: object) -> None:
        raise UnsupportedOperation("it has no windows")

    monkeypatch.setattr(OneSided, "new_window", refuse)
    found = document(capsys, "put", "send", *SMALL, status=1)
    assert found["missing"] == [{"by": "local", "op": "put", "reason": "it has no windows"}]
    assert [(row["op"], row["bytes"]) for row in found["rows"]] == [("send", 8), ("send", 64)]


@pytest.mark.search
def test_bench_compares_processes_with_other_libraries():
    done = bench("send", "put", *QUICK, "--transport", "c10d,local", "--vs", "gloo,mpich", "--json")
    assert done.returncode == 1, done.stderr  # `local` does not join processes.
    found = json.loads(done.stdout)
    missing = {(each["by"], each["op"]): each["reason"] for each in found["missing"]}
    assert "joins ranks of one process" in missing["local", None]
    assert missing["gloo", "put"] == "torch.distributed has no put"
    rows = {(row["op"], row["by"]): row for row in found["rows"]}
    expected = {("send", "c10d"), ("put", "c10d"), ("send", "gloo")}
    if importlib.util.find_spec("mpi4py") is None:
        assert missing["mpich", None] == "mpi4py is not installed: pip install mpi4py mpich"
    else:
        expected.add(("send", "mpich"))
    assert set(rows) == expected
    assert {row["wrong"] for row in rows.values()} == {0}
    send, gloo = rows["send", "c10d"], rows["send", "gloo"]
    assert all(trip > 0 for _, trip in send["states"])
    assert gloo["ratio"] == pytest.approx(gloo["p50_us"] / send["p50_us"], abs=0.001)
    assert (send["carrier"], gloo["carrier"]) == ("c10d", None)


@pytest.mark.search
def test_bench_compares_the_ways_to_await_gloo():
    ways = ["gloo", "gloo:executor", "gloo:polling", "gloo:future"]
    done = bench("all_reduce", "send_burst", *QUICK, "--bind", "-s", "0.05", "--vs", ",".join(ways), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["by"] for row in found["rows"] if row["op"] == "all_reduce"] == ["auto", *ways]
    assert [row["by"] for row in found["rows"] if row["op"] == "send_burst"] == ["auto", *ways[:2]]
    assert {row["wrong"] for row in found["rows"]} == {0}
    missing = {(each["by"], each["op"]): each["reason"] for each in found["missing"]}
    assert missing["gloo:future", "send_burst"] == "its work never says by itself that it is done"


@pytest.mark.search
def test_neighbours_burn_cpu_and_end_with_the_block():
    with neighbours(1) as (pid,):
        while int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11]) < 2:  # ticks on a processor
            os.sched_yield()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.search
def test_bench_inside_torchrun_uses_its_ranks():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*torchrun, "-m", "aiocomms", "bench", *QUICK, "--json", "--vs", "gloo")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], [row["by"] for row in found["rows"]]) == (2, ["auto", "gloo"])
    refused = run(*torchrun, "-m", "aiocomms", "bench", *QUICK, "--ranks", "3")
    assert refused.returncode != 0
    assert "aiocomms bench: --ranks is 3, wanted 2, which torchrun has started" in refused.stderr


@pytest.mark.search
def test_bench_ends_when_a_rank_dies(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1': os.abort()\n")
    done = bench(*QUICK, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert f"aiocomms bench: process 1 ended by signal {int(signal.SIGABRT)}" in done.stderr


# ------------------------------------------------------------------------------------------------------ documentation


@pytest.mark.deterministic
def test_bench_page_documents_every_field_and_option():
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    fields = {field for struct in (Report, Row, Missing) for field in struct.__struct_fields__}
    assert {field for field in fields if f"`{field}`" not in page} == set()
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    options = [
        option for action in parser._actions for option in action.option_strings if option not in ("-h", "--help")
    ]
    assert [option for option in options if not re.search(rf"`{option}\b", page)] == []


# ------------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["all_reduced"], "op is 'all_reduced', wanted some of all_reduce, reduce"),
        (["-b", "4M"], "--maxbytes is 2097152, wanted 4194304 to 68719476736"),
        (["-f", "1"], "--stepfactor is 1, wanted 2 to"),
        (["-i", "9"], "--iters is 9, wanted 10 to 100000"),
        (["-w", "-1"], "--warmup is -1, wanted 0 to 100000"),
        (["-c", "-1"], "--check is -1, wanted 0 to 100000"),
        (["-s", "0"], "--seconds is 0.0, wanted 0.001 to inf"),
        (["--neighbours", "-1"], "--neighbours is -1, wanted 0 to 1024"),
        (["-n", "0"], "--ranks is 0, wanted 1 to 1024"),
        (["get", "-n", "3"], "--ranks is 3 and op is 'get', wanted 2 ranks"),
        (["--transport", "smoke"], "--transport names 'smoke', wanted some of auto, c10d, local"),
        (["--vs", "glue"], "--vs names 'glue', wanted some of mpich, ucxx, gloo"),
        (["--vs", "gloo", "--in-process"], "--vs is given with --in-process, wanted one of them"),
        (["--bind", "--in-process"], "--bind is given with --in-process, wanted one of them"),
        (["--vs", "gloo:waving"], "--vs names 'gloo:waving', wanted some of mpich, ucxx, gloo"),
        (["--plot", "/nowhere/at/all.png"], "--plot is /nowhere/at/all.png, wanted a file in a folder that there is"),
        (["--plot", "picture.doc"], "--plot is picture.doc, wanted a name that ends in one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_senseless_bench_arguments_are_refused_with_a_message(given, message, capsys):
    assert main(["bench", *given]) == 1
    assert f"aiocomms bench: {message}" in capsys.readouterr().err


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-b", "8Q"], "argument -b/--minbytes: is '8Q', wanted bytes such as 8, 4K, 1M or 1G"),
        (["-e", "1"], "argument -e/--maxbytes: is '1', wanted 4 bytes to 2^36"),
        (["--vs", "gloo,,"], "argument --vs: is 'gloo,,', wanted names with commas between"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unparsable_bench_arguments_exit_with_2(given, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *given])
    assert message in capsys.readouterr().err


@pytest.mark.deterministic
def test_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(arguments, "find_spec", lambda _: None)
    assert main([*HERE, "--plot", "picture.png"]) == 1
    assert "--plot needs matplotlib, which is not installed: pip install 'aiocomms[bench]'" in capsys.readouterr().err
