"""A driver and its workers, with all ranks in one process: plans, errors, drain, loss and re-entry."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import signal
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import pytest
import torch
from concurrency import ranks, together, turns

from aiocomms.bootstrap import supervised
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommClosedError,
    CommTimeoutError,
    DriverLostError,
    LaneAbortedError,
    PlanLostError,
    WorkerError,
)
from aiocomms.serving import CurrentComm, Driver, Service
from aiocomms.serving.plans import LEAVES
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

Make = Callable[[CurrentComm], Callable[..., Awaitable[object]]]


async def serve(world, make: Make, body: Callable[[Driver], Awaitable[object]], recover=None) -> None:
    """Run ``body(driver)`` on rank 0 of a service whose ranks execute plans by ``make(comm)``."""

    await ranks(world, lambda comm: serve_one(comm, make, body, recover))


async def serve_one(comm, make: Make, body: Callable[[Driver], Awaitable[object]], recover=None) -> None:
    async with Service(comm, recover) as service:
        execute = make(service.comm)
        if service.comm.rank:
            await service.work(execute)
        else:
            async with service.drive(execute) as driver:
                await body(driver)


def drive(run, size: int, make: Make, body: Callable[[Driver], Awaitable[object]], recover=None) -> None:
    """Run ``body(driver)`` as :func:`serve` does, in a world of its own."""

    async def main():
        async with local_world(size) as world:
            await serve(world, make, body, recover)

    run(main)


def summing(comm):
    """Return a function that all-reduces the tensor of a plan as often as the plan says."""

    async def execute(plan):
        times, x = plan
        x = x + comm.rank
        for _ in range(times):
            await comm.all_reduce(x)
        return x

    return execute


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["run", "run_in_order"])
def test_every_rank_executes_each_plan(run, size, how):
    async def body(driver):
        give = getattr(driver, how)
        large = torch.arange(20_000.0)  # This tensor takes a message of its own.
        results = await together(*(lambda n=n: give((n, large + n)) for n in range(4)))
        for n, x in enumerate(results):
            want = large + n if n == 0 else (size * (large + n) + size * (size - 1) / 2) * size ** (n - 1)
            assert torch.equal(x, want)

    drive(run, size, summing, body)


def test_plans_may_overtake_each_other_in_another_order_on_each_rank(run):
    """Each rank holds back another one of the two plans until the other has ended there."""

    def make(comm):
        first = anyio.Event()

        async def execute(plan):
            if plan == comm.rank:
                await first.wait()
            with contextlib.suppress(WorkerError):
                x = await comm.all_reduce(torch.tensor([plan * 10 + 1.0]))
            first.set()
            return x.item()

        return execute

    async def body(driver):
        # Rank 0 starts plan 1 first, and rank 1 plan 0. Were they one lane, the sums would mix.
        started = []
        async with anyio.create_task_group() as tasks:

            async def one(plan):
                started.append((plan, await driver.run(plan)))

            for plan in (0, 1, 2):
                tasks.start_soon(one, plan)
        assert sorted(started) == [(0, 2.0), (1, 22.0), (2, 42.0)]

    drive(run, 2, make, body)


def test_plans_in_order_run_one_after_the_other_on_every_rank(run):
    seen = {rank: [] for rank in range(3)}

    def make(comm):
        async def execute(plan):
            seen[comm.rank].append(("begin", plan))
            await turns(3 * (comm.rank + plan) % 5)
            await comm.all_reduce(torch.ones(1))
            seen[comm.rank].append(("end", plan))

        return execute

    async def body(driver):
        await together(*(lambda n=n: driver.run_in_order(n) for n in range(5)))

    async def main():
        async with local_world(3) as world:
            issued = world[0]._core.ledger.calls
            await serve(world, make, body)
            assert world[0]._core.ledger.calls == issued + 5  # These are collectives of the communicator itself.

    run(main)
    order = [plan for what, plan in seen[0] if what == "begin"]
    assert sorted(order) == list(range(5))
    assert all(events == [(what, n) for n in order for what in ("begin", "end")] for events in seen.values())


def test_worker_error_fails_its_request_and_others_go_on(run):
    """Rank 1 fails amid the collectives of its plan: rank 0 and rank 2 wait for it there, and give up."""
    cleaned = []

    def make(comm):
        async def execute(plan):
            try:
                for turn in range(3):
                    if plan == "bad" and turn == 1 and comm.rank == 1:
                        await steady.wait()
                        raise ValueError("no such expert")
                    x = await comm.all_reduce(torch.ones(4))
                    if plan != "bad" and turn == 1:
                        await over.wait()
            except BaseException:
                cleaned.append(comm.rank)
                raise
            return x.sum().item()

        return execute

    async def main():
        nonlocal steady, over
        steady, over = anyio.Event(), anyio.Event()

        async def body(driver):
            async def bad():
                with pytest.raises(WorkerError, match="rank 1: ValueError: no such expert") as caught:
                    await driver.run("bad")
                assert caught.value.peer == 1
                assert 'raise ValueError("no such expert")' in str(caught.value.__cause__)
                over.set()

            async def good():
                assert await driver.run("good") == 12.0

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(good)
                tasks.start_soon(bad)
                await turns(50)
                steady.set()
            assert sorted(cleaned) == [0, 1, 2]
            for _ in range(20):
                assert await driver.run("good") == 12.0
            assert driver.failure is None

        async with local_world(3) as world:
            await serve(world, make, body)
            assert not any(comm.aborted for comm in world)
            assert not any(comm._core.router.turns for comm in world)

    steady = over = None
    run(main)


def test_driver_error_is_raised_unchanged(run):
    def make(comm):
        async def execute(plan):
            if comm.rank == 0:
                raise KeyError(plan)
            await comm.all_reduce(torch.ones(1))

        return execute

    async def body(driver):
        with pytest.raises(KeyError, match="nothing"):
            await driver.run("nothing")
        assert driver.failure is None

    drive(run, 3, make, body)


class Panic(BaseException):
    """An error of a library that `except Exception` must not catch."""


async def awaits_what_was_cancelled():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def panics():
    raise Panic("no more")


@pytest.mark.fault(120)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("how", ["run", "run_in_order"])
@pytest.mark.parametrize("fails", [awaits_what_was_cancelled, cancels_itself, panics])
def test_base_exception_of_a_plan_fails_only_that_plan(transport, culprit, how, fails):
    """A plan may raise CancelledError although its service was not cancelled, as from a cancelled future."""

    def make(comm):
        async def execute(plan):
            if plan == "bad" and comm.rank == culprit:
                await fails()
            return (await comm.all_reduce(torch.ones(1))).item() if plan == "good" else None

        return execute

    async def body(driver):
        give = getattr(driver, how)

        async def bad():
            raised = "Panic: no more" if fails is panics else "CancelledError"
            with pytest.raises(WorkerError, match=f"failed on rank {culprit}: .*{raised}") as caught:
                await give("bad")
            assert caught.value.peer == culprit
            assert raised.partition(":")[0] in repr(caught.value.__cause__)

        good = await together(lambda: give("good"), bad, lambda: give("good"), bad)
        assert good == [2.0, None, 2.0, None]
        assert await give("good") == 2.0
        assert driver.failure is None

    async def main():
        async with local_world(2, transport) as world:
            await serve(world, make, body)
            assert not any(comm.aborted for comm in world)

    asyncio.run(main())


@pytest.mark.fault(120)
@pytest.mark.parametrize("culprit", [0, 1])
def test_system_exit_within_a_plan_reaches_every_rank(culprit):
    """SystemExit ends the loop at once; the abort reaches the other ranks before that."""
    said = {}

    def make(comm):
        async def execute(plan):
            await comm.barrier()
            if comm.rank == culprit:
                raise SystemExit(3)
            await comm.barrier()

        return execute

    async def body(driver):
        await driver.run(None)

    async def main():
        async with local_world(2) as world:
            for comm in world:
                comm.register_abort_hook(lambda error, rank=comm.rank: said.setdefault(rank, error.message))
            await serve(world, make, body)

    with pytest.raises(SystemExit):
        asyncio.run(main())
    assert said == dict.fromkeys(range(2), f"aborted by rank {culprit}: SystemExit: 3")


@pytest.mark.fault(120)
@pytest.mark.parametrize("culprit", [0, 1])
def test_base_exception_of_recover_is_given_as_the_reason(culprit):
    """A CancelledError of `recover` without a cancellation of the service becomes the cause of a CommAbortedError."""
    ended = {}

    async def recover(lost):
        if lost.rank == culprit:
            await awaits_what_was_cancelled()
        return await lost.reconfigure(ranks=[1 - culprit])

    async def body(driver):
        driver._comm.abort("enough")
        await driver.ready()

    async def one(comm):
        try:
            await serve_one(comm, summing, body, recover)
        except BaseException as error:
            ended[comm.rank] = error

    async def main():
        async with local_world(2) as world:
            await ranks(world, one)

    asyncio.run(main())
    assert isinstance(ended[culprit], CommAbortedError)
    assert ended[culprit].message == "recover raised CancelledError"
    assert isinstance(ended[culprit].__cause__, asyncio.CancelledError)


@pytest.mark.fault(120)
def test_cancelled_worker_raises_cancelled_error_and_loses_its_plans():
    """A cancellation of the service's own task is not reported as a failure of its plan."""

    def make(comm):
        async def execute(plan):
            entered.set()
            await asyncio.sleep(math.inf)

        return execute

    async def body(driver):
        await driver.run(None)

    async def main():
        nonlocal entered
        entered = asyncio.Event()
        async with local_world(2) as world:
            tasks = [asyncio.create_task(serve_one(comm, make, body)) for comm in world]
            await entered.wait()
            tasks[1].cancel()
            driver, worker = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(worker, asyncio.CancelledError)
            assert isinstance(driver, PlanLostError)

    entered = None
    asyncio.run(main())


@pytest.mark.fault(121)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_workers_raise_driver_lost_error_without_their_driver(transport):
    """A recovery without the driver would make a worker rank 0, which must drive, so each worker fails."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = list(map(signal.getsignal, numbers))
    ended = {}

    async def works(comm):
        async with Service(comm, lambda lost: lost.reconfigure(ranks=[1, 2])) as service:
            with pytest.raises(DriverLostError, match="a worker has become rank 0") as c:
                await service.work(summing(service.comm))
            ended[comm.rank] = c.value.peer
            assert service.comm.rank == comm.rank - 1

    async def main():
        async with local_world(3, transport) as world:

            async def body(driver):
                assert (await driver.run((1, torch.ones(1)))).item() == 6.0
                world[0].abort("the driver is gone")

            async def drives():
                with pytest.raises(CommAbortedError, match="the driver is gone"):
                    await serve_one(world[0], summing, body)

            await together(drives, lambda: works(world[1]), lambda: works(world[2]))

    asyncio.run(main())
    assert ended == {1: 0, 2: 0}
    assert list(map(signal.getsignal, numbers)) == before


def test_abort_of_a_user_lane_within_a_plan_is_no_abort_of_the_plan(run):
    """Rank 1 aborts a lane that its plan uses, and its plan succeeds, so `run` raises the error of rank 0."""

    def make(comm):
        async def execute(plan):
            if comm.rank:
                comm.lane(plan).abort("not today")
                return
            with comm.lane(plan):
                await comm.barrier()

        return execute

    async def body(driver):
        with pytest.raises(LaneAbortedError, match="aborted by rank 1: not today"):
            await driver.run("own")
        assert driver.failure is None

    drive(run, 2, make, body)


def test_plan_in_order_that_fails_before_any_op_fails_alone(run):
    def make(comm):
        async def execute(plan):
            if plan == "bad":
                raise ValueError(plan)
            return (await comm.all_reduce(torch.ones(1))).item()

        return execute

    async def body(driver):
        async def bad():
            with pytest.raises((WorkerError, ValueError), match="bad"):
                await driver.run_in_order("bad")

        await together(bad, lambda: driver.run_in_order("good"), bad)
        assert await driver.run_in_order("good") == 2.0

    drive(run, 2, make, body)


@pytest.mark.parametrize("where", ["loop", "thread"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_plan_in_order_that_fails_amid_its_ops_loses_and_recovers_the_communicator(run, culprit, where):
    """Plans in order use no lanes, so collectives of the next plan would match those of the failed one."""

    def make(comm):
        def forward(plan):
            x = comm.portal().all_reduce(torch.ones(1)).wait()
            if plan == "bad" and comm.rank == culprit:
                raise ValueError(plan)
            return comm.portal().all_reduce(x).wait().item()

        async def execute(plan):
            if where == "thread":
                return await anyio.to_thread.run_sync(forward, plan)
            x = await comm.all_reduce(torch.ones(1))
            if plan == "bad" and comm.rank == culprit:
                raise ValueError(plan)
            return (await comm.all_reduce(x)).item()

        return execute

    async def body(driver):
        assert await driver.run_in_order("good") == 4.0
        with pytest.raises(WorkerError if culprit else ValueError, match="bad"):
            await driver.run_in_order("bad")
        await driver.ready()
        assert await driver.run_in_order("good") == 4.0

    drive(run, 2, make, body, lambda lost: lost.reconfigure(size=2))


def test_layers_and_driver_continue_after_a_lost_rank(run):
    """A layer keeps its CurrentComm over a recovery; requests until then raise PlanLostError with the reason."""

    class Layer:
        def __init__(self, comm):
            self.comm = comm

        async def forward(self, x):
            return await self.comm.all_reduce(x)

    def make(comm):
        layer = Layer(comm)

        async def execute(plan):
            if plan == "hold" and comm.rank:
                await anyio.sleep_forever()
            return (await layer.forward(torch.ones(1))).item(), comm.size, comm.name

        return execute

    recovering, go_on = [], None

    async def recover(lost):
        recovering.append(lost.rank)
        await go_on.wait()
        return await lost.reconfigure(ranks=[0, 1])

    async def main():
        nonlocal go_on
        go_on = anyio.Event()
        async with local_world(3) as world:

            async def body(driver):
                async def held():
                    with pytest.raises(PlanLostError, match="out of memory") as caught:
                        await driver.run("hold")
                    assert isinstance(caught.value.__cause__, CommAbortedError)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(held)
                    await turns(50)
                    world[2].abort("out of memory")
                assert "out of memory" in str(driver.failure)
                with pytest.raises(PlanLostError, match="out of memory"):
                    await driver.run("too early")
                go_on.set()
                await driver.ready()
                assert await driver.run("again") == (2.0, 2, "world@2")

            async def third():
                with pytest.raises(CommAbortedError):
                    async with Service(world[2]) as service:
                        await service.work(make(service.comm))

            await together(lambda: serve(world[:2], make, body, recover), third)
        assert sorted(recovering) == [0, 1]

    run(main)
    gc.collect()


def test_service_without_recover_ends_on_every_rank_when_a_rank_is_lost(run):
    async def body(driver):
        with pytest.raises(PlanLostError, match="enough"):
            await driver.run((1, torch.ones(1)))
        with pytest.raises(PlanLostError, match="enough"):
            await driver.run((1, torch.ones(1)))

    def make(comm):
        async def execute(plan):
            if comm.rank == 1:
                comm.current.abort("enough")
            await comm.all_reduce(plan[1])

        return execute

    async def main():
        async with local_world(2) as world:
            ended = []

            async def one(comm):
                with pytest.raises(CommAbortedError, match="enough"):
                    await serve_one(comm, make, body)
                ended.append(comm.rank)

            await ranks(world, one)
            assert sorted(ended) == [0, 1]

    run(main)


def test_driver_exit_waits_for_pending_plans_and_refuses_new_ones(run):
    order = []

    def make(comm):
        async def execute(plan):
            if comm.rank:
                await turns(30)
            await comm.all_reduce(torch.ones(1))
            order.append(comm.rank)
            return plan

        return execute

    async def main():
        async with local_world(3) as world:

            async def one(comm):
                async with Service(comm) as service:
                    if comm.rank:
                        await service.work(make(service.comm))
                        order.append(f"left {comm.rank}")
                        return
                    async with anyio.create_task_group() as tasks:

                        async def request(driver):
                            order.append(await driver.run("answer"))

                        async with service.drive(make(service.comm)) as driver:
                            tasks.start_soon(request, driver)
                            await turns(5)
                        order.append("drained")
                        with pytest.raises(CommClosedError, match="ending"):
                            await driver.run("late")

            await ranks(world, one)

    run(main)
    assert sorted(order[:3]) == [0, 1, 2]
    assert set(order[3:]) == {"answer", "drained", "left 1", "left 2"}


def test_cancelled_caller_leaves_a_plan_in_order_to_its_end(run):
    ended = []

    def make(comm):
        async def execute(plan):
            await go_on.wait()
            ended.append((await comm.all_reduce(torch.ones(1))).item())

        return execute

    go_on = None

    async def main():
        nonlocal go_on
        go_on = anyio.Event()

        async def body(driver):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(driver.run_in_order, "x")
                await turns(3)
                tasks.cancel_scope.cancel()
            assert not ended
            go_on.set()

        async with local_world(2) as world:
            await serve(world, make, body)
        assert ended == [2.0, 2.0]

    run(main)


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_cancelled_caller_ends_its_plan_on_all_ranks(run, where):
    """A task is cancelled; a thread gets an error from its operation, or from the next one that it calls."""
    seen = {rank: [] for rank in range(3)}

    def make(comm):
        def forward():
            while True:
                seen[comm.rank].append("step")
                comm.portal().all_reduce(torch.ones(1)).wait()

        async def execute(plan):
            if plan == "next":
                return (await comm.all_reduce(torch.ones(1))).item()
            try:
                if where == "thread":
                    await anyio.to_thread.run_sync(forward)
                while True:
                    seen[comm.rank].append("step")
                    await comm.all_reduce(torch.ones(1))
            except BaseException as error:
                seen[comm.rank].append(type(error))
                raise

        return execute

    async def body(driver):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(driver.run, "endless")
                while min(map(len, seen.values())) < 10:
                    await turns()
                scope.cancel()
        while driver._plans:
            await turns()
        ends = {steps.pop() for steps in seen.values()}
        assert ends <= (
            {LaneAbortedError} if where == "thread" else {LaneAbortedError, anyio.get_cancelled_exc_class()}
        )
        steps = [len(steps) for steps in seen.values()]
        assert max(steps) - min(steps) <= 2
        assert await driver.run("next") == 3.0
        assert [len(steps) for steps in seen.values()] == steps

    drive(run, 3, make, body)


def test_caller_that_is_cancelled_already_begins_no_plan(run):
    seen = []

    def make(comm):
        async def execute(plan):
            seen.append(plan)

        return execute

    async def body(driver):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await driver.run("never")
        assert await driver.run("next") is None
        assert "never" not in seen

    drive(run, 2, make, body)


def test_all_ranks_end_a_plan_in_order_at_the_step_at_which_rank_0_was_cancelled(run):
    steps = {}

    async def one(comm, began) -> None:
        async with Service(comm) as service:

            async def execute(plan):
                step = 0
                while not await service.cancelled():
                    await comm.all_reduce(torch.ones(1))
                    step += 1
                    if step == 5:
                        began.set()
                steps[comm.rank] = step

            if comm.rank:
                await service.work(execute)
                return
            with pytest.raises(ArgumentError, match="outside of a plan"):
                await service.cancelled()
            async with service.drive(execute) as driver, anyio.create_task_group() as tasks:
                tasks.start_soon(driver.run_in_order, "endless")
                await began.wait()
                tasks.cancel_scope.cancel()
            assert driver.failure is None

    async def main():
        began = anyio.Event()
        async with local_world(3) as world:
            await ranks(world, lambda comm: one(comm, began))

    run(main)
    assert len(set(steps.values())) == 1
    assert set(steps) == {0, 1, 2}


def stepping(comm):
    """Return a function that runs as many steps as a plan says."""

    async def execute(steps):
        for _ in range(steps):
            await comm.all_reduce(torch.ones(1))
            await comm.broadcast_object("a token", 0)

    return execute


def stepping_in_threads(comm):
    def forward(steps):
        for _ in range(steps):
            comm.portal().all_reduce(torch.ones(1)).wait()

    async def execute(steps):
        await anyio.to_thread.run_sync(forward, steps)

    return execute


async def left_behind(driver):
    """Return the numbers of lane turns, pending operations, tasks and objects once no plan is under way."""
    while driver._plans:
        await turns()
    await turns(50)
    gc.collect()
    core = driver._comm._core
    return len(core.router.turns), len(core.in_flight.look()), len(asyncio.all_tasks()), len(gc.get_objects())


@pytest.mark.parametrize(("make", "count"), [(stepping, 600), (stepping_in_threads, 300)])
def test_plans_that_are_cancelled_at_random_leave_nothing_behind(monkeypatch, make, count):
    """The keys of aborted lanes are kept up to a bound, so that no operation uses one again."""
    monkeypatch.setattr("aiocomms.lowering.lane_abort.REMEMBERED", 100)
    draws = random.Random(7)

    async def clients(driver):
        for _ in range(count):
            while len(driver._plans) > 50:  # A thread of an aborted lane whose key is dropped would wait for ever.
                await turns()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(driver.run, draws.randrange(1, 6))
                await turns(draws.randrange(12))
                if draws.random() < 0.9:
                    tasks.cancel_scope.cancel()

    async def body(driver):
        for _ in range(2):  # The flight recorder is full then, too.
            await clients(driver)
        *before, objects = await left_behind(driver)
        for _ in range(2):
            await clients(driver)
        *after, more = await left_behind(driver)
        assert after == before
        assert more < objects + count  # Half of the plans may not leave an object each; a pool of threads grows.
        assert driver.failure is None

    drive(anyio.run, 2, make, body)


def test_service_can_drive_and_work_repeatedly(run):
    async def main():
        async with local_world(2) as world:

            async def one(comm):
                async with Service(comm) as service:
                    execute = summing(service.comm)
                    for _ in range(3):
                        if comm.rank:
                            await service.work(execute)
                            continue
                        async with service.drive(execute) as driver:
                            assert (await driver.run((1, torch.ones(1)))).item() == 3.0

            await ranks(world, one)

    run(main)


def test_idle_worker_outlives_the_deadline(run):
    """A worker still takes a plan after the deadline of an op that was called later."""

    async def body(driver):
        with pytest.raises(CommTimeoutError):
            await world[0].recv(torch.empty(0), 1, tag=99)
        for comm in world:
            comm.set_timeout(30)
        assert (await driver.run((1, torch.ones(1)))).item() == 3.0

    async def main():
        nonlocal world
        async with local_world(2) as world:
            for comm in world:
                comm.set_timeout(0.05)
            await serve(world, summing, body)

    world = None
    run(main)


def test_model_in_a_thread_ends_when_its_plan_is_aborted(run):
    """A thread cannot be cancelled: it ends by the error of the operation that it waits for."""
    ended = []

    def make(comm):
        def forward(plan):
            x = torch.ones(1)
            try:
                comm.portal().all_reduce(x).wait()
                if plan == "bad" and comm.rank == 1:
                    raise ValueError(plan)
                return comm.portal().all_reduce(x).wait().item()
            except LaneAbortedError as error:
                ended.append(error.message)
                raise

        async def execute(plan):
            return await anyio.to_thread.run_sync(forward, plan)

        return execute

    async def body(driver):
        assert await driver.run("good") == 4.0
        with pytest.raises(WorkerError, match="bad"):
            await driver.run("bad")
        assert ended == ["the lane was aborted by rank 1: ValueError: bad"]
        assert await driver.run("good") == 4.0

    drive(run, 2, make, body)


def test_worker_that_leaves_fails_plans_with_plan_lost_error(run):
    async def body(driver):
        with pytest.raises(PlanLostError, match="rank 1"):
            await driver.run((1, torch.ones(1)))

    async def main():
        async with local_world(2) as world:

            async def leaves():
                async with Service(world[1]):
                    pass

            async def drives():
                with pytest.raises(CommAbortedError, match="rank 1"):
                    await serve_one(world[0], summing, body)

            await together(leaves, drives)

    run(main)


def test_exception_in_the_drive_block_propagates_and_ends_the_workers(run):
    async def main():
        async with local_world(2) as world:

            async def drives():
                with pytest.raises(ZeroDivisionError):
                    async with Service(world[0]) as service, service.drive(summing(service.comm)):
                        raise ZeroDivisionError

            async def works():
                with pytest.raises(CommAbortedError, match="ZeroDivisionError"):
                    async with Service(world[1]) as service:
                        await service.work(summing(service.comm))

            await together(drives, works)

    run(main)


def test_plans_may_run_in_inference_mode(run):
    """Inference tensors may be written in inference mode only; collectives complete on the loop, which has no mode."""

    def make(comm):
        def forward(plan):
            with torch.inference_mode():
                return comm.portal().all_reduce(torch.ones(plan)).wait().sum().item()

        async def execute(plan):
            return await anyio.to_thread.run_sync(forward, plan)

        return execute

    async def body(driver):
        for n in (1, 5, 50_000):
            assert await driver.run(n) == 3 * n
            assert await driver.run_in_order(n) == 3 * n

    drive(run, 3, make, body)


def test_waiting_callers_fail_when_the_driver_ends(run):
    """An error leaves the block of `drive` while tasks outside of it wait."""

    def make(comm):
        async def execute(plan):
            await anyio.sleep_forever()

        return execute

    async def drives(comm):
        async with anyio.create_task_group() as tasks:
            drivers = []

            async def body(driver):
                drivers.append(driver)
                for _ in range(3):
                    tasks.start_soon(told, driver)
                await turns()
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await serve_one(comm, make, body)
            await told(drivers[0])

    async def told(driver):
        with pytest.raises(CommClosedError):
            await driver.run("x")

    async def works(comm):
        with pytest.raises(CommAbortedError, match="ZeroDivisionError"):
            await serve_one(comm, make, drives)

    async def main():
        async with local_world(2) as world:
            await together(lambda: drives(world[0]), lambda: works(world[1]))

    run(main)


def test_plan_that_cannot_be_sent_is_refused(run):
    async def body(driver):
        with pytest.raises(ArgumentError, match="object"):
            await driver.run(object())
        assert (await driver.run((1, torch.ones(1)))).item() == 3.0

    drive(run, 2, summing, body)


def test_work_on_rank_0_and_drive_on_others_are_refused(run):
    async def main():
        async with local_world(2) as world:
            with pytest.raises(ArgumentError, match="call drive"):
                await Service(world[0]).work(summing(world[0]))
            with pytest.raises(ArgumentError, match="call work"):
                async with Service(world[1]).drive(summing(world[1])):
                    pass

    run(main)


@pytest.mark.fault(122)
def test_worker_ignores_signals_and_restores_their_handlers(run, caplog):
    numbers = signal.SIGINT, signal.SIGTERM

    async def body(driver):
        assert (await driver.run((1, torch.ones(1)))).item() == 6.0
        for number in numbers:
            signal.raise_signal(number)
        assert (await driver.run((1, torch.ones(1)))).item() == 6.0

    async def main():
        before = list(map(signal.getsignal, numbers))
        async with local_world(3) as world:
            await serve(world, summing, body)
        assert list(map(signal.getsignal, numbers)) == before

    run(main)
    assert [text for text in caplog.messages if "SIG" in text] == [
        "SIGTERM does not end a rank that works: rank 0 ends it when it has drained, so send it there"
    ]


def test_worker_ignores_a_signal_that_its_program_ignores_without_a_word(run, caplog):
    async def body(driver):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
        assert (await driver.run((1, torch.ones(1)))).item() == 3.0

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        drive(run, 2, summing, body)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not caplog.messages


def test_sigterm_has_a_worker_leave_and_the_others_recover(run, monkeypatch):
    """The plan under way ends before the worker leaves, and the next one waits for the recovery."""
    monkeypatch.setattr("aiocomms.serving.driver.GRACE", -math.inf)
    ended = []

    async def recover(lost):
        return await lost.reconfigure(ranks=[0])

    def make(comm):
        async def execute(plan):
            await turns(plan)
            await comm.barrier()
            return comm.size

        return execute

    async def body(driver):
        async def under_way():
            ended.append(await driver.run(50))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(under_way)
            await turns(5)
            signal.raise_signal(signal.SIGTERM)
            while not driver._parting:
                await turns()
            ended.append(await driver.run(0))

    drive(run, 2, make, body, recover)
    assert ended == [2, 1]


def test_worker_stays_if_the_launcher_ends_all_ranks(run, monkeypatch):
    """Rank 0 may not know of the signal, because its program installs a handler within ``drive``."""
    monkeypatch.setattr("aiocomms.serving.driver.GRACE", -math.inf)
    monkeypatch.setattr(supervised, "is_announced", lambda what: what == supervised.ENDS)

    async def body(driver):
        signal.raise_signal(signal.SIGTERM)
        await turns(20)
        assert not driver._parting
        assert (await driver.run((1, torch.ones(1)))).item() == 3.0

    async def recover(lost):
        raise AssertionError

    drive(run, 2, summing, body, recover)


def test_driver_knows_of_the_sigterm_that_its_program_takes(run, monkeypatch):
    """The program's own handler runs, as uvicorn's does; the workers got the signal, too, and stay."""
    told = []
    monkeypatch.setattr("aiocomms.serving.driver.GRACE", -math.inf)

    async def body(driver):
        signal.raise_signal(signal.SIGTERM)
        while not driver._ending:
            await turns()
        driver._heard(1, LEAVES)
        await turns(20)
        assert not driver._parting
        assert (await driver.run((1, torch.ones(1)))).item() == 1.0

    async def recover(lost):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        drive(run, 1, summing, body, recover)
        assert told == ["SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("what", ["all_reduce", "recv_object", "broadcast_object"])
def test_aborted_lane_fails_pending_ops_and_refuses_new_ones(run, what):
    async def main():
        async with local_world(2) as world:
            calls = {
                "all_reduce": lambda lane: lane.all_reduce(torch.ones(20_000)),
                "recv_object": lambda lane: lane.recv_object(1),
                "broadcast_object": lambda lane: lane.broadcast_object(None, root=1),
            }
            await ranks(world, lambda comm: comm.lane("both use lanes").barrier())
            lane = world[0].lane("x")
            works = [calls[what](lane) for _ in range(3)]
            lane.abort("enough")
            for work in works:
                with pytest.raises(LaneAbortedError, match="aborted by rank 0: enough"):
                    await work
            with pytest.raises(LaneAbortedError, match="aborted by rank 0: enough"):
                lane.barrier()
            assert not world[0]._core.router.turns
            await ranks(world, lambda comm: comm.lane("y").all_reduce(torch.ones(1)))
            assert not world[0].aborted

    run(main)
