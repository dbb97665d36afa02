"""Calls with wrong arguments. Such a call sends nothing, and raises an error that names the argument.

The next operation works.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from aiocomms import ReduceOp
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommAbortedError,
    CommClosedError,
    UnsupportedOperation,
)
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks, reductions
from aiocomms.testing.conformance.rank import pending

COUNT = 4

Arguments = dict[str, Any]


def tensor(comm: Communicator, count: int = COUNT, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(count, device=comm.device).to(dtype)


def tensors(comm: Communicator) -> list[Tensor]:
    return [tensor(comm) for _ in range(comm.size)]


def splits(comm: Communicator) -> list[int]:
    return [1] * comm.size


GOOD: dict[str, Callable[[Communicator], Arguments]] = {
    "broadcast": lambda c: {"tensor": tensor(c), "root": 0},
    "all_reduce": lambda c: {"tensor": tensor(c), "op": ReduceOp.SUM},
    "reduce": lambda c: {"tensor": tensor(c), "root": 0, "op": ReduceOp.SUM},
    "scan": lambda c: {"tensor": tensor(c), "op": ReduceOp.SUM},
    "exscan": lambda c: {"tensor": tensor(c), "op": ReduceOp.SUM},
    "all_gather": lambda c: {"outputs": tensors(c), "tensor": tensor(c)},
    "all_gather_v": lambda c: {"outputs": tensors(c), "tensor": tensor(c)},
    "all_gather_single": lambda c: {"output": tensor(c, COUNT * c.size), "input": tensor(c)},
    "reduce_scatter": lambda c: {"output": tensor(c), "inputs": tensors(c), "op": ReduceOp.SUM},
    "reduce_scatter_v": lambda c: {"output": tensor(c), "inputs": tensors(c), "op": ReduceOp.SUM},
    "reduce_scatter_single": lambda c: {"output": tensor(c), "input": tensor(c, COUNT * c.size), "op": ReduceOp.SUM},
    "all_to_all": lambda c: {"outputs": tensors(c), "inputs": tensors(c)},
    "all_to_all_single": lambda c: {"output": tensor(c, COUNT * c.size), "input": tensor(c, COUNT * c.size)},
    "all_to_all_v_single": lambda c: {
        "output": tensor(c, c.size),
        "input": tensor(c, c.size),
        "output_split_sizes": splits(c),
        "input_split_sizes": splits(c),
    },
    "scatter": lambda c: {"output": tensor(c), "inputs": tensors(c), "root": c.rank},
    "gather": lambda c: {"outputs": tensors(c), "input": tensor(c), "root": c.rank},
    "gather_single": lambda c: {"output": tensor(c, COUNT * c.size), "input": tensor(c), "root": c.rank},
    "barrier": lambda c: {},
    "send": lambda c: {"tensor": tensor(c), "dst": (c.rank + 1) % c.size, "tag": 0},
    "recv": lambda c: {"tensor": tensor(c), "src": (c.rank + 1) % c.size, "tag": 0},
    "send_object": lambda c: {"obj": 1, "dst": (c.rank + 1) % c.size, "tag": 0},
    "recv_object": lambda c: {"src": (c.rank + 1) % c.size, "tag": 0},
    "broadcast_object": lambda c: {"obj": 1, "root": 0},
    "all_gather_object": lambda c: {"obj": 1},
    "gather_object": lambda c: {"obj": 1, "root": 0},
    "scatter_object": lambda c: {"objs": [1] * c.size, "root": c.rank},
}
"""Correct arguments of each operation. If a collective has arguments that only its root uses, this rank is the root."""

WRITTEN = {
    "tensor": {"broadcast", "all_reduce", "reduce", "scan", "exscan", "recv"},
    "output": set(GOOD),
    "outputs": set(GOOD),
}
"""The names of the operations that write into the tensors of a parameter, by the name of the parameter."""


class Subclass(torch.Tensor):
    """A subclass of :class:`torch.Tensor`. The data of such a tensor may be in the memory of another object."""


def _resized(comm: Communicator) -> Tensor:
    freed = tensor(comm)
    freed.untyped_storage().resize_(0)
    return freed


def _quietly(make: Callable[[], Tensor]) -> Tensor:
    """Make a tensor of a deprecated kind, without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


UNREADABLE: dict[str, tuple[Callable[[Communicator], object], type[Exception]]] = {
    "None": (lambda c: None, ArgumentError),
    "a list": (lambda c: [1.0] * COUNT, ArgumentTypeError),
    "an array backwards": (lambda c: tensor(c).cpu().numpy()[::-1], ArgumentError),
    "an array of strings": (lambda c: tensor(c).cpu().numpy().astype("U"), ArgumentError),
    "a subclass": (lambda c: tensor(c).as_subclass(Subclass), ArgumentTypeError),
    "meta": (lambda c: torch.empty(COUNT, device="meta"), ArgumentError),
    "sparse": (lambda c: tensor(c).to_sparse(), ArgumentError),
    "quantised": (
        lambda c: _quietly(lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        ArgumentError,
    ),
    "nested": (lambda c: _quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), ArgumentError),
    "of another dtype": (lambda c: torch.empty(COUNT, dtype=torch.float4_e2m1fn_x2, device=c.device), ArgumentError),
    "not contiguous": (lambda c: tensor(c, 2 * COUNT)[::2], ArgumentError),
    "transposed": (lambda c: torch.ones(2, COUNT, device=c.device).T, ArgumentError),
    "expanded": (lambda c: torch.ones(1, device=c.device).expand(COUNT), ArgumentError),
    "negative view": (lambda c: torch._neg_view(tensor(c)), ArgumentError),
    "conjugate view": (lambda c: tensor(c, dtype=torch.complex64).conj(), ArgumentError),
    "freed": (_resized, ArgumentError),
}

WRONG_RANKS: list[object] = [-1, 2**40, 0.0, True, None, "0", torch.tensor(0)]

WRONG: dict[str, list[object]] = {
    "root": WRONG_RANKS,
    "dst": WRONG_RANKS,
    "src": WRONG_RANKS,
    "tag": [2**31, -(2**31) - 1, 0.0, True, None, "0"],
    "op": ["average", "SUM", "", b"sum", None, 0, torch.distributed.ReduceOp.SUM],
    "timeout": [0, -1, math.nan, math.inf, True, "1", 1e9, timedelta(0), timedelta(seconds=-1)],
    "outputs": [3, "list", {}, torch.ones(2, 2)],
    "inputs": [3, "list", {}, torch.ones(2, 2)],
}
"""The wrong values of a parameter, by the name of the parameter. Every operation must refuse these values."""


def carried(comm: Communicator, name: str) -> bool:
    return "p2p" in comm.transports or (name in GOOD and not name.endswith("object") and name not in ("send", "recv"))


def refuse(
    comm: Communicator, name: str, wrong: Arguments, parameter: str, error: type[Exception] = ArgumentError
) -> None:
    """Call an operation with one wrong argument.

    The call must raise an error that names the argument, and start nothing.
    """
    before = pending(comm)
    arguments = {**GOOD[name](comm), **wrong}
    try:
        work = getattr(comm, name)(**arguments)
    except error as caught:
        assert parameter in str(caught), f"{name}: the error does not name {parameter}: {caught}"
        assert isinstance(caught, (ValueError, TypeError, UnsupportedOperation)), f"{name}: {caught!r}"
        assert pending(comm) == before, f"{name}: something was started"
        return
    except Exception as caught:
        raise AssertionError(f"{name}({wrong}) raised {caught!r}, wanted {error.__name__}") from caught
    raise AssertionError(f"{name}({wrong}) was accepted: {work}")


async def still_works(comm: Communicator, name: str) -> None:
    """Use the communicator on all ranks after one rank has made a wrong call."""
    total = torch.full((3,), comm.rank + 1.0, device=comm.device)
    await comm.all_reduce(total)
    assert (total == comm.size * (comm.size + 1) / 2).all(), f"after wrong calls of {name}: {total}"
    if "p2p" in comm.transports:
        got = torch.empty(1, device=comm.device)
        sending = comm.send(torch.full((1,), comm.rank + 0.0, device=comm.device), (comm.rank + 1) % comm.size)
        await comm.recv(got, (comm.rank - 1) % comm.size)
        await sending
        assert got.item() == (comm.rank - 1) % comm.size


def wrong_calls(comm: Communicator, name: str) -> Iterator[tuple[Arguments, str, type[Exception]]]:
    """Generate wrong arguments of an operation, the name that the error must contain, and the error's class."""
    for parameter, value in {**GOOD[name](comm), "timeout": None}.items():
        for wrong in WRONG.get(parameter, []):
            yield {parameter: wrong}, parameter, ArgumentError
        written = name in WRITTEN.get(parameter, ())
        if isinstance(value, Tensor):
            for make, error in UNREADABLE.values():
                yield {parameter: make(comm)}, parameter, error
            if written:
                yield {parameter: tensor(comm, len(value)).requires_grad_()}, parameter, ArgumentError
        elif parameter in ("outputs", "inputs"):
            yield from wrong_lists(comm, parameter, written)


def wrong_lists(comm: Communicator, parameter: str, written: bool) -> Iterator[tuple[Arguments, str, type[Exception]]]:
    """Generate the wrong values of a parameter that takes a list of tensors, one per rank."""
    good, last = tensors(comm), comm.size - 1
    item = f"{parameter}[{last}]"
    for wrong in ([], good[1:], [*good, tensor(comm)]):
        yield {parameter: wrong}, parameter, ArgumentError
    for make, error in UNREADABLE.values():
        yield {parameter: [*good[:-1], make(comm)]}, item, error
    yield {parameter: [*good[:-1], tensor(comm, dtype=torch.int64)]}, item, ArgumentError
    if written:
        yield {parameter: [*good[:-1], good[0]]}, parameter, ArgumentError
        yield {parameter: [*good[:-1], tensor(comm).requires_grad_()]}, item, ArgumentError


@pytest.mark.core
@ranks(2, more=(3,))
@pytest.mark.parametrize("name", GOOD)
async def test_wrong_arguments_of_an_operation_are_refused_before_anything_is_sent(
    comm: Communicator, case: Case, name: str
) -> None:
    """Only one rank makes the wrong calls. If these calls sent anything, the other ranks would notice."""
    if carried(comm, name) and comm.rank == comm.size - 1:
        for wrong, parameter, error in wrong_calls(comm, name):
            refuse(comm, name, wrong, parameter, error)
    await still_works(comm, name)


def misfits(comm: Communicator) -> list[tuple[str, Arguments, str]]:
    """Return calls whose arguments are each valid alone, but contradict each other."""
    c, n = comm, comm.size
    flat = tensor(c, COUNT * n)
    shared, scalar = tensors(c), torch.ones((), device=c.device)
    return [
        ("all_gather", {"tensor": tensor(c, 5)}, "outputs"),
        ("all_gather", {"tensor": tensor(c, dtype=torch.int32)}, "outputs"),
        ("all_gather", {"outputs": [*tensors(c)[:-1], tensor(c, 5)]}, f"outputs[{n - 1}]"),
        ("all_gather_v", {"tensor": tensor(c, 5)}, f"outputs[{c.rank}]"),
        ("all_gather_single", {"output": tensor(c, COUNT * n + 1)}, "output"),
        ("all_gather_single", {"output": tensor(c, COUNT * n, torch.int32)}, "output"),
        ("all_gather_single", {"output": flat, "input": flat[1 : 1 + COUNT]}, "overlaps"),
        ("reduce_scatter", {"output": tensor(c, 5)}, "inputs"),
        ("reduce_scatter", {"inputs": shared, "output": shared[(c.rank + 1) % n]}, "overlaps"),
        ("reduce_scatter_v", {"output": tensor(c, 5)}, f"inputs[{c.rank}]"),
        ("reduce_scatter_single", {"input": tensor(c, COUNT * n + 1)}, "input"),
        ("reduce_scatter_single", {"output": tensor(c, dtype=torch.int32)}, "input"),
        ("all_to_all", {"outputs": shared, "inputs": shared}, "overlaps"),
        ("all_to_all", {"outputs": [t.to(torch.int32) for t in tensors(c)]}, f"outputs[{c.rank}]"),
        ("all_to_all_single", {"output": tensor(c, n), "input": tensor(c, 2 * n)}, "output"),
        ("all_to_all_single", {"output": tensor(c, n + 1), "input": tensor(c, n + 1)}, "divisible"),
        ("all_to_all_single", {"output": flat, "input": flat}, "overlaps"),
        ("all_to_all_single", {"output": scalar, "input": scalar.clone()}, "input"),
        ("all_to_all_v_single", {"output": tensor(c, n + 1)}, "output_split_sizes"),
        ("all_to_all_v_single", {"input": tensor(c, n + 1)}, "input_split_sizes"),
        ("all_to_all_v_single", {"output": torch.ones(n, 2, device=c.device)}, "output"),
        ("all_to_all_v_single", {"output": scalar}, "output"),
        *(
            ("all_to_all_v_single", {name: wrong}, name)
            for name in ("output_split_sizes", "input_split_sizes")
            for wrong in ([1] * (n + 1), [1] * (n - 1), [2] * n, [n + 1, *[0] * (n - 2), -1], [1.0] * n, [True] * n)
        ),
        ("scatter", {"inputs": None}, "inputs"),
        ("scatter", {"output": tensor(c, 5)}, "inputs[0]"),
        ("scatter", {"inputs": shared, "output": shared[(c.rank + 1) % n]}, "overlaps"),
        ("gather", {"outputs": None}, "outputs"),
        ("gather", {"input": tensor(c, 5)}, "outputs[0]"),
        ("gather_single", {"output": None}, "output"),
        ("gather_single", {"output": tensor(c, COUNT * n - 1)}, "output"),
        ("scatter_object", {"objs": [1] * (n + 1)}, "objs"),
        ("scatter_object", {"objs": None}, "objs"),
        ("send_object", {"obj": object()}, "obj"),
        ("send_object", {"obj": {"deep": [object()]}}, "obj"),
        ("send_object", {"obj": 2**64}, "obj"),
        ("broadcast_object", {"obj": {1.5: {2}}, "root": c.rank}, "obj"),
    ]  # fmt: skip


@pytest.mark.core
@ranks(2, more=(3,))
async def test_arguments_that_contradict_each_other_are_refused_before_anything_is_sent(
    comm: Communicator, case: Case
) -> None:
    if comm.rank == comm.size - 1:
        for name, wrong, text in misfits(comm):
            if carried(comm, name):
                refuse(comm, name, wrong, text)
    await still_works(comm, "any")


@pytest.mark.core
@ranks(2, more=(3,))
async def test_arguments_for_the_root_are_ignored_on_other_ranks(comm: Communicator, case: Case) -> None:
    """Ranks other than the root ignore the arguments for the root. On these ranks, a gather returns None."""
    mine, out = tensor(comm, COUNT), tensor(comm, COUNT)
    for root in range(comm.size):
        off = comm.rank != root
        rubbish: Any = ["no tensor", 1]
        gathered = await comm.gather(rubbish if off else tensors(comm), mine, root)
        single = await comm.gather_single(rubbish if off else tensor(comm, COUNT * comm.size), mine, root)
        assert (gathered is None, single is None) == (off, off)
        assert await comm.scatter(out, rubbish if off else tensors(comm), root) is out
    await still_works(comm, "off the root")


@pytest.mark.core
@ranks(2)
async def test_operator_undefined_for_the_dtype_is_refused_before_anything_is_sent(
    comm: Communicator, case: Case
) -> None:
    """Every reducing operation refuses an operator that the dtype does not support. The operation sends nothing."""
    undefined = [
        (ReduceOp.SUM, torch.bool), (ReduceOp.PRODUCT, torch.bool), (ReduceOp.AVG, torch.int32),
        (ReduceOp.AVG, torch.bool), (ReduceOp.PREMUL_SUM(2.0), torch.int64), (ReduceOp.BAND, torch.float32),
        (ReduceOp.BOR, torch.float16), (ReduceOp.BXOR, torch.complex64), (ReduceOp.MIN, torch.complex64),
        (ReduceOp.MAX, torch.complex128), *((op, dtype) for op in reductions() for dtype in data.CARRIED_ONLY),
    ]  # fmt: skip
    if comm.rank == 0:
        for name in (name for name, good in GOOD.items() if "op" in good(comm)):
            for op, dtype in undefined:
                wrong = {k: _as(v, dtype) for k, v in GOOD[name](comm).items()} | {"op": op}
                refuse(comm, name, wrong, str(dtype), UnsupportedOperation)
    await still_works(comm, "reductions")


def _as(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return [_as(item, dtype) for item in value] if isinstance(value, list) else value


@ranks(2, more=(1,))
async def test_input_that_requires_grad_is_accepted(comm: Communicator, case: Case) -> None:
    """A tensor that an operation only reads may require grad, or be a :class:`torch.nn.Parameter`."""
    for mine in (tensor(comm).requires_grad_(), torch.nn.Parameter(tensor(comm)), torch.inference_mode()(tensor)(comm)):
        outputs = tensors(comm)
        await comm.all_gather(outputs, mine)
        assert all(torch.equal(out, tensor(comm)) for out in outputs)


@ranks(2)
async def test_strides_of_a_tensor_of_at_most_one_element_are_accepted(comm: Communicator, case: Case) -> None:
    """A tensor of at most one element is contiguous, whatever its strides are.

    For example, a slice with one element has the strides of the tensor from which it was made.
    """
    many = torch.arange(16.0, device=comm.device) + comm.rank
    odd = [many[1::2][:1], many.view(4, 4)[:1, ::4], torch.empty_strided((0, 3), (0, 0), device=comm.device)]
    odd += [many[8:].to(torch.int16)[::3][:1], torch.empty_strided((), (), device=comm.device).fill_(comm.rank)]
    for item in odd:
        want = item.clone() - comm.rank
        await comm.broadcast(item, 0)
        assert torch.equal(item, want)
        everybody = await comm.all_gather([torch.empty_like(want) for _ in range(comm.size)], item)
        assert all(torch.equal(one, want) for one in everybody)
        if "p2p" in comm.transports:
            sending = comm.send(item, 1 - comm.rank)
            into = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=comm.device)
            assert torch.equal(await comm.recv(into, 1 - comm.rank), want)
            await sending
            assert torch.equal((await comm.all_gather_object([item]))[0][0].to(comm.device), want)


@pytest.mark.core
@ranks(2)
@pytest.mark.parametrize("state", ["closed", "aborted"])
async def test_every_operation_of_a_closed_or_aborted_communicator_raises(
    comm: Communicator, case: Case, state: str
) -> None:
    other = await case.open("other")
    await other.barrier()
    await comm.barrier()  # An abort by one rank may come before the other one has seen the end of the first barrier.
    if state == "closed":
        await other.aclose()
    else:
        other.abort("for the test")
    for name, good in GOOD.items():
        if carried(comm, name):
            with pytest.raises(CommClosedError if state == "closed" else CommAbortedError, match=name):
                getattr(other, name)(**good(comm))
    await other.aclose()
