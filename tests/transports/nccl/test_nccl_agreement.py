"""The messages of ranks about their collectives, and their times: late, in few frames, and beside what NCCL does."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import Any

import pytest
import torch
from aiocomms_nccl import agreement, wire
from aiocomms_nccl.control import Control
from fake_cuda import FakeCuda, Gate

from aiocomms.errors import CommError, MismatchError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

NEVER = 3600.0


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[wire.Calls]:
    """The frames by which ranks tell what they have called."""
    sent: list[wire.Calls] = []
    send = Control.send

    def noting(self: Control, peer: int, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Calls):
            sent.append(frame)
        send(self, peer, frame)

    monkeypatch.setattr(Control, "send", noting)
    return sent


def transport(comm: Any) -> Any:
    return comm._core.transports[0]


async def all_parked(comms: list[Any]) -> None:
    """Wait until threads sleep on what is under way, and the reminder is set."""
    while not all(transport(comm).launcher.parked for comm in comms):  # noqa: ASYNC110 - the fake knows no loop
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_what_waits_for_less_than_some_milliseconds_costs_no_frame(
    cuda: FakeCuda, frames: list[wire.Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "TELL_AFTER", NEVER)
    async with local_world(2, "nccl_fake") as comms:
        for _ in range(3):
            gate = Gate(cuda.current_stream())
            works = [comm.all_reduce(torch.zeros(2)) for comm in comms]
            await all_parked(comms)
            gate.open()
            for work in works:
                await work
        assert frames == []


@pytest.mark.asyncio
async def test_all_calls_until_then_go_in_one_frame(
    cuda: FakeCuda, frames: list[wire.Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "TELL_AFTER", 0.0)
    async with local_world(2, "nccl_fake") as comms:
        works = [comms[0].all_reduce(torch.ones(2)) for _ in range(3)]
        while transport(comms[1])._agreement._log._heard[0] < 3:  # noqa: ASYNC110 - the fake knows no loop
            await asyncio.sleep(0)
        assert [frame.count for frame in frames] == [3]
        assert not any(work.done() for work in works)
        for _ in works:
            await comms[1].all_reduce(torch.ones(2))
        for work in works:
            assert (await work).tolist() == [2, 2]


@pytest.mark.asyncio
async def test_a_rank_that_is_told_tells_what_it_has_called_itself(
    cuda: FakeCuda, frames: list[wire.Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of a broadcast is done, and says so to a rank that waits for a third."""
    monkeypatch.setattr(agreement, "TELL_AFTER", 0.0)
    async with local_world(3, "nccl_fake") as comms:
        works = [comm.all_reduce(torch.ones(2)) for comm in comms[:2]]
        while transport(comms[0])._agreement.waiting_for(works[0]) != [2]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await comms[2].all_reduce(torch.ones(2))
        for work in works:
            await work


@pytest.mark.asyncio
async def test_ranks_that_disagree_learn_it_while_they_wait(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "TELL_AFTER", 0.0)
    async with local_world(2, "nccl_fake") as comms:
        works = [comm.all_reduce(torch.ones(2 + comm.rank)) for comm in comms]
        errors = await asyncio.gather(*works, return_exceptions=True)
    assert {type(error) for error in errors} == {MismatchError}


@pytest.mark.asyncio
async def test_a_collective_that_was_called_later_is_not_told_of_at_once(
    cuda: FakeCuda, frames: list[wire.Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that one has waited counts for no other: then the ranks are reminded again."""
    monkeypatch.setattr(agreement, "TELL_AFTER", NEVER)
    async with local_world(2, "nccl_fake") as comms:
        ours = [transport(comm).control for comm in comms]
        for number in range(2):
            gate = Gate(cuda.current_stream())
            works = [comm.all_reduce(torch.zeros(2)) for comm in comms]
            await all_parked(comms)
            while not all(control.reminds for control in ours):  # noqa: ASYNC110 - the fake knows no loop
                await asyncio.sleep(0)
            if number:  # the reminder of the first op comes now
                for comm in comms:
                    transport(comm).control._due = True
                    transport(comm).progress()
                assert all(control.reminds for control in ours)
            gate.open()
            for work in works:
                await work
        assert frames == []


@pytest.mark.asyncio
async def test_with_nothing_under_way_nobody_is_reminded_again(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "TELL_AFTER", NEVER)
    async with local_world(2, "nccl_fake") as comms:
        gate = Gate(cuda.current_stream())
        works = [comm.all_reduce(torch.zeros(2)) for comm in comms]
        await all_parked(comms)
        gate.open()
        for work in works:
            await work
        for comm in comms:
            control = transport(comm).control
            control._due = True
            transport(comm).progress()
            assert not control.reminds


@pytest.mark.asyncio
async def test_in_debug_mode_ranks_compare_before_any_completes(cuda: FakeCuda, frames: list[wire.Calls]) -> None:
    async with local_world(2, "nccl_fake_debug") as comms:
        work = comms[0].all_reduce(torch.ones(2))
        assert [frame.count for frame in frames] == [1]
        await comms[1].all_reduce(torch.ones(2))
        await work
        with pytest.raises(CommError):
            await asyncio.gather(comms[0].barrier(), comms[1].all_reduce(torch.ones(2)))


@pytest.mark.real
@pytest.mark.search
def test_a_reminder_comes_once_and_wakes_who_waits_for_the_descriptor() -> None:
    one, other = socket.socketpair()
    with other:
        control = Control({1: one})
        waits = select.poll()
        waits.register(control.fileno(), select.POLLIN)
        assert waits.poll(0) == []
        control.remind(0.001)
        control.remind(NEVER)  # a reminder is set already
        assert waits.poll(10_000) != []
        assert not control.reminded()  # before it is looked at
        assert control.poll() == []
        assert control.reminded()
        assert not control.reminded()
        assert waits.poll(20) == []
        control.remind(NEVER)
        assert waits.poll(20) == []
        control.close(0.1)
