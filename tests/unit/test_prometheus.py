"""The exporter for Prometheus: real ops, a real registry, and scrapes that Prometheus' own parser reads."""

from __future__ import annotations

import gc
import time

import anyio
import prometheus_client
import pytest
import torch
from concurrency import ranks, run_on, turns
from prometheus_client.parser import text_string_to_metric_families

import aiocomms
from aiocomms.diagnosis.durations import BOUNDS
from aiocomms.errors import ArgumentTypeError, CommAbortedError, CommError, PlanLostError
from aiocomms.integrations.metrics import SIZES
from aiocomms.integrations.prometheus import instrument
from aiocomms.serving import Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

TRANSPORTS = ["local", "ucx"]
OWN = {"comm": "world", "rank": 0}


def scrape(registry):
    """Return the samples of a scrape, by their names and labels."""
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples.get((f"aiocomms_{name}", tuple(sorted({k: str(v) for k, v in labels.items()}.items()))))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ops_are_counted_by_kind_transport_and_size(transport):
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(2, transport, name="measured") as comms:
            await ranks(comms, lambda comm: comm.barrier())  # This op ends before `instrument`.
            handles = [instrument(comm, registry) for comm in comms]

            async def call(comm):
                for _ in range(3):
                    await comm.all_reduce(torch.ones(2))
                await comm.all_reduce(torch.ones(1 << 10))
                await comm.barrier()
                if comm.rank == 0:
                    await comm.send(torch.ones(2), 1)
                else:
                    await comm.recv(torch.ones(2), 0)

            await ranks(comms, call)
            seen = scrape(registry)
            for rank in (0, 1):
                own = {"comm": "measured", "rank": rank, "transport": transport}
                assert value(seen, "op_seconds_count", **own, op="all_reduce", size="<1KiB") == 3
                assert value(seen, "op_seconds_count", **own, op="all_reduce", size="<16KiB") == 1
                assert value(seen, "op_seconds_count", **own, op="barrier", size="0") == 1
                assert value(seen, "bytes_total", **own, op="all_reduce") == 3 * 8 + 4096
                assert value(seen, "op_seconds_sum", **own, op="all_reduce", size="<1KiB") > 0
                most = value(seen, "op_seconds_bucket", **own, op="all_reduce", size="<1KiB", le="+Inf")
                assert most == value(seen, "op_seconds_bucket", **own, op="all_reduce", size="<1KiB", le="50.0") == 3
                assert value(seen, "pending", comm="measured", rank=rank) == 0
            assert value(seen, "op_seconds_count", **{**own, "rank": 0}, op="send", size="<1KiB") == 1
            assert value(seen, "op_seconds_count", **{**own, "rank": 1}, op="recv", size="<1KiB") == 1
            for handle in handles:
                handle.remove()
                handle.remove()
            assert scrape(registry) == {}
            await ranks(comms, lambda comm: comm.barrier())

    run_on("asyncio", main)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_scrape_on_another_thread_shows_pending_and_failed_ops(transport):
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(2, transport) as comms:
            one, two = comms
            instrument(one, registry)
            work = one.recv(torch.ones(4), 1, timeout=None)
            seen = await anyio.to_thread.run_sync(scrape, registry)
            assert value(seen, "pending", comm="world", rank=0) == 1
            assert value(seen, "pending_bytes", comm="world", rank=0) == 16
            assert value(seen, "oldest_pending_seconds", comm="world", rank=0) >= 0
            assert value(seen, "failures_total", comm="world", rank=0, reason="CommAbortedError", peer=1) is None
            two.abort("enough")
            with pytest.raises(CommAbortedError):
                await work
            seen = scrape(registry)
            assert value(seen, "failures_total", comm="world", rank=0, reason="CommAbortedError", peer=1) == 1
            assert value(seen, "pending", comm="world", rank=0) == 0
            counted = [name for name, _ in seen if name == "aiocomms_op_seconds_count"]
            assert counted == []  # A failed op has no duration.

    run_on("asyncio", main)


def test_scrape_shows_the_lateness_of_the_loop(run):
    """The lateness is the time until the loop ran the call of the last scrape, or the time since that call."""

    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(1) as [comm]:
            instrument(comm, registry)
            assert value(scrape(registry), "loop_lateness_seconds", comm="world", rank=0) is None
            waiting = [value(scrape(registry), "loop_lateness_seconds", comm="world", rank=0) for _ in range(2)]
            assert 0 < waiting[0] < waiting[1]
            await turns()
            late = value(scrape(registry), "loop_lateness_seconds", comm="world", rank=0)
            assert late >= waiting[1]

    run(main)


def test_scrape_shows_the_heartbeat_age_while_peers_are_asked(monkeypatch):
    monkeypatch.setenv("AIOCOMMS_HEARTBEAT", "5")

    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(2, "ucx") as [one, _]:
            instrument(one, registry)
            labels = {"comm": "world", "rank": 0, "peer": 1}
            assert value(scrape(registry), "heartbeat_age_seconds", **labels) is None
            one._core.in_flight.heartbeat.look(time.monotonic())  # The watchdog does this while an op is pending.
            assert value(scrape(registry), "heartbeat_age_seconds", **labels) == 0.0
            assert one.statistics().silence.keys() == {1}
            one._core.in_flight.heartbeat.look(time.monotonic() - 60)
            assert value(scrape(registry), "heartbeat_age_seconds", **labels) is None
            assert value(scrape(registry), "shared_memory_bytes", comm="world", rank=0) > 0

    run_on("asyncio", main)


def test_closed_communicator_disappears_from_the_scrape():
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(1, name="first") as [first], local_world(1, name="second") as [second]:
            for comm in (first, second):
                instrument(comm, registry)
            await first.aclose()
            seen = scrape(registry)
            assert value(seen, "pending", comm="first", rank=0) is None
            assert value(seen, "pending", comm="second", rank=0) == 0
        assert scrape(registry) == {}
        del first, second, comm
        gc.collect()
        assert scrape(registry) == {}

    run_on("asyncio", main)


@pytest.mark.fault(127)
@pytest.mark.parametrize("transport", ["local", "c10d", "ucx"])
def test_series_continue_after_a_recovery(transport):
    """A failure that no scrape saw before the recovery is counted after it, beside the ops of the successor."""

    async def main():
        registry = prometheus_client.CollectorRegistry()
        own = {"comm": "world", "rank": 0}
        count = {**own, "op": "all_reduce", "size": "<1KiB", "transport": transport}
        failed = {**own, "reason": "CommAbortedError", "peer": 1}
        async with local_world(2, transport) as comms:
            for generation in (1, 2, 3):
                instrument(comms[0], registry)
                await ranks(comms, lambda comm: comm.all_reduce(torch.ones(2)))
                seen = scrape(registry)
                assert value(seen, "generation", **own) == generation
                assert value(seen, "op_seconds_count", **count) == generation
                assert value(seen, "bytes_total", **own, op="all_reduce", transport=transport) == 8 * generation
                assert value(seen, "failures_total", **failed) == (generation - 1 or None)
                assert value(seen, "pending", **own) == 0
                work = comms[0].recv(torch.ones(1), 1)
                comms[1].abort("enough")
                with pytest.raises(CommAbortedError):
                    await work
                comms[:] = await ranks(comms, lambda comm: comm.reconfigure(ranks=[0, 1]))
            seen = scrape(registry)  # The last communicator adds nothing yet.
            assert {dict(labels)["comm"] for _, labels in seen} == {"world"}
            assert (value(seen, "failures_total", **failed), value(seen, "pending", **own)) == (3, None)
            instrument(comms[0], registry)
            assert value(scrape(registry), "failures_total", **failed) == 3
            await ranks(comms, lambda comm: comm.aclose())
            assert scrape(registry) == {}

    run_on("asyncio", main)


@pytest.mark.parametrize("transport", ["local", "c10d"])
def test_series_of_a_split_continue_after_a_recovery_of_its_parent(transport):
    async def main():
        registry = prometheus_client.CollectorRegistry()
        labels = {"comm": "world/1", "rank": 0, "reason": "CommAbortedError", "peer": 1}
        async with local_world(2, transport) as comms:
            for failures in (1, 2):
                one, two = await ranks(comms, lambda comm: comm.split([0, 1]))
                instrument(one, registry)
                work = one.recv(torch.ones(1), 1)
                two.abort("enough")
                with pytest.raises(CommAbortedError):
                    await work
                await ranks([one, two], lambda comm: comm.aclose())
                assert value(scrape(registry), "failures_total", **labels) == failures
                comms[:] = await ranks(comms, lambda comm: comm.reconfigure(ranks=[0, 1]))
            await ranks(comms, lambda comm: comm.aclose())

    run_on("asyncio", main)


def test_communicator_lost_before_instrument_counts_its_failure():
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(1) as [comm]:
            work = comm.recv(torch.ones(1), 0)
            comm.abort("enough")
            with pytest.raises(CommAbortedError):
                await work
            instrument(comm, registry)
            await comm.aclose()
            failed = {"comm": "world", "rank": 0, "reason": "CommAbortedError", "peer": 0}
            assert value(scrape(registry), "failures_total", **failed) == 1

    run_on("asyncio", main)


def test_refused_op_is_neither_timed_nor_counted_as_failure():
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(1) as [comm]:
            instrument(comm, registry)
            told = []

            def refuse(op, seq):
                raise CommError("no")

            comm.register_post_hook(lambda work: told.append((work.seq, str(work.error), work.done())))
            hook = comm.register_pre_hook(refuse)
            with pytest.raises(CommError, match="no"):
                comm.barrier()
            hook.remove()
            await comm.barrier()
            assert told == [(0, "no", True), (1, "None", True)]
            seen = scrape(registry)
            assert value(seen, "op_seconds_count", comm="world", rank=0, op="barrier", transport="local", size="0") == 1
            assert not [name for name, _ in seen if name == "aiocomms_failures_total"]

    run_on("asyncio", main)


def test_instrument_accepts_a_blocking_communicator():
    registry = prometheus_client.CollectorRegistry()
    with aiocomms.blocking.new_comm("local", rank=0, size=1) as comm:
        instrument(comm, registry)
        comm.all_reduce(torch.ones(2)).wait()
        seen = scrape(registry)
        labels = {"comm": "world", "rank": 0, "op": "all_reduce", "transport": "local", "size": "<1KiB"}
        assert value(seen, "op_seconds_count", **labels) == 1
        assert value(seen, "loop_lateness_seconds", comm="world", rank=0) is None
    assert scrape(registry) == {}


def test_second_instrument_of_a_communicator_or_service_counts_nothing_twice():
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(1) as [comm], Service(comm) as service:
            handle = instrument(comm, registry)
            assert instrument(comm, registry) is instrument(comm.portal(), registry) is handle
            assert instrument(service, registry) is instrument(service, registry)
            await comm.barrier()
            assert value(scrape(registry), "op_seconds_count", op="barrier", transport="local", size="0", **OWN) == 1
            instrument(service, registry).remove()
            handle.remove()
            assert instrument(comm, registry) is not handle

    run_on("asyncio", main)


@pytest.mark.parametrize("first", ["comm", "service"])
def test_communicator_of_a_service_is_measured_until_both_handles_are_removed(first):
    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(1) as [comm], Service(comm) as service:
            both = {"comm": comm, "service": service}
            handles = {name: instrument(both[name], registry) for name in sorted(both, key=lambda name: name != first)}
            for handle, count in ((handles[first], 1), (handles.pop(first), 2)):
                handle.remove()  # The second call does nothing.
                await comm.barrier()
                labels = {"op": "barrier", "transport": "local", "size": "0", **OWN}
                assert value(scrape(registry), "op_seconds_count", **labels) == count
            for handle in handles.values():
                handle.remove()
            assert scrape(registry) == {}

    run_on("asyncio", main)


def test_communicators_of_one_name_share_their_series():
    """Prometheus refuses a scrape that has two samples with equal labels."""

    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with local_world(1) as [one], local_world(1) as [two]:
            works = [comm.recv(torch.ones(1), 0, timeout=None) for comm in (one, two)]
            services = [Service(comm) for comm in (one, two)]
            for service in services:
                instrument(service, registry)
                await service.comm.barrier()
            found = [
                (sample.name, *sorted(sample.labels.items())) for each in registry.collect() for sample in each.samples
            ]
            assert len(found) == len(set(found))
            seen = scrape(registry)
            assert value(seen, "op_seconds_count", op="barrier", transport="local", size="0", **OWN) == 2
            assert (value(seen, "pending", **OWN), value(seen, "generation", **OWN)) == (2, 1)
            assert value(seen, "plans_running", **OWN) == 0
            for work in works:
                await work.cancel()

    run_on("asyncio", main)


def test_instrument_refuses_an_object_that_is_no_communicator():
    with pytest.raises(ArgumentTypeError, match="comm is 3, wanted a Communicator"):
        instrument(3, prometheus_client.CollectorRegistry())


def test_histogram_buckets_cover_sizes_and_durations():
    sizes = {0: "0", 1: "<1KiB", 1023: "<1KiB", 1024: "<16KiB", (1 << 22) - 1: "<4MiB", 1 << 26: ">=64MiB"}
    assert {size: SIZES[size.bit_length()] for size in sizes} == sizes
    assert (BOUNDS[0], BOUNDS[-1]) == (1e-6, 50.0)
    assert sorted(BOUNDS) == list(BOUNDS)


@pytest.mark.fault(127)
def test_series_of_a_service_continue_after_a_recovery():
    """A scrape shows the plans of a service on every rank, and its current communicator, until the service ends."""

    async def recover(lost):
        return await lost.reconfigure(ranks=[0, 1])

    async def main():
        registry = prometheus_client.CollectorRegistry()
        own, worker = ({"comm": "world", "rank": rank} for rank in (0, 1))

        async def drive(driver, services):
            for generation in (1, 2):
                assert await driver.run("good") == 2.0
                if generation == 1:
                    services[1].current.abort("enough")
                    with pytest.raises(PlanLostError):
                        await driver.run("good")
                    await driver.ready()
            with pytest.raises(KeyError):
                await driver.run("bad")
            seen = scrape(registry)
            assert {dict(labels)["comm"] for _, labels in seen} == {"world"}
            for labels in (own, worker):
                assert value(seen, "recoveries_total", **labels) == 1
                assert value(seen, "generation", **labels) == 2
                assert value(seen, "plans_total", **labels, outcome="done", reason="") == 2
                assert value(seen, "plan_seconds_count", **labels) == 2
                assert value(seen, "plan_wait_seconds_bucket", **labels, le="+Inf") == 3
                assert value(seen, "plans_running", **labels) == value(seen, "oldest_plan_seconds", **labels) == 0
            assert value(seen, "plan_seconds_sum", **own) > 0
            assert value(seen, "plans_total", **own, outcome="failed", reason="KeyError") == 1
            assert value(seen, "plans_total", **own, outcome="failed", reason="PlanLostError") == 1
            assert value(seen, "plans_total", **worker, outcome="cancelled", reason="") == 1
            assert value(seen, "plans_total", **own, outcome="refused", reason="") == 0
            handles[1].remove()
            assert {dict(labels)["rank"] for _, labels in scrape(registry)} == {"0"}

        async def one(service):
            async def execute(plan):
                if plan == "bad" and service.comm.rank == 0:
                    raise KeyError(plan)
                return (await service.comm.all_reduce(torch.ones(1))).item()

            async with service:
                if service.comm.rank:
                    await service.work(execute)
                else:
                    async with service.drive(execute) as driver:
                        await drive(driver, services)

        async with local_world(2) as world:
            services = [Service(comm, recover) for comm in world]
            handles = [instrument(service, registry) for service in services]
            await ranks(services, one)
        assert scrape(registry) == {}

    run_on("asyncio", main)
