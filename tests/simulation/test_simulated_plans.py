"""Callers of a driver in a simulated world: they leave, take items one by one, wait for turns, have limits, retry."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch
from repeating import repeated

import aiocomms
from aiocomms.bootstrap import supervised
from aiocomms.errors import CommError, PlanLostError, PlanTimeoutError, ServiceBusyError, WorkerError
from aiocomms.serving import Driver, Service
from aiocomms.testing import Faults, here, simulate

pytestmark = pytest.mark.deterministic

Drive = Callable[[Driver, Service], Awaitable[Any]]
SPAN = 0.01
"""Seconds that a step of a plan takes."""


class Model:
    """A model that carries out plans of some steps, and notes what it does."""

    def __init__(self, service: Service) -> None:
        self.comm = service.comm
        self.steps = Counter[int]()
        self.most = self.running = 0

    async def step(self, plan: Any, turn: int) -> float:
        if (plan.get("fails"), plan.get("at", 1)) == (self.comm.rank, turn):
            raise ValueError("no such expert")
        if (plan.get("sleeps"), plan.get("at", 1)) == (self.comm.rank, turn):
            await asyncio.sleep(1e6)
        self.steps[plan["x"]] += 1
        await asyncio.sleep(SPAN)
        return (await self.comm.all_reduce(torch.tensor([float(plan["x"])]))).item()

    async def sum_up(self, plan: Any) -> float:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for turn in range(plan.get("steps", 3)):
                y = await self.step(plan, turn)
            return y
        finally:
            self.running -= 1

    async def generate(self, plan: Any) -> AsyncGenerator[float]:
        for turn in range(plan.get("steps", 5)):
            yield await self.step(plan, turn)

    def execute(self, plan: Any) -> Any:
        return self.generate(plan) if plan.get("yields") else self.sum_up(plan)


MODELS: dict[int, Model] = {}
"""The model of each rank, for the tests to look at."""


async def serve(drive: Drive, recover: Any = None, **limits: Any) -> Any:
    """Drive on rank 0, and work on the others, which may have been started anew."""
    comm = await aiocomms.new_comm(timeout=20, join=here().restarts > 0)
    async with Service(comm, recover) as service:
        model = MODELS[comm.rank] = Model(service)
        if comm.rank:
            return await service.work(model.execute)
        async with service.drive(model.execute, **limits) as driver:
            return await drive(driver, service)


async def with_a_newcomer(lost: Any) -> Any:
    return await lost.reconfigure(size=lost.size, timeout=60)


async def settled(driver: Driver) -> None:
    """Wait until no plan is under way."""
    while plans := list(driver._plans.values()):
        await plans[0].over.wait()


# ------------------------------------------------------------------------------------------------------- cancellation


async def leave_at_random(driver: Driver, service: Service) -> Any:
    """Have clients leave; nothing of their plans goes on, and those of the others are right."""
    answers = 0

    async def client(number: int) -> None:
        nonlocal answers
        await asyncio.sleep(random.random())
        task = asyncio.create_task(driver.run({"x": number, "steps": 20}))
        if number % 4:
            await asyncio.sleep(random.uniform(0, 20 * SPAN))
            task.cancel()
            before = {rank: model.steps[number] for rank, model in MODELS.items()}
            await asyncio.wait([task])
            await settled_one(number)
            for rank, steps in before.items():
                assert MODELS[rank].steps[number] <= steps + 2
            return
        assert await task == number * service.comm.size
        answers += 1

    async def settled_one(number: int) -> None:
        await asyncio.sleep(0.1)
        steps = sum(model.steps[number] for model in MODELS.values())
        await asyncio.sleep(1)
        assert steps == sum(model.steps[number] for model in MODELS.values())

    await asyncio.gather(*map(client, range(40)))
    await settled(driver)
    core = service.current._core
    assert not core.router.turns
    assert driver.failure is None
    return answers


def test_nothing_goes_on_of_plans_whose_clients_have_left():
    for seed in range(5):
        assert repeated(lambda: serve(leave_at_random), 3, seed=seed).results == [10, None, None]


async def leave_while_ranks_die(driver: Driver, service: Service) -> Any:
    async def client(number: int) -> str:
        await asyncio.sleep(random.random())
        try:
            async with asyncio.timeout(random.uniform(0, 40 * SPAN)):
                assert await driver.run({"x": number, "steps": 20}, retry=True) == number * service.comm.size
            return "answered"
        except TimeoutError:
            return "left"

    ends = Counter(await asyncio.gather(*map(client, range(20))))
    await settled(driver)
    await driver.ready()
    assert await driver.run({"x": 1}, retry=True) == service.comm.size
    return ends.total()


def test_clients_leave_while_a_rank_dies_and_others_go_on():
    async def program() -> Any:
        if here().rank == 1 and not here().restarts:
            asyncio.get_running_loop().call_later(random.random(), here().world.kill, 1, 0.5)
        return await serve(leave_while_ranks_die, with_a_newcomer)

    for seed in range(10):
        assert simulate(program, 3, seed=seed).results[0] == 20


# ------------------------------------------------------------------------------------------------------------ streams


async def take_all(driver: Driver, service: Service) -> Any:
    plan = {"x": 1, "yields": True}
    assert await driver.run(plan) == [3.0] * 5
    assert [item async for item in driver.stream(plan)] == [3.0] * 5
    with pytest.raises(aiocomms.errors.ArgumentTypeError, match="no async generator"):
        [item async for item in driver.stream({"x": 1})]
    with pytest.raises(WorkerError, match="no such expert"):
        [item async for item in driver.stream({**plan, "fails": 1, "at": 2})]
    with pytest.raises(ValueError, match="no such expert"):
        [item async for item in driver.stream({**plan, "fails": 0, "at": 2})]
    with pytest.raises(PlanTimeoutError, match=r"rank 2 is in no operation of it"):
        [item async for item in driver.stream({**plan, "sleeps": 2, "at": 3}, timeout=2)]
    assert await driver.run({"x": 2}) == 6.0
    return "done"


def test_stream_gives_what_execute_yields_and_raises_what_it_raises():
    for seed in range(3):
        assert repeated(lambda: serve(take_all), 3, seed=seed).results[0] == "done"


async def take_slowly(driver: Driver, service: Service) -> Any:
    steps = MODELS[0].steps
    async with aclosing(driver.stream({"x": 7, "yields": True, "steps": 100})) as items:
        for taken in range(1, 4):
            await anext(items)
            await asyncio.sleep(5)
            assert steps[7] == taken + 1  # one is ready
        await asyncio.sleep(15)
        with pytest.raises(PlanTimeoutError, match="no item was taken for 10 s"):
            [item async for item in items]
    assert steps[7] < 6
    assert driver.failure is None
    assert await driver.run({"x": 2}) == 4.0


def test_generator_waits_for_its_client_but_not_for_ever():
    simulate(lambda: serve(take_slowly), 2)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "drop"])
def test_client_that_ends_a_stream_ends_its_plan_on_all_ranks(how):
    async def client(driver: Driver) -> None:
        items = driver.stream({"x": 3, "yields": True, "steps": 1000})
        async for _ in items:
            if how == "break":
                return
            if MODELS[1].steps[3] > 5:
                break
        if how == "aclose":
            await items.aclose()
        elif how == "cancel":
            async for _ in items:
                pass
        del items

    async def drive(driver: Driver, service: Service) -> None:
        task = asyncio.create_task(client(driver))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.01)
        before = [model.steps[3] for model in MODELS.values()]
        await asyncio.sleep(1)
        after = [model.steps[3] for model in MODELS.values()]
        assert max(after) - min(before) <= 2
        assert not driver._plans
        assert await driver.run({"x": 2}) == 6.0

    simulate(lambda: serve(drive), 3)


# ---------------------------------------------------------------------------------------------------------- admission


async def queue_up(driver: Driver, service: Service) -> Any:
    order: list[int] = []

    async def client(number: int, priority: float) -> None:
        await driver.run({"x": number}, priority=priority)
        order.append(number)

    tasks = []
    for number, priority in enumerate([5, 5, 1, 0, 1, -1]):  # the first two begin at once
        tasks.append(asyncio.create_task(client(number, priority)))
        await asyncio.sleep(0)
    with pytest.raises(ServiceBusyError, match="2 plans are under way, and 4 wait for their turn"):
        await driver.run({"x": 9})
    with pytest.raises(ServiceBusyError):
        driver.stream({"x": 9, "yields": True})
    tasks[2].cancel()
    await asyncio.sleep(0)
    late = asyncio.create_task(client(6, 0))
    await asyncio.sleep(0)
    tasks[4].cancel()
    await asyncio.sleep(0)
    with pytest.raises(PlanTimeoutError, match=r"waited 0\.001 s for its turn, and 2 are under way"):
        await driver.run({"x": 9}, timeout=0.001)
    await asyncio.gather(*tasks, late, return_exceptions=True)
    assert MODELS[0].most == 2
    assert driver._turns.waiting == 0
    return order


def test_plans_begin_by_priority_and_not_more_than_wanted():
    for seed in range(3):
        results = repeated(lambda: serve(queue_up, max_running=2, max_waiting=4), 3, seed=seed).results
        order = results[0]
        assert sorted(order[:2]) == [0, 1]
        assert sorted(order[2:4]) == [3, 5]
        assert order[4:] == [6]


async def many_leave(driver: Driver, service: Service) -> Any:
    """Clients come, wait and leave at random; every plan that nobody has cancelled is carried out."""
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        await asyncio.sleep(2 * random.random())
        try:
            async with asyncio.timeout(random.choice([0.0, 0.1, 0.5, None, None])):
                assert await driver.run({"x": number}, priority=random.randrange(3)) == number * service.comm.size
                done += 1
        except (TimeoutError, ServiceBusyError):
            pass

    await asyncio.gather(*map(client, range(60)))
    await settled(driver)
    assert MODELS[0].most <= 3
    assert driver._turns.waiting == 0
    return done


def test_clients_that_leave_the_queue_hold_nobody_up():
    for seed in range(5):
        assert repeated(lambda: serve(many_leave, max_running=3, max_waiting=10), 2, seed=seed).results[0] > 20


async def end_with_a_queue(driver: Driver, service: Service) -> Any:
    tasks = [asyncio.create_task(driver.run({"x": number})) for number in range(5)]
    await asyncio.sleep(0)
    return tasks


async def end_and_look() -> Any:
    tasks = await serve(end_with_a_queue, max_running=1)
    return [await task for task in tasks] if tasks else None


def test_plans_that_wait_are_carried_out_before_the_end():
    assert simulate(end_and_look, 2).results[0] == [0.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("limits", [{"max_running": 0}, {"max_waiting": -1}, {"max_running": 1.5}])
def test_wrong_limits_are_refused(limits):
    with pytest.raises(aiocomms.errors.ArgumentError, match="max_"):
        simulate(lambda: serve(queue_up, **limits), 1)


# -------------------------------------------------------------------------------------------------------- time limits


async def be_late(driver: Driver, service: Service) -> Any:
    with pytest.raises(PlanTimeoutError) as caught:
        await driver.run({"x": 1, "sleeps": 2}, timeout=1)
    assert caught.value.late == (0, 1, 2)
    where = r"rank 0 has been in all_reduce for 0\.\d\d s, rank 1 has been in all_reduce for .*, rank 2 is in no oper"
    assert caught.match(f"was not done within 1 s: {where}")
    await settled(driver)
    assert await driver.run({"x": 2}, timeout=1) == 6.0
    assert driver.failure is None
    with pytest.raises(aiocomms.errors.ArgumentError, match="timeout"):
        await driver.run({"x": 2}, timeout=-1)
    return "late"


def test_late_plan_says_where_each_rank_stands_and_ends():
    for seed in range(3):
        assert repeated(lambda: serve(be_late), 3, seed=seed).results[0] == "late"


# ------------------------------------------------------------------------------------------------------------ retries


async def retry_all(driver: Driver, service: Service) -> Any:
    async def client(number: int) -> Any:
        await asyncio.sleep(2 * random.random())
        return await driver.run({"x": number, "steps": 20}, retry=True)

    return await asyncio.gather(*map(client, range(20)))


def test_plans_that_may_be_retried_are_answered_although_ranks_die():
    async def program() -> Any:
        if here().rank == 1 and not here().restarts:
            asyncio.get_running_loop().call_later(0.3 + random.random(), here().world.kill, 1, 0.5)
        return await serve(retry_all, with_a_newcomer)

    for seed in range(6):
        assert repeated(program, 3, seed=seed).results[0] == [3.0 * number for number in range(20)]


async def insist(driver: Driver, service: Service) -> Any:
    with pytest.raises(PlanLostError):
        await driver.run({"x": 1, "steps": 1000}, retry=True)
    await driver.ready()
    return await driver.run({"x": 1})


def test_plan_that_is_lost_three_times_is_given_up():
    async def program() -> Any:
        if here().rank and here().restarts < 3:
            asyncio.get_running_loop().call_later(1.0, here().world.kill, 1, 0.5)
        return await serve(insist, with_a_newcomer)

    assert simulate(program, 2).results[0] == 2.0


@pytest.mark.parametrize("seed", range(8))
def test_every_caller_hears_the_end_whatever_goes_wrong(seed):
    async def drive(driver: Driver, service: Service) -> Any:
        async def client(number: int) -> str:
            await asyncio.sleep(2 * random.random())
            try:
                if number % 2:
                    items = [item async for item in driver.stream({"x": number, "yields": True}, timeout=30)]
                    assert items == [number * service.comm.size] * 5
                else:
                    assert await driver.run({"x": number}, timeout=30, retry=True) == number * service.comm.size
            except CommError as error:
                return type(error).__name__
            return "answered"

        return dict(Counter(await asyncio.gather(*map(client, range(30)))))

    async def program() -> Any:
        try:
            return await serve(drive, with_a_newcomer, max_running=4)
        except CommError as error:
            return type(error).__name__

    faults = Faults(deaths=1, restarts=True, pauses=1, cuts=1, within=2.0)
    history = simulate(program, 3, seed=seed, faults=faults)
    assert history.seconds < 200


# -------------------------------------------------------------------------------------------------------- replacement


LEFT: set[tuple[int, int]] = set()
"""The processes that have told their supervisor that they leave: the rank of each, and how many were it before."""


@pytest.fixture(autouse=True)
def _supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hear what processes report, as ``aiocomms run`` does."""
    LEFT.clear()
    monkeypatch.setattr(supervised, "report_leaves", lambda rank, _: LEFT.add((rank, here().restarts)))


async def serve_with_replacements(drive: Drive, leaves: Callable[[], Any], **limits: Any) -> Any:
    """Serve; each worker leaves at some moment, and another process takes its place, as a supervisor has it."""
    me = here()
    LEFT.discard((me.rank, me.restarts))
    comm = await aiocomms.new_comm(timeout=60, join=me.restarts > 0)
    async with Service(comm, with_a_newcomer) as service:
        model = MODELS[comm.rank] = Model(service)
        if comm.rank:
            if not me.restarts and (delay := leaves()) is not None:
                asyncio.get_running_loop().call_later(delay, service.leave)
            await service.work(model.execute)
        else:
            async with service.drive(model.execute, **limits) as driver:
                return await drive(driver, service)
    if (me.rank, me.restarts) in LEFT:  # The end of the service has ended the others.
        me.world.start(me.rank, 0.5)
    return "left"


async def ask_all_the_time(driver: Driver, service: Service) -> Any:
    """Have requests come all the time; no one fails."""

    async def client(number: int) -> None:
        await asyncio.sleep(0.1 * number)
        if number % 5 == 4:
            items = [item async for item in driver.stream({"x": number, "yields": True})]
            assert items == [number * service.comm.size] * 5
        else:
            run = driver.run if number % 5 else driver.run_in_order
            assert await run({"x": number}) == number * service.comm.size

    await asyncio.gather(*map(client, range(60)))
    return service.comm.name


def test_workers_are_replaced_and_no_request_fails():
    async def program() -> Any:
        return await serve_with_replacements(ask_all_the_time, lambda: 5 * random.random(), max_running=4)

    for seed in range(6):
        results = repeated(program, 3, seed=seed).results
        assert results[0] in ("world@2", "world@3")
        assert results[1:] == ["left", "left"]


def test_worker_leaves_although_another_one_dies():
    """The requests that are under way at the death fail, or are carried out again, and no others."""

    async def drive(driver: Driver, service: Service) -> Any:
        async def client(number: int) -> None:
            await asyncio.sleep(0.1 * number)
            assert await driver.run({"x": number}, retry=True) == number * service.comm.size

        await asyncio.gather(*map(client, range(60)))
        return service.comm.size

    async def program() -> Any:
        if here().rank == 2 and not here().restarts:
            delay = random.choice([2.4 * random.random(), 4 + random.random()])  # before it leaves, or behind that
            asyncio.get_running_loop().call_later(delay, here().world.kill, 2, 0.5)
        return await serve_with_replacements(drive, lambda: 1.5 if here().rank == 1 else None)

    for seed in range(8):
        assert simulate(program, 3, seed=seed).results[0] == 3


async def leave_in_vain(driver: Driver, service: Service) -> Any:
    """Rank 0 was told to end, too: it answers what is under way, and then all ranks end."""
    task = asyncio.create_task(driver.run({"x": 1, "steps": 300}))
    await asyncio.sleep(0.5)
    driver._told_to_end()
    await asyncio.sleep(1)
    assert await driver.run({"x": 2}) == 6.0
    assert await task == 3.0
    return service.comm.name


def test_workers_stay_until_a_driver_that_was_told_to_end_has_drained():
    results = simulate(lambda: serve_with_replacements(leave_in_vain, lambda: 0.2), 3).results
    assert results == ["world", "left", "left"]
    assert not LEFT


async def leave_without_recover(driver: Driver, service: Service) -> Any:
    with pytest.raises(aiocomms.errors.ArgumentError, match=r"does not run|no recover"):
        service.leave()


def test_worker_cannot_leave_what_cannot_go_on_without_it():
    simulate(lambda: serve(leave_without_recover), 2)
    simulate(lambda: serve(leave_without_recover, with_a_newcomer), 2)


def test_a_driver_that_is_replaced_leaves_its_workers_to_its_successor(monkeypatch):
    """No worker ends, and each request is answered by the process that took it."""
    monkeypatch.setattr(supervised, "is_announced", lambda what: what == supervised.REPLACED and not here().restarts)

    async def drive(driver: Driver, service: Service) -> Any:
        answers = [await driver.run({"x": number}) for number in range(3)]
        assert answers == [0, service.comm.size, 2 * service.comm.size]
        if not here().restarts:
            driver._told_to_end()
            here().world.start(0, 0.5)
        return service.comm.name

    history = repeated(lambda: serve(drive, with_a_newcomer), 3, seed=0)
    assert history.results == ["world@2", None, None]


def test_a_worker_that_is_to_end_while_ranks_recover_ends_at_once():
    """Rank 2 dies for good; then rank 1 is told to end, as all are when a job is stopped."""

    async def program() -> Any:
        me, now = here(), asyncio.get_running_loop().time
        began = now()
        comm = await aiocomms.new_comm(timeout=20)
        async with Service(comm, with_a_newcomer) as service:
            if me.rank == 1:
                asyncio.get_running_loop().call_later(3, service.leave)
                await service.work(Model(service).execute)
                assert (1, 0) in LEFT
                return now() - began
            if me.rank == 2:
                me.world.kill(2)
            async with service.drive(Model(service).execute) as driver:
                await asyncio.sleep(3)
                driver._told_to_end()
        return now() - began

    ends = simulate(program, 3).results
    assert all(3 <= end < 5 for end in ends[:2])
