"""A driver and its workers as real processes: one is killed amid requests, and the service goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import HANGS, KILLED, Rank, Run
from simulated import NET, PROCESSES

import aiocomms
from aiocomms.errors import PeerDiedError, PlanLostError
from aiocomms.lowlevel import clock
from aiocomms.serving import Service

LARGE = 300_000
"""Elements: what is sent of it waits for the other end."""

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(params=[NET, "c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def model(service: Service, place: Rank) -> Callable[..., Any]:
    """Sums up as often as a plan says; its layer holds what it was given at first."""
    comm = service.comm

    async def execute(plan: dict[str, Any]) -> Any:
        x = plan["x"] + comm.rank
        for turn in range(plan["times"]):
            if plan.get("dies") == comm.rank and turn == 1:
                await place.die()
            if plan.get("fails") == comm.rank and turn == 1:
                raise ValueError("no such expert")
            await comm.all_reduce(x)
        return x[:2].tolist()

    return execute


def wanted(x: float, times: int, size: int) -> list[float]:
    return [(size * x + size * (size - 1) / 2) * size ** (times - 1)] * 2


async def stay(place: Rank, drive: Callable[..., Any]) -> Any:
    """A rank that works, or drives; those that are left go on without the dead."""
    comm = await place.open()
    async with Service(comm, lambda lost: lost.reconfigure(timeout=HANGS)) as service:
        execute = model(service, place)
        if comm.rank:
            return await service.work(execute)
        async with service.drive(execute) as driver:
            return await drive(driver, service)


async def _die_amid_requests(driver: Any, service: Service) -> list[str]:
    x = torch.ones(LARGE)
    assert await driver.run({"x": x, "times": 3}) == wanted(1, 3, 3)
    requests = [driver.run({"x": x, "times": 3, "dies": 1 if i == 5 else None}) for i in range(10)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    lost = [error for error in results if not isinstance(error, list)]
    assert lost
    for error in lost:
        assert isinstance(error, PlanLostError), error
        assert isinstance(error.__cause__, aiocomms.CommError)
    assert all(result == wanted(1, 3, 3) for result in results if isinstance(result, list))
    await driver.ready()
    assert service.comm.size == 2
    again = await asyncio.gather(*(driver.run({"x": x, "times": 3}) for _ in range(10)))
    assert again == [wanted(1, 3, 2)] * 10
    assert await driver.run_in_order({"x": x, "times": 2}) == wanted(1, 2, 2)
    return ["served"]


async def killed(place: Rank) -> Any:
    return await stay(place, _die_amid_requests)


@PROCESSES
def test_killed_worker_fails_its_requests_and_others_go_on(ranks: Run) -> None:
    assert ranks(3, killed) == [["served"], KILLED, None]


async def replaced(place: Rank) -> Any:
    """Rank 1 dies; what was rank 2's process until then takes its place, as a new rank 1."""

    async def recover(lost: Any) -> Any:
        return await lost.reconfigure(size=2, timeout=HANGS)

    async def drive(driver: Any, service: Service) -> str:
        with pytest.raises(PlanLostError) as caught:
            await driver.run({"x": torch.ones(4), "times": 2, "dies": 1})
        assert "rank 1" in str(caught.value)
        await driver.ready()
        assert await driver.run({"x": torch.ones(4), "times": 2}) == wanted(1, 2, 2)
        return service.comm.name

    if place.rank == 2:
        await place.all_told("open", 0)
        comm = await aiocomms.new_comm(place.transport, store=place.store(), rank=1, size=2, join=True)
    else:
        comm = await place.open(ranks=[0, 1])
        place.tell(f"open {place.rank}")
    async with Service(comm, recover) as service:
        execute = model(service, place)
        if comm.rank:
            return await service.work(execute)
        async with service.drive(execute) as driver:
            return await drive(driver, service)


def test_newcomer_replaces_a_killed_worker(ranks: Run) -> None:
    assert ranks(3, replaced) == ["world@2", KILLED, None]


async def _fail_amid_collectives(driver: Any, service: Service) -> str:
    """The failing rank leaves the others in collectives that it never calls; nobody else's request notices."""
    x = torch.ones(LARGE if clock.simulation is None else 3)  # where each message waits for the other end
    for _ in range(5):
        requests = [driver.run({"x": x, "times": 4, "fails": 1 if i % 3 == 1 else None}) for i in range(9)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        for i, result in enumerate(results):
            if i % 3 == 1:
                assert isinstance(result, aiocomms.errors.WorkerError), result
                assert result.peer == 1
            else:
                assert result == wanted(1, 4, 3)
    assert driver.failure is None
    return service.comm.name


async def failing(place: Rank) -> Any:
    return await stay(place, _fail_amid_collectives)


def test_error_amid_collectives_fails_only_its_request(ranks: Run) -> None:
    assert ranks(3, failing) == ["world", None, None]


async def orphaned(place: Rank) -> Any:
    """Rank 0 dies: the workers end, and say why."""
    comm = await place.open()
    if comm.rank == 0:
        await place.all_told("works", 1, 2)
        await place.die()
    async with Service(comm) as service:
        place.tell(f"works {comm.rank}")
        with pytest.raises(PeerDiedError, match="rank 0"):
            await service.work(model(service, place))
        return "ended"


def test_workers_end_when_the_driver_dies(ranks: Run) -> None:
    assert ranks(3, orphaned) == [KILLED, "ended", "ended"]


async def inferring(place: Rank) -> str:
    """Any op may write to a tensor that a model makes in torch's inference mode, also an op that ends outside of it."""
    comm = await place.open()
    lane, other = comm.lane("x"), 1 - comm.rank
    for count in (5, LARGE):
        for way in (comm, lane):
            with torch.inference_mode():
                x, into = torch.ones(count) + comm.rank, [torch.zeros(count) for _ in range(4)]
                rows = [torch.zeros(count) for _ in range(2)]
                works = [
                    way.all_reduce(into[0].add_(x)),
                    way.broadcast(into[1] if comm.rank else x, 0),
                    way.all_gather(rows, x),
                    way.send(x, other),
                    way.recv(into[2], other),
                    way.reduce_scatter(into[3], [x, x], "mean"),
                ]
            for work in works:
                await work
            assert [t[-1].item() for t in (into[0], rows[0], rows[1], into[2], into[3])] == [3, 1, 2, 1 + other, 1.5]
    with torch.inference_mode():
        window = await comm.new_window(torch.zeros(4))
    await window.put(torch.ones(2), other)
    await window.flush(other)
    await comm.barrier()
    with torch.inference_mode():
        mine = torch.zeros(2)
    await window.get(mine, other)
    assert mine.tolist() == [1, 1]
    await comm.barrier()  # no rank closes before the other has read
    await comm.aclose()
    return "inferred"


def test_service_runs_in_inference_mode(ranks: Run) -> None:
    assert ranks(2, inferring) == ["inferred"] * 2
