"""How each collective is handed to the engine: addresses, sizes and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.reductions import ReduceOp
from aiocomms_ucx._engine import Engine

DTYPES: Final = {
    dtype: number
    for number, dtype in enumerate(
        (
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        )
    )
}  # fmt: skip
"""The engine's numbers, as in reduce.hpp."""
DTYPE_NAMES: Final = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
_OPERATORS: Final = {
    kind: number
    for number, kind in enumerate(("sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum"))
}

_ALL: Final[frozenset[type[ops.Op]]] = ops.COLLECTIVES | {ops.WindowOpen, ops.WindowClose}
FORMS: Final = {cls: number for number, cls in enumerate(sorted(_ALL, key=lambda cls: cls.name))}
"""Which operation it is, for its fingerprint: the same numbers on all ranks."""

Start = Callable[[Engine, int, int, int, Any, int], bool]
"""Called with the engine, a ticket, the communicator's number, its size, the op and the op's form; True: it is done."""


def _how(op: ReduceOp, dtype: torch.dtype) -> tuple[int, int, float]:
    return DTYPES[dtype], _OPERATORS[op.kind], op.factor


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]


def _barrier(engine: Engine, ticket: int, group: int, size: int, op: ops.Barrier, form: int) -> bool:
    return engine.barrier(ticket, group, form, 0)


def _broadcast(engine: Engine, ticket: int, group: int, size: int, op: ops.Broadcast, form: int) -> bool:
    tensor = op.tensor
    return engine.broadcast(ticket, group, form, tensor.data_ptr(), tensor.nbytes, DTYPES[tensor.dtype], op.root)


def _all_reduce(engine: Engine, ticket: int, group: int, size: int, op: ops.AllReduce, form: int) -> bool:
    tensor, how = op.tensor, op.op
    return engine.all_reduce(
        ticket, group, form, tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], _OPERATORS[how.kind], how.factor
    )


def _reduce(engine: Engine, ticket: int, group: int, size: int, op: ops.Reduce, form: int) -> bool:
    tensor = op.tensor
    return engine.reduce(ticket, group, form, tensor.data_ptr(), tensor.numel(), *_how(op.op, tensor.dtype), op.root)


def _blocks(tensor: Tensor, size: int) -> tuple[list[int], list[int]]:
    """Where the equal chunks of a tensor lie, one per rank, and their bytes; without a tensor for each."""
    nbytes = tensor.nbytes // size
    first = tensor.data_ptr()
    return [first + rank * nbytes for rank in range(size)], [nbytes] * size


def _reduce_scatter(engine: Engine, ticket: int, group: int, size: int, op: Any, form: int) -> bool:
    out = op.output
    if isinstance(op, ops.ReduceScatterSingle):
        ins, counts = _blocks(op.input, size)[0], [out.numel()] * size
    else:
        ins, counts = _addresses(op.inputs), [tensor.numel() for tensor in op.inputs]
    return engine.reduce_scatter(ticket, group, form, ins, counts, out.data_ptr(), *_how(op.op, out.dtype))


def _all_gather(engine: Engine, ticket: int, group: int, size: int, op: Any, form: int) -> bool:
    mine = op.input
    if isinstance(op, ops.AllGatherSingle):
        outs, sizes = _blocks(op.output, size)
    else:
        outs, sizes = _addresses(op.outputs), _sizes(op.outputs)
    return engine.all_gather(ticket, group, form, mine.data_ptr(), outs, sizes, DTYPES[mine.dtype])


def _gather(engine: Engine, ticket: int, group: int, size: int, op: Any, form: int) -> bool:
    tensor = op.input
    outs = _addresses(op.outs(size))
    return engine.gather(ticket, group, form, tensor.data_ptr(), outs, tensor.nbytes, DTYPES[tensor.dtype], op.root)


def _scatter(engine: Engine, ticket: int, group: int, size: int, op: ops.Scatter, form: int) -> bool:
    out = op.output
    ins = _addresses(op.ins(size))
    return engine.scatter(ticket, group, form, ins, out.data_ptr(), out.nbytes, DTYPES[out.dtype], op.root)


def _all_to_all(engine: Engine, ticket: int, group: int, size: int, op: Any, form: int) -> bool:
    if isinstance(op, ops.AllToAllSingle):
        ins, sizes = _blocks(op.input, size)
        outs, _ = _blocks(op.output, size)
        return engine.all_to_all(ticket, group, form, ins, sizes, outs, sizes, DTYPES[op.input.dtype], True)
    given, taken = op.ins(size), op.outs(size)
    return engine.all_to_all(
        ticket, group, form, _addresses(given), _sizes(given), _addresses(taken), _sizes(taken),
        DTYPES[given[0].dtype], False,
    )  # fmt: skip


_START: Final[dict[str, Start]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}

START: Final[dict[type[ops.Op], tuple[Start, int]]] = {cls: (_START[cls.kind], FORMS[cls]) for cls in ops.COLLECTIVES}
"""How an op of each type is started, and its form."""


def describe(op: Any) -> str:
    """What a rank is doing, for ranks that do something else."""
    name, *rest = op.signature()
    if isinstance(op, ops.AllToAllSingle):
        rest.append(tuple(op.input.shape))
    return f"{name}({', '.join(map(str, rest))})"
