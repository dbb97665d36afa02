"""The semantics of the collectives: the effect of each collective on the tensors of all ranks.

Each function gets one operation record from each rank, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aiocomms.errors import MismatchError
from aiocomms.ops import reductions
from aiocomms.ops.writing import note_copy, writing

Records = Sequence[Any]


def perform(records: Records) -> None:
    """Perform a collective that all ranks have called.

    :param records: one operation record per rank, all of the same kind.
    :raises MismatchError: the ranks' tensors have incompatible shapes or dtypes. No tensor was written.
    """
    _SEMANTICS[records[0].kind](records)


def _copy(out: Tensor, source: Tensor) -> None:
    if source.requires_grad:  # an autograd graph does not reach from one rank to another
        source = source.detach()
    if out.data_ptr() != source.data_ptr():
        with writing(out):
            out.view(-1).copy_(source.view(-1))
        note_copy(out)


def _barrier(records: Records) -> None:
    pass


def _broadcast(records: Records) -> None:
    root = records[records[0].root].tensor
    for record in records:
        _copy(record.tensor, root)


def _all_reduce(records: Records) -> None:
    first = records[0]
    if len(records) == 1 and first.op.kind != "premul_sum":
        return  # the reduction of a single tensor is that tensor
    reductions.reduce(first.op, [r.tensor for r in records], first.tensor)
    for record in records[1:]:
        _copy(record.tensor, first.tensor)


def _reduce(records: Records) -> None:
    first = records[0]
    reductions.reduce(first.op, [r.tensor for r in records], records[first.root].tensor)


def _scan(records: Records) -> None:
    tensors = [record.tensor.clone() for record in records]
    for rank, record in enumerate(records):
        reductions.reduce(record.op, tensors[: rank + record.own], record.tensor)


def _all_gather(records: Records) -> None:
    for record in records:
        for out, source in zip(record.outs(len(records)), records, strict=True):
            _copy(out, source.input)


def _gather(records: Records) -> None:
    for out, source in zip(records[records[0].root].outs(len(records)), records, strict=True):
        _copy(out, source.input)


def _scatter(records: Records) -> None:
    for record, chunk in zip(records, records[records[0].root].ins(len(records)), strict=True):
        _copy(record.output, chunk)


def _reduce_scatter(records: Records) -> None:
    inputs = [record.ins(len(records)) for record in records]
    # All results are computed before the first is written, because a rank's output may be one of its inputs.
    results = [torch.empty_like(record.output) for record in records]
    for rank, result in enumerate(results):
        reductions.reduce(records[0].op, [chunks[rank].view(result.shape) for chunks in inputs], result)
    for record, result in zip(records, results, strict=True):
        _copy(record.output, result)


def _all_to_all(records: Records) -> None:
    size = len(records)
    inputs = [record.ins(size) for record in records]
    outputs = [record.outs(size) for record in records]
    pairs = [(src, dst) for src in range(size) for dst in range(size)]
    for src, dst in pairs:
        given, wanted = inputs[src][dst].numel(), outputs[dst][src].numel()
        if given != wanted:
            raise MismatchError(f"rank {src} sends {given} elements to rank {dst}, which wants {wanted}")
    for src, dst in pairs:
        _copy(outputs[dst][src], inputs[src][dst])


_SEMANTICS: dict[str, Callable[[Records], None]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "scan": _scan,
    "exscan": _scan,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
