"""What both ranks run: `torchrun --standalone --nproc-per-node 2 -m kv_cache`.

Rank 0 takes prompts through the model and pushes their KV cache, block by block, into rank 1's memory. Rank 1 goes on
with one token of each of its sequences in turn. A prompt is a plan, of which either rank carries out its part. In the
end rank 0 compares all with the same done in one process, and ends with an error if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from functools import partial
from pathlib import Path

import torch
from anyio import CapacityLimiter, to_thread
from torch import Tensor

import aiocomms
from aiocomms.errors import CommError
from aiocomms.serving import Service

from .model import BLOCK, SHAPE, VOCABULARY, Model, generate_alone
from .transfer import DECODE, PREFILL, Transfer, blocks_for

Plan = tuple[list[int], int]
"""A prompt, and how many tokens are to follow it."""
TOLERANCE = 1e-4  # most that a logit may differ from that of the one process; they are around 1


def choose_device() -> str:
    """This rank's GPU if the machine has one, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def make_prompts(count: int) -> list[Plan]:
    """Prompts, and how many tokens are to follow each."""
    draw = random.Random(7)
    return [
        ([draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 100))], draw.randint(1, 24)) for _ in range(count)
    ]


async def prefill(transfer: Transfer, model: Model, plan: Plan) -> tuple[list[int], Tensor]:
    """Rank 0's part of a plan: fill the decode rank's blocks; a block travels while the next one is computed."""
    prompt, count = plan
    # Room for what is to be generated is taken too, so that a sequence that was begun can always be finished.
    async with transfer.filling(blocks_for(len(prompt) + count)) as table:
        own = torch.zeros(blocks_for(len(prompt)), *SHAPE, device=transfer.comm.device)
        puts = []
        for i, block in enumerate(own):
            chunk = prompt[i * BLOCK : (i + 1) * BLOCK]
            logits = await asyncio.to_thread(model.extend, chunk, i * BLOCK, own, list(range(i + 1)))
            puts.append(transfer.push(block, table[i]))
        await asyncio.gather(*puts)
    await transfer.comm.send_object(logits, DECODE)
    return await transfer.comm.recv_object(DECODE, timeout=None)  # it generates as long as it likes


async def decode(transfer: Transfer, model: Model, turns: CapacityLimiter, plan: Plan) -> None:
    """Rank 1's part of a plan: go on from where prefill ended, a token of each sequence in turn."""
    prompt, count = plan
    async with transfer.filled(blocks_for(len(prompt) + count)) as table:
        logits = await transfer.comm.recv_object(PREFILL)
        tokens = [int(logits.argmax())]
        for place in range(len(prompt), len(prompt) + count - 1):
            arguments = tokens[-1:], place, transfer.pool, table
            logits = await to_thread.run_sync(model.extend, *arguments, limiter=turns)
            tokens.append(int(logits.argmax()))
    await transfer.comm.send_object((tokens, logits), PREFILL)


def compare(model: Model, done: list[tuple[list[int], Tensor]], prompts: list[Plan], device: torch.device) -> None:
    """Do it all in one process, without blocks.

    :raises SystemExit: something differs
    """
    worst = 0.0
    for number, (prompt, count) in enumerate(prompts):
        expected, logits = generate_alone(model, prompt, count, device)
        tokens, last = done[number]
        if tokens != expected:
            raise SystemExit(f"sequence {number}: {tokens}, and in one process {expected}")
        worst = max(worst, (last - logits).abs().max().item())
    if not worst <= TOLERANCE:
        raise SystemExit(f"a logit differs by {worst} from that of one process, and {TOLERANCE} is allowed")
    print(f"every token as in one process; the logits differ by at most {worst:.1e}", flush=True)


async def main() -> None:
    """Join the other rank, and be the one or the other."""
    parser = argparse.ArgumentParser(prog="kv_cache", description=__doc__)
    parser.add_argument("--sequences", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=24, help="of the decode rank's pool; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the generated tokens to this file")
    options = parser.parse_args()
    device = choose_device()
    # On a GPU by name: windows are what it is about, and "auto" would open NCCL beside it.
    async with Service(await aiocomms.new_comm("auto" if device == "cpu" else "ucx", device)) as service:
        comm = service.current
        if comm.size != 2:
            raise SystemExit(f"there are {comm.size} ranks, and it takes 2: one for prefill, one for decode")
        torch.set_num_threads(1)
        model, prompts = Model(comm.device), make_prompts(options.sequences)
        transfer = await Transfer.open(service.comm, options.blocks)
        if comm.rank == PREFILL:
            print(f"{comm.device}, {comm.transports.get('rma') or comm.transports['p2p']}", flush=True)
            async with service.drive(partial(prefill, transfer, model)) as driver:
                done = await asyncio.gather(*(driver.run(prompt) for prompt in prompts))
        else:
            await service.work(partial(decode, transfer, model, CapacityLimiter(1)))
            counts = f"at most {transfer.most} in flight, in {transfer.capacity} blocks"
            print(f"decode: {counts}; waited {transfer.waited} times for free ones", flush=True)
        await transfer.window.aclose()
        if comm.rank == PREFILL:
            await asyncio.to_thread(compare, model, done, prompts, comm.device)
            if options.json:
                options.json.write_text(json.dumps([tokens for tokens, _ in done]))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except* (CommError, ValueError) as errors:
        error = errors.exceptions[0]
        raise SystemExit(f"{type(error).__name__}: {error}") from None
