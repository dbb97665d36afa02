"""Torch's own code over the backend on a fake GPU, in processes: tensors of the CPU stand for tensors on the GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from places import group
from plugins import installed
from processes import HANGS, Rank, Run
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from aiocomms import blocking
from aiocomms.integrations.torch_backend import communicators

pytestmark = [pytest.mark.timeout(HANGS), pytest.mark.real, pytest.mark.search]
GPU = torch.device("cuda", 0)


def distribute(folder: Path) -> None:
    """Make the fake transport an installed one."""
    folder.mkdir(parents=True)
    sys.path.insert(0, str(installed(folder, ucx_fake="fake_ucx:FakeUcxTransport")))


def net(rank: int) -> torch.nn.Module:
    """Return a model whose weights differ between ranks, until DDP gives all ranks the weights of rank 0."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5 + rank, parameter.numel()).view_as(parameter))
    return model


def gradients(rank: int, hook: bool) -> list[list[float]]:
    model = DistributedDataParallel(net(rank))
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    data = torch.linspace(-1, 1, 12).view(3, 4) * (rank + 1)
    for _ in range(2):
        model(data).square().sum().backward()
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


async def ddp(place: Rank) -> None:
    """The gradients of DDP equal those over gloo, also with a communication hook."""
    distribute(Path(place.folder) / f"rank {place.rank}")
    opened: list[torch.device] = []

    def open_gpu(transport: Any, device: torch.device, **where: Any) -> blocking.Communicator:
        opened.append(device)
        return blocking.new_comm("ucx_fake", **where)

    communicators.open_gpu = open_gpu
    communicators.device_of = lambda tensors: GPU if tensors else torch.device("cpu")
    with group(place, "gloo"):
        wanted = [gradients(place.rank, hook) for hook in (False, True)]
    with group(place):
        assert [gradients(place.rank, hook) for hook in (False, True)] == wanted
        assert opened == [GPU]
        assert dist.group.WORLD.comms.gpu.comm.statistics().collectives > 0


@pytest.mark.parametrize("transport", ["ucx"])
def test_ddp(ranks: Run) -> None:
    ranks(2, ddp)
