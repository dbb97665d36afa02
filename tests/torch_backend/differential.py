"""Random programs, run over gloo, the backend and communicators, and compared in all their visible effects.

``python tests/torch_backend/differential.py --seed=1 --programs=1000`` prints the differences, with the seeds that
repeat them, and the known differences that it has met.
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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from processes import Rank, runner  # noqa: E402 - found by the path above

import aiocomms.integrations.torch_backend  # noqa: E402
from aiocomms import ReduceOp, blocking  # noqa: E402
from aiocomms.testing import local_world  # noqa: E402

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
]
TOGETHER = 500
"""The number of programs that the same processes run."""
NOT_OF_GLOO = {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128}
"""Dtypes that gloo refuses, the complex ones unless torch views them as real ones."""
SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0), (3, 2, 2), (300,), (70_000,)]
LAYOUTS = ["contiguous", "contiguous", "transposed", "strided", "offset"]
MODES = ["plain", "plain", "grad", "saved", "inference", "no_grad"]
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]
REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"]
KINDS = [
    *REDUCING,
    *("broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *("message", "barrier"),
]
ONE_SIDED = {"gather", "scatter", "message"}
"""Calls whose tensors differ between ranks, so that a refusal on one rank leaves the others waiting."""
ROOTED = ONE_SIDED | {"broadcast", "reduce"}
"""Calls that write on some ranks only."""


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
    """The way to call torch's groups: by a function, or by a method."""


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
        kind = chance.choice(KINDS)
        shape = chance.choice(SHAPES)
        return Call(
            kind,
            chance.choice(DTYPES),
            shape if shape or not kind.endswith("_single") else (1,),
            LAYOUTS[0] if kind in ONE_SIDED else chance.choice(LAYOUTS),
            chance.choice(OPS[:1] * 4 + OPS) if kind in REDUCING else "SUM",
            chance.randrange(size),
            chance.choice(["function", "method"]),
        )

    calls = tuple(call() for _ in range(chance.randint(1, 4)))
    return Program(seed, chance.choice(MODES), chance.random() < 0.5, calls)


# ------------------------------------------------------------------------------------------------------- tensors


@dataclass
class Tensors:
    """The tensors that one call of one rank writes and reads; a call in place reads no others."""

    written: list[Tensor]
    read: list[Tensor]


def _whole(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (shape[0] * size, *shape[1:])


@functools.lru_cache(maxsize=64)
def _values(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> Tensor:
    """Return small integers, whose reductions are exact in every dtype. All trials of a program ask for the same."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**63)
    values = torch.randint(0, 2 if dtype is torch.bool else 4, shape, generator=generator)
    return (values + 1j * (3 - values)).to(dtype) if dtype.is_complex else values.to(dtype)


def _laid(tensor: Tensor, layout: str) -> Tensor:
    """Return the same values in another memory layout."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided" and tensor.dim():
        return tensor.repeat_interleave(2, 0)[::2]
    if layout == "offset" and tensor.dim():
        return torch.cat([tensor[:1], tensor])[-tensor.shape[0] :] if tensor.shape[0] else tensor
    return tensor


def shapes(call: Call, rank: int, size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes of the tensors that a rank writes and reads."""
    part, parts = [call.shape], [call.shape] * size
    of_root = rank == call.root
    table: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
        "all_gather": (parts, part),
        "gather": (parts if of_root else [], part),
        "scatter": (part, parts if of_root else []),
        "reduce_scatter": (part, parts),
        "all_to_all": (parts, parts),
        "barrier": ([], []),
        "message": (part if rank == (call.root + 1) % size else [], part if of_root else []),
    }
    if call.kind.endswith("_single"):
        whole = [_whole(call.shape, size)]
        both = {"all_gather_single": (whole, part), "reduce_scatter_single": (part, whole)}
        return both.get(call.kind, (whole, whole))
    return table.get(call.kind, (part, []))


def made(program: Program, index: int, rank: int, size: int) -> Tensors:
    """Return the tensors of a call, with the same values each time."""
    call = program.calls[index]
    numbers = itertools.count()

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return _laid(_values(shape, call.dtype, program.seed, index, rank, next(numbers)).clone(), call.layout)

    written, read = shapes(call, rank, size)
    return Tensors([tensor(each) for each in written], [tensor(each) for each in read])


def defined(op: str, dtype: torch.dtype) -> bool:
    """Return whether a reduction is defined for a dtype."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    number = dtype is not torch.bool
    return {"B": whole, "A": not whole, "M": not dtype.is_complex, "S": number, "P": number}[op[0]]


def _reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    given = [each if dtype.is_floating_point or dtype.is_complex else each.to(torch.int64) for each in tensors]
    both = {
        "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    total = functools.reduce(both[op], given)
    return (total / len(tensors) if op == "AVG" else total).to(dtype)


def expected(program: Program, index: int, rank: int, size: int) -> list[Tensor] | None:
    """Return the final values of the tensors that a rank writes, or None if they are unspecified."""
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
        return root.read if own.written else []
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


# --------------------------------------------------------------------------------------------------- who runs them

_Start = Callable[[Call, list[Tensor], list[Tensor]], Any]
Starts = Callable[[Call, Tensors], Any]
"""A function that starts a call, and returns its work, or None if there is no work."""


def _torchs(call: Call) -> Any:
    return getattr(dist.ReduceOp, call.op)


def _ours(call: Call) -> ReduceOp:
    op: ReduceOp = getattr(ReduceOp, call.op)
    return op


def by_torch(group: Any) -> Starts:
    """Start calls as programs of torch do: by functions, or by methods with a tensor in the place of a list."""
    size, more = dist.get_world_size(group), {"group": group, "async_op": True}

    def message(call: Call, out: list[Tensor], given: list[Tensor]) -> Any:
        if given:
            return dist.isend(given[0], group=group, group_dst=(call.root + 1) % size, tag=3)
        return dist.irecv(out[0], group=group, group_src=call.root, tag=3) if out else None

    functions: dict[str, _Start] = {
        "all_reduce": lambda call, out, _: dist.all_reduce(out[0], _torchs(call), **more),
        "reduce": lambda call, out, _: dist.reduce(out[0], group_dst=call.root, op=_torchs(call), **more),
        "reduce_scatter": lambda call, out, given: dist.reduce_scatter(out[0], given, _torchs(call), **more),
        "reduce_scatter_single": lambda call, out, given: dist.reduce_scatter_single(
            out[0], given[0], _torchs(call), **more
        ),
        "broadcast": lambda call, out, _: dist.broadcast(out[0], group_src=call.root, **more),
        "all_gather": lambda _, out, given: dist.all_gather(out, given[0], **more),
        "all_gather_single": lambda _, out, given: dist.all_gather_single(out[0], given[0], **more),
        "gather": lambda call, out, given: dist.gather(given[0], out or None, group_dst=call.root, **more),
        "scatter": lambda call, out, given: dist.scatter(out[0], given or None, group_src=call.root, **more),
        "all_to_all": lambda _, out, given: dist.all_to_all(out, given, **more),
        "all_to_all_single": lambda _, out, given: dist.all_to_all_single(out[0], given[0], **more),
        "message": message,
        "barrier": lambda *_: dist.barrier(**more),
    }
    methods: dict[str, _Start] = {
        "all_reduce": lambda call, out, _: group.allreduce(out[0], _torchs(call)),
        "reduce": lambda call, out, _: group.reduce(out[0], call.root, _torchs(call)),
        "reduce_scatter": lambda call, out, given: group.reduce_scatter(out[0], given, _torchs(call)),
        "broadcast": lambda call, out, _: group.broadcast(out[0], call.root),
        "all_gather": lambda _, out, given: group.allgather(out, given[0]),
        "gather": lambda call, out, given: group.gather(out, given[0], call.root),
        "scatter": lambda call, out, given: group.scatter(out[0], given, call.root),
        "all_to_all_single": lambda _, out, given: group.all_to_all_single(out[0], given[0], [], []),
        "barrier": lambda *_: group.barrier(),
    }
    ways = {"function": functions, "method": functions | methods}
    return lambda call, its: ways[call.way][call.kind](call, its.written, its.read)


def by_aiocomms(comm: Any) -> Starts:
    """Start calls on a communicator, or a portal of one."""

    def message(call: Call, out: list[Tensor], given: list[Tensor]) -> Any:
        if given:
            return comm.send(given[0], (call.root + 1) % comm.size, tag=3)
        return comm.recv(out[0], call.root, tag=3) if out else None

    methods: dict[str, _Start] = {
        "all_reduce": lambda call, out, _: comm.all_reduce(out[0], _ours(call)),
        "reduce": lambda call, out, _: comm.reduce(out[0], call.root, _ours(call)),
        "reduce_scatter": lambda call, out, given: comm.reduce_scatter(out[0], given, _ours(call)),
        "reduce_scatter_single": lambda call, out, given: comm.reduce_scatter_single(out[0], given[0], _ours(call)),
        "broadcast": lambda call, out, _: comm.broadcast(out[0], call.root),
        "all_gather": lambda _, out, given: comm.all_gather(out, given[0]),
        "all_gather_single": lambda _, out, given: comm.all_gather_single(out[0], given[0]),
        "gather": lambda call, out, given: comm.gather(out or None, given[0], call.root),
        "scatter": lambda call, out, given: comm.scatter(out[0], given or None, call.root),
        "all_to_all": lambda _, out, given: comm.all_to_all(out, given),
        "all_to_all_single": lambda _, out, given: comm.all_to_all_single(out[0], given[0]),
        "message": message,
        "barrier": lambda *_: comm.barrier(),
    }
    return lambda call, its: methods[call.kind](call, its.written, its.read)


# ------------------------------------------------------------------------------------------------ what can be seen


@dataclass
class Outcome:
    """The outcome of one call on one rank."""

    refused: str
    """The reason for a refusal, or an empty text."""
    values: list[Any]
    written: list[int | None]
    """The increases of the versions of the tensors that it writes; None for a tensor without one."""
    read: list[int | None]
    backward: str
    """The result for a gradient that needs an old value: computed, refused, or empty if none was asked for."""


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _mode(name: str) -> contextlib.AbstractContextManager[Any]:
    return {"inference": torch.inference_mode, "no_grad": torch.no_grad}.get(name, contextlib.nullcontext)()


DIFFERENCE = "DIFFERENCE of seed"
_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, aiocomms.CommError)


class Trial:
    """A program on one rank, run by one implementation."""

    def __init__(self, program: Program, rank: int, size: int, starts: Starts) -> None:
        self._program, self._starts = program, starts
        self._tensors = [made(program, index, rank, size) for index in range(len(program.calls))]
        self._refused = [""] * len(program.calls)
        pairs = zip(program.calls, self._tensors, strict=True)
        self._sums: list[Tensor | None] = [self._prepared(call, its) for call, its in pairs]
        self._before = [self._versions(its) for its in self._tensors]

    def _prepared(self, call: Call, its: Tensors) -> Tensor | None:
        every = [each for each in (*its.written, *its.read) if each.is_floating_point()]
        if self._program.mode == "grad":
            for each in its.read if call.kind in ROOTED else every:
                each.requires_grad_(each.is_floating_point())
        if self._program.mode == "saved" and every:
            factor = torch.ones((), dtype=every[0].dtype, requires_grad=True)
            return sum(((each * factor).sum() for each in every), torch.zeros(()))
        return None

    @staticmethod
    def _versions(its: Tensors) -> tuple[list[int | None], list[int | None]]:
        return [_version(each) for each in its.written], [_version(each) for each in its.read]

    def run(self) -> list[Outcome]:
        """Start all calls, and wait for them."""
        under_way: list[tuple[int, Any]] = []
        for index, call in enumerate(self._program.calls):
            try:
                under_way.append((index, self._starts(call, self._tensors[index])))
            except _REFUSALS as error:
                self._refused[index] = f"{type(error).__name__}: {error}"
            if not self._program.together:
                self._wait(under_way)
        self._wait(under_way)
        return [self._outcome(index) for index in range(len(self._program.calls))]

    def _wait(self, works: list[tuple[int, Any]]) -> None:
        while works:
            index, work = works.pop(0)
            try:
                if work is not None:
                    work.wait()
            except _REFUSALS as error:
                self._refused[index] = f"{type(error).__name__}: {error}"

    def _outcome(self, index: int) -> Outcome:
        its, total = self._tensors[index], self._sums[index]
        backward = ""
        if total is not None:
            try:
                torch.autograd.backward(total)
                backward = "computed"
            except RuntimeError:
                backward = "refused"
        risen = [
            [None if after is None or before is None else after - before for after, before in zip(*pair, strict=True)]
            for pair in zip(self._versions(its), self._before[index], strict=True)
        ]
        values = [each.detach().clone() for each in its.written]
        return Outcome(self._refused[index], values, risen[0], risen[1], backward)


# ---------------------------------------------------------------------------------------------------- differences


def differs(program: Program, index: int, rank: int, size: int, who: str, seen: Outcome) -> str:
    """Return the fault of an outcome, or ``known: `` and the reason for a known difference, or an empty text."""
    call = program.calls[index]
    if call.kind in REDUCING and not defined(call.op, call.dtype):
        return "" if seen.refused else f"{call.op} of {call.dtype} is {seen.values}"
    if seen.refused:
        known = KNOWN[who.partition(" ")[0]].items()
        return next((f"known: {who}: {why}" for text, why in known if text in seen.refused), seen.refused)
    wanted = expected(program, index, rank, size)
    if wanted is not None and not all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        for one, other in itertools.zip_longest(seen.values, wanted, fillvalue=torch.empty(0))
    ):
        if who == "gloo" and call.layout != "contiguous":
            return "known: gloo: it takes a tensor that is not contiguous for one that is"
        return f"got {seen.values}, wanted {wanted}"
    if any(seen.read):
        return f"the versions of what is read have risen: {seen.read}"
    writes = wanted is not None and not (call.kind == "broadcast" and rank == call.root)
    own = program.mode != "inference" and writes
    if who.startswith("gloo"):
        return f"known: {who}: autograd is told of no write" if own and wanted and not any(seen.written) else ""
    if own and not all(seen.written):
        return f"autograd is not told of the writes: {seen.written}"
    saved = program.mode == "saved" and seen.backward and wanted is not None
    if saved and (seen.backward == "refused") != (own and bool(seen.written) and call.dtype.is_floating_point):
        return f"a gradient that needs what was overwritten is {seen.backward}"
    return ""


KNOWN: dict[str, dict[str, str]] = {
    "gloo": {
        "contiguous": "it carries no tensor that is not contiguous",
        "ReduceOp.AVG": "it has no AVG",
    },
    "backend": {"on complex tensors": "torch's own function refuses it"},
    "communicator": {
        "is not contiguous": "it copies nothing, and says what to give",
        "requires grad": "autograd would not see the write",
    },
}
"""Differences that are no defects: by implementation, a part of the message, and the reason."""


def of_gloo(call: Call) -> bool:
    """Return whether gloo carries a call; after a refusal by gloo or autograd, its next operation may hang."""
    return call.dtype not in NOT_OF_GLOO and (call.kind not in REDUCING or defined(call.op, call.dtype))


async def compares(place: Rank, seeds: Sequence[int]) -> Counter[str]:
    """Run the programs of some seeds by each implementation in turn, and count the differences, known or not."""
    rank, size, store = place.rank, place.size, place.store()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    starts: dict[str, Starts] = {"gloo": by_torch(dist.group.WORLD)}
    found: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        for on in ("ucx", "c10d"):
            group = dist.new_group(backend="aiocomms", pg_options=on, timeout=timedelta(seconds=20))
            starts[f"backend over {on}"] = by_torch(group)
            comm = blocking.new_comm(on, store=store, rank=rank, size=size, name=on, timeout=20)
            starts[f"communicator over {on}"] = by_aiocomms(stack.enter_context(comm))
        portals = []
        if rank == 0:
            portals = [
                each.portal() for each in await stack.enter_async_context(local_world(size, "local", timeout=20))
            ]
        for seed in seeds:
            program = drawn(seed, size)
            for who, start in starts.items():
                if who == "gloo" and (program.mode == "grad" or not all(map(of_gloo, program.calls))):
                    continue
                found.update(_judged(program, rank, size, who, start))
            locals_ = [
                asyncio.to_thread(_judged, program, each, size, "communicator over local", by_aiocomms(portal))
                for each, portal in enumerate(portals)
            ]
            for one in await asyncio.gather(*locals_):
                found.update(one)
            found["programs"] += rank == 0
            found["calls"] += len(program.calls) * (rank == 0)
    dist.destroy_process_group()
    return found


def _judged(program: Program, rank: int, size: int, who: str, start: Starts) -> Counter[str]:
    with _mode(program.mode):
        outcomes = Trial(program, rank, size, start).run()
    found: Counter[str] = Counter()
    for index, (call, outcome) in enumerate(zip(program.calls, outcomes, strict=True)):
        what = differs(program, index, rank, size, who, outcome)
        if what and not what.startswith("known: "):
            found[f"{DIFFERENCE} {program.seed}, {who}, rank {rank}: {call}, {program.mode}: {what[:300]}"] += 1
        elif what:
            found[what] += 1
    return found


def first_differences(found: Counter[str]) -> list[str]:
    """Return the differences of the first program that has any: later ones may follow from them."""
    different = sorted(what for what in found if what.startswith(DIFFERENCE))
    return [what for what in different if what.partition(",")[0] == different[0].partition(",")[0]]


def main() -> int:
    """Run programs in a process for each rank, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    first, found = given.seed * 1_000_000, Counter[str]()
    different: list[str] = []
    with tempfile.TemporaryDirectory() as folder, runner("ucx", Path(folder)) as run:
        for seed in range(first, first + given.programs, TOGETHER):
            seeds = range(seed, min(seed + TOGETHER, first + given.programs))
            found = sum(run(given.ranks, compares, seeds), found)
            if different := first_differences(found):
                break
    for what, count in sorted(found.items()):
        if not what.startswith(DIFFERENCE) or what in different:
            print(f"{count:9,}  {what}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
