"""Modes of torch that any task of the loop has entered: no code of aiocomms runs in them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from concurrency import ranks, run_on, together
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.testing import local_world

pytestmark = [pytest.mark.deterministic, pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])]

SMALL, LARGE = 2, 3 * 2**15
"""Numbers of elements: large tensors take other schedules, and travel outside of an object's encoding."""


def ones(count: int) -> Tensor:
    return torch.ones(count, device="cpu")


def parts(comm: Communicator, count: int) -> list[Tensor]:
    return [ones(count) for _ in range(comm.size)]


COLLECTIVES: dict[str, Callable[[Communicator, int], Any]] = {
    "all_reduce": lambda comm, n: comm.all_reduce(ones(n)),
    "reduce": lambda comm, n: comm.reduce(ones(n), 1),
    "scan": lambda comm, n: comm.scan(ones(n)),
    "exscan": lambda comm, n: comm.exscan(ones(n)),
    "broadcast": lambda comm, n: comm.broadcast(ones(n), 1),
    "all_gather": lambda comm, n: comm.all_gather(parts(comm, n), ones(n)),
    "all_gather_single": lambda comm, n: comm.all_gather_single(ones(comm.size * n), ones(n)),
    "reduce_scatter": lambda comm, n: comm.reduce_scatter(ones(n), parts(comm, n)),
    "reduce_scatter_single": lambda comm, n: comm.reduce_scatter_single(ones(n), ones(comm.size * n)),
    "all_to_all": lambda comm, n: comm.all_to_all(parts(comm, n), parts(comm, n)),
    "all_to_all_single": lambda comm, n: comm.all_to_all_single(ones(comm.size * n), ones(comm.size * n)),
    "gather": lambda comm, n: comm.gather(parts(comm, n) if comm.rank == 0 else None, ones(n), 0),
    "scatter": lambda comm, n: comm.scatter(ones(n), parts(comm, n) if comm.rank == 0 else None, 0),
    "in a lane": lambda comm, n: comm.lane("a").all_reduce(ones(n)),
    "all_gather_object": lambda comm, n: comm.all_gather_object([ones(n), b"x" * n, "y" * n]),
    "broadcast_object": lambda comm, n: comm.broadcast_object(ones(n) if comm.rank == 0 else None, 0),
    "barrier": lambda comm, n: comm.barrier(),
}


async def communicate(world: Sequence[Communicator], count: int) -> None:
    """Call every operation that takes tensors, with ``count`` elements."""
    for call in COLLECTIVES.values():
        await ranks(world, lambda comm, call=call: call(comm, count))
    zero, one, *_ = world
    await together(lambda: zero.send(ones(count), 1), lambda: one.recv(ones(count), 0))
    await together(lambda: zero.send_object(ones(count), 1), lambda: one.recv_object(0))
    out, into = await together(lambda: zero.open_stream(1), lambda: one.open_stream(0))
    await together(lambda: out.send(ones(count)), into.__anext__)
    await together(out.aclose, into.aclose)


async def everything(transport: str) -> None:
    """Open a world, and call operations of every kind on its ranks."""
    async with local_world(3, transport) as world:
        await communicate(world, SMALL)
        await communicate(world, LARGE)
        await ranks(world, lambda comm: comm.split([0, 1, 2]))
        windows = await ranks(world, lambda comm: comm.new_window(ones(8)))
        await windows[0].put(ones(2), 1)
        await windows[0].signal(1)
        await windows[1].wait_signal(0)
        assert (await windows[2].get(ones(2), 1)).tolist() == [1, 1]
        await together(*(window.aclose for window in windows))


class Watching(TorchDispatchMode):
    """A dispatch mode that records which functions of aiocomms call torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch"):
            frame = frame.f_back
        name = frame.f_globals["__name__"]
        if name.startswith("aiocomms") and not name.startswith("aiocomms.testing"):
            self.seen.add(f"{name}, line {frame.f_lineno}: {func}")
        return func(*args, **(kwargs or {}))


@pytest.mark.fault(116)
def test_internal_steps_run_outside_torch_dispatch_modes(transport: str) -> None:
    with Watching() as watching:
        run_on("asyncio", everything, transport)
    assert not watching.seen, "\n".join(sorted(watching.seen))


@pytest.fixture
def default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


@pytest.mark.fault(115)
@pytest.mark.usefixtures("default_device")
def test_internal_buffers_ignore_the_default_device(transport: str) -> None:
    run_on("asyncio", everything, transport)


@pytest.mark.fault(115)
def test_object_received_within_a_default_device_is_on_its_own_device(transport: str) -> None:
    async def main() -> None:
        async with local_world(2, transport) as (one, two):
            for count in (8, 8192):
                sending = one.send_object({"a": torch.full((count,), 7.0), "b": b"x" * 4 * count}, 1)
                with torch.device("meta"):
                    got = await two.recv_object(0)
                await sending
                assert (got["a"].device.type, got["a"].sum().item(), len(got["b"])) == ("cpu", 7.0 * count, 4 * count)

    run_on("asyncio", main)


@pytest.mark.fault(116)
@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode])
def test_op_that_ends_within_another_tasks_mode_gives_plain_tensors(transport: str, mode: Callable[[], Any]) -> None:
    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def elsewhere() -> None:
            with mode():
                entered.set()
                await leave.wait()

        async with local_world(2, transport) as (one, two):
            tensor, other = torch.full((LARGE,), 1.0), torch.full((LARGE,), 2.0)
            received, reduced = two.recv_object(0), two.all_reduce(other)
            task = asyncio.create_task(elsewhere())
            await entered.wait()
            work = one.all_reduce(tensor)
            sending = one.send_object(tensor, 1)
            got = await received
            await asyncio.gather(work, reduced)
            leave.set()
            await asyncio.gather(task, sending)
            assert type(got) is Tensor
            assert not got.is_inference()
            got += 1  # An in-place update of an inference tensor would fail.
            assert tensor.tolist() == other.tolist() == [3.0] * LARGE

    run_on("asyncio", main)


@pytest.mark.fault(116)
def test_wrapper_and_fake_tensors_are_refused(transport: str) -> None:
    async def main() -> None:
        async with local_world(2, transport) as (one, two):
            calls = [one.all_reduce, lambda it: one.send(it, 1), lambda it: one.send_object([it], 1)]

            def refused(tensor: Tensor) -> Tensor:
                for call in calls:
                    with pytest.raises(ArgumentError, match=r"is a tensor|holds a tensor|tangent"):
                        call(tensor)
                return tensor.sum()

            torch.vmap(refused)(torch.ones(3, 4))
            torch.func.grad(refused)(torch.ones(4))
            refused(torch._to_functional_tensor(torch.ones(4)))
            with FakeTensorMode():
                fake = torch.ones(4)
            for call in calls:
                with pytest.raises(ArgumentTypeError):
                    call(fake)
            await ranks((one, two), lambda comm: comm.barrier())

    run_on("asyncio", main)


@pytest.mark.fault(117)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
def test_tensor_with_a_tangent_is_refused(transport: str) -> None:
    async def main() -> None:
        async with local_world(2, transport) as (one, two):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(torch.ones(4), torch.ones(4))
                with pytest.raises(ArgumentError, match="has a tangent of forward-mode AD"):
                    one.all_reduce(dual)
                works = [comm.all_reduce(torch.ones(4)) for comm in (one, two)]
                for work in works:
                    assert (await work).tolist() == [2.0] * 4

    run_on("asyncio", main)


def test_atomics_change_memory_that_was_made_in_inference_mode(transport, run):
    async def main():
        with torch.inference_mode():
            memories = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]

        async def rank(comm):
            async with await comm.new_window(memories[comm.rank]) as window:
                before = await window.fetch_add(1 - comm.rank, 0, 5)
                await comm.barrier()
                swapped = await window.compare_swap(comm.rank, 0, 5, 6)
                await comm.barrier()
                return before, swapped, int(memories[comm.rank].item())

        async with local_world(2, transport) as world:
            assert await ranks(world, rank) == [(0, 5, 6)] * 2

    run(main)
