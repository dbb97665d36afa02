"""The parts of the GPU benchmarks that need no GPU: statistics, targets, report, heartbeat, a run of each measure."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import HANGS, Rank, Run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of a distribution

from benchmarks.gpu import onegpu, report, targets  # noqa: E402
from benchmarks.gpu.measures import MEASURES  # noqa: E402
from benchmarks.gpu.rank import run  # noqa: E402
from benchmarks.gpu.stage import Stage  # noqa: E402
from benchmarks.gpu.targets import TARGETS  # noqa: E402
from benchmarks.gpu.ticks import ticking  # noqa: E402

pytestmark = pytest.mark.deterministic

ONE_RANK = [target.key for target in TARGETS if target.size == 1]
SIZES = {"rounds": 3, "nbytes": 4096, "op_seconds": 1e-5, "long_seconds": 2e-3, "parked_seconds": 0.05}


class Host(Stage):
    """A stage without a GPU: each op is complete when the host has waited for it."""

    backend = "gloo"

    def __init__(self, transport: str) -> None:
        self.transport = self.p2p = transport
        self.device = torch.device("cpu")

    def init(self, store: dist.Store, rank: int, size: int) -> None:
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=size)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def synchronize(self) -> None:
        pass

    def order(self, work: Any) -> None:
        work.wait_blocking()

    def seconds_of_copy(self, nbytes: int, times: int) -> float:
        return 1e-3


@pytest.fixture
def transport() -> str:
    return "c10d"


# ------------------------------------------------------------------------------------------------------- statistics


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """One round on a busy machine does not change the ratio."""
    assert targets.paired([2.0, 20.0, 200.0], [1.0, 10.0, 1000.0]) == 2.0


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 51.0), (99, 100.0), (100, 100.0)])
def test_percentiles(percent: float, value: float) -> None:
    assert targets.percentile([float(n) for n in range(100, 0, -1)], percent) == value
    assert targets.percentile([7.0], percent) == 7.0


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert targets.bus_bandwidth("all_reduce", 1000, 0.5, 2) == 2000 * 1.0
    assert targets.bus_bandwidth("all_reduce", 1000, 0.5, 4) == 2000 * 1.5
    assert targets.bus_bandwidth("all_gather", 1000, 0.5, 4) == 2000 * 0.75
    assert targets.bus_bandwidth("all_gather", 1000, 0.5, 1) == 2000


def test_a_limit_is_the_most_or_the_least() -> None:
    by_key = {target.key: target for target in TARGETS}
    assert by_key["post"].met(1.5)
    assert not by_key["post"].met(1.51)
    assert by_key["p2p"].met(0.7)
    assert not by_key["p2p"].met(0.69)
    assert [target.wanted for target in TARGETS] == [
        "<= 1.5x", "<= 25 µs", "<= 0.3 ms", "<= 3 %", ">= 0.98x", ">= 0.98x", ">= 0.7x", "<= 1.2x",
    ]  # fmt: skip
    assert set(MEASURES) == set(by_key)


# ----------------------------------------------------------------------------------------------------------- report


def test_the_report_says_what_was_missed_and_what_is_missing() -> None:
    post, wait, beat, *_ = TARGETS
    figures = [targets.figure(post, 1.234), targets.figure(wait, 99.0), targets.missing(beat, "RuntimeError: no")]
    results = {"where": {"GPU": "one"}, "figures": figures}
    rows = {line.split("|")[1].strip(): line for line in report.markdown(results).splitlines() if "|" in line}
    assert [cell.strip() for cell in rows[post.what].split("|")[2:5]] == ["<= 1.5x", "1.23x", "yes"]
    assert [cell.strip() for cell in rows[wait.what].split("|")[2:5]] == ["<= 25 µs", "99 µs", "MISSED"]
    assert "RuntimeError: no" in rows[beat.what]
    for target in TARGETS[3:]:
        assert report.NOT_MEASURED in rows[target.what]
    assert "* GPU: one" in report.markdown(results)
    assert report.missed(results) == ["await"]
    assert report.lacking(results) == ["heartbeat: RuntimeError: no"]
    json.dumps(results)


def test_the_documentation_has_the_table() -> None:
    """The table has a row for each target, with the target's present limit."""
    page = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    for target in TARGETS:
        [row] = [line for line in page.splitlines() if target.what in line]
        assert f"| {target.wanted} " in row


# -------------------------------------------------------------------------------------------------------- heartbeat


@pytest.mark.search
@pytest.mark.real
def test_the_heartbeat_counts_every_tick_of_a_blocked_loop() -> None:
    late: list[float] = []

    async def main() -> float:
        with ticking(1e-3, late):
            await asyncio.sleep(0.02)
            before = len(late)
            began = time.monotonic()
            time.sleep(0.03)  # noqa: ASYNC251 - the loop is to be blocked
            blocked = time.monotonic() - began
            await asyncio.sleep(0.005)
        assert before >= 10
        return blocked

    blocked = asyncio.run(main())
    assert max(late) >= blocked - 2e-3
    assert sum(value > 0.01 for value in late) >= (blocked - 0.01) / 1e-3 - 2  # every tick that passed, not only one


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}  # not the one that lists them


def test_the_heartbeat_leaves_nothing_behind() -> None:
    async def main() -> None:
        with ticking(1e-3, []):
            pass

    before = open_descriptors()
    asyncio.run(main())
    assert open_descriptors() == before


# --------------------------------------------------------------------------------------------------------- measures


async def measure(place: Rank, keys: list[str], wrong: str = "") -> list[dict[str, Any]]:
    """Run the measures as a rank's process does, with a stage that needs no GPU."""
    stage = Host(place.transport)
    stage.init(dist.FileStore(str(place.folder / "torch"), place.size), place.rank, place.size)
    if wrong:
        MEASURES[wrong] = lambda bench: bench.comm.broadcast(torch.zeros(3), 99)
    try:
        return await run(stage, place.folder, place.rank, place.size, keys, **SIZES)
    finally:
        dist.destroy_process_group()


@pytest.mark.search
@pytest.mark.real
def test_every_measure_of_one_rank(ranks: Run) -> None:
    """Every measure gives a figure; without a GPU its value means nothing."""
    [figures] = ranks(1, measure, ONE_RANK)
    assert [figure["key"] for figure in figures] == ONE_RANK
    assert [figure for figure in figures if figure["value"] is None] == []
    by_key = {figure["key"]: figure for figure in figures}
    assert by_key["post"]["value"] > 0
    assert len(by_key["post"]["detail"]["ours_us"]) == SIZES["rounds"]
    assert by_key["heartbeat"]["value"] >= 1  # a long op blocks the loop in this stage
    assert by_key["parked"]["detail"]["seconds"] >= SIZES["parked_seconds"]
    assert all(value > 0 for value in by_key["bandwidth1"]["detail"]["torch_gb_per_s"])


@pytest.mark.search
@pytest.mark.real
def test_every_measure_of_two_ranks(ranks: Run) -> None:
    keys = ["bandwidth2", "p2p", "get"]
    for figures in ranks(2, measure, keys):
        assert [figure["key"] for figure in figures] == keys
        assert all(figure["value"] > 0 for figure in figures)


@pytest.mark.search
@pytest.mark.real
def test_a_measure_that_fails_is_a_figure_that_is_missing(ranks: Run) -> None:
    [figures] = ranks(1, measure, ["post", "await"], "post")
    assert figures[0]["value"] is None
    assert "ArgumentError" in figures[0]["why"]
    assert figures[1]["value"] is not None


@pytest.mark.search
@pytest.mark.real
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip() == "benchmarks.gpu needs an NVIDIA GPU, and torch sees none here"


# -------------------------------------------------------------------------------------------------- ranks on one GPU


def test_ranks_that_share_a_gpu() -> None:
    """NCCL has a switch for this from 2.30 on. With older versions each process has a host ID of its own."""
    switched, older = [onegpu.environment(nccl, 0) for nccl in ((2, 30, 7), (2, 29, 7))]
    always = {"NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0", "CUDA_MODULE_LOADING": "EAGER"}
    assert switched == {**always, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in older
    assert older["NCCL_HOSTID"] != onegpu.environment((2, 29, 7), 1)["NCCL_HOSTID"]
