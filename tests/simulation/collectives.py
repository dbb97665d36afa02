"""Steps of a program: collectives, each with the result that it has to have."""

from __future__ import annotations

from typing import Any

import torch
from place import BrokenPromiseError, Place
from torch import Tensor

from aiocomms import ReduceOp
from aiocomms.errors import UnsupportedOperation

BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def operator(at: Place, dtype: torch.dtype) -> ReduceOp:
    """Draw a reduction for a dtype."""
    kinds = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]
    kinds += [ReduceOp.AVG] if dtype.is_floating_point else BITWISE
    return at.draw.choice(kinds)


def reduced(op: ReduceOp | str, tensors: list[Tensor]) -> Tensor:
    """Reduce tensors in the plainest way. Products and sums of these are exact, or of at most 4 factors below 1000."""
    stack = torch.stack(tensors)
    kind = ReduceOp.parse(op).kind
    match kind:
        case "sum":
            return stack.sum(0, dtype=stack.dtype)
        case "product":
            return stack.prod(0, dtype=stack.dtype)
        case "max":
            return stack.amax(0)
        case "min":
            return stack.amin(0)
        case "avg":
            return stack.sum(0, dtype=stack.dtype) / len(tensors)
    total = tensors[0].clone()
    for one in tensors[1:]:
        total = {"band": total & one, "bor": total | one, "bxor": total ^ one}[kind]
    return total


def rounded(at: Place, got: Tensor, wanted: Tensor, what: str) -> None:
    """Compare, where floating point may have rounded in another order."""
    if wanted.is_floating_point():
        close = (
            got.dtype == wanted.dtype
            and got.shape == wanted.shape
            and torch.allclose(got, wanted, rtol=2e-3 if wanted.dtype is torch.float16 else 1e-5)
        )
        wanted = got if close else wanted
    at.same(got, wanted, what)


async def broadcast(at: Place) -> None:
    count, dtype, root = at.count(), at.dtype(), at.someone()
    tensor = at.numbers(count, dtype, at.rank)
    at.same(await at.end(at.comm.broadcast(tensor, root)), at.numbers(count, dtype, root), "broadcast")


async def all_gather(at: Place) -> None:
    count, dtype = at.count(), at.dtype()
    outputs = [torch.full((count,), 7, dtype=dtype) for _ in range(at.size)]
    got = await at.end(at.comm.all_gather(outputs, at.numbers(count, dtype, at.rank)))
    at.same(got, [at.numbers(count, dtype, r) for r in range(at.size)], "all_gather")


async def all_gather_v(at: Place) -> None:
    counts, dtype = [at.count() for _ in range(at.size)], at.dtype()
    outputs = [torch.full((count,), 7, dtype=dtype) for count in counts]
    got = await at.end(at.comm.all_gather_v(outputs, at.numbers(counts[at.rank], dtype, at.rank)))
    at.same(got, [at.numbers(count, dtype, r) for r, count in enumerate(counts)], "all_gather_v")


async def all_gather_single(at: Place) -> None:
    count, dtype = at.count(), at.dtype()
    output = torch.full((at.size * count,), 7, dtype=dtype)
    got = await at.end(at.comm.all_gather_single(output, at.numbers(count, dtype, at.rank)))
    at.same(got, torch.cat([at.numbers(count, dtype, r) for r in range(at.size)]), "all_gather_single")


async def all_to_all(at: Place) -> None:
    counts, dtype = [[at.count() for _ in range(at.size)] for _ in range(at.size)], at.dtype()
    inputs = [at.numbers(counts[at.rank][r], dtype, at.rank, r) for r in range(at.size)]
    outputs = [torch.full((counts[r][at.rank],), 7, dtype=dtype) for r in range(at.size)]
    got = await at.end(at.comm.all_to_all(outputs, inputs))
    at.same(got, [at.numbers(counts[r][at.rank], dtype, r, at.rank) for r in range(at.size)], "all_to_all")


async def all_to_all_single(at: Place) -> None:
    count, dtype = at.count(), at.dtype()
    given = torch.cat([at.numbers(count, dtype, at.rank, r) for r in range(at.size)])
    got = await at.end(at.comm.all_to_all_single(torch.full_like(given, 7), given))
    at.same(got, torch.cat([at.numbers(count, dtype, r, at.rank) for r in range(at.size)]), "all_to_all_single")


async def all_to_all_v_single(at: Place) -> None:
    rows, dtype = [[at.draw.randrange(4) for _ in range(at.size)] for _ in range(at.size)], at.dtype()
    given = torch.cat([at.numbers(rows[at.rank][r], dtype, at.rank, r) for r in range(at.size)])
    theirs = [rows[r][at.rank] for r in range(at.size)]
    output = torch.full((sum(theirs),), 7, dtype=dtype)
    got = await at.end(at.comm.all_to_all_v_single(output, given, theirs, rows[at.rank]))
    wanted = torch.cat([at.numbers(count, dtype, r, at.rank) for r, count in enumerate(theirs)])
    at.same(got, wanted, "all_to_all_v_single")


async def scatter(at: Place) -> None:
    count, dtype, root = at.count(), at.dtype(), at.someone()
    inputs = [at.numbers(count, dtype, r) for r in range(at.size)] if at.rank == root else None
    got = await at.end(at.comm.scatter(torch.full((count,), 7, dtype=dtype), inputs, root))
    at.same(got, at.numbers(count, dtype, at.rank), "scatter")


async def gather(at: Place) -> None:
    count, dtype, root = at.count(), at.dtype(), at.someone()
    outputs = [torch.full((count,), 7, dtype=dtype) for _ in range(at.size)] if at.rank == root else None
    got = await at.end(at.comm.gather(outputs, at.numbers(count, dtype, at.rank), root))
    wanted = [at.numbers(count, dtype, r) for r in range(at.size)] if at.rank == root else None
    at.same(got, wanted, "gather")


async def gather_single(at: Place) -> None:
    count, dtype, root = at.count(), at.dtype(), at.someone()
    output = torch.full((at.size * count,), 7, dtype=dtype) if at.rank == root else None
    got = await at.end(at.comm.gather_single(output, at.numbers(count, dtype, at.rank), root))
    wanted = torch.cat([at.numbers(count, dtype, r) for r in range(at.size)]) if at.rank == root else None
    at.same(got, wanted, "gather_single")


async def barrier(at: Place) -> None:
    """See that no rank leaves a barrier before all have come."""
    at.come()
    await at.end(at.comm.barrier())
    at.all_have_come()


async def all_reduce(at: Place) -> None:
    count, dtype = at.count(), at.dtype()
    kind = operator(at, dtype)
    got = await at.end(at.comm.all_reduce(at.numbers(count, dtype, at.rank), kind))
    rounded(at, got, reduced(kind, [at.numbers(count, dtype, r) for r in range(at.size)]), f"all_reduce {kind}")


async def reduce(at: Place) -> None:
    count, dtype, root = at.count(), at.dtype(), at.someone()
    kind, mine = operator(at, dtype), at.numbers(count, dtype, at.rank)
    await at.end(at.comm.reduce(mine, root, kind))
    if at.rank == root:
        rounded(at, mine, reduced(kind, [at.numbers(count, dtype, r) for r in range(at.size)]), f"reduce {kind}")
    else:
        at.same(mine, at.numbers(count, dtype, at.rank), "another rank's tensor of a reduce")


async def scan(at: Place) -> None:
    count, dtype = at.count(), at.dtype()
    kind = operator(at, dtype)
    got = await at.end(at.comm.scan(at.numbers(count, dtype, at.rank), kind))
    rounded(at, got, reduced(kind, [at.numbers(count, dtype, r) for r in range(at.rank + 1)]), f"scan {kind}")


async def exscan(at: Place) -> None:
    count, dtype = at.count(), at.dtype()
    kind = at.draw.choice(("sum", "product"))
    got = await at.end(at.comm.exscan(at.numbers(count, dtype, at.rank), kind))
    nothing = torch.zeros(count, dtype=dtype) if kind == "sum" else torch.ones(count, dtype=dtype)
    before = [at.numbers(count, dtype, r) for r in range(at.rank)]
    rounded(at, got, reduced(kind, before) if before else nothing, f"exscan {kind}")


async def reduce_scatter(at: Place) -> None:
    await _scattered(at, "reduce_scatter", [at.count()] * at.size)


async def reduce_scatter_v(at: Place) -> None:
    await _scattered(at, "reduce_scatter_v", [at.count() for _ in range(at.size)])


async def _scattered(at: Place, name: str, counts: list[int]) -> None:
    dtype = at.dtype()
    kind = operator(at, dtype)
    inputs = [at.numbers(count, dtype, at.rank, r) for r, count in enumerate(counts)]
    mine = counts[at.rank]
    got = await at.end(getattr(at.comm, name)(torch.full((mine,), 7, dtype=dtype), inputs, kind))
    rounded(at, got, reduced(kind, [at.numbers(mine, dtype, r, at.rank) for r in range(at.size)]), f"{name} {kind}")


async def reduce_scatter_single(at: Place) -> None:
    count, dtype = at.count(), at.dtype()
    kind = operator(at, dtype)
    given = torch.cat([at.numbers(count, dtype, at.rank, r) for r in range(at.size)])
    got = await at.end(at.comm.reduce_scatter_single(torch.full((count,), 7, dtype=dtype), given, kind))
    wanted = reduced(kind, [at.numbers(count, dtype, r, at.rank) for r in range(at.size)])
    rounded(at, got, wanted, f"reduce_scatter_single {kind}")


def thing(at: Place, *whose: int) -> tuple[Any, Any]:
    """Return an object for a rank, or a message, and what it is without its tensors."""
    base = (at.number * 7 + sum((i + 2) * one for i, one in enumerate(whose))) % 50
    return {"it": base, "text": "x" * base, "list": [None, 1.5, (base, True)], "bytes": b"ab" * base}, base


async def objects(at: Place) -> None:
    """Every collective of objects; and tensors within an object."""
    name, root = at.draw.choice(("broadcast", "all_gather", "gather", "scatter")), at.someone()
    pickled = at.draw.random() < 0.3
    mine = thing(at, at.rank)[0]
    everybody = [thing(at, r)[0] for r in range(at.size)]
    match name:
        case "broadcast":
            got = await at.end(at.comm.broadcast_object(mine, root, pickle=pickled))
            at.same(got, everybody[root], "broadcast_object")
        case "all_gather":
            at.same(await at.end(at.comm.all_gather_object(mine, pickle=pickled)), everybody, "all_gather_object")
        case "gather":
            got = await at.end(at.comm.gather_object(mine, root, pickle=pickled))
            at.same(got, everybody if at.rank == root else None, "gather_object")
        case "scatter":
            got = await at.end(at.comm.scatter_object(everybody if at.rank == root else None, root, pickle=pickled))
            at.same(got, mine, "scatter_object")


async def edges(at: Place) -> None:
    """Reduce what is summed in halves, compared without a sign, or refused; and wait by a tensor without elements."""
    halves = torch.tensor([2048.0 if at.rank == 0 else 1.0], dtype=torch.float16)
    wanted = torch.tensor([2048.0 + at.size - 1]).to(torch.float16)
    at.same(await at.end(at.comm.all_reduce(halves)), wanted, "sum of halves")
    who = at.someone()
    large = torch.tensor([40000 if at.rank == who else 5], dtype=torch.uint16)
    await at.end(at.comm.all_reduce(large, ReduceOp.MAX))
    at.same(large.tolist(), [40000], "largest of unsigned integers")
    try:
        at.comm.all_reduce(torch.zeros(2).to(torch.float8_e5m2))
    except UnsupportedOperation:
        pass
    else:
        raise BrokenPromiseError("float8 is summed")
    at.come()
    await at.end(at.comm.all_reduce(torch.empty(0)))
    at.all_have_come()


async def guarded(at: Place) -> None:
    """Nothing is written beside a result."""
    count, root = at.count(), at.someone()
    memory = torch.full((count + 2,), -3, dtype=torch.int32)
    memory[1:-1] = at.numbers(count, torch.int32, at.rank)
    await at.end(at.comm.broadcast(memory[1:-1], root))
    at.same([int(memory[0]), int(memory[-1])], [-3, -3], "memory beside a broadcast")
    at.same(memory[1:-1], at.numbers(count, torch.int32, root), "broadcast amid other memory")


STEPS = (
    *(edges, guarded),
    *(broadcast, all_gather, all_gather_v, all_gather_single, all_to_all, all_to_all_single, all_to_all_v_single),
    *(scatter, gather, gather_single, barrier, all_reduce, all_reduce, reduce, scan, exscan),
    *(reduce_scatter, reduce_scatter_v, reduce_scatter_single, objects),
)
