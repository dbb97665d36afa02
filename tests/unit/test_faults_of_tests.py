"""Injected faults: each kind, over transports that carry ops themselves, and by messages."""

from __future__ import annotations

import gc

import anyio
import pytest
import torch
from concurrency import ranks
from processes import KILLED, death

from aiocomms import new_comm
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    MessageTruncatedError,
    MismatchError,
    PeerDiedError,
    UnsupportedOperation,
)
from aiocomms.testing import here, local_world, run_ranks, simulate
from aiocomms.testing.faults import delay, drop, inject, kill, mismatch, slow_link

pytestmark = pytest.mark.deterministic

PATIENCE = 100.0  # The seconds of a deadline that does not pass.


@pytest.fixture(params=["local", "ucx", {"p2p": "local"}], ids=["local", "ucx", "messages"])
def transport(request):
    """Return a transport: two carry most ops themselves, one of these with native code; the third has only messages."""
    return request.param


async def sums(comm, n=3, timeout=PATIENCE):
    return (await comm.all_reduce(torch.ones(n), timeout=timeout)).tolist()


def test_delayed_op_completes_after_later_messages(run, transport):
    async def main():
        async with local_world(3, transport, timeout=PATIENCE) as comms:
            until = anyio.Event()
            with inject(comms, delay(until=until, ranks=[1], op="all_reduce")) as injected:
                works = [comm.all_reduce(torch.ones(3)) for comm in comms]
                for tag in range(3):  # These messages go on, on the same rank and on the same loop.
                    sending = comms[1].send(torch.full((2,), tag), 0, tag)
                    assert (await comms[0].recv(torch.zeros(2, dtype=torch.int64), 1, tag)).tolist() == [tag] * 2
                    await sending
                assert [work.done() for work in works] == [False] * 3
                until.set()
                assert [(await work).tolist() for work in works] == [[3.0] * 3] * 3
            assert injected == [("delay", 1, "all_reduce", 1)]
            assert await run_ranks(comms, sums) == [[3.0] * 3] * 3

    run(main)


def test_delayed_op_keeps_the_order_of_its_tag(run, transport):
    """Collectives and messages of one tag keep their order behind one that is delayed."""

    async def main():
        async with local_world(2, transport, timeout=PATIENCE) as comms:
            until = anyio.Event()
            with inject(comms[1], delay(until=until, ranks=[1], nth=1)):
                late = [comms[1].send(torch.tensor([n]), 0) for n in range(4)]
                received = [comms[0].recv(torch.tensor([9]), 1) for _ in range(4)]
                await ranks(comms, lambda comm: comm.barrier())
                assert not any(work.done() for work in received)
                until.set()
                assert [(await work).item() for work in received] == list(range(4))
                await ranks(late, lambda work: work)

            until = anyio.Event()
            with inject(comms[1], delay(until=until, op="all_reduce", nth=1)):
                works = [[comm.all_reduce(torch.tensor([n])) for n in range(4)] for comm in comms]
                await ranks(comms, lambda comm: comm.all_gather_object(comm.rank))
                until.set()
                for both in works:
                    assert [(await work).item() for work in both] == [0, 2, 4, 6]

    run(main)


def test_delay_ends_with_its_block(run, transport):
    async def main():
        async with local_world(2, transport, timeout=PATIENCE) as comms:
            for fault in (delay(PATIENCE * 100, ranks=[1]), slow_link(1 / PATIENCE, ranks=[1])):
                with inject(comms, fault):
                    # Each object travels in several messages.
                    works = [comm.all_gather_object(torch.ones(20_000)) for comm in comms]
                    await anyio.lowlevel.checkpoint()
                assert [len(gathered) for gathered in [await work for work in works]] == [2, 2]

    run(main)


def test_delayed_or_dropped_recv_can_be_withdrawn(run, transport):
    async def main():
        async with local_world(2, transport, timeout=PATIENCE) as comms:
            for fault in (delay(until=anyio.Event(), op="recv"), drop(op="recv")):
                with inject(comms, fault):
                    work = comms[0].recv(torch.zeros(1), 1)
                    assert await work.cancel()
                    with pytest.raises(CommTimeoutError, match="withdrawn"):
                        await comms[0].recv(torch.zeros(1), 1, timeout=0.01)
                sending = comms[1].send(torch.ones(1), 0)
                assert (await comms[0].recv(torch.zeros(1), 1)).item() == 1
                await sending

    run(main)


def test_dropped_collective_times_out_on_all_ranks(run, transport):
    async def main():
        async with local_world(3, transport) as comms:
            with inject(comms, drop(ranks=[2], op="all_reduce", nth=2)) as injected:
                assert await run_ranks(comms, sums) == [[3.0] * 3] * 3

                async def each(comm):
                    with pytest.raises((CommTimeoutError, CommAbortedError)) as caught:
                        await sums(comm, timeout=0.3 if comm.rank == 0 else PATIENCE)
                    return type(caught.value)

                errors = await run_ranks(comms[::-1], each)  # The deadline begins when all ranks have called.
                assert CommTimeoutError in errors
                assert injected == [("drop", 2, "all_reduce", 2)]

    run(main)


def test_collective_behind_a_dropped_one_does_not_match_in_its_place(run):
    async def main():
        async with local_world(2) as comms:
            with inject(comms, drop(ranks=[1], op="all_reduce", nth=1)) as injected:
                lost = [comm.all_reduce(torch.ones(1)) for comm in comms]
                behind = comms[1].all_reduce(torch.full((1,), 5.0))
                await ranks(comms, lambda comm: comm.send(torch.ones(1), 1) if not comm.rank else
                            comm.recv(torch.ones(1), 0))  # fmt: skip
                assert not any(work.done() for work in (*lost, behind))
                assert injected == [("drop", 1, "all_reduce", 1)]
            comms[0].abort("enough")
            for work in (*lost, behind):
                with pytest.raises(CommAbortedError):
                    await work

    run(main)


def test_killed_rank_is_dead_for_the_others(run, transport):
    async def main():
        async with local_world(3, transport, timeout=PATIENCE) as comms:
            with inject(comms, kill(ranks=[1], op="all_reduce", nth=3)) as injected:

                async def each(comm):
                    for _ in range(2):
                        await sums(comm)
                    if comm.rank == 1:
                        with pytest.raises(CommAbortedError, match="killed by a fault of the test"):
                            await sums(comm)
                        return None
                    return await death(sums(comm))

                errors = await run_ranks(comms, each)
            assert {error.peer for error in errors[::2]} == {1}
            assert "rank 1 was killed by a fault of the test" in str(errors[0])
            assert injected == [("kill", 1, "all_reduce", 3)]

    run(main)


@pytest.mark.parametrize("differs", ["dtype", "size"])
@pytest.mark.parametrize("op", ["all_reduce", "gather", "all_gather_single"])
def test_injected_mismatch_raises_mismatch_error(run, transport, differs, op):
    async def main():
        async with local_world(3, transport, timeout=PATIENCE) as comms:
            calls = {
                "all_reduce": lambda comm: comm.all_reduce(torch.ones(4)),
                "gather": lambda comm: comm.gather(
                    None if comm.rank else [torch.zeros(4) for _ in range(3)], torch.ones(4), 0
                ),
                "all_gather_single": lambda comm: comm.all_gather_single(torch.zeros(12), torch.ones(4)),
            }
            with inject(comms, mismatch(differs, ranks=[1], op=op)) as injected:

                async def call(comm):
                    await calls[op](comm)
                    await comm.barrier()  # A rank that only sends in a gather gets the error here.

                async def each(comm):
                    with pytest.raises((MismatchError, CommAbortedError)) as caught:
                        await call(comm)
                    return caught.value

                errors = await run_ranks(comms, each)
            assert any(isinstance(error, MismatchError) for error in errors)
            assert injected == [("mismatch", 1, op, 1)]

    run(main)


def test_injected_root_mismatch_raises_mismatch_error(run):
    async def main():
        for transport in ("local", "ucx"):
            async with local_world(2, transport, timeout=PATIENCE) as comms:
                with inject(comms, mismatch("root", ranks=[1])):
                    for work in [comm.broadcast(torch.ones(1), 0) for comm in comms]:
                        with pytest.raises(MismatchError):
                            await work
        async with local_world(2, {"p2p": "local"}, timeout=PATIENCE) as comms:
            with inject(comms, mismatch("root")), pytest.raises(UnsupportedOperation, match="has no root"):
                comms[0].broadcast(torch.ones(1), 0)

    run(main)


def test_injected_message_size_fails_only_its_recv(run, transport):
    async def main():
        async with local_world(2, transport, timeout=PATIENCE) as comms:
            given = torch.ones(2)
            with inject(comms, mismatch("size", op="send")):
                sending = comms[0].send(given, 1)
                with pytest.raises(MessageTruncatedError):
                    await comms[1].recv(torch.zeros(2), 0)
                await sending
            assert given.tolist() == [1, 1]
            assert await run_ranks(comms, sums) == [[2.0] * 3] * 2
            with inject(comms, mismatch("dtype", op="recv")):
                comms[0].send(given, 1).add_done_callback(lambda work: work.exception())
                with pytest.raises(MismatchError):
                    await comms[1].recv(torch.zeros(2), 0)

    run(main)


def test_fault_hits_each_user_call_once(run, transport):
    """Objects, windows, streams, batches and lanes count as one call each, whatever their number of messages."""
    big = torch.ones(20_000)

    async def held(comms, op, start):
        """Check that the first of the works that ``start`` starts is held back while others go on."""
        until = anyio.Event()
        with inject(comms, delay(until=until, ranks=[1], op=op)) as injected:
            works = start()
            await ranks(comms, lambda comm: comm.barrier())
            assert not works[0].done()
            until.set()
            await ranks(works, lambda work: work)
        assert injected == [("delay", 1, op, 1)]

    async def main():
        async with local_world(2, transport, timeout=PATIENCE) as comms:
            windows = await run_ranks(comms, lambda comm: comm.new_window(torch.zeros(2)))
            await held(comms, "all_gather_object", lambda: [comm.all_gather_object(big) for comm in reversed(comms)])
            await held(comms, "put", lambda: [windows[1].put(torch.full((2,), 7.0), 0), windows[1].flush(0)])
            assert windows[0].tensor.tolist() == [7.0, 7.0]
            await held(comms, "all_reduce", lambda: [comm.lane("one").all_reduce(big) for comm in reversed(comms)])
            await held(
                comms,
                "send_object",
                lambda: [comms[1].send_object({"big": big}, 0), comms[0].recv_object(1)],
            )
            await ranks(windows, lambda window: window.aclose())

    run(main)


def test_delay_holds_back_messages_of_a_stream(run):
    async def main():
        async with local_world(2, timeout=PATIENCE) as comms:
            streams = await run_ranks(comms, lambda comm: comm.open_stream(1 - comm.rank))
            until = anyio.Event()
            with inject(comms, delay(until=until, ranks=[1], op="stream", nth=1)) as injected:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(streams[1].send, torch.ones(3))
                    while not injected:
                        await anyio.lowlevel.checkpoint()
                    await ranks(comms, lambda comm: comm.barrier())
                    until.set()
                    assert (await streams[0].receive()).tolist() == [1.0] * 3
            for stream in streams:
                await stream.aclose()

    run(main)


def test_fault_probability_is_reproducible_by_seed(run):
    async def main():
        seen = []
        for seed in (7, 7, 8):
            async with local_world(2) as comms:
                with inject(comms, delay(1e-6, op="all_reduce", probability=0.5), seed=seed) as injected:
                    for _ in range(20):
                        await run_ranks(comms, sums)
                seen.append(sorted(injected))
        assert seen[0] == seen[1] != seen[2]
        assert 5 < len(seen[0]) < 35

    run(main)


def test_slow_link_delays_in_proportion_to_bytes():
    """The test's own clock moves only while tasks wait, so it measures the delays alone."""
    trio = pytest.importorskip("trio")
    from trio.testing import MockClock

    async def main():
        async with local_world(2, timeout=None) as comms:
            with inject(comms, slow_link(bytes_per_second=1000, ranks=[0])) as injected:
                began = trio.current_time()

                async def message(tag, nbytes):
                    sending = comms[0].send(torch.zeros(nbytes, dtype=torch.uint8), 1, tag)
                    await comms[1].recv(torch.zeros(nbytes, dtype=torch.uint8), 0, tag)
                    await sending

                for tag, (nbytes, since) in enumerate([(500, 0.5), (1000, 1.5), (0, 1.5)]):
                    await message(tag, nbytes)
                    assert trio.current_time() - began == pytest.approx(since)
                await ranks([7, 8], lambda tag: message(tag, 1000))  # These messages go one after the other.
                assert trio.current_time() - began == pytest.approx(3.5)
                assert [fault.op for fault in injected] == ["send"] * 5
                await ranks(comms, lambda comm: comm.all_reduce(torch.zeros(250)))
                assert trio.current_time() - began == pytest.approx(4.5)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    gc.collect()


async def one_of_them_is_killed(place):
    async with place.open() as comm:
        with inject(comm, kill(ranks=[1], op="all_reduce", nth=3)):
            for _ in range(2):
                await sums(comm)
            return (await death(sums(comm))).peer


@pytest.mark.real
@pytest.mark.parametrize("transport", ["c10d", "ucx"])
def test_kill_ends_the_process_of_its_rank(ranks, transport):
    assert ranks(3, one_of_them_is_killed) == [1, KILLED, 1]


async def simulated_with(*faults):
    """Sum tensors under faults of rank 1; return the type of the error, or the seconds that it took."""
    began = here().world.time
    async with new_comm(timeout=5) as comm:
        with inject(comm, *faults):
            try:
                await comm.all_reduce(torch.ones(1))
            except CommError as error:
                return type(error)
            return here().world.time - began


def test_killed_rank_of_a_simulation_dies_alone():
    history = simulate(lambda: simulated_with(kill(ranks=[1], op="all_reduce")), 3)
    assert history.results == [PeerDiedError, None, PeerDiedError]
    assert any(line.endswith("rank 1: dies") for line in history.trace)


@pytest.mark.parametrize(("fault", "outcome"), [(drop, CommTimeoutError), (mismatch, MismatchError)])
def test_fault_in_a_simulation_fails_the_call_on_all_ranks(fault, outcome):
    assert simulate(lambda: simulated_with(fault(ranks=[1]))).results == [outcome, outcome]


@pytest.mark.parametrize("fault", [delay(3, ranks=[1]), slow_link(1, ranks=[1])], ids=["delay", "slow_link"])
def test_fault_in_a_simulation_delays_by_virtual_time(fault):
    assert min(simulate(lambda: simulated_with(fault)).results) > 3


def test_fault_spares_child_communicators_and_ops_outside_its_block(run):
    async def main():
        async with local_world(2, timeout=PATIENCE) as comms:
            children = await run_ranks(comms, lambda comm: comm.split([0, 1]))
            early = comms[1].recv(torch.zeros(1), 0)
            with inject(comms, drop()), inject(comms, kill(op="barrier")):
                await run_ranks(children, sums)
            await ranks([early, comms[0].send(torch.ones(1), 1)], lambda work: work)
            await run_ranks(comms, sums)
            await run_ranks(children, lambda comm: comm.aclose())

    run(main)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: drop(op="allreduce"), "op is 'allreduce', which is the name of no operation; did you mean"),
        (lambda: mismatch(op="barrier"), "op is 'barrier', on whose dtype ranks cannot disagree"),
        (lambda: mismatch("root", op="all_reduce"), "on whose root ranks cannot disagree; wanted one of broadcast"),
        (lambda: mismatch("shape"), "differs is 'shape', wanted one of 'dtype', 'size', 'root'"),
        (lambda: delay(), "seconds is None and until is None, wanted one of them"),
        (lambda: delay(until=3), "until is 3"),
        (lambda: delay(-1), "seconds is -1, wanted seconds"),
        (lambda: slow_link(0), "bytes_per_second is 0, wanted more than 0"),
        (lambda: kill(nth=0), "nth is 0, wanted the number of a call, from 1 on"),
        (lambda: kill(ranks=[]), r"ranks is \[\], wanted a list of ranks"),
        (lambda: kill(ranks=1), "ranks is 1, wanted a list of ranks"),
        (lambda: drop(probability=0), "probability is 0, wanted a number above 0 and at most 1"),
    ],
)  # fmt: skip
def test_fault_with_wrong_arguments_is_refused(make, wrong):
    with pytest.raises(ArgumentError, match=wrong):
        make()


def test_inject_with_wrong_ranks_or_types_is_refused(run):
    async def main():
        async with local_world(2) as comms:
            for world, faults, wrong in [
                (comms, [kill(ranks=[0, 2])], r"ranks of a kill has \[2\], wanted ranks of 'world', from 0 to 1"),
                (comms, [], "wanted at least one communicator and one fault"),
                ([], [kill()], "wanted at least one communicator and one fault"),
                (3, [kill()], r"world is 3 \(int\), wanted a list of communicators"),
                ([3], [kill()], r"world\[0\] is 3 \(int\), wanted a Communicator"),
            ]:
                with pytest.raises(ArgumentError, match=wrong), inject(world, *faults):
                    raise AssertionError("it began")
            for world, faults in [(comms, [kill]), (["world"], [kill()])]:
                with pytest.raises(ArgumentTypeError), inject(world, *faults):
                    raise AssertionError("it began")

    run(main)
