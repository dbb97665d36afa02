"""A driver and its workers in a simulated world: workers die, are started anew, or are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from repeating import repeated

import aiocomms
from aiocomms.errors import CommAbortedError, CommError, DriverLostError, PlanLostError, WorkerError
from aiocomms.serving import Driver, Service
from aiocomms.testing.simulation import Faults, here

pytestmark = pytest.mark.deterministic

RANKS = 3
PATIENCE = 60.0
PLANS = 12


def model(service: Service) -> Callable[[Any], Awaitable[Any]]:
    """Return what carries out a plan: it sums up a number over the ranks, some times."""

    async def execute(plan: Any) -> Any:
        x = torch.full((2,), float(plan["x"]))
        for turn in range(3):
            if plan.get("fails") == service.comm.rank and turn == 1:
                raise ValueError("no such expert")
            await service.comm.all_reduce(x)
        return x.tolist()

    return execute


async def serve(drive: Callable[[Driver, Service], Awaitable[Any]], recover: Any, joins: bool = False) -> Any:
    """Drive on rank 0, and work on the others."""
    comm = await aiocomms.new_comm(timeout=5, join=joins)
    async with Service(comm, recover) as service:
        if comm.rank:
            return await service.work(model(service))
        async with service.drive(model(service)) as driver:
            return await drive(driver, service)


def carried_out(result: Any, x: float) -> bool:
    """Return whether a result is right for some number of ranks."""
    return result in [[x * size**3] * 2 for size in range(1, here().ranks + 1)]


async def plan_after_plan(driver: Driver, service: Service) -> Any:
    """Have plans carried out until each was; count those that were lost on their way."""
    lost = 0

    async def insist(number: int) -> None:
        nonlocal lost
        run = driver.run if number % 3 else driver.run_in_order
        await asyncio.sleep(0.1 * number)
        while True:
            try:
                assert carried_out(await run({"x": number}), number)
                return
            except PlanLostError:
                lost += 1
                await driver.ready()

    await asyncio.gather(*(insist(number) for number in range(PLANS)))
    return "served", service.comm.size, lost


async def go_on_with_fewer() -> Any:
    try:
        return await serve(plan_after_plan, lambda lost: lost.reconfigure(timeout=PATIENCE))
    except DriverLostError:
        return "without a driver"
    except CommAbortedError:
        return "excluded"


async def go_on_with_as_many() -> Any:
    return await serve(
        plan_after_plan, lambda lost: lost.reconfigure(size=RANKS, timeout=PATIENCE), joins=here().restarts > 0
    )


def test_plans_are_carried_out_by_all_ranks():
    for seed in range(3):
        assert repeated(go_on_with_fewer, RANKS, seed=seed).results == [("served", RANKS, 0), None, None]


async def die_amid(doomed: int, program: Any, restart: float | None = None) -> Any:
    """Have one rank die after half a second of a program."""
    if here().rank == doomed and not here().restarts:
        asyncio.get_running_loop().call_later(0.5, here().world.kill, doomed, restart)
    return await program()


def test_the_plans_of_a_dead_worker_are_lost_and_the_others_go_on():
    for seed in range(4):
        results = repeated(lambda: die_amid(1, go_on_with_fewer), RANKS, seed=seed).results
        assert results[0][:2] == ("served", RANKS - 1)
        assert results[1:] == [None, None]


def test_a_worker_that_was_started_anew_takes_its_part_again():
    for seed in range(4):
        results = repeated(lambda: die_amid(2, go_on_with_as_many, restart=0.2), RANKS, seed=seed).results
        assert results[0][:2] == ("served", RANKS)


async def work_for_nobody() -> Any:
    """Lose the driver, without a way to recover."""
    try:
        return await die_amid(0, lambda: serve(plan_after_plan, None))
    except CommError as error:
        return type(error).__name__, error.message


def test_workers_say_that_the_driver_died():
    for seed in range(4):
        dead, *others = repeated(work_for_nobody, RANKS, seed=seed).results
        assert dead is None
        assert [name for name, _ in others] == ["PeerDiedError"] * 2
        assert all("rank 0" in message for _, message in others)


async def fail(driver: Driver, service: Service) -> Any:
    """Have one plan fail on a worker, and another one go on."""
    failing = driver.run({"x": 1, "fails": 1})
    failed, done = await asyncio.gather(failing, driver.run({"x": 2}), return_exceptions=True)
    assert isinstance(failed, WorkerError)
    assert carried_out(done, 2)
    return str(failed)


def test_a_plan_that_fails_on_a_worker_ends_alone():
    for seed in range(4):
        text, *_ = repeated(lambda: serve(fail, None), RANKS, seed=seed).results
        assert "no such expert" in text


async def go_on_or_say_why() -> Any:
    try:
        return await go_on_with_fewer()
    except CommError as error:
        return type(error).__name__


@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_left_serves_whatever_goes_wrong(seed):
    history = repeated(go_on_or_say_why, RANKS, seed=seed, faults=Faults(deaths=1, cuts=1, pauses=1, within=1.0))
    driver = history.results[0]
    # Where the driver has died, or the others have excluded it, the workers end.
    assert driver in (None, "excluded") or driver[0] == "served"
