"""The collectives, and the call to the UCX engine that starts each kind of collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiocomms import ops
from aiocomms_ucx._engine import Engine, Lanes, Operator

_OPERATORS: Final = {operator.name.lower(): int(operator) for operator in Operator}

COLLECTIVE: Final[frozenset[type[ops.Op]]] = ops.COLLECTIVES | {ops.WindowOpen, ops.WindowClose}
FORMS: Final = {cls: number for number, cls in enumerate(sorted(COLLECTIVE, key=lambda cls: cls.name))}
"""The number (form) of each op type. The number is a part of an op's fingerprint, and is the same on all ranks."""

Start = Callable[[Engine | Lanes, int, int, int, Any, int], float]
"""A function that starts a collective.

The arguments are the engine, a ticket, the communicator's number, the number of ranks, the op, and the number of the
op's type in :data:`FORMS`. For a lane, the communicator's lanes replace the engine, and the lane's number replaces the
communicator's number. The function returns the value of :func:`time.monotonic` at which the collective completed, or 0
if the collective is pending.
"""


def _barrier(engine: Engine | Lanes, ticket: int, number: int, size: int, op: ops.Barrier, form: int) -> float:
    return engine.barrier(ticket, number, form, 0)


def _broadcast(engine: Engine | Lanes, ticket: int, number: int, size: int, op: ops.Broadcast, form: int) -> float:
    return engine.broadcast(ticket, number, form, op.tensor, op.root)


def _all_reduce(engine: Engine | Lanes, ticket: int, number: int, size: int, op: ops.AllReduce, form: int) -> float:
    how = op.op
    return engine.all_reduce(ticket, number, form, op.tensor, _OPERATORS[how.kind], how.factor)


def _reduce(engine: Engine | Lanes, ticket: int, number: int, size: int, op: ops.Reduce, form: int) -> float:
    how = op.op
    return engine.reduce(ticket, number, form, op.tensor, _OPERATORS[how.kind], how.factor, op.root)


def _reduce_scatter(engine: Engine | Lanes, ticket: int, number: int, size: int, op: Any, form: int) -> float:
    ins, how = op.input if isinstance(op, ops.ReduceScatterSingle) else op.inputs, op.op
    return engine.reduce_scatter(ticket, number, form, size, ins, op.output, _OPERATORS[how.kind], how.factor)


def _all_gather(engine: Engine | Lanes, ticket: int, number: int, size: int, op: Any, form: int) -> float:
    outs = op.output if isinstance(op, ops.AllGatherSingle) else op.outputs
    return engine.all_gather(ticket, number, form, size, op.input, outs)


def _gather(engine: Engine | Lanes, ticket: int, number: int, size: int, op: Any, form: int) -> float:
    return engine.gather(ticket, number, form, op.input, op.outs(size), op.root)


def _scatter(engine: Engine | Lanes, ticket: int, number: int, size: int, op: ops.Scatter, form: int) -> float:
    return engine.scatter(ticket, number, form, op.ins(size), op.output, op.root)


def _all_to_all(engine: Engine | Lanes, ticket: int, number: int, size: int, op: Any, form: int) -> float:
    if isinstance(op, ops.AllToAllSingle):
        return engine.all_to_all(ticket, number, form, size, op.input, op.output)
    return engine.all_to_all(ticket, number, form, size, op.ins(size), op.outs(size))


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
"""The function that starts an op of each type, and the type's number in :data:`FORMS`."""


def describe(op: Any) -> str:
    """Describe a rank's call for the errors of other ranks whose calls differ from this call."""
    name, *rest = op.signature()
    if isinstance(op, ops.AllToAllSingle):
        rest.append(tuple(op.input.shape))
    return f"{name}({', '.join(map(str, rest))})"
