"""Every collective, compared with plain torch: all dtypes, odd sizes, in place, concurrent calls, synchronisation."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable

import anyio
import pytest
import torch

from aiocomms import ReduceOp, Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import UnsupportedOperation
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks, reductions, refusable
from aiocomms.testing.conformance.trials import EVERY, MOVING, REDUCING, Setting, Trial


def start(name: str, comm: Communicator, case: Case, setting: Setting) -> Trial | None:
    """Start a trial: a collective with its expected result. Return None if the transport refuses an optional dtype."""
    try:
        return EVERY[name](comm, case, setting)
    except UnsupportedOperation as error:
        refusable(setting.dtype, error)
        return None
    except Exception as error:
        error.add_note(f"{name}: {setting}")
        raise


async def check(name: str, setting: Setting, trial: Trial) -> None:
    """Wait for the collective of a trial, and check the result."""
    try:
        await trial.check()
    except Exception as error:
        error.add_note(f"{name}: {setting}")
        raise


async def check_all(name: str, comm: Communicator, case: Case, settings: Iterable[Setting]) -> None:
    """Start all trials without waiting for results, then check the trials in the same order."""
    started = [(setting, start(name, comm, case, setting)) for setting in settings]
    for setting, trial in started:
        if trial is not None:
            await check(name, setting, trial)


def share(settings: list[Setting], dtype: torch.dtype, size: int) -> list[Setting]:
    """Choose only some of the settings if there are many ranks, to save time. The choice depends on the dtype."""
    step = max(1, size // 2)
    return settings[data.ALL_DTYPES.index(dtype) % step :: step]


@pytest.mark.memory
@ranks(1, 2, 3, 4, 7)
@pytest.mark.parametrize("name", MOVING)
async def test_collectives_deliver_every_dtype_bit_for_bit(comm: Communicator, case: Case, name: str) -> None:
    for dtype in data.ALL_DTYPES:
        settings = [Setting(dtype, s, i % comm.size, ReduceOp.SUM, i) for i, s in enumerate(data.SHAPES)]
        await check_all(name, comm, case, share(settings, dtype, comm.size))


@pytest.mark.fault(140)
@pytest.mark.memory
@ranks(1, 2, 3, 4, 7)
@pytest.mark.parametrize("name", REDUCING)
async def test_reductions_are_right_for_every_operator_and_dtype(comm: Communicator, case: Case, name: str) -> None:
    """Successive operators get successive shapes. The first operator's shape differs from dtype to dtype."""
    for i, dtype in enumerate(data.REDUCED_DTYPES):
        defined = [op for op in reductions() if op.supports(dtype)]
        shapes = itertools.cycle(data.SHAPES[i % len(data.SHAPES) :] + data.SHAPES[: i % len(data.SHAPES)])
        settings = [Setting(dtype, next(shapes), k % comm.size, op, k) for k, op in enumerate(defined)]
        await check_all(name, comm, case, share(settings, dtype, comm.size))


@pytest.mark.fault(140)
@ranks(2)
async def test_reductions_of_unsigned_integers_wrap_around_and_compare_unsigned(comm: Communicator, case: Case) -> None:
    """Sums and products wrap around. Values beyond the signed range compare as large, not as negative."""
    for dtype in data.UNSIGNED:
        most = 256**dtype.itemsize - 1
        given = ([0, most, most, 1, most // 2], [most, most, 1, 2, most // 2 + 1])
        wanted = {
            "sum": [most, most - 1, 0, 3, most], "product": [0, 1, most, 2, most // 2 + 1],
            "min": [0, most, 1, 1, most // 2], "max": [most, most, most, 2, most // 2 + 1],
            "band": [0, most, 1, 0, 0], "bor": [most, most, most, 3, most], "bxor": [most, 0, most - 1, 3, most],
        }  # fmt: skip
        for kind, values in wanted.items():
            slot = case.full(torch.tensor(given[comm.rank], dtype=dtype))
            await comm.all_reduce(slot.tensor, ReduceOp(kind))
            slot.expect(torch.tensor(values, dtype=dtype))


@pytest.mark.core
@ranks(2)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
async def test_reductions_accept_an_operator_by_name(comm: Communicator, case: Case, op: str) -> None:
    """Each collective with a reduction accepts the name of an operator instead of the operator."""
    contents = [[case.numbers(torch.float64, (5,), r, dst) for dst in range(comm.size)] for r in range(comm.size)]
    mine, root = contents[comm.rank], comm.size - 1
    first = data.reduced(ReduceOp.parse(op), [given[0] for given in contents])
    share = data.reduced(ReduceOp.parse(op), [given[comm.rank] for given in contents])
    everywhere, rooted = case.full(mine[0]), case.full(mine[0])
    data.near(await comm.all_reduce(everywhere.tensor, op), *first)
    data.near(await comm.reduce(rooted.tensor, root, op), *(first if comm.rank == root else (mine[0], None)))
    ins = [case.full(content).tensor for content in mine]
    for scatter in (comm.reduce_scatter, comm.reduce_scatter_v):
        data.near(await scatter(case.empty(torch.float64, (5,)).tensor, ins, op), *share)
    whole = case.full(torch.stack(mine))
    data.near(await comm.reduce_scatter_single(case.empty(torch.float64, (5,)).tensor, whole.tensor, op), *share)


@pytest.mark.memory
@ranks(2, 3, 7, more=(1, 4))
@pytest.mark.parametrize("name", EVERY)
async def test_collectives_of_large_tensors_are_right(comm: Communicator, case: Case, name: str) -> None:
    setting = Setting(torch.float32, data.LARGE, comm.size - 1, ReduceOp.SUM, "large")
    await check_all(name, comm, case, [setting])


@ranks(1, 2, 3, 4, 7)
async def test_rooted_collectives_accept_every_root(comm: Communicator, case: Case) -> None:
    for name in ("broadcast", "reduce", "gather", "gather_single", "scatter"):
        settings = [Setting(torch.int32, (5,), root, ReduceOp.SUM, name) for root in range(comm.size)]
        await check_all(name, comm, case, settings)


@pytest.mark.memory
@ranks(2, 3, 7)
async def test_all_reduce_gives_every_rank_the_same_bits(comm: Communicator, case: Case) -> None:
    for i, dtype in enumerate(d for d in data.REDUCED_DTYPES if d.is_floating_point or d.is_complex):
        for shape in ((11,), (4099,), (70_001,)):
            slot = case.full(case.numbers(dtype, shape, comm.rank))
            try:
                await comm.all_reduce(slot.tensor)
            except UnsupportedOperation as error:
                refusable(dtype, error)
                continue
            case.agree(f"all_reduce of {dtype}{shape}, number {i}", slot.tensor)


@ranks(2, 3, 7)
async def test_half_precision_is_accumulated_in_float32(comm: Communicator, case: Case) -> None:
    """Rounding in half precision would lose a small number that is added to a large number."""
    for dtype, much in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        if case.rounds_each_step(dtype):
            continue
        tensor = torch.full((9,), much if comm.rank == 0 else 1.0, dtype=dtype, device=comm.device)
        try:
            await comm.all_reduce(tensor)
        except UnsupportedOperation:
            continue
        data.same_bits(tensor, torch.full((9,), much + comm.size - 1).to(dtype))


@ranks(1, 2, 3, 4, 7)
async def test_collectives_in_place_are_right(comm: Communicator, case: Case) -> None:
    """An input may be this rank's part of the output, or the output may be a part of the input."""
    everyone, root = range(comm.size), comm.size - 1
    contents = [case.bits(torch.int32, (13,), r) for r in everyone]
    outs = [case.full(contents[r]) if r == comm.rank else case.empty(torch.int32, (13,)) for r in everyone]
    tensors = [out.tensor for out in outs]
    for gather in (comm.all_gather, comm.all_gather_v):
        await gather(tensors, tensors[comm.rank])
        for out, content in zip(outs, contents, strict=True):
            out.expect(content)
    whole = case.empty(torch.int32, (comm.size, 13))
    whole.tensor[comm.rank] = contents[comm.rank].to(comm.device)
    await comm.all_gather_single(whole.tensor, whole.tensor[comm.rank])
    whole.expect(torch.stack(contents))
    mine = comm.rank == root
    await comm.gather(tensors if mine else None, tensors[comm.rank], root)
    await comm.gather_single(whole.tensor if mine else None, whole.tensor[comm.rank], root)
    out = outs[root] if mine else case.empty(torch.int32, (13,))
    await comm.scatter(out.tensor, tensors if mine else None, root)
    out.expect(contents[comm.rank])
    whole.expect(torch.stack(contents))


@ranks(1, 2, 3, 4, 7)
async def test_reduce_scatter_in_place_writes_only_its_output(comm: Communicator, case: Case) -> None:
    contents = [[case.numbers(torch.int64, (13,), r, dst) for dst in range(comm.size)] for r in range(comm.size)]
    want = data.reduced(ReduceOp.SUM, [given[comm.rank] for given in contents]).value
    for scatter in (comm.reduce_scatter, comm.reduce_scatter_v):
        ins = [case.full(content) for content in contents[comm.rank]]
        await scatter(ins[comm.rank].tensor, [slot.tensor for slot in ins])
        ins[comm.rank].expect(want)
        for r, slot in enumerate(ins):
            if r != comm.rank:
                slot.expect_untouched()
    whole = case.full(torch.stack(contents[comm.rank]))
    await comm.reduce_scatter_single(whole.tensor[comm.rank], whole.tensor)
    after = torch.stack(contents[comm.rank])
    after[comm.rank] = want
    whole.expect(after)


@ranks(3, more=(2, 7))
@pytest.mark.parametrize("name", EVERY)
async def test_concurrent_calls_of_one_collective_match_in_call_order(
    comm: Communicator, case: Case, name: str
) -> None:
    """The order of the calls is the same on all ranks, but the order of the awaits differs."""
    settings = [Setting(torch.int32, (n,), n % comm.size, ReduceOp.BXOR, n) for n in range(10)]
    started = [(setting, EVERY[name](comm, case, setting)) for setting in settings]
    random.Random(f"{case.seed} {case.name} {comm.rank}").shuffle(started)
    async with anyio.create_task_group() as tasks:
        for setting, trial in started:
            tasks.start_soon(check, name, setting, trial)


@pytest.mark.memory
@ranks(2, 3, 7)
async def test_concurrent_collectives_even_different_ones_match_in_call_order(comm: Communicator, case: Case) -> None:
    draw = random.Random(f"{case.seed} {case.name}")
    started: list[tuple[str, Setting, Trial]] = []
    for i in range(60):
        name = draw.choice(list(EVERY))
        dtype = draw.choice(data.REDUCED_DTYPES if name in REDUCING else data.ALL_DTYPES)
        op = draw.choice([op for op in reductions() if name in MOVING or op.supports(dtype)])
        setting = Setting(dtype, draw.choice(data.SHAPES), draw.randrange(comm.size), op, i)
        trial = start(name, comm, case, setting)
        if trial is not None:
            started.append((name, setting, trial))
        if len(started) > 8:
            await check(*started.pop(0))
    for item in started:
        await check(*item)


Synchronising = Callable[[Communicator], Work[object]]

SYNCHRONISING: dict[str, Synchronising] = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(_nothing(comm)),
    "all_gather": lambda comm: comm.all_gather([_nothing(comm) for _ in range(comm.size)], _nothing(comm)),
    "all_gather_single": lambda comm: comm.all_gather_single(_nothing(comm), _nothing(comm)),
    "all_to_all": lambda comm: comm.all_to_all(
        [_nothing(comm) for _ in range(comm.size)], [_nothing(comm) for _ in range(comm.size)]
    ),
    "all_to_all_single": lambda comm: comm.all_to_all_single(_nothing(comm), _nothing(comm)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(_nothing(comm), [_nothing(comm) for _ in range(comm.size)]),
    "reduce_scatter_single": lambda comm: comm.reduce_scatter_single(_nothing(comm), _nothing(comm)),
}


def _nothing(comm: Communicator) -> torch.Tensor:
    return torch.empty(0, device=comm.device)


@pytest.mark.memory
@ranks(2, 3, 7, more=(4,))
@pytest.mark.parametrize("name", SYNCHRONISING)
async def test_synchronising_collective_completes_after_every_rank_has_called(
    comm: Communicator, case: Case, name: str
) -> None:
    """Each rank in turn calls last, after all others have called. Empty tensors synchronise the ranks, too."""
    for late in range(comm.size):
        if comm.rank == late:
            await case.told(f"called {late}")
        called = time.monotonic()
        work = SYNCHRONISING[name](comm)
        case.tell(f"called {late}")
        await work
        case.synchronised(f"{name} with rank {late} late", called)


@pytest.mark.memory
@ranks(2, 3, 7)
async def test_broadcast_completes_on_the_root_before_others_call(comm: Communicator, case: Case) -> None:
    """The root's broadcast does not wait for ranks that call late. These ranks get the data when they call."""
    contents = [case.bits(torch.int16, (6,), root) for root in range(comm.size)]
    for root, content in enumerate(contents):
        slot = case.full(content) if comm.rank == root else case.empty(torch.int16, (6,))
        if comm.rank != root:
            await case.told(f"called {root}", root)
        work = comm.broadcast(slot.tensor, root)
        case.tell(f"called {root}")
        await work
        slot.expect(content)


@pytest.mark.fault(50)
@pytest.mark.loops
@ranks(2, more=(3,))
async def test_work_that_is_never_awaited_completes(comm: Communicator, case: Case) -> None:
    slots = [case.full(case.numbers(torch.int32, (3,), i, comm.rank)) for i in range(5)]
    done: list[object] = []
    all_done = anyio.Event()

    def note(work: Work[object]) -> None:
        done.append(work.result())
        if len(done) == len(slots):
            all_done.set()

    hook = comm.register_post_hook(note)
    for slot in slots:
        comm.all_reduce(slot.tensor)
    await all_done.wait()
    hook.remove()
    for i, slot in enumerate(slots):
        contents = [case.numbers(torch.int32, (3,), i, r) for r in range(comm.size)]
        slot.expect(data.reduced(ReduceOp.SUM, contents).value)
