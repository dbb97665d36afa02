"""Drawn programs, run by gloo, by the backend and by communicators, and compared in all that can be seen of them.

``python tests/torch_backend/differential.py --seed=1 --programs=1000`` prints what differs, with the seed that repeats
it, and which of the differences that are known it has met.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from processes import Rank, runner  # noqa: E402 - found by the path above

import aiocomms.torch_backend  # noqa: E402
from aiocomms import ReduceOp, blocking  # noqa: E402
from aiocomms.testing import local_world  # noqa: E402

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
]
FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0), (3, 2, 2), (300,), (70_000,)]
LAYOUTS = ["contiguous", "contiguous", "transposed", "strided", "offset"]
MODES = ["plain", "plain", "grad", "saved", "inference", "no_grad"]
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]
KINDS = {
    "all_reduce": "reduces",
    "reduce": "reduces",
    "reduce_scatter": "reduces",
    "reduce_scatter_single": "reduces",
    "broadcast": "",
    "all_gather": "",
    "all_gather_single": "",
    "gather": "",
    "scatter": "",
    "all_to_all": "",
    "all_to_all_single": "",
    "message": "",
    "barrier": "",
}


@dataclass(frozen=True)
class Call:
    """One call, of all ranks."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    op: str
    root: int
    way: str
    """Torch's function, or the group's method with options, or in its short form."""


@dataclass(frozen=True)
class Program:
    """Calls in a mode of torch; each is waited for at once, or all when all are under way."""

    seed: int
    mode: str
    together: bool
    calls: tuple[Call, ...]


def drawn(seed: int, size: int) -> Program:
    """Draw a program for so many ranks."""
    chance = random.Random(seed)

    def call() -> Call:
        kind = chance.choice(list(KINDS))
        shape = chance.choice(SHAPES)
        return Call(
            kind,
            chance.choice(DTYPES),
            shape if shape or not kind.endswith("_single") else (1,),
            chance.choice(LAYOUTS),
            chance.choice(OPS[:1] * 4 + OPS) if KINDS[kind] else "SUM",
            chance.randrange(size),
            chance.choice(["function", "options", "short"]),
        )

    calls = tuple(call() for _ in range(chance.randint(1, 4)))
    return Program(seed, chance.choice(MODES), chance.random() < 0.5, calls)


# ------------------------------------------------------------------------------------------------------- tensors


@dataclass
class Tensors:
    """What one call of one rank writes, and what it reads; in place, where nothing else is read."""

    written: list[Tensor]
    read: list[Tensor]


def _whole(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (shape[0] * size, *shape[1:])


def _values(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> Tensor:
    """Small integers, whose reductions are exact in every dtype."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**63)
    values = torch.randint(0, 2 if dtype is torch.bool else 4, shape, generator=generator)
    return (values + 1j * (3 - values)).to(dtype) if dtype.is_complex else values.to(dtype)


def _laid(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another place."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided" and tensor.dim():
        return tensor.repeat_interleave(2, 0)[::2]
    if layout == "offset" and tensor.dim():
        return torch.cat([tensor[:1], tensor])[-tensor.shape[0] :] if tensor.shape[0] else tensor
    return tensor


def shapes(call: Call, rank: int, size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of what a rank writes and reads."""
    part, parts = [call.shape], [call.shape] * size
    of_root = rank == call.root
    table: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
        "all_gather": (parts, part),
        "gather": (parts if of_root else [], part),
        "scatter": (part, parts if of_root else []),
        "reduce_scatter": (part, parts),
        "all_to_all": (parts, parts),
        "barrier": ([], []),
    }
    if call.kind.endswith("_single"):
        whole = [_whole(call.shape, size)]
        both = {"all_gather_single": (whole, part), "reduce_scatter_single": (part, whole)}
        return both.get(call.kind, (whole, whole))
    return table.get(call.kind, (part, []))


def made(program: Program, index: int, rank: int, size: int) -> Tensors:
    """The tensors of a call, the same each time."""
    call = program.calls[index]
    numbers = itertools.count()

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return _laid(_values(shape, call.dtype, program.seed, index, rank, next(numbers)), call.layout)

    written, read = shapes(call, rank, size)
    return Tensors([tensor(each) for each in written], [tensor(each) for each in read])


def _reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack([each.contiguous() for each in tensors])
    if op in ("SUM", "AVG"):
        total = functools.reduce(torch.add, tensors) if tensors[0].dtype is not torch.bool else stacked.any(0)
        return (total / len(tensors)).to(tensors[0].dtype) if op == "AVG" else total
    if op == "PRODUCT":
        return functools.reduce(torch.mul, tensors)
    if op in ("MIN", "MAX"):
        narrow = stacked.to(torch.uint8) if stacked.dtype is torch.bool else stacked
        return (narrow.amin(0) if op == "MIN" else narrow.amax(0)).to(stacked.dtype)
    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
    return functools.reduce(bits, tensors)


def expected(program: Program, index: int, rank: int, size: int) -> list[Tensor] | None:
    """What the tensors that a rank writes hold in the end; None: nobody says it."""
    call = program.calls[index]
    ranks = [made(program, index, each, size) for each in range(size)]
    own, root = ranks[rank], ranks[call.root]
    if call.kind in ("all_reduce", "reduce"):
        if call.kind == "reduce" and rank != call.root:
            return None
        return [_reduced(call.op, [each.written[0] for each in ranks])]
    if call.kind == "reduce_scatter":
        return [_reduced(call.op, [each.read[rank] for each in ranks])]
    if call.kind == "reduce_scatter_single":
        return [_reduced(call.op, [each.read[0].chunk(size)[rank] for each in ranks])]
    if call.kind == "broadcast":
        return root.written
    if call.kind == "message":
        return ranks[(rank - 1) % size].written if rank != call.root or size == 1 else own.written
    if call.kind == "scatter":
        return [root.read[rank]]
    if call.kind == "all_to_all":
        return [each.read[rank] for each in ranks]
    if call.kind == "all_to_all_single":
        return [torch.cat([each.read[0].chunk(size)[rank] for each in ranks])]
    gathered = [each.read[0] for each in ranks if own.read]
    if call.kind == "all_gather_single":
        return [torch.cat(gathered)]
    return gathered if own.written else []
