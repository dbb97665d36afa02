"""Torch code on torch.distributed, run over the backend and over gloo: DDP, FSDP2, DTensor, pipelines, checkpoints.

The code is torch's own, out of its wheel; both backends must give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from places import group
from processes import HANGS, KILLED, Rank, Run
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

pytestmark = [pytest.mark.timeout(HANGS), pytest.mark.real]
over_ucx = pytest.mark.parametrize("transport", ["ucx"])

Found = dict[str, Tensor]


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))


def batch(rank: int, rows: int = 6, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def gradients(model: nn.Module) -> Found:
    return {name: whole(it.grad) for name, it in model.named_parameters()}


def ddp(rank: int) -> Found:
    """Train by DDP for several steps, with many small buckets, and backward passes that are not reduced."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(rank + 10 * step)).square().mean().backward()
        model(batch(rank + 10 * step + 5)).square().mean().backward()
        optimizer.step()
    return gradients(model) | {f"after {name}": whole(it) for name, it in model.named_parameters()}


def ddp_sparse(rank: int) -> Found:
    """Return sparse gradients of an embedding; each rank uses other rows, and another number of them."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.EmbeddingBag(10, 3, sparse=True, mode="sum"))
    model(torch.arange(2 + 4 * rank).view(1, -1)).square().sum().backward()
    return gradients(model)


class PartlyUsed(nn.Module):
    """A model of which no output depends on some of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def ddp_uneven(rank: int) -> Found:
    """Train with more batches on one rank: DDP's Join then calls the group's methods with tensors, not lists."""
    model = DistributedDataParallel(PartlyUsed(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(batch(rank + 10 * step)).square().mean().backward()
            optimizer.step()
    return {name: whole(it) for name, it in model.named_parameters()}


def fsdp(rank: int) -> Found:
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    for step in range(2):
        model(batch(rank + 10 * step)).square().mean().backward()
    return gradients(model)


def tensor_parallel(rank: int) -> Found:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), init_device_mesh("cpu", (2,)), plan)
    out = model(batch(3))
    out.square().mean().backward()
    return gradients(model) | {"out": whole(out)}


def pipelined(rank: int, schedule: Any) -> Found:
    model = network()
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    run = schedule(stage, n_microbatches=3, loss_fn=lambda out, wanted: (out - wanted).square().mean())
    losses: list[Tensor] = []
    for step in range(2):
        if rank == 0:
            run.step(batch(step))
        else:
            run.step(target=batch(step + 7), losses=losses)
    return gradients(part) | {f"loss {i}": loss.detach() for i, loss in enumerate(losses)}


def gpipe(rank: int) -> Found:
    return pipelined(rank, ScheduleGPipe)


def one_f_one_b(rank: int) -> Found:
    return pipelined(rank, Schedule1F1B)


def compiled(rank: int) -> Found:
    world = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = functional.all_reduce(x * 2, "sum", world)
        gathered = functional.all_gather_tensor(x, 0, world)
        return total + 1, gathered, functional.reduce_scatter_tensor(gathered, "sum", 0, world)

    with torch.no_grad():
        return dict(zip(("total", "gathered", "scattered"), run(batch(rank)), strict=True))


def distributed(rank: int) -> Found:
    """Distribute a TwoTensor as DTensors, and the weights of rank 0 to all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    two = TwoTensor(torch.arange(8.0).view(4, 2), 10 * torch.arange(8.0).view(4, 2))
    found: Found = {}
    for name, placement in (("shard", Shard(0)), ("replicate", Replicate())):
        tensor = distribute_tensor(two, mesh, [placement])
        for each, of in (("local", tensor.to_local()), ("whole", tensor.full_tensor())):
            found |= {f"{each} a of {name}": of.a, f"{each} b of {name}": of.b}
    torch.manual_seed(rank)
    layer = parallelize_module(nn.Linear(4, 4, bias=False), mesh, ColwiseParallel(), src_data_rank=0)
    return found | {"weights": whole(layer.weight)}


class Narrow(Tensor):
    """A parameter that FSDP2 gathers as bfloat16, by the extension that torchao's float8 tensors use."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda it: it.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        keeps = {"detach", "split", "new_zeros", "view", "as_strided", "slice", "clone", "copy_"}
        return tree_map_only(Tensor, cls, out) if func._schema.name.removeprefix("aten::") in keeps else out

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs: Any, meta: Any, dtype: Any, *, out: Tensor | None = None) -> Any:
        if out is None:
            return outputs[0].float(), outputs
        out.copy_(outputs[0].float())
        return None


def fsdp_extended(rank: int) -> Found:
    model = nn.Linear(8, 4, bias=False)
    model.weight = nn.Parameter(Narrow(network()[0].weight.detach()[:4].clone()))
    fully_shard(model)
    out = model(batch(rank))
    out.square().mean().backward()
    return {"out": out.detach(), "gradient": model.weight.grad.to_local()}


HOSTS: list[Callable[[int], Found]] = [
    *(ddp, ddp_sparse, ddp_uneven, fsdp, fsdp_extended, tensor_parallel, distributed, gpipe, one_f_one_b, compiled),
]


async def compares(place: Rank, host: int) -> None:
    found = []
    for backend in ("gloo", "aiocomms"):
        with group(place, backend):
            found.append(HOSTS[host](place.rank))
    theirs, ours = found
    assert theirs.keys() == ours.keys()
    assert theirs
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.fault(134)
@pytest.mark.search
@pytest.mark.parametrize("host", range(len(HOSTS)), ids=[host.__name__ for host in HOSTS])
@over_ucx
def test_the_numbers_are_those_over_gloo(ranks: Run, host: int) -> None:
    ranks(2, compares, host)


async def keeps(place: Rank) -> None:
    """Two ranks read a checkpoint that they have written together, over other values."""
    with group(place):
        mesh = init_device_mesh("cpu", (2,))

        def sharded(factor: float) -> dict[str, Any]:
            model = network()
            fully_shard(model, mesh=mesh)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            return dict(model.state_dict())

        written, read = sharded(3.0), sharded(0.0)
        checkpoint.save(written, checkpoint_id=str(place.folder / "kept"))
        checkpoint.load(read, checkpoint_id=str(place.folder / "kept"))
        checkpoint.async_save(written, checkpoint_id=str(place.folder / "later")).result()
        checkpoint.load(read, checkpoint_id=str(place.folder / "later"))
        for name in written:
            assert torch.equal(whole(read[name]), whole(written[name]))
            assert bool(whole(read[name]).any())


async def loses_a_rank(place: Rank) -> None:
    """DDP's reducer, in C++, raises an error that names the dead rank."""
    with group(place):
        model = DistributedDataParallel(network())
        model(batch(place.rank)).sum().backward()
        out = model(batch(place.rank)).sum()
        if place.rank == 1:
            await place.die()
        with pytest.raises(RuntimeError, match="rank 1"):
            out.backward()


@pytest.mark.search
@pytest.mark.fault(1, transport="ucx")
@over_ucx
def test_ddp_hears_of_a_death(ranks: Run) -> None:
    assert ranks(2, loses_a_rank) == [None, KILLED]


@pytest.mark.search
@over_ucx
def test_checkpoints(ranks: Run) -> None:
    ranks(2, keeps)
