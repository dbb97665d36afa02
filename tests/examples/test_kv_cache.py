"""The KV-cache example, as its users run it: two real processes; and what its parts do alone."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from anyio import CapacityLimiter
from processes import HANGS
from torch import Tensor
from torch.nn import functional

from aiocomms.errors import CommAbortedError, PlanLostError
from aiocomms.serving import Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

EXAMPLES = Path(__file__).parents[2] / "examples"
NEED = 8
"""Blocks of the longest sequence that the example makes: with no more than these there is one at a time."""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's main module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("kv_cache.__main__")


def run(*options: str, size: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the example's command."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.run(
        [*launcher, "-m", "kv_cache", *options], cwd=EXAMPLES, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip


def logits(model: Any, tokens: list[int]) -> Tensor:
    """Of every position, `[tokens, VOCABULARY]`: the model written down once more, with no cache and no blocks."""
    x = model.embedding[tokens] + model.positions[: len(tokens)]
    norm = [x.shape[-1:]]
    for layer in model.layers:
        q, k, v = (functional.layer_norm(x, *norm) @ layer["qkv"].T).split(x.shape[-1], -1)
        q, k, v = (t.reshape(len(tokens), 4, -1).swapaxes(0, 1) for t in (q, k, v))
        scores = q @ k.swapaxes(1, 2) / k.shape[-1] ** 0.5
        future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        heads = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + heads.swapaxes(0, 1).reshape(len(tokens), -1) @ layer["out"].T
        x = x + functional.gelu(functional.layer_norm(x, *norm) @ layer["up"].T) @ layer["down"].T
    return functional.layer_norm(x, *norm) @ model.embedding.T


def assert_right(example: ModuleType, generated: list[list[int]]) -> None:
    """Each token is the likeliest one behind those before it."""
    model = example.Model(torch.device("cpu"))
    prompts = example.make_prompts(len(generated))
    for tokens, (prompt, count) in zip(generated, prompts, strict=True):
        assert len(tokens) == count
        best = logits(model, prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1)
        assert tokens == best.tolist()


@pytest.mark.real
@pytest.mark.parametrize("blocks", [NEED, pytest.param(20, marks=pytest.mark.search), 400])
def test_two_processes_give_the_tokens_of_one(example: ModuleType, tmp_path: Path, blocks: int) -> None:
    """Where blocks are so scarce that prefill must wait for decode, and where they are not."""
    done = run(f"--blocks={blocks}", "--sequences=20", f"--json={tmp_path / 'tokens'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every token as in one process" in done.stdout
    waited = int(re.search(r"waited (\d+) times", done.stdout)[1])
    flight = int(re.search(r"at most (\d+) in flight", done.stdout)[1])
    assert flight <= blocks
    assert waited or blocks == 400
    assert_right(example, json.loads((tmp_path / "tokens").read_text()))


@pytest.mark.real
def test_sequence_too_long_for_the_pool_is_refused() -> None:
    done = run("--blocks=2")
    assert done.returncode != 0
    assert re.search(r"ValueError: a sequence of \d blocks does not fit: 2 is the most", done.stderr)


@pytest.mark.search
@pytest.mark.real
def test_other_than_two_ranks_are_refused() -> None:
    done = run(size=1)
    assert done.returncode != 0
    assert "there are 1 ranks, and it takes 2" in done.stderr


async def both(example: ModuleType, blocks: int, sequences: int) -> list[Any]:
    """Both ranks in this process, without a comparison."""
    model, prompts = example.Model(torch.device("cpu")), example.make_prompts(sequences)

    async def rank(comm: Any) -> Any:
        async with Service(comm) as service:
            transfer = await example.Transfer.open(service.comm, blocks)
            if comm.rank == 1:
                await service.work(partial(example.decode, transfer, model, CapacityLimiter(1)))
                assert sorted(transfer._free) == list(range(blocks))
                return await transfer.window.aclose()
            async with service.drive(partial(example.prefill, transfer, model)) as driver:
                done = await asyncio.gather(*(driver.run(prompt) for prompt in prompts))
            await transfer.window.aclose()
            return done

    async with local_world(2) as comms, asyncio.timeout(HANGS):
        done, _ = await asyncio.gather(*(rank(comm) for comm in comms))
    return done


@pytest.mark.parametrize("blocks", [NEED, 11, 40])
def test_both_ranks_in_one_process_give_the_right_tokens(example: ModuleType, blocks: int) -> None:
    """Long enough for every block to be used again."""
    done = asyncio.run(both(example, blocks, 30))
    assert_right(example, [tokens for tokens, _ in done])


def test_comparison_finds_a_misplaced_block(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    push = example.Transfer.push
    monkeypatch.setattr(example.Transfer, "push", lambda self, block, number: push(self, block, (number + 1) % 40))
    done = asyncio.run(both(example, 40, 5))
    with pytest.raises(SystemExit, match=r"differs|in one process"):
        example.compare(example.Model(torch.device("cpu")), done, example.make_prompts(5), torch.device("cpu"))


@pytest.mark.search
def test_lost_prefill_rank_ends_decode(example: ModuleType) -> None:
    """With sequences in flight, and some that wait for blocks."""

    async def main() -> None:
        model = example.Model(torch.device("cpu"))
        async with local_world(2) as comms, asyncio.timeout(HANGS):
            first, last = Service(comms[0]), Service(comms[1])
            prefill, decode = await asyncio.gather(*(example.Transfer.open(one.comm, 20) for one in (first, last)))
            decoding = asyncio.ensure_future(last.work(partial(example.decode, decode, model, CapacityLimiter(1))))
            with pytest.raises(CommAbortedError, match="out of memory"):
                await drive(first, partial(example.prefill, prefill, model), decode)
            with pytest.raises(CommAbortedError, match="out of memory"):
                await decoding

    async def drive(service: Service, execute: Any, decode: Any) -> None:
        async with service.drive(execute) as driver:
            requests = [asyncio.ensure_future(driver.run(([1, 2, 3], 140))) for _ in range(5)]
            while decode.most < 2:  # noqa: ASYNC110 - a signal from the other rank makes it so
                await asyncio.sleep(0)
            service.current.abort("out of memory")
            for request in requests:
                with pytest.raises(PlanLostError, match="out of memory"):
                    await request

    asyncio.run(main())
