"""Ranges of a communicator's ops in torch's profiler."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch
from concurrency import ranks, run_on
from torch.profiler import ProfilerActivity, profile, record_function

from aiocomms.errors import ArgumentTypeError
from aiocomms.integrations.profiler import record_ops
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


def profiled() -> profile:
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True)


def named(found: profile, prefix: str = "aiocomms:") -> list[Any]:
    events = [event for event in found.events() if event.name.startswith(prefix)]
    return sorted(events, key=lambda event: event.time_range.start)


@pytest.mark.parametrize("transport", ["local", "ucx"])
def test_profiler_range_of_an_op_has_its_tensor_shapes(transport: str) -> None:
    async def calls(comm) -> None:
        await comm.all_reduce(torch.ones(2, 3))
        await comm.all_gather_single(torch.ones(8), torch.ones(4))
        await comm.barrier()
        await comm.lane("own").broadcast(torch.ones(5), 0)
        if comm.rank:
            await comm.recv(torch.ones(7), 0)
        else:
            await comm.send(torch.ones(7), 1)

    async def main() -> None:
        async with local_world(2, transport) as comms:
            handle = record_ops(comms[1])
            await ranks(comms, calls)
            with profiled() as found:
                await ranks(comms, calls)
            handle.remove()
            with profiled() as later:
                await ranks(comms, calls)
        shown = [(event.name.removeprefix("aiocomms:"), event.input_shapes) for event in named(found)]
        assert shown == [
            ("all_reduce", [[2, 3]]),
            ("all_gather_single", [[4], [8]]),
            ("barrier", []),
            ("broadcast", [[5]]),
            ("recv", [[7]]),
        ]
        assert named(later) == []

    run_on("asyncio", main)


def test_profiler_range_lasts_from_the_call_to_the_end_of_the_op(run) -> None:
    async def main() -> None:
        async with local_world(2) as (one, two):
            record_ops(one)
            with profiled() as found:
                with record_function("before the call"):
                    pass
                work = one.recv(torch.ones(2), 1)
                with record_function("under way"):
                    await anyio.lowlevel.checkpoint()
                await two.send(torch.ones(2), 0)
                await work
                with record_function("after it"):
                    pass
        [op] = named(found)
        times = {
            event.name: event.time_range
            for event in found.events()
            if event.name in ("before the call", "under way", "after it")
        }
        assert times["before the call"].end <= op.time_range.start <= times["under way"].start
        assert times["under way"].end <= op.time_range.end <= times["after it"].start

    run(main)


def test_profiler_range_ends_when_its_op_fails_or_is_refused(run) -> None:
    def refuse(op, seq) -> None:
        raise ValueError(f"no {op.name}")

    async def main() -> None:
        async with local_world(2) as (one, _):
            handle = record_ops(one)
            hook = one.register_pre_hook(refuse)
            with profiled() as found:
                with pytest.raises(ValueError, match="no barrier"):
                    one.barrier()
                hook.remove()
                work = one.recv(torch.ones(2), 1)
                assert await work.cancel()
                assert handle._ranges == {}
                with record_function("after them"):
                    pass
        assert [event.name for event in named(found)] == ["aiocomms:barrier", "aiocomms:recv"]
        [after] = named(found, "after them")
        assert all(event.time_range.end <= after.time_range.start for event in named(found))

    run(main)


def test_profiler_started_or_stopped_amid_an_op_leaves_no_range_open(run) -> None:
    async def main() -> None:
        async with local_world(2) as (one, two):
            handle = record_ops(one)
            early = one.recv(torch.ones(2), 1)  # no profiler runs yet
            assert handle._ranges == {}
            with profiled() as found:
                late = one.recv(torch.ones(3), 1, tag=1)
                await two.send(torch.ones(2), 0)
                await early
            await two.send(torch.ones(3), 0, tag=1)
            await late
            assert handle._ranges == {}
            with profiled() as next_one:
                cut = one.recv(torch.ones(4), 1, tag=2)
                handle.remove()
                handle.remove()
            await cut.cancel()
        assert [event.input_shapes for event in named(found)] in ([], [[[3]]])  # The profiler may drop this range.
        assert [event.input_shapes for event in named(next_one)] == [[[4]]]  # The range ended with the handle.

    run(main)


def test_record_ops_refuses_an_object_that_is_no_communicator() -> None:
    with pytest.raises(ArgumentTypeError, match="comm is 7, wanted a Communicator"):
        record_ops(7)
