"""The calls of the nccl transport on the loop's thread, over the fake GPU: none of them waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aiocomms_nccl import bringup
from fake_cuda import FakeCuda, FakeEvent
from fake_nccl import FakeComm, FakeNccl, FakeNcclTransport
from loop_watch import watched
from torch.distributed import HashStore

import aiocomms
from aiocomms import new_comm
from aiocomms.testing import local_world, run_ranks

pytestmark = pytest.mark.deterministic

FORMS: list[tuple[type, str]] = [
    (FakeNccl, "unique_id"),
    (FakeNccl, "communicator"),
    (FakeComm, "commSplit"),
    (FakeComm, "abort"),
    (FakeComm, "destroy"),
    (FakeEvent, "synchronize"),
    (FakeNcclTransport, "layers"),
    (FakeNcclTransport, "gpu"),
]
"""Calls that wait for other ranks or for the GPU, or load something."""
CALLS: list[tuple[type, str]] = [(FakeComm, "_call"), (FakeNccl, "group_start"), (FakeNccl, "group_end")]
"""Calls that take long when an algorithm is called first, or where CUDA's queue is full."""


def on_the_loop(monkeypatch: pytest.MonkeyPatch, *functions: tuple[type, str]) -> list[str]:
    """Note which of some functions are called on this thread."""
    here, called = threading.get_ident(), list[str]()

    def noting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                called.append(name)
            return function(*args, **kwargs)

        return call

    for owner, name in functions:
        kept = owner.__dict__[name]
        wrapped = noting(getattr(kept, "__func__", kept), f"{owner.__name__}.{name}")
        monkeypatch.setattr(owner, name, classmethod(wrapped) if isinstance(kept, classmethod) else wrapped)
    return called


async def calls(comm: aiocomms.Communicator) -> None:
    """Call one op of each kind that NCCL carries, and split."""
    other, tensor = 1 - comm.rank, torch.ones(4)
    await comm.all_reduce(tensor)
    await comm.all_gather_single(torch.empty(8), tensor)
    await comm.all_to_all_single(torch.empty(4), tensor)
    await comm.barrier()
    received = comm.recv(torch.empty(4), other)
    await comm.send(tensor, other)
    await received
    got = comm.recv_object(other)
    await comm.send_object({"a": tensor}, other)
    await got
    async with await comm.split([0, 1]) as part:
        await part.all_reduce(tensor)


def is_native(cuda: FakeCuda, comm: Any) -> bool:
    return bool(comm._core.transports[0].launcher.spin == 0)


@pytest.mark.asyncio
async def test_nothing_that_waits_is_called_on_the_loop(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    forming, called = on_the_loop(monkeypatch, *FORMS), on_the_loop(monkeypatch, *CALLS)
    with watched() as held:
        async with local_world(2, "nccl_fake") as comms:
            await run_ranks(comms, calls)
            native = is_native(cuda, comms[0])
    assert forming == []
    assert held == [], "\n".join(map(str, held))
    assert bool(called) is not native  # the launcher in Python calls NCCL where it is called itself


@pytest.mark.asyncio
async def test_nor_when_a_program_forms_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the transport and for addresses does not run on the loop's thread either."""
    looked = on_the_loop(monkeypatch, (FakeNcclTransport, "probe"), (FakeNcclTransport, "preference"))
    monkeypatch.setattr(bringup, "_address", noted := _noting(bringup._address))
    store = HashStore()

    async def rank(number: int) -> None:
        async with new_comm("nccl_fake", store=store, rank=number, size=2) as comm:
            await comm.barrier()

    with watched() as held:
        await asyncio.gather(rank(0), rank(1))
    assert held == [], "\n".join(map(str, held))
    assert looked == []
    assert noted.threads
    assert threading.get_ident() not in noted.threads


class _noting:  # noqa: N801 - the class stands for a function
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.threads = function, set[int]()

    def __call__(self, *args: Any) -> Any:
        self.threads.add(threading.get_ident())
        return self.function(*args)
