"""The statistics of a service: outcomes, durations and number of its plans, also after a recovery."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import anyio
import anyio.to_thread
import pytest
import torch
from concurrency import ranks, together, turns

from aiocomms.errors import (
    ArgumentTypeError,
    CommAbortedError,
    PlanLostError,
    PlanTimeoutError,
    ServiceBusyError,
    WorkerError,
)
from aiocomms.serving import Driver, PlanFailures, Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

Body = Callable[[Driver, list[Service]], Awaitable[object]]


class Gate:
    """An event that the plans named ``"wait"`` wait for on every rank."""

    def __init__(self) -> None:
        self.opened = anyio.Event()


def make(service: Service, gate: Gate):
    """Return the function that executes plans: ``"wait"``, ``"items"``, ``("fail", rank)``, or any other word."""

    async def give():
        for n in range(3):
            yield n

    async def execute(plan):
        if plan == "wait":
            await gate.opened.wait()
        if plan[0] == "fail" and service.comm.rank == plan[1]:
            raise KeyError(plan)
        return (await service.comm.all_reduce(torch.ones(1))).item()

    return lambda plan: give() if plan == "items" else execute(plan)


async def serve(world, body: Body, gate: Gate, recover=None, **limits) -> list[Service]:
    """Run ``body(driver, services)`` on rank 0, and return the services once they have ended."""
    services = [Service(comm, recover) for comm in world]

    async def one(service: Service) -> None:
        async with service:
            if service.comm.rank:
                await service.work(make(service, gate))
            else:
                async with service.drive(make(service, gate), **limits) as driver:
                    await body(driver, services)

    await ranks(services, one)
    return services


@asynccontextmanager
async def calling(call: Awaitable[object]):
    """Run a call in a task during the block, and cancel it at the end."""

    async def await_it() -> None:
        await call

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(await_it)
        await turns()
        yield
        tasks.cancel_scope.cancel()


def test_every_call_is_counted_once_by_how_it_has_ended(run):
    async def body(driver: Driver, services: list[Service]) -> None:
        await driver.run("good")
        await driver.run_in_order("good")
        assert [item async for item in driver.stream("items")] == [0, 1, 2]
        with pytest.raises(KeyError):
            await driver.run(("fail", 0))
        for _ in range(2):
            with pytest.raises(WorkerError):
                await driver.run(("fail", 1))
        with pytest.raises(ArgumentTypeError):
            await driver.run(object())
        async with aclosing(driver.stream("items")) as items:
            async for _ in items:
                break
        async with calling(driver.run("wait")):
            pass
        await turns(50)

    async def main() -> None:
        async with local_world(2) as world:
            one, two = (service.statistics() for service in await serve(world, body, Gate()))
        assert (one.done, one.cancelled, one.refused, one.running, one.waiting) == (3, 2, 0, 0, 0)
        assert one.failed == [
            PlanFailures("WorkerError", 2), PlanFailures("KeyError", 1), PlanFailures("ArgumentTypeError", 1),
        ]  # fmt: skip
        assert (sum(one.took.counts), sum(one.waited.counts)) == (3, 8)
        assert one.waited.seconds > 0
        assert one.took.seconds > 0
        # Rank 1 never got the plan that could not be sent, and a plan that rank 0 cancels is no failure here.
        assert two.failed == [PlanFailures("KeyError", 2)]
        assert (two.done + two.cancelled, two.refused, two.running, two.recoveries) == (6, 0, 0, 0)
        assert two.cancelled >= 2
        assert sum(two.took.counts) == two.done

    run(main)


def test_plans_under_way_and_waiting_are_seen_from_any_thread(run):
    async def body(driver: Driver, services: list[Service]) -> None:
        assert services[0].statistics().oldest is None
        async with calling(driver.run("wait")), calling(driver.run("good")):
            for _ in range(2):
                with pytest.raises(ServiceBusyError):
                    await driver.run("good")
            with pytest.raises(ServiceBusyError):
                driver.stream("items")
            seen = await anyio.to_thread.run_sync(services[0].statistics)
            assert (seen.running, seen.waiting, seen.refused, seen.failed) == (1, 1, 3, [])
            assert seen.oldest > 0
            theirs = services[1].statistics()
            assert (theirs.running, theirs.waiting) == (1, 0)

    async def main() -> None:
        async with local_world(2) as world:
            one, two = (s.statistics() for s in await serve(world, body, Gate(), max_running=1, max_waiting=1))
        assert (one.running, one.waiting, one.oldest, one.cancelled) == (0, 0, None, 2)
        assert (two.running, two.cancelled) == (0, 1)

    run(main)


@pytest.mark.virtual_time
def test_plan_that_is_late_fails_by_its_time_limit(run):
    async def body(driver: Driver, services: list[Service]) -> None:
        async with calling(driver.run("wait")):
            with pytest.raises(PlanTimeoutError, match="has waited"):
                await driver.run("good", timeout=1)
            assert services[0].statistics().failed == [PlanFailures("PlanTimeoutError", 1)]
            assert services[0].statistics().waiting == 0

    async def main() -> None:
        async with local_world(2) as world:
            await serve(world, body, Gate(), max_running=1)

    run(main)


def test_counts_go_on_over_a_recovery_under_the_first_name(run):
    async def recover(lost):
        return await lost.reconfigure(ranks=[0, 1])

    async def body(driver: Driver, services: list[Service]) -> None:
        told = []
        hook = services[1].register_comm_hook(lambda comm: told.append(comm.name))
        await driver.run("good")

        async def lost() -> None:
            with pytest.raises(PlanLostError):
                await driver.run("wait")

        async def again() -> None:
            assert await driver.run("wait", retry=True) == 2.0

        async def abort() -> None:
            await turns(20)
            services[1].current.abort("enough")
            gate.opened.set()

        await together(lost, again, abort)
        await driver.run("good")
        hook.remove()
        assert told == ["world", "world@2"]

    async def main() -> None:
        nonlocal gate
        gate = Gate()
        async with local_world(2) as world:
            one, two = (s.statistics() for s in await serve(world, body, gate, recover))
        assert (one.name, one.rank, one.recoveries, one.done) == ("world", 0, 1, 3)
        assert one.failed == [PlanFailures("PlanLostError", 1)]
        assert sum(one.waited.counts) == 5  # The attempt that was lost counts, too.
        assert (two.name, two.rank, two.recoveries, two.done) == ("world", 1, 1, 3)
        assert two.failed == [PlanFailures("PlanLostError", 2)]

    gate = None
    run(main)


def test_state_of_a_driver_says_whether_it_takes_plans(run):
    seen = []

    async def recover(lost):
        seen.append(held[0].state)
        return await lost.reconfigure(ranks=[0, 1])

    async def body(driver: Driver, services: list[Service]) -> None:
        held.append(driver)
        seen.append(driver.state)
        services[0].current.abort("enough")
        await driver.ready()
        seen.append(driver.state)
        driver._told_to_end()
        seen.append(driver.state)

    async def main() -> None:
        async with local_world(2) as world:
            assert [service.closed for service in await serve(world, body, Gate(), recover)] == [True, True]
        seen.append(held[0].state)

    held = []
    run(main)
    assert [state.doing for state in seen if state is not seen[2]] == ["serves", "recovers", "serves", "ends", "ended"]
    assert isinstance(seen[1].reason, CommAbortedError)
    assert "has ended" in str(seen[-1].reason)
    assert seen[0].reason is None


def test_comm_hook_that_raises_at_once_is_not_registered(run):
    async def main() -> None:
        async with local_world(1) as [comm], Service(comm) as service:

            def refuse(comm):
                raise ValueError(comm.name)

            with pytest.raises(ValueError, match="world"):
                service.register_comm_hook(refuse)
            assert not service._watch.comm_hooks

    run(main)
