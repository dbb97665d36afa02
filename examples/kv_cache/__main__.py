"""What both ranks run: `torchrun --standalone --nproc-per-node 2 -m kv_cache`.

Rank 0 takes prompts through the model and pushes their KV cache, block by block, into rank 1's memory. Rank 1 goes on
with one token of each of its sequences in turn. In the end it compares all with the same done in one process, and ends
with an error if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path

import torch

import aiocomms
from aiocomms.errors import CommError

from .model import BLOCK, SHAPE, VOCABULARY, Model, generate_alone
from .transfer import DECODE, PREFILL, Sequence, Transfer, blocks_for

TOLERANCE = 1e-4  # most that a logit may differ from that of the one process; they are around 1


def choose_device() -> str:
    """This rank's GPU if the machine has one, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def make_prompts(count: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens are to follow each."""
    draw = random.Random(7)
    return [
        ([draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 100))], draw.randint(1, 24)) for _ in range(count)
    ]


async def prefill(transfer: Transfer, model: Model, prompts: list[tuple[list[int], int]]) -> None:
    """Rank 0: one prompt after the other; a block travels while the next one is computed."""
    for number, (prompt, count) in enumerate(prompts):
        # Room for what is to be generated is taken too, so that a sequence that was begun can always be finished.
        table = await transfer.claim(blocks_for(len(prompt) + count))
        own = torch.zeros(blocks_for(len(prompt)), *SHAPE, device=transfer.comm.device)
        puts, logits = [], None
        for i, block in enumerate(own):
            chunk = prompt[i * BLOCK : (i + 1) * BLOCK]
            logits = await asyncio.to_thread(model.extend, chunk, i * BLOCK, own, list(range(i + 1)))
            puts.append(transfer.push(block, table[i]))
        await asyncio.gather(*puts)
        first = int(logits.argmax())
        await transfer.hand_over(Sequence(number, len(prompt), count, [first], table, logits))
    await transfer.hand_over(Sequence(-1, 0, 0))
    print(f"prefill: {len(prompts)} prompts; waited {transfer.waited} times for a free block", flush=True)


async def decode(transfer: Transfer, model: Model) -> dict[int, Sequence]:
    """Rank 1: a token of each sequence in turn, while others arrive; blocks go back when a sequence is finished."""
    done: dict[int, Sequence] = {}
    most = 0
    async with asyncio.TaskGroup() as tasks:
        arriving: asyncio.Queue[Sequence | None] = asyncio.Queue()
        tasks.create_task(receive(transfer, arriving))
        active: list[Sequence] = []
        more = True
        while more or active:
            while more and (not active or not arriving.empty()):
                sequence = await arriving.get()
                active += [sequence] if sequence else []
                more = sequence is not None
            most = max(most, len(active))
            for sequence in active:
                if len(sequence.tokens) < sequence.count:
                    place = sequence.length + len(sequence.tokens) - 1
                    arguments = sequence.tokens[-1:], place, transfer.pool, sequence.table
                    sequence.logits = await asyncio.to_thread(model.extend, *arguments)
                    sequence.tokens.append(int(sequence.logits.argmax()))
                else:
                    done[sequence.number] = sequence
                    await transfer.grant(sequence.table)
            active = [sequence for sequence in active if sequence.number not in done]
    print(f"decode: {len(done)} sequences, at most {most} in flight, in {transfer.capacity} blocks", flush=True)
    return done


async def receive(transfer: Transfer, arriving: asyncio.Queue[Sequence | None]) -> None:
    """Hand out all blocks, then take over sequences until there are no more."""
    await transfer.grant(list(range(transfer.capacity)))
    sequence: Sequence | None = Sequence(-1, 0, 0)
    while sequence is not None:
        sequence = await transfer.take_over()
        arriving.put_nowait(sequence)


def compare(
    model: Model, done: dict[int, Sequence], prompts: list[tuple[list[int], int]], device: torch.device
) -> None:
    """Do it all in one process, without blocks.

    :raises SystemExit: something differs
    """
    worst = 0.0
    for number, (prompt, count) in enumerate(prompts):
        tokens, logits = generate_alone(model, prompt, count, device)
        if done[number].tokens != tokens:
            raise SystemExit(f"sequence {number}: {done[number].tokens}, and in one process {tokens}")
        if done[number].logits is not None:  # there are none where the first token was the last
            worst = max(worst, (done[number].logits - logits).abs().max().item())
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
    async with aiocomms.new_comm("auto" if device == "cpu" else "ucx", device) as comm:
        if comm.size != 2:
            raise SystemExit(f"there are {comm.size} ranks, and it takes 2: one for prefill, one for decode")
        torch.set_num_threads(1)
        model, prompts = Model(comm.device), make_prompts(options.sequences)
        transfer = await Transfer.open(comm, options.blocks)
        if comm.rank == PREFILL:
            print(f"{comm.device}, {comm.transports.get('rma') or comm.transports['p2p']}", flush=True)
            await prefill(transfer, model, prompts)
        else:
            done = await decode(transfer, model)
        await transfer.aclose()
        if comm.rank == DECODE:
            await asyncio.to_thread(compare, model, done, prompts, comm.device)
            if options.json:
                options.json.write_text(json.dumps([done[number].tokens for number in range(len(prompts))]))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except* (CommError, ValueError) as errors:
        error = errors.exceptions[0]
        raise SystemExit(f"{type(error).__name__}: {error}") from None
