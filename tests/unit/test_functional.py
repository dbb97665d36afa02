"""The forms that return a new tensor, against plain torch."""

from __future__ import annotations

import anyio
import pytest
import torch
import torch.distributed as dist
from concurrency import ranks, together

from aiocomms import ReduceOp, functional
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

SIZES = [1, 2, 3, 4]


def inputs(size, *shape):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(*shape, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_functional_forms_return_new_tensors(run, size):
    async def main():
        given = inputs(size, size * 2, 3)
        stack = torch.stack(given)
        copies = [t.clone() for t in given]
        root = size - 1
        async with local_world(size) as world:

            async def each(comm):
                mine, r = given[comm.rank], comm.rank
                part = slice(2 * r, 2 * r + 2)
                assert (await functional.broadcast(mine, root, comm)).equal(stack[root])
                torch.testing.assert_close(await functional.all_reduce(mine, group=comm), stack.sum(0))
                torch.testing.assert_close(await functional.all_reduce(mine, "mean", comm), stack.mean(0))
                assert (await functional.all_reduce(mine, "max", comm)).equal(stack.amax(0))
                assert (await functional.all_reduce(mine, "min", comm)).equal(stack.amin(0))
                torch.testing.assert_close(await functional.all_reduce(mine, "product", comm), stack.prod(0))
                reduced = await functional.reduce(mine, root, ReduceOp.SUM, comm)
                torch.testing.assert_close(reduced, stack.sum(0) if r == root else mine)
                assert (await functional.all_gather(mine, comm)).equal(stack)
                gathered = await functional.gather(mine, root, comm)
                assert gathered.equal(stack) if r == root else gathered is None
                chunk = await functional.scatter(mine if r == root else None, root, comm)
                assert chunk.equal(stack[root][part])
                torch.testing.assert_close(await functional.reduce_scatter(mine, "sum", comm), stack.sum(0)[part])
                turned = await functional.all_to_all(mine, comm)
                assert turned.equal(torch.cat([t[part] for t in given]))
                assert await functional.barrier(comm) is None

            await ranks(world, each)
        assert all(a.equal(b) for a, b in zip(given, copies, strict=True))

    run(main)


def test_functional_recv_returns_what_was_sent():
    async def main():
        async with local_world(2) as (one, two):
            tensor = torch.arange(6, dtype=torch.int16).view(2, 3).T
            got = await together(
                lambda: functional.send(tensor, 1, 3, one),
                lambda: functional.recv((3, 2), 0, 3, two, dtype=torch.int16),
            )
            assert got[1].equal(tensor)

    anyio.run(main)


def test_functional_forms_accept_views_and_parameters():
    async def main():
        async with local_world(2) as world:

            async def each(comm):
                weight = torch.nn.Parameter(torch.ones(2, 3))
                out = await functional.all_reduce(weight.T, group=comm)
                assert out.equal(torch.full((3, 2), 2.0))
                assert not out.requires_grad
                assert weight.equal(torch.ones(2, 3))

            await ranks(world, each)

    anyio.run(main)


def test_functional_group_is_found_by_name_until_it_closes(run):
    async def main():
        async with local_world(2) as world, local_world(2, name="tp") as tensor_parallel:
            with pytest.raises(ArgumentError, match=r"2 communicators of that name"):
                functional.barrier()
            got = await ranks(tensor_parallel, lambda comm: functional.all_reduce(torch.ones(1), group=comm))
            assert [t.item() for t in got] == [2, 2]
            assert world[0].name == "world"
        with pytest.raises(ArgumentError, match="no open communicator"):
            functional.barrier("tp")

    run(main)


def test_functional_group_defaults_to_the_world():
    async def main():
        async with local_world(1):
            for group in (None, "", "world"):
                assert (await functional.all_gather(torch.ones(2), group)).shape == (1, 2)

    anyio.run(main)


def test_wrong_arguments_of_functional_forms_send_nothing():
    async def main():
        async with local_world(3) as world:
            one = world[0]
            for call, name in (
                (lambda: functional.all_reduce([1.0], group=one), "tensor"),
                (lambda: functional.all_reduce(torch.eye(2).to_sparse(), group=one), "sparse_coo tensor, wanted"),
                (lambda: torch.func.vmap(functional.all_reduce)(torch.eye(2), group=one), "vmap.*call the op outside"),
                (lambda: functional.all_reduce(torch.ones(2), "median", one), "op"),
                (lambda: ReduceOp("median"), "kind is 'median', wanted one of 'sum', "),
                (lambda: ReduceOp.PREMUL_SUM(10**400), "factor is 1000.*, wanted a number that a float can hold"),
                (lambda: functional.scatter(torch.ones(4), 0, one), "divisible"),
                (lambda: functional.scatter(torch.ones((3,) + (1,) * 14), 0, one), "15 dimensions, wanted at most 14"),
                (lambda: functional.reduce_scatter(torch.ones(4), "sum", one), "divisible"),
                (lambda: functional.reduce_scatter(torch.tensor(1.0), "sum", one), "divisible"),
                (lambda: functional.all_to_all(torch.ones(4), one), "divisible"),
                (lambda: functional.broadcast(torch.ones(4), 3, one), "root"),
                (lambda: functional.gather(torch.ones(4), -1, one), "root"),
            ):
                with pytest.raises(ArgumentError, match=name):
                    call()
            with pytest.raises(ArgumentTypeError, match="group"):
                functional.barrier(7)
            for shape, dtype, error, text in (
                ("ab", torch.float32, ArgumentTypeError, r"shape is 'ab' \(str\), wanted a sequence of ints"),
                (3, torch.float32, ArgumentTypeError, r"shape is 3 \(int\), wanted a sequence of ints"),
                ((2, -1), torch.float32, ArgumentError, r"shape is \(2, -1\), wanted sizes of at least 0"),
                ((2,), "float32", ArgumentTypeError, r"dtype is 'float32' \(str\), wanted a torch.dtype"),
                ((2,), torch.float4_e2m1fn_x2, ArgumentError, "dtype torch.float4_e2m1fn_x2, wanted one of"),
            ):
                with pytest.raises(error, match=text):
                    functional.recv(shape, 1, group=one, dtype=dtype)
            got = await ranks(world, lambda comm: functional.all_reduce(torch.ones(1), group=comm))
            assert [t.item() for t in got] == [3, 3, 3]

    anyio.run(main)


def process_groups():
    """Yield a group as ``new_group`` returns it, and one as its backend's constructor does."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    yield dist.ProcessGroup(dist.HashStore(), 0, 1)
    yield dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)


def test_process_group_as_group_suggests_from_process_group():
    for group in process_groups():
        match = r"group is .*ProcessGroup.*, wanted a Communicator or its name: .*aiocomms.from_process_group\(group\)"
        with pytest.raises(ArgumentTypeError, match=match):
            functional.all_reduce(torch.ones(1), group=group)


def test_object_with_a_rank_attribute_as_group_is_refused():
    class HasRank:
        rank = 0

    with pytest.raises(ArgumentTypeError, match=r"group is .*HasRank.*, wanted a Communicator or its name$"):
        functional.barrier(HasRank())
