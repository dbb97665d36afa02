"""The training of the model on the project's own documentation."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

from .model import VOCABULARY, Model, Shape

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "text_generator" / "model.safetensors"
STEPS, TEXTS, WINDOW = 400, 4, 512
RATE, WARMUP = 5e-3, 20


def documentation() -> bytes:
    """Return the text of the project's documentation."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return b"\n\n".join(page.read_bytes() for page in pages)


def initial(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random weights, with zeros for weights that write into the residual stream."""
    weights = {}
    for name, (rows, columns) in shape.weights().items():
        scale = 0.02 if name == "embedding" else 0.0 if name.endswith(("out", "down")) else columns**-0.5
        weights[name] = (torch.randn(rows, columns, generator=generator) * scale).requires_grad_()
    return weights


def steppers(model: Model, steps: int) -> list[tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]]:
    """Return Muon for matrices (K. Jordan et al., https://kellerjordan.github.io/posts/muon) and AdamW for the rest."""
    matrices = [weight for name, weight in model.weights.items() if name != "embedding"]
    optimizers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([model.weights["embedding"]], lr=1.6 * RATE, betas=(0.9, 0.95), weight_decay=0, fused=True),
    ]

    def rate(step: int) -> float:
        return min((step + 1) / WARMUP, 1.0, 0.02 + 2 * (steps - step) / steps)

    return [(each, torch.optim.lr_scheduler.LambdaLR(each, rate)) for each in optimizers]


def train(text: bytes, shape: Shape, steps: int = STEPS, texts: int = TEXTS, window: int = WINDOW) -> Model:
    """Train from a fixed seed, and print the progress.

    :param texts: the number of windows of the text in a batch
    :param window: the bytes of a window
    """
    generator = torch.Generator().manual_seed(1)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    model = Model(shape, initial(shape, generator))
    stepping = steppers(model, steps)
    began, average = time.monotonic(), math.log(VOCABULARY)
    for step in range(steps):
        starts = torch.randint(len(data) - window - 1, (texts,), generator=generator)
        batch = torch.stack([data[at : at + window + 1] for at in starts.tolist()]).long()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer, schedule in stepping:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        average += (loss.item() - average) / min(step + 1, 20)
        if (step + 1) % 60 == 0 or step + 1 == steps:
            seconds = time.monotonic() - began
            print(f"step {step + 1:4} of {steps}, {average / math.log(2):.2f} bits a byte, {seconds:.0f} s", flush=True)
    return model


def kept() -> Path:
    """Return the file with the model. Train the model if there is no file."""
    if not KEPT.exists():
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        text, shape = documentation(), Shape()
        count = sum(rows * columns for rows, columns in shape.weights().values())
        print(f"training {count:,} parameters on {len(text):,} bytes of documentation, once", flush=True)
        train(text, shape).save(KEPT)
    return KEPT


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="text_generator.train", description=__doc__)
    parser.parse_args()
    print(kept(), file=sys.stderr)
