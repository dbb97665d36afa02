"""Collectives of lanes over a fake GPU: what is launched in which order, and what ends them at each of their steps."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import torch
from aiocomms_nccl import wire
from aiocomms_nccl.channels import CHANNELS
from aiocomms_nccl.control import Control
from aiocomms_nccl.direction import AT_ONCE
from concurrency import until
from fake_cuda import FakeCuda, FakeStream, Gate
from fake_nccl import FakeNccl, FakeNcclError, FakeNcclTransport, transport, world
from processes import PATIENCE

from aiocomms import ReduceOp
from aiocomms.cuda import recorded
from aiocomms.errors import (
    CommAbortedError,
    CommError,
    CommTimeoutError,
    LaneAbortedError,
    MismatchError,
    PeerDiedError,
    ProtocolError,
    UnsupportedOperation,
)
from aiocomms.lowering.tags import number_of

pytestmark = pytest.mark.deterministic


def ones() -> torch.Tensor:
    return torch.ones(3)


def lanes(comm: Any) -> Any:
    """Return what a rank knows of its lanes."""
    return transport(comm)._lanes


def at_rest(comms: Any) -> bool:
    """Return whether nothing is kept of any lane."""
    kept = [part for comm in comms for part in (lanes(comm)._lanes, lanes(comm)._posted)]
    sequencer = lanes(comms[0])._sequencer
    return not any(kept) and not sequencer and not sequencer.has_news


async def reduced(comms: Any, key: Any, **options: Any) -> None:
    """Have all ranks sum up on a lane, and check the sum."""
    tensors = [torch.full((3,), float(comm.rank + 1)) for comm in comms]
    works = [comm.lane(key).all_reduce(it, **options) for comm, it in zip(comms, tensors, strict=True)]
    await asyncio.gather(*(work.wait() for work in works))
    for work, tensor in zip(works, tensors, strict=True):
        assert await work is tensor
        assert tensor.tolist() == [sum(range(1, len(comms) + 1))] * 3


def of_channels(comm: Any) -> list[Any]:
    """NCCL's communicators of a rank's channels."""
    return [it.comm for it in lanes(comm).comm_streams()]


def in_channel(channel: int, count: int = 1) -> list[int]:
    """Keys of lanes that one channel carries."""
    return [key for key in range(200) if number_of(key) % CHANNELS == channel][:count]


def counts_launched(comm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of elements of each collective that a rank launches, in order."""
    counts = list[int]()
    launcher = transport(comm).launcher
    launch = launcher.launch

    def noted(cs: Any, what: str, plan: Any, after: Any, then: Any) -> Any:
        counts.append(plan.calls[0][3])
        return launch(cs, what, plan, after, then)

    monkeypatch.setattr(launcher, "launch", noted)
    return counts


# -------------------------------------------------------------------------------------------------------- order


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_all_ranks_launch_one_sequence_whatever_the_order_of_the_calls(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    async with world(size) as comms:
        sequences = [counts_launched(comm, monkeypatch) for comm in comms]
        keys, tensors = list(range(50)), dict[tuple[int, int], torch.Tensor]()
        works = []
        for comm in comms:
            random.Random(comm.rank).shuffle(keys)
            for key in keys:
                tensors[comm.rank, key] = torch.full((1 + key,), float(key))
                works.append(comm.lane(key).all_reduce(tensors[comm.rank, key]))
        await asyncio.gather(*(work.wait() for work in works))
        assert all(tensor.tolist() == [float(size * key)] * (1 + key) for (_, key), tensor in tensors.items())
        assert all(sequence == sequences[0] for sequence in sequences)
        assert sorted(sequences[0]) == list(range(1, 51))
        assert at_rest(comms)


@pytest.mark.asyncio
async def test_nothing_is_launched_that_a_rank_has_not_called(cuda: FakeCuda) -> None:
    async with world(3) as comms:
        await reduced(comms, "before")
        before = [[list(it.calls) for it in of_channels(comm)] for comm in comms]
        works = [comm.lane("late").barrier() for comm in comms[:2]]
        for _ in range(50):
            await asyncio.sleep(0)
        assert [[list(it.calls) for it in of_channels(comm)] for comm in comms] == before
        await reduced(comms, "another")
        works.append(comms[2].lane("late").barrier())
        await asyncio.gather(*(work.wait() for work in works))
        assert at_rest(comms)


@pytest.mark.asyncio
async def test_an_op_comes_after_what_the_callers_stream_did_at_the_call(cuda: FakeCuda) -> None:
    """The launch comes later, when another stream may be the current one."""
    async with world(2) as comms:
        mine, tensors = FakeStream(cuda.gpu), [torch.zeros(3) for _ in comms]
        gate = Gate(mine)
        with cuda.on(mine):
            cuda.enqueue(mine, lambda: tensors[0].fill_(2))
            first = comms[0].lane("a").all_reduce(tensors[0])
        second = comms[1].lane("a").all_reduce(tensors[1])
        await until(lambda: lanes(comms[0]).end_of(first))
        assert not first.done()
        gate.open()
        await asyncio.gather(first.wait(), second.wait())
        assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2


@pytest.mark.asyncio
async def test_collectives_of_one_lane_run_one_after_the_other_without_being_awaited(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        tensors = [torch.full((3,), float(comm.rank + 1)) for comm in comms]
        works = []
        for comm, tensor in zip(comms, tensors, strict=True):
            works += [comm.lane("a").broadcast(tensor, 0), comm.lane("a").all_reduce(tensor)]
            works += [comm.lane("a").all_reduce(tensor, ReduceOp.PREMUL_SUM(2.0)), comm.lane("a").broadcast(tensor, 1)]
        await asyncio.gather(*(work.wait() for work in works))
        assert [tensor.tolist() for tensor in tensors] == [[8.0] * 3] * 2


@pytest.mark.asyncio
async def test_lanes_of_different_channels_overlap(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        (one,), (other,) = in_channel(0), in_channel(1)
        gate = Gate(cuda.current_stream())
        held = [comm.lane(one).all_reduce(ones()) for comm in comms]
        with cuda.on(FakeStream(cuda.gpu)):
            await reduced(comms, other)
        assert not any(work.done() for work in held)
        gate.open()
        await asyncio.gather(*(work.wait() for work in held))


@pytest.mark.asyncio
async def test_nccl_has_no_more_collectives_than_cuda_takes(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        (key,) = in_channel(2)
        await reduced(comms, key)
        gate = Gate(cuda.current_stream())
        works = [comm.lane(key).all_reduce(ones()) for _ in range(3 * AT_ONCE) for comm in comms]
        await until(lambda: all(len(transport(comm).launcher) == AT_ONCE for comm in comms))
        for _ in range(50):
            await asyncio.sleep(0)
        assert [len(transport(comm).launcher) for comm in comms] == [AT_ONCE] * 2
        gate.open()
        await asyncio.gather(*(work.wait() for work in works))
        assert at_rest(comms)


@pytest.mark.asyncio
async def test_what_is_called_in_one_turn_is_told_together(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    send = Control.send

    def counted(self: Control, peer: int, frame: wire.Frame) -> None:
        sent.append(type(frame))
        send(self, peer, frame)

    async with world(2) as comms:
        await reduced(comms, "before")
        monkeypatch.setattr(Control, "send", counted)
        works = [comm.lane(key).barrier() for comm in comms for key in range(200)]
        await asyncio.gather(*(work.wait() for work in works))
        assert sent.count(wire.LaneCalls) == 2  # the first at once
        assert 1 <= sent.count(wire.LaneEntries) <= 3


@pytest.mark.asyncio
async def test_channels_are_formed_by_the_first_lane_that_all_use(cuda: FakeCuda) -> None:
    nccl = FakeNcclTransport.nccl_layer
    async with world(2) as comms:
        await asyncio.gather(*(comm.barrier() for comm in comms))
        assert len(nccl.comms) == 2
        await reduced(comms, "a")
        await reduced(comms, "b")
        assert len(nccl.comms) == 2 + 2 * CHANNELS
    assert {comm.state for comm in nccl.comms} == {"destroyed"}


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_channels_are_formed(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    may_form, form = threading.Event(), FakeNccl.unique_id

    def unique_id(self: FakeNccl) -> bytes:
        may_form.wait(PATIENCE)
        return form(self)

    async with world(2) as comms:
        monkeypatch.setattr(FakeNccl, "unique_id", unique_id)
        works = [comm.lane("a").barrier() for comm in comms]
        await asyncio.gather(*(comm.barrier() for comm in comms))
        assert not any(work.done() for work in works)
        may_form.set()
        await asyncio.gather(*(work.wait() for work in works))


@pytest.mark.asyncio
async def test_lanes_go_on_while_the_communicator_is_split(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        await reduced(comms, "a")
        splits = [asyncio.ensure_future(comm.split([0, 1])) for comm in comms]
        await reduced(comms, "a")
        parts = await asyncio.gather(*splits)
        await reduced(parts, "a")
        for part in parts:
            await part.aclose()


# -------------------------------------------------------------------------------------------------- streams, memory


@pytest.mark.asyncio
async def test_a_stream_waits_for_what_is_launched_and_for_nothing_else(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        tensor, seen, mine = ones(), torch.zeros(3), FakeStream(cuda.gpu)
        gate = Gate(cuda.current_stream())
        work = comms[0].lane("a").all_reduce(tensor)
        with pytest.raises(UnsupportedOperation, match="await the work instead"):
            work.wait_stream(mine)
        other = comms[1].lane("a").all_reduce(ones())
        await until(lambda: lanes(comms[0]).end_of(work))
        work.wait_stream(mine)
        cuda.enqueue(mine, lambda: seen.copy_(tensor))
        after = recorded(mine, cuda=cuda)
        assert not after.done()
        gate.open()
        await after
        assert seen.tolist() == [2.0] * 3
        await asyncio.gather(work.wait(), other.wait())
        work.wait_stream(mine)  # done: nothing to wait for


@pytest.mark.asyncio
async def test_a_lane_is_refused_in_a_capture(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        with cuda.graph(), pytest.raises(UnsupportedOperation, match="cannot be captured"):
            comms[0].lane("a").barrier()
        assert at_rest(comms)
        await reduced(comms, "a")


@pytest.mark.asyncio
async def test_without_memory_an_op_of_a_lane_fails_alone(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        cuda.gpu.memory = 0
        with pytest.raises(CommError, match="no GPU memory"):
            comms[0].lane("a").all_reduce(ones(), ReduceOp.PREMUL_SUM(2.0))
        cuda.gpu.memory = None
        assert at_rest(comms)
        await reduced(comms, "a")


# -------------------------------------------------------------------------------------------------------- ends


class Step:
    """A collective of a lane on two ranks, of which the steps so far have happened, and the others wait.

    :param name: ``"called"`` by one rank; ``"ordered"`` by the log, of which one rank has not heard;
        ``"heard"`` and not launched, for the channels are not formed; ``"launched"``, and the GPU waits.
    """

    def __init__(self, name: str, comms: Any, caller: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.comms = comms
        self.works: dict[int, Any] = {}
        self.tensors = [ones() for _ in comms]
        self._caller = caller
        self._cuda = cuda
        self._patch = monkeypatch
        self._held: list[Any] = []
        self._may_form = threading.Event()
        self._gate: Gate | None = None

    async def reach(self) -> None:
        """Let the steps happen."""
        if self.name != "heard":
            await reduced(self.comms, "channels")
        else:
            form = FakeNccl.unique_id
            self._patch.setattr(FakeNccl, "unique_id", lambda it: (self._may_form.wait(PATIENCE), form(it))[1])
        self._gate = Gate(self._cuda.current_stream()) if self.name == "launched" else None
        log = lanes(self.comms[1])
        if self.name == "ordered":
            self._patch.setattr(log, "handle", lambda *frame: self._held.append(frame))
        for comm in self.comms if self.name != "called" else [self.comms[self._caller]]:
            self.works[comm.rank] = comm.lane("it").all_reduce(self.tensors[comm.rank])
        if self.name == "called":
            sequencer = lanes(self.comms[0])._sequencer
            await until(lambda: sequencer and not sequencer.has_news)
        elif self.name == "ordered":
            await until(lambda: self._held)
        elif self.name == "heard":
            await until(lambda: all(lanes(comm)._lanes and not self._waiting(comm) for comm in self.comms))
        else:
            await until(lambda: all(lanes(comm).end_of(work) for comm, work in self._both()))

    def _waiting(self, comm: Any) -> Any:
        return next(iter(lanes(comm)._lanes.values())).waiting

    def _both(self) -> list[tuple[Any, Any]]:
        return [(self.comms[rank], work) for rank, work in self.works.items()]

    def go_on(self) -> None:
        """Let the other steps happen, too."""
        self._may_form.set()
        if self._gate is not None:
            self._gate.open()
        log = lanes(self.comms[1])
        held, self._held = self._held, []
        if self.name == "ordered":
            self._patch.delattr(log, "handle")
        if not self.comms[1].aborted:
            for frame in held:
                log.handle(*frame)
            log._owner.control.wake()  # The transport handles frames in a turn of its own.

    async def ends(self) -> list[BaseException | None]:
        """Return what the works end with."""
        for work in self.works.values():
            await work.wait()
        return [work.exception() for work in self.works.values()]


STEPS = pytest.mark.parametrize(
    ("step", "caller"), [("called", 0), ("called", 1), ("ordered", 0), ("heard", 0), ("launched", 0)]
)
RANKS = pytest.mark.parametrize("ends", [0, 1])


@pytest.mark.asyncio
@STEPS
@RANKS
async def test_an_abort_ends_it_at_every_step(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, step: str, caller: int, ends: int
) -> None:
    async with world(2) as comms:
        at = Step(step, comms, caller, cuda, monkeypatch)
        await at.reach()
        comms[ends].abort("enough")
        for error in await at.ends():
            assert isinstance(error, CommAbortedError)
            assert "enough" in str(error)
        at.go_on()
    assert {comm.state for comm in FakeNcclTransport.nccl_layer.comms} == {"aborted"}


@pytest.mark.asyncio
@STEPS
@RANKS
async def test_a_lane_is_given_up_at_every_step(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, step: str, caller: int, ends: int
) -> None:
    """Collectives in the log run to their end on all ranks, and other lanes notice nothing."""
    async with world(2) as comms:
        at = Step(step, comms, caller, cuda, monkeypatch)
        await at.reach()
        comms[ends].lane("it").abort("not any more")
        if step in ("heard", "launched"):
            for _ in range(50):
                await asyncio.sleep(0)
            assert not any(work.done() for work in at.works.values())  # its tensors are in use
        at.go_on()
        for rank, error in zip(at.works, await at.ends(), strict=True):
            # In other cases the work has ended before that rank has heard.
            if rank == ends or step == "called" or error is not None:
                assert isinstance(error, LaneAbortedError)
                assert "not any more" in str(error)
        wanted = 1.0 if step == "called" else 2.0
        assert all(tensor.tolist() == [wanted] * 3 for tensor in at.tensors)
        await reduced(comms, "another")
        await until(lambda: at_rest(comms))
        assert not any(comm.aborted for comm in comms)


@pytest.mark.asyncio
async def test_a_lane_is_called_and_given_up_in_one_turn(cuda: FakeCuda) -> None:
    """Its end comes behind what the log has named by then, and its word behind what it has called."""
    async with world(2) as comms:
        await reduced(comms, "channels")
        first = comms[0].lane("it").all_reduce(ones())
        await until(lambda: not lanes(comms[0])._sequencer.has_news)
        tensor = ones()
        works = [comms[1].lane("it").all_reduce(tensor), comms[1].lane("it").barrier()]
        comms[1].lane("it").abort("not any more")
        for work in works:
            assert isinstance(await failure(work), LaneAbortedError)
        await first.wait()
        assert tensor.tolist() == [2.0] * 3
        await reduced(comms, "another")
        await until(lambda: at_rest(comms))


@pytest.mark.asyncio
@pytest.mark.parametrize(("step", "caller"), [("ordered", 0), ("heard", 0), ("launched", 0)])
@RANKS
async def test_closing_waits_for_it_at_every_step(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, step: str, caller: int, ends: int
) -> None:
    async with world(2) as comms:
        at = Step(step, comms, caller, cuda, monkeypatch)
        await at.reach()
        closing = asyncio.ensure_future(comms[ends].aclose())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        at.go_on()
        assert await at.ends() == [None, None]
        await closing
        assert all(tensor.tolist() == [2.0] * 3 for tensor in at.tensors)


@pytest.mark.asyncio
@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("when", ["before the call", "after the call"])
async def test_a_rank_that_closes_without_the_call_fails_it(cuda: FakeCuda, caller: int, when: str) -> None:
    async with world(2) as comms:
        waiting, leaving = comms[caller], comms[1 - caller]
        await reduced(comms, "before")
        if when == "before the call":
            await leaving.aclose()
            await until(lambda: transport(waiting).closed_by(leaving.rank))
            work = waiting.lane("it").barrier()
        else:
            work = waiting.lane("it").barrier()
            await leaving.aclose()
        with pytest.raises(CommAbortedError, match=f"closed by rank {leaving.rank}"):
            await work
        assert waiting.aborted


@pytest.mark.asyncio
@pytest.mark.parametrize("leaves", [0, 2])
async def test_a_third_rank_closes_without_the_call(cuda: FakeCuda, leaves: int) -> None:
    """The sequencer knows that it has not called, or is that rank."""
    async with world(3) as comms:
        work = comms[1].lane("it").barrier()
        await comms[leaves].aclose()
        with pytest.raises(CommAbortedError, match=f"closed by rank {leaves}"):
            await work


@pytest.mark.asyncio
async def test_a_lane_is_given_up_after_the_sequencer_has_closed(cuda: FakeCuda) -> None:
    """No rank says any more where the lane ends: there is nothing of it in the log that is not known."""
    async with world(2) as comms:
        work = comms[1].lane("it").barrier()
        lanes(comms[1]).handle = lambda *_: None  # the sequencer's answer is not heard
        comms[1].lane("it").abort("not any more")
        await comms[0].aclose()
        with pytest.raises(LaneAbortedError, match="not any more"):
            await work
        assert not comms[1].aborted


@pytest.mark.asyncio
@STEPS
async def test_a_rank_dies_at_every_step(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, step: str, caller: int
) -> None:
    async with world(2) as comms:
        at = Step(step, comms, caller, cuda, monkeypatch)
        await at.reach()
        for rank in (0, 1):
            transport(comms[rank]).control._disconnect(1 - rank)  # a connection that breaks, without a goodbye
            transport(comms[rank]).lose(PeerDiedError(f"rank {1 - rank} is gone", peer=1 - rank))
        for error in await at.ends():
            assert isinstance(error, PeerDiedError)
        at.go_on()


@pytest.mark.asyncio
@pytest.mark.parametrize("caller", [0, 1, 2])
async def test_a_deadline_says_who_has_not_called(cuda: FakeCuda, caller: int) -> None:
    async with world(3) as comms:
        await reduced(comms, "before")
        work = comms[caller].lane("it").barrier()
        missing = [rank for rank in range(3) if rank != caller]
        await until(lambda: transport(comms[caller]).waiting_for(work) == missing)
        comms[missing[0]].lane("it").barrier()
        await until(lambda: transport(comms[caller]).waiting_for(work) == missing[1:])
        late = comms[caller].lane("it").barrier(timeout=0.3)  # this barrier waits for the one before it
        with pytest.raises(CommTimeoutError, match=f"lane it.*waiting for rank {missing[1]}") as caught:
            await late
        assert caught.value.late == (missing[1],)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["heard", "launched"])
async def test_a_deadline_passes_though_all_have_called(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with world(2) as comms:
        at = Step(step, comms, 0, cuda, monkeypatch)
        await at.reach()
        with pytest.raises(CommTimeoutError, match="lane it"):
            await comms[0].lane("it").barrier(timeout=0.3)
        assert all(isinstance(error, CommTimeoutError) for error in await at.ends())
        at.go_on()


@pytest.mark.asyncio
async def test_a_cancelled_await_stops_no_collective(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        tensor = ones()
        waiting = asyncio.ensure_future(comms[0].lane("a").all_reduce(tensor).wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await comms[1].lane("a").all_reduce(ones())
        await comms[0].lane("a").aclose()
        assert tensor.tolist() == [2.0] * 3
        await reduced(comms, "a")


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", [0, 1, 2])
async def test_hundreds_of_lanes_in_any_order_of_which_some_are_given_up(cuda: FakeCuda, ends: int) -> None:
    """Each rank has a task for each lane; 10 % of them fail on one rank, and 10 % of the awaits are cancelled."""
    failing = set(random.Random(ends).sample(range(200), 20))

    async def request(comm: Any, key: int, mix: random.Random) -> None:
        with comm.lane(key):
            for step in range(3):
                if (key in failing, comm.rank, step) == (True, ends, key % 3):
                    raise ValueError("a bad request")
                for _ in range(mix.randrange(3)):
                    await asyncio.sleep(0)
                tensor = torch.full((1 + key % 5,), float(key + step + comm.rank))
                work = comm.all_reduce(tensor)
                if mix.random() < 0.1:
                    waiting = asyncio.ensure_future(work.wait())
                    await asyncio.sleep(0)
                    waiting.cancel()
                else:
                    await work
                    assert tensor.tolist() == [3.0 * (key + step) + 3] * len(tensor), (key, step)

    async with world(3) as comms:
        tasks = dict[tuple[int, int], Any]()
        for comm in comms:
            mix = random.Random(f"{ends} {comm.rank}")
            for key in mix.sample(range(200), 200):
                tasks[comm.rank, key] = asyncio.ensure_future(request(comm, key, random.Random(f"{comm.rank} {key}")))
        done = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for (_, key), error in zip(tasks, done, strict=True):
            assert error is None or (key in failing and "a bad request" in str(error)), (key, error)
        assert sum(isinstance(error, ValueError) for error in done) == len(failing)
        for comm in comms:
            for key in range(200):
                await comm.lane(key).aclose()
        await until(lambda: at_rest(comms))
        assert not any(comm.aborted for comm in comms)
        await reduced(comms, "goes on")


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.asyncio
@pytest.mark.parametrize("callers", [(0, 1), (1, 2), (2, 1)])
async def test_ranks_that_disagree_are_told_at_once(cuda: FakeCuda, callers: tuple[int, int]) -> None:
    """Tell them also where the sequencer's rank has not called."""
    async with world(3) as comms:
        first, second = (comms[rank] for rank in callers)
        works = [first.lane("it").all_reduce(ones()), second.lane("it").all_reduce(torch.ones(4))]
        texts = [await failure(work) for work in works]
        assert any(isinstance(error, MismatchError) for error in texts)
        for error in texts:
            assert "in lane it, rank" in str(error)
            assert "all_reduce(sum, torch.float32, (3,))" in str(error)
            assert "all_reduce(sum, torch.float32, (4,))" in str(error)
        assert first.aborted
        assert second.aborted


@pytest.mark.asyncio
async def test_a_rank_that_disagrees_with_what_the_sequencer_has_heard(cuda: FakeCuda) -> None:
    """The sequencer's own rank finds it at its call."""
    async with world(2) as comms:
        other = comms[1].lane("it").all_reduce(torch.ones(4))
        await until(lambda: len(lanes(comms[0])._sequencer))
        work = comms[0].lane("it").barrier()
        assert work.done()
        for error in (await failure(work), await failure(other)):
            assert isinstance(error, MismatchError)
            assert "calls barrier()" in str(error)


@pytest.mark.asyncio
@pytest.mark.parametrize("rank", [0, 1])
async def test_an_error_of_nccl_while_a_collective_of_a_lane_is_pending(cuda: FakeCuda, rank: int) -> None:
    async with world(2) as comms:
        await reduced(comms, "it")
        gate = Gate(cuda.current_stream())
        works = [comm.lane("it").barrier() for comm in comms]
        for comm in of_channels(comms[rank]):
            comm.shared.async_error = 6
        for work in works:
            assert "ncclRemoteError" in str(await failure(work))
        gate.open()


@pytest.mark.asyncio
async def test_nccl_refuses_a_collective_of_a_lane(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FakeNcclError(5)

    async with world(2) as comms:
        await reduced(comms, "it")
        for comm in of_channels(comms[0]):
            monkeypatch.setattr(comm, "allReduce", refuse)
        works = [comm.lane("it").barrier() for comm in comms]
        for work in works:
            assert "ncclInvalidUsage" in str(await failure(work))


@pytest.mark.asyncio
async def test_a_device_that_breaks_while_the_log_is_heard(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(2) as comms:
        await reduced(comms, "channels")
        handle = lanes(comms[1]).handle

        def breaks(peer: int, frame: wire.LaneFrame) -> None:
            cuda.gpu.broken = True
            handle(peer, frame)

        monkeypatch.setattr(lanes(comms[1]), "handle", breaks)
        work = comms[1].lane("it").barrier()
        comms[0].lane("it").barrier()
        assert "CUDA has failed, and this process must end" in str(await failure(work))
        cuda.gpu.broken = False
    assert not caplog.records


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["called", "heard"])
async def test_a_device_that_breaks_before_the_launch(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    async with world(2) as comms:
        at = Step(step, comms, 1, cuda, monkeypatch)
        await at.reach()
        cuda.gpu.broken = True
        at.go_on()
        for error in await at.ends():
            assert "CUDA has failed, and this process must end" in str(error)
        cuda.gpu.broken = False
    assert not caplog.records


@pytest.mark.asyncio
async def test_parts_of_an_all_to_all_that_do_not_fit(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        works = [
            comm.lane("it").all_to_all_v_single(torch.zeros(3 + rank), ones(), [1, 2 + rank], [1, 2])
            for rank, comm in enumerate(comms)
        ]
        errors = [await failure(work) for work in works]
        assert any("bytes from rank" in str(error) for error in errors)


async def failure(work: Any) -> BaseException:
    await work.wait()
    error = work.exception()
    assert error is not None
    return error


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("src", "frame", "text"),
    [
        (0, wire.LaneEntries([7]), "that was not called"),
        (0, wire.FormChannels([bytes(128)]), "another number of communicators"),
        (1, wire.LaneEntries([7]), "sends the order of lanes"),
        (0, wire.LaneCalls([]), "sends calls of lanes here"),
        (1, wire.LaneCalls([wire.LaneCall(7, "barrier()", [1], [1])]), "another number of ranks"),
    ],
)
async def test_frames_that_make_no_sense_lose_the_communicator(
    cuda: FakeCuda, src: int, frame: wire.LaneFrame, text: str
) -> None:
    async with world(2) as comms:
        there = comms[1 - src]
        with pytest.raises(ProtocolError, match=text):
            transport(there)._lanes.handle(src, frame)
        transport(comms[src]).control.send(1 - src, frame)
        with pytest.raises(CommError, match=text):
            await there.lane("it").barrier()


@pytest.mark.asyncio
@pytest.mark.parametrize("rank", [0, 1])
async def test_nccl_that_cannot_form_the_channels(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The communicators that it has formed by then are aborted."""
    make, made = FakeNccl.communicator, list[Any]()

    def communicator(self: FakeNccl, size: int, unique_id: bytes, me: int) -> Any:
        if me == rank and len(made) == 2:
            raise self.errors[0](2)
        comm = make(self, size, unique_id, me)
        made.extend([comm] if me == rank else [])
        return comm

    async with world(2) as comms:
        monkeypatch.setattr(FakeNccl, "communicator", communicator)
        works = [comm.lane("it").barrier() for comm in comms]
        errors = [await failure(work) for work in works]
        assert all("ncclSystemError" in str(error) for error in errors)
        assert [comm.state for comm in made] == ["aborted"] * 2


def test_many_calls_are_told_in_several_frames() -> None:
    calls = [wire.LaneCall(lane, "x" * 1000, [2**40] * 4, [2**40] * 4) for lane in range(300)]
    frames = list(wire.lane_calls(calls))
    assert len(frames) > 1
    assert [call for frame in frames for call in frame.calls] == calls
    entries = list(wire.lane_entries(range(2**62 - 20_000, 2**62)))
    assert [lane for frame in entries for lane in frame.lanes] == list(range(2**62 - 20_000, 2**62))
    waits = [(2**61 + lane, [2**20] * lane) for lane in range(17)] * 100
    told = list(wire.lane_waits(waits))
    assert [wait for frame in told for wait in frame.waits] == waits
    assert all(len(wire.pack(frame)) <= wire.LONGEST for frame in (*frames, *entries, *told))
