"""The trials: every collective, with random data to send and the expected result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiocomms import ReduceOp, Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case

Shape = tuple[int, ...]


class Setting(NamedTuple):
    """The values that vary between trials of one operation."""

    dtype: torch.dtype
    shape: Shape
    """The shape of the tensor that one rank gives to one other rank."""
    root: int
    op: ReduceOp
    key: object
    """The key from which the trial's random data is computed. Each trial has its own key."""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}, root {self.root}, {self.op}, {self.key}"


class Trial:
    """A started operation, and its expected result."""

    def __init__(self, work: Work[Any], result: object) -> None:
        self.work = work
        self._result = result
        self._written: list[tuple[data.Slot, Tensor, Tensor | None]] = []
        self._untouched: list[data.Slot] = []

    def writes(self, slot: data.Slot, want: Tensor, allowance: Tensor | None = None) -> Trial:
        """Declare that the operation must write ``want`` into a tensor."""
        self._written.append((slot, want, allowance))
        return self

    def keeps(self, *slots: data.Slot) -> Trial:
        """Declare that the operation must not change the given tensors."""
        self._untouched.extend(slots)
        return self

    async def check(self) -> None:
        """Wait for the operation, and check its result and all tensors."""
        self.verify(await self.work)

    def verify(self, result: object) -> None:
        """Check the result and all tensors of an operation that is done."""
        wanted = self._result
        if isinstance(wanted, list) and isinstance(result, list):
            assert len(result) == len(wanted) and all(a is b for a, b in zip(result, wanted, strict=True))
        else:
            assert result is wanted, f"the result is {result!r}, wanted the tensor that was given"
        for slot, want, allowance in self._written:
            slot.expect(want, allowance)
        for slot in self._untouched:
            slot.expect_untouched()


Start = Callable[[Communicator, Case, Setting], Trial]

MOVING: dict[str, Start] = {}
"""The collectives that move data without changing it."""

REDUCING: dict[str, Start] = {}
"""The collectives that apply a reduction operator."""


def moving(start: Start) -> Start:
    """Add a function to ``MOVING``. The function starts a trial of the operation that has the function's name."""
    MOVING[start.__name__] = start
    return start


def reducing(start: Start) -> Start:
    """Add a function to ``REDUCING``. The function starts a trial of the operation that has the function's name."""
    REDUCING[start.__name__] = start
    return start


def ragged(shape: Shape, *which: int) -> Shape:
    """Return a shape that differs by rank or pair of ranks, with a few more elements along the first dimension."""
    more = sum(which) % 4
    return (shape[0] + more, *shape[1:]) if shape else (more,)


def rows(shape: Shape) -> Shape:
    """Return the shape itself, or a shape of one element if the shape has no dimensions."""
    return shape or (1,)


# ------------------------------------------------------------------------------------------------------ moving


@moving
def broadcast(comm: Communicator, case: Case, s: Setting) -> Trial:
    content = case.bits(s.dtype, s.shape, s.key)
    slot = case.full(content) if comm.rank == s.root else case.empty(s.dtype, s.shape)
    return Trial(comm.broadcast(slot.tensor, s.root), slot.tensor).writes(slot, content)


def _gathering(comm: Communicator, case: Case, s: Setting, shapes: Sequence[Shape]) -> Any:
    contents = [case.bits(s.dtype, shape, s.key, r) for r, shape in enumerate(shapes)]
    return contents, case.full(contents[comm.rank])


@moving
def all_gather(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents, mine = _gathering(comm, case, s, [s.shape] * comm.size)
    outs = [case.empty(s.dtype, s.shape) for _ in contents]
    outputs = [out.tensor for out in outs]
    return _into(Trial(comm.all_gather(outputs, mine.tensor), outputs), outs, contents).keeps(mine)


@moving
def all_gather_v(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents, mine = _gathering(comm, case, s, [ragged(s.shape, r) for r in range(comm.size)])
    outs = [case.empty(s.dtype, tuple(content.shape)) for content in contents]
    outputs = [out.tensor for out in outs]
    return _into(Trial(comm.all_gather_v(outputs, mine.tensor), outputs), outs, contents).keeps(mine)


@moving
def all_gather_single(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents, mine = _gathering(comm, case, s, [s.shape] * comm.size)
    out = case.empty(s.dtype, (comm.size, *s.shape))
    trial = Trial(comm.all_gather_single(out.tensor, mine.tensor), out.tensor)
    return trial.writes(out, torch.stack(contents)).keeps(mine)


@moving
def gather(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents, mine = _gathering(comm, case, s, [s.shape] * comm.size)
    if comm.rank != s.root:
        return Trial(comm.gather(None, mine.tensor, s.root), None).keeps(mine)
    outs = [case.empty(s.dtype, s.shape) for _ in contents]
    outputs = [out.tensor for out in outs]
    return _into(Trial(comm.gather(outputs, mine.tensor, s.root), outputs), outs, contents).keeps(mine)


@moving
def gather_single(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents, mine = _gathering(comm, case, s, [s.shape] * comm.size)
    if comm.rank != s.root:
        return Trial(comm.gather_single(None, mine.tensor, s.root), None).keeps(mine)
    out = case.empty(s.dtype, (comm.size, *s.shape))
    trial = Trial(comm.gather_single(out.tensor, mine.tensor, s.root), out.tensor)
    return trial.writes(out, torch.stack(contents)).keeps(mine)


@moving
def scatter(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents = [case.bits(s.dtype, s.shape, s.key, r) for r in range(comm.size)]
    out = case.empty(s.dtype, s.shape)
    ins = [case.full(content) for content in contents] if comm.rank == s.root else []
    work = comm.scatter(out.tensor, [slot.tensor for slot in ins] or None, s.root)
    return Trial(work, out.tensor).writes(out, contents[comm.rank]).keeps(*ins)


@moving
def all_to_all(comm: Communicator, case: Case, s: Setting) -> Trial:
    me, everyone = comm.rank, range(comm.size)
    ins = [case.full(case.bits(s.dtype, ragged(s.shape, me, 2 * r), s.key, me, r)) for r in everyone]
    wants = [case.bits(s.dtype, ragged(s.shape, r, 2 * me), s.key, r, me) for r in everyone]
    outs = [case.empty(s.dtype, tuple(want.shape)) for want in wants]
    outputs = [out.tensor for out in outs]
    trial = Trial(comm.all_to_all(outputs, [slot.tensor for slot in ins]), outputs)
    return _into(trial, outs, wants).keeps(*ins)


@moving
def all_to_all_single(comm: Communicator, case: Case, s: Setting) -> Trial:
    me, everyone, shape = comm.rank, range(comm.size), rows(s.shape)
    given = case.full(torch.cat([case.bits(s.dtype, shape, s.key, me, r) for r in everyone]))
    out = case.empty(s.dtype, tuple(given.tensor.shape))
    trial = Trial(comm.all_to_all_single(out.tensor, given.tensor), out.tensor)
    return trial.writes(out, torch.cat([case.bits(s.dtype, shape, s.key, r, me) for r in everyone])).keeps(given)


@moving
def all_to_all_v_single(comm: Communicator, case: Case, s: Setting) -> Trial:
    me, everyone = comm.rank, range(comm.size)
    gives = [case.bits(s.dtype, ragged(s.shape, me, 2 * r), s.key, me, r) for r in everyone]
    gets = [case.bits(s.dtype, ragged(s.shape, r, 2 * me), s.key, r, me) for r in everyone]
    given, want = case.full(torch.cat(gives)), torch.cat(gets)
    out = case.empty(s.dtype, tuple(want.shape))
    work = comm.all_to_all_v_single(out.tensor, given.tensor, [len(t) for t in gets], [len(t) for t in gives])
    return Trial(work, out.tensor).writes(out, want).keeps(given)


# ---------------------------------------------------------------------------------------------------- reducing


@reducing
def all_reduce(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents = [case.numbers(s.dtype, s.shape, s.key, r) for r in range(comm.size)]
    slot = case.full(contents[comm.rank])
    return Trial(comm.all_reduce(slot.tensor, s.op), slot.tensor).writes(slot, *case.reduced(s.op, contents))


@reducing
def reduce(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents = [case.numbers(s.dtype, s.shape, s.key, r) for r in range(comm.size)]
    slot = case.full(contents[comm.rank])
    trial = Trial(comm.reduce(slot.tensor, s.root, s.op), slot.tensor)
    return trial.writes(slot, *case.reduced(s.op, contents)) if comm.rank == s.root else trial.keeps(slot)


@reducing
def scan(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents = [case.numbers(s.dtype, s.shape, s.key, r) for r in range(comm.size)]
    slot = case.full(contents[comm.rank])
    want = case.reduced(s.op, contents[: comm.rank + 1])
    return Trial(comm.scan(slot.tensor, s.op), slot.tensor).writes(slot, *want)


@reducing
def exscan(comm: Communicator, case: Case, s: Setting) -> Trial:
    contents = [case.numbers(s.dtype, s.shape, s.key, r) for r in range(comm.size)]
    slot = case.full(contents[comm.rank])
    before = contents[: comm.rank]
    want = case.reduced(s.op, before) if before else data.ExpectedResult(data.of_none(s.op, s.dtype, s.shape), None)
    return Trial(comm.exscan(slot.tensor, s.op), slot.tensor).writes(slot, *want)


@reducing
def reduce_scatter(comm: Communicator, case: Case, s: Setting) -> Trial:
    ins, want = _scattered(comm, case, s, [s.shape] * comm.size)
    out = case.empty(s.dtype, s.shape)
    work = comm.reduce_scatter(out.tensor, [slot.tensor for slot in ins], s.op)
    return Trial(work, out.tensor).writes(out, *want).keeps(*ins)


@reducing
def reduce_scatter_v(comm: Communicator, case: Case, s: Setting) -> Trial:
    ins, want = _scattered(comm, case, s, [ragged(s.shape, r) for r in range(comm.size)])
    out = case.empty(s.dtype, tuple(want.value.shape))
    work = comm.reduce_scatter_v(out.tensor, [slot.tensor for slot in ins], s.op)
    return Trial(work, out.tensor).writes(out, *want).keeps(*ins)


@reducing
def reduce_scatter_single(comm: Communicator, case: Case, s: Setting) -> Trial:
    ins, want = _scattered(comm, case, s, [s.shape] * comm.size)
    given = case.full(torch.stack([slot.tensor.cpu() for slot in ins]))
    out = case.empty(s.dtype, s.shape)
    work = comm.reduce_scatter_single(out.tensor, given.tensor, s.op)
    return Trial(work, out.tensor).writes(out, *want).keeps(given)


def _scattered(
    comm: Communicator, case: Case, s: Setting, shapes: Sequence[Shape]
) -> tuple[list[data.Slot], data.ExpectedResult]:
    everyone = range(comm.size)
    ins = [case.full(case.numbers(s.dtype, shape, s.key, comm.rank, r)) for r, shape in enumerate(shapes)]
    mine = [case.numbers(s.dtype, shapes[comm.rank], s.key, r, comm.rank) for r in everyone]
    return ins, case.reduced(s.op, mine)


def _into(trial: Trial, slots: Sequence[data.Slot], wants: Sequence[Tensor]) -> Trial:
    for slot, want in zip(slots, wants, strict=True):
        trial.writes(slot, want)
    return trial


EVERY: dict[str, Start] = {**MOVING, **REDUCING}
"""All collectives that move or reduce tensors."""
