"""The nccl transport over a fake GPU (fake_cuda, fake_nccl): order, polling, parking, captures, errors, the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch
from aiocomms_nccl import NcclTransport, bringup, native
from aiocomms_nccl import nccl as names
from aiocomms_nccl.direction import AT_ONCE
from aiocomms_nccl.launcher import PythonLauncher
from aiocomms_nccl.matching import Matcher
from concurrency import until
from fake_cuda import THREAD_LOCAL, CudaError, FakeCuda, FakeEvent, FakeStream, Gate, streams_at
from fake_nccl import FakeComm, FakeNccl, FakeNcclError, FakeNcclTransport, failed, transport, world
from processes import PATIENCE, SUITE_HANGS
from torch.distributed import HashStore

import aiocomms
from aiocomms import ReduceOp, ops
from aiocomms.bootstrap import registry
from aiocomms.cuda import SPIN, Completions, crossing, recorded
from aiocomms.errors import (
    ArgumentError,
    CapturedWorkError,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerDiedError,
    StoreLostError,
    UnsupportedOperation,
)
from aiocomms.ops import reductions

pytestmark = pytest.mark.deterministic


def nccl() -> FakeNccl:
    return FakeNcclTransport.nccl_layer


def fake_comm(comm: Any) -> Any:
    """The fake NCCL communicator of the collectives, which a test makes fail; nobody but its transport sees it."""
    return transport(comm)._comm_stream.comm


def sleepers() -> set[object]:
    """The threads that sleep on events, or are there to do so: of Python, and of the native launcher."""
    ours: set[object] = {it for it in threading.enumerate() if it.name == "aiocomms sleeps on events"}
    return ours | native_threads("aiocomms sleeps")


def native_threads(*names: str) -> set[object]:
    """The numbers of threads that native code has named so."""
    found = set[object]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            if (task / "comm").read_text().rstrip() in names:
                found.add(task.name)
    return found


async def parked(cuda: FakeCuda, count: int = 1) -> None:
    while cuda.gpu.sleeping < count:  # noqa: ASYNC110 - the fake knows no loop
        await asyncio.sleep(0)


async def at_rest(comm: Any) -> None:
    """Wait until no turn of the loop is asked for: nothing else shows that."""
    while comm._core.driver._turns:  # noqa: ASYNC110 - the loop ends with a turn
        await asyncio.sleep(0)


# -------------------------------------------------------------------------------------------------------- order


@pytest.mark.asyncio
async def test_an_op_comes_after_what_the_callers_stream_does(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        tensors = [torch.zeros(3) for _ in comms]
        gate = Gate(cuda.current_stream())
        for tensor in tensors:
            cuda.enqueue(cuda.current_stream(), lambda tensor=tensor: tensor.fill_(2))
        works = [comm.all_reduce(tensor) for comm, tensor in zip(comms, tensors, strict=True)]
        await parked(cuda)
        assert not any(work.done() for work in works)
        gate.open()
        for work, tensor in zip(works, tensors, strict=True):
            assert await work is tensor
            assert tensor.tolist() == [4, 4, 4]


@pytest.mark.asyncio
async def test_a_rank_gets_its_own_part_without_its_graph(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        out = torch.zeros(2)
        await comm.all_to_all([out], [torch.ones(2, requires_grad=True)])
        assert out.tolist() == [1, 1]
        assert out.grad_fn is None


@pytest.mark.asyncio
async def test_another_stream_waits_and_the_host_does_not(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        tensor, seen = torch.ones(3), torch.zeros(3)
        gate, mine = Gate(cuda.current_stream()), FakeStream(cuda.gpu)
        cuda.enqueue(cuda.current_stream(), lambda: tensor.fill_(5))
        work = comm.all_reduce(tensor)
        work.wait_stream(mine)
        cuda.enqueue(mine, lambda: seen.copy_(tensor))
        after = recorded(mine, cuda=cuda)
        assert not after.done()
        gate.open()
        await after
        assert seen.tolist() == [5, 5, 5]
        await work
        work.wait_stream(mine)  # done: nothing to wait for


@pytest.mark.asyncio
async def test_a_stream_cannot_wait_for_a_message(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        work = comms[0].recv(torch.zeros(3), 1)
        with pytest.raises(UnsupportedOperation, match="await the work instead"):
            work.wait_stream()
        await comms[1].send(torch.ones(3), 0)
        await work
        work.wait_stream()


@pytest.mark.real
@pytest.mark.asyncio
async def test_messages_cross_and_wait_for_their_producers(cuda: FakeCuda) -> None:
    """Both ranks receive first; what is sent is written before, on the caller's stream, and what is received read."""
    async with world(2) as comms:
        given, taken = [torch.zeros(1000) for _ in comms], [torch.zeros(1000) for _ in comms]
        gate = Gate(cuda.current_stream())
        for rank, tensor in enumerate(given):
            cuda.enqueue(cuda.current_stream(), lambda tensor=tensor, rank=rank: tensor.fill_(rank + 1))
        works = [comm.recv(tensor, 1 - comm.rank) for comm, tensor in zip(comms, taken, strict=True)]
        works += [comm.send(tensor, 1 - comm.rank) for comm, tensor in zip(comms, given, strict=True)]
        while not all(len(transport(comm).launcher) == 2 for comm in comms):  # noqa: ASYNC110 - until all is enqueued
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # in which they would have moved
        assert not any(work.done() for work in works)
        gate.open()
        for work in works:
            await work
        assert [int(tensor[0]) for tensor in taken] == [2, 1]


@pytest.mark.asyncio
async def test_nccl_has_no_more_messages_than_cuda_takes(cuda: FakeCuda) -> None:
    """CUDA blocks whoever enqueues too many, and two ranks that it blocks in what they receive would never send."""
    async with world(2) as comms:
        await _with_directions(comms)
        directions = [direction for comm in comms for direction in transport(comm)._matcher._directions.values()]
        gate = Gate(cuda.current_stream())
        taken = [[torch.zeros(3) for _ in range(5 * AT_ONCE)] for _ in comms]
        works = [comm.recv(slot, 1 - comm.rank) for comm in comms for slot in taken[comm.rank]]
        works += [comm.send(torch.full((3,), float(i)), 1 - comm.rank) for comm in comms for i in range(5 * AT_ONCE)]
        while not all(len(transport(comm).launcher) == 2 * AT_ONCE for comm in comms):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert [direction.carried for direction in directions] == [1 + AT_ONCE] * 4
        gate.open()
        for work in works:
            await work
        assert [direction.carried for direction in directions] == [1 + 5 * AT_ONCE] * 4
        assert all(slot.tolist() == [i] * 3 for slots in taken for i, slot in enumerate(slots))


@pytest.mark.asyncio
async def test_a_hint_asks_for_priority(cuda: FakeCuda) -> None:
    async with aiocomms.new_comm("nccl_fake", rank=0, size=1, hints={"high_priority_stream": True}) as comm:
        await comm.barrier()
    assert [stream.priority for stream in cuda.made] == [-1]


# -------------------------------------------------------------------------------------------- polling and parking


def queue(cuda: FakeCuda, wake: Any = lambda: None) -> Completions:
    return Completions(cuda, wake, spin=3)


@pytest.mark.asyncio
async def test_only_the_head_of_a_stream_is_asked(cuda: FakeCuda) -> None:
    completions, stream, fired = queue(cuda), FakeStream(cuda.gpu), list[int]()
    gates, events = [], []
    for i in range(4):
        if i < 2:
            gates.append(Gate(stream))
        events.append(completions.add(stream, lambda i=i: fired.append(i)))
    assert isinstance(events[0], FakeEvent)
    assert not completions.poll()
    assert not completions.poll()
    assert [event.queries for event in events] == [2, 0, 0, 0]
    gates[0].open()
    while not completions.poll():
        pass
    assert fired == [0]
    assert [event.queries for event in events[2:]] == [0, 0]
    gates[1].open()
    while completions:
        completions.poll()
    assert fired == [0, 1, 2, 3]
    completions.close()


@pytest.mark.asyncio
async def test_an_event_that_a_thread_may_look_at_is_not_used_again(cuda: FakeCuda) -> None:
    """Else the thread might sleep on what the event stands for next, and the loop with it."""
    completions, stream, late = queue(cuda), FakeStream(cuda.gpu), threading.Event()
    gate = Gate(stream)
    event = completions.add(stream, lambda: None)
    event.synchronize = lambda: late.wait(PATIENCE)  # type: ignore[method-assign]
    for _ in range(4):
        completions.poll()
    assert completions.parked
    gate.open()
    while completions:
        completions.poll()
    assert completions.mark(stream) is not event
    late.set()
    completions.close()


@pytest.mark.asyncio
async def test_memory_that_an_op_takes_is_kept_until_done(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[weakref.ref[torch.Tensor]] = []
    empty_like = cuda.empty_like

    def noted(stream: FakeStream, tensor: torch.Tensor) -> torch.Tensor:
        memory = empty_like(stream, tensor)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(cuda, "empty_like", noted)
    async with world(2) as comms:
        work = comms[0].all_reduce(torch.ones(3), ReduceOp.PREMUL_SUM(2.0))
        stream = transport(comms[0])._comm_stream.stream  # the transport's own, which no caller of an op sees
        while len(stream.queue) > 2:  # noqa: ASYNC110 - until it waits in NCCL, with the end event behind it
            await asyncio.sleep(0)
        gc.collect()
        assert taken[0]() is not None
        await comms[1].all_reduce(torch.ones(3), ReduceOp.PREMUL_SUM(2.0))
        await work
        del work
        gc.collect()
        assert taken[0]() is None


@pytest.mark.asyncio
async def test_events_are_used_again_and_never_while_they_live(cuda: FakeCuda) -> None:
    """The fake refuses to record an event anew that has not fired."""
    async with world(1) as (comm,):
        before = cuda.gpu.events
        for _ in range(200):
            await comm.all_reduce(torch.ones(2))
        works = [comm.all_reduce(torch.ones(2)) for _ in range(50)]
        for work in works:
            await work
        assert cuda.gpu.events - before < 250  # Without reuse there are 500: two for each op.


@pytest.mark.asyncio
async def test_parked_it_costs_nothing_and_is_woken_once(cuda: FakeCuda) -> None:
    before = sleepers()  # the sleepers of other tests' communicators end with them
    async with world(1) as (comm,):
        gate = Gate(cuda.current_stream())
        work = comm.all_reduce(torch.ones(4))
        await parked(cuda)
        await at_rest(comm)
        for _ in range(3):  # the native launcher tells the loop that a thread sleeps
            await asyncio.sleep(0)
        polls: list[bool | None] = []
        progress = transport(comm).progress

        def counted() -> bool | None:
            polls.append(progress())
            return polls[-1]

        transport(comm).progress = counted  # type: ignore[method-assign]
        for _ in range(SPIN):
            await asyncio.sleep(0)
        assert not polls
        assert cuda.gpu.sleeping == 1
        gate.open()
        await work
        assert polls.count(True) == 1
        assert len(polls) <= 2  # a thread may say what the loop has just seen
        (sleeper,) = sleepers() - before
    if isinstance(sleeper, threading.Thread):
        sleeper.join(PATIENCE)  # the thread ends by itself
    assert not sleepers() - before


@pytest.mark.asyncio
async def test_with_nothing_pending_nothing_runs(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        for _ in range(3):
            await asyncio.gather(*(comm.barrier() for comm in comms))
        threads = set(threading.enumerate())
        while cuda.gpu.sleeping:  # noqa: ASYNC110 - a thread that has yet to hear of the last event
            await asyncio.sleep(0)
        await at_rest(comms[0])
        assert set(threading.enumerate()) <= threads


@pytest.mark.asyncio
async def test_a_wait_without_a_loop(cuda: FakeCuda) -> None:
    """Wait on the loop's own thread, which then asks by itself, and sleeps as the loop would."""
    async with world(1) as (comm,):
        gate = Gate(cuda.current_stream())
        work = comm.all_reduce(torch.ones(4))
        with pytest.raises(TimeoutError):
            work.wait_blocking(0.02)
        threading.Timer(0.05, gate.open).start()
        work.wait_blocking(PATIENCE)


@pytest.mark.real
@pytest.mark.asyncio
async def test_a_tensor_is_kept_until_its_event_has_fired(cuda: FakeCuda) -> None:
    """Whatever becomes of its work: cancelled here, then given up with the communicator."""
    async with world(1) as (comm,):
        gate = Gate(cuda.current_stream())
        tensor = torch.ones(4)
        held = weakref.ref(tensor)
        task = asyncio.ensure_future(comm.all_reduce(tensor).wait())
        await parked(cuda)
        task.cancel()
        del tensor
        gc.collect()
        assert held() is not None
        comm.abort("for the test")
        await asyncio.sleep(0.05)
        gc.collect()
        assert held() is not None  # NCCL has given up, but what it was to follow is still at work
        gate.open()
    del comm, task
    gc.collect()
    assert held() is None


# ------------------------------------------------------------------------------------------------------ captures


@pytest.mark.asyncio
async def test_the_fake_refuses_what_cuda_refuses(cuda: FakeCuda) -> None:
    event, other = cuda.event(), cuda.event()
    errors: list[BaseException] = []
    with pytest.raises(CudaError, match="901"), cuda.graph():  # noqa: PT012 - a capture has to have a body
        event.record(cuda.current_stream())
        with pytest.raises(CudaError, match="907"):
            event.query()
        thread = threading.Thread(target=lambda: _catch(errors, other.query))
        thread.start()
        thread.join()
    assert [getattr(error, "code", 0) for error in errors] == [900]
    with cuda.graph(THREAD_LOCAL):
        thread = threading.Thread(target=other.query)
        thread.start()
        thread.join()
    gate = Gate(cuda.default)
    other.record(cuda.default)
    with pytest.raises(AssertionError, match="recorded again"):
        other.record(cuda.default)
    gate.open()
    comm = nccl().communicator(1, nccl().unique_id(), 0)
    with pytest.raises(FakeNcclError):
        comm.allReduce(0, 0, 1, 17, names.SUM, cuda.default.cuda_stream)
    with pytest.raises(FakeNcclError):
        nccl().group_end()
    comm.abort()
    with pytest.raises(AssertionError, match="aborted"):
        comm.check_async_error()


def _catch(errors: list[BaseException], call: Any) -> None:
    try:
        call()
    except CudaError as error:
        errors.append(error)


@pytest.mark.asyncio
async def test_a_captured_collective_is_replayed(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        tensors = [torch.full((3,), float(comm.rank + 1)) for comm in comms]
        graphs, works = [], []
        for comm, tensor in zip(comms, tensors, strict=True):
            with cuda.graph() as graph:
                work = comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(2.0))
                assert work.done()
                with pytest.raises(CapturedWorkError, match=r"wait_stream\(\)"):
                    await work
                work.wait_stream()
            graphs.append(graph)
            works.append(work)
        assert [tensor.tolist() for tensor in tensors] == [[1] * 3, [2] * 3]
        for times in (1, 2):
            streams = [FakeStream(cuda.gpu) for _ in comms]
            for graph, stream in zip(graphs, streams, strict=True):
                graph.replay(stream)
            for stream in streams:
                await recorded(stream, cuda=cuda)
            assert all(tensor.tolist() == [6.0 * 4 ** (times - 1)] * 3 for tensor in tensors)
        await asyncio.gather(*(comm.barrier() for comm in comms))  # the communicator goes on outside
    del works
    gc.collect()  # no task has awaited them, and no warning is given


@pytest.mark.asyncio
async def test_a_capture_that_is_not_joined_fails(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        with pytest.raises(CudaError, match="904"), cuda.graph():
            comm.all_reduce(torch.ones(3))


@pytest.mark.asyncio
async def test_what_a_capture_uses_is_kept_until_it_ends(cuda: FakeCuda) -> None:
    """Then the graph has its own memory, and a communicator that outlives many graphs holds nothing of them."""
    async with world(1) as (comm,):
        with cuda.graph():
            tensor = torch.ones(3)
            held = weakref.ref(tensor)
            comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(2.0)).wait_stream()
            del tensor
            gc.collect()
            assert held() is not None
        await comm.barrier()
        gc.collect()
        assert held() is None


@pytest.mark.asyncio
async def test_temporary_memory_of_a_captured_op_is_the_graphs_own(cuda: FakeCuda) -> None:
    """Else other tensors get that memory, and a replay writes to it."""
    async with world(1) as (comm,):
        with cuda.graph() as graph:
            comm.all_reduce(torch.ones(3), ReduceOp.PREMUL_SUM(2.0)).wait_stream()
            comm.all_reduce(torch.ones(5), ReduceOp.PREMUL_SUM(2.0)).wait_stream()
        assert [len(memory) for memory in graph.memory] == [3, 5]


@pytest.mark.asyncio
async def test_threads_of_ours_break_no_capture(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that form, split and end communicators call CUDA, and may do so while another thread captures."""
    modes = []

    def noting(name: str, cls: Any) -> None:
        real = getattr(cls, name)

        def call(self: Any, *args: Any) -> Any:
            modes.append((name, cuda.gpu.mode))
            return real(self, *args)

        monkeypatch.setattr(cls, name, call)

    noting("communicator", FakeNccl)
    for name in ("commSplit", "abort", "destroy"):
        noting(name, FakeComm)
    async with world(2) as comms:
        part, other = await asyncio.gather(*(comm.split([comm.rank]) for comm in comms))
        part.abort("for the test")
        await part.aclose()
        await other.aclose()
        await asyncio.gather(comms[0].send(torch.ones(3), 1), comms[1].recv(torch.ones(3), 0))
    assert {name for name, _ in modes} == {"communicator", "commSplit", "abort", "destroy"}
    assert {mode for _, mode in modes} == {THREAD_LOCAL}


@pytest.mark.real
@pytest.mark.asyncio
async def test_nothing_is_asked_during_a_capture(cuda: FakeCuda) -> None:
    """Neither on the loop, nor by the thread that sleeps, nor by one in another thread's capture."""
    async with world(1) as (comm,):
        stream = FakeStream(cuda.gpu)
        gate = Gate(stream)
        with cuda.on(stream):
            work = comm.all_reduce(torch.ones(3))
        await parked(cuda)
        with cuda.graph():
            gate.open()
            await asyncio.sleep(0.02)
            assert not work.done()
        await work
        gate = Gate(stream)
        with cuda.on(stream):
            work = comm.all_reduce(torch.ones(3))  # no thread sleeps on it yet
        with cuda.graph():
            await asyncio.sleep(0.02)
        gate.open()
        await work


@pytest.mark.asyncio
async def test_neither_poll_nor_thread_breaks_a_capture(cuda: FakeCuda) -> None:
    """Events from before it: asked by nobody on this thread, and slept on in thread-local mode on another."""
    woken = threading.Event()
    completions, stream = queue(cuda, woken.set), FakeStream(cuda.gpu)
    gate = Gate(stream)
    completions.add(stream, lambda: None)
    with cuda.graph():
        for _ in range(10):
            assert not completions.poll()
        completions._park()  # this is the moment between the loop's last poll and its sleep, which no caller can choose
        await parked(cuda)
        gate.open()
        assert woken.wait(PATIENCE)
        assert not completions.poll()
    assert completions.poll()
    completions.close()


@pytest.mark.asyncio
async def test_what_cannot_be_captured_is_refused(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        with cuda.graph():
            with pytest.raises(UnsupportedOperation, match="cannot be captured"):
                comms[0].send(torch.ones(3), 1)
            with pytest.raises(CapturedWorkError, match=r"after graph\.replay"):
                recorded(cuda=cuda)
            joined = comms[0].barrier()
            outside = FakeStream(cuda.gpu)
            with cuda.on(outside), pytest.raises(UnsupportedOperation, match="end the capture first"):
                comms[0].barrier()
            joined.wait_stream()


@pytest.mark.asyncio
@pytest.mark.parametrize("root", [0, 1])
async def test_what_is_made_of_messages_is_refused_in_a_capture_before_anything_is_done(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, root: int
) -> None:
    """An object's copy to a GPU would break the capture, and the communicator with it."""

    def copies(*_: object) -> None:
        raise AssertionError("it copies to the GPU")

    async with world(2) as comms:
        with cuda.graph(), monkeypatch.context() as patch:
            patch.setattr(crossing, "to_device", copies)
            for call in (
                lambda: comms[0].broadcast_object({"a": torch.ones(3)}, root),
                lambda: comms[0].all_gather_object(1),
                lambda: comms[0].send_object(1, 1),
                lambda: comms[0].lane("a").all_reduce(torch.ones(3)),
            ):
                with pytest.raises(UnsupportedOperation, match="cannot be captured"):
                    call()
        assert not comms[0].aborted
        assert await asyncio.gather(*(comm.broadcast_object(comm.rank, root) for comm in comms)) == [root, root]


@pytest.mark.asyncio
async def test_each_step_is_on_the_stream_of_the_call(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stream is current on the loop's thread when a step's messages have come."""
    async with world(3) as comms:
        own = FakeStream(cuda.gpu)
        await asyncio.gather(*(comm.lane("a").all_reduce(torch.ones(3, dtype=torch.int16)) for comm in comms))
        streams = streams_at(cuda, monkeypatch, (Matcher, "post"), (reductions, "combine"))
        tensors = [torch.full((3,), comm.rank, dtype=torch.int16) for comm in comms]  # NCCL does not reduce these
        with cuda.on(own):
            works = [comm.lane("a").all_reduce(tensor) for comm, tensor in zip(comms, tensors, strict=True)]
        await asyncio.gather(*works)
        assert all(tensor.tolist() == [3] * 3 for tensor in tensors)
        assert len(streams) > 6
        assert set(streams) == {own}


@pytest.mark.asyncio
async def test_an_await_of_a_point_in_a_stream(cuda: FakeCuda) -> None:
    """Parks, is woken, may be cancelled, and leaves nothing behind."""
    stream = FakeStream(cuda.gpu)
    await recorded(stream, cuda=cuda)
    gate = Gate(stream)
    point = recorded(stream, cuda=cuda)
    task = asyncio.ensure_future(_await(point))
    await parked(cuda)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = asyncio.ensure_future(_await(point))
    await parked(cuda, 2)
    gate.open()
    await again
    assert point.done()


@pytest.mark.asyncio
async def test_a_point_in_a_stream_breaks_no_capture(cuda: FakeCuda) -> None:
    """Neither that of another thread nor that of this one, which an await outlasts."""
    point = recorded(FakeStream(cuda.gpu), cuda=cuda)
    begun, end, errors = threading.Event(), threading.Event(), list[BaseException]()

    def capture() -> None:
        with cuda.graph():
            begun.set()
            end.wait(PATIENCE)

    other = threading.Thread(target=_catch, args=(errors, capture))
    other.start()
    begun.wait(PATIENCE)
    await point
    assert point.done()
    end.set()
    other.join(PATIENCE)
    assert not errors
    with cuda.graph():
        task = asyncio.ensure_future(_await(point))
        for _ in range(3):
            await asyncio.sleep(0)
    await task


async def _await(what: Any) -> None:
    await what


# -------------------------------------------------------------------------------------------------------- errors


@pytest.mark.asyncio
async def test_without_memory_an_op_fails_alone(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        cuda.gpu.memory = 0
        tensor = torch.full((3,), 3.0)
        with pytest.raises(CommError, match=r"no GPU memory .* nothing was sent"):
            comms[0].all_reduce(tensor, ReduceOp.PREMUL_SUM(2.0))
        cuda.gpu.memory = None
        works = [comm.all_reduce(tensor if comm.rank == 0 else torch.ones(3)) for comm in comms]
        await asyncio.gather(*(work.wait() for work in works))
        assert tensor.tolist() == [4, 4, 4]
        sums = await asyncio.gather(*(comm.all_gather_object(comm.rank) for comm in comms))  # lowered, with its tags
        assert sums == [[0, 1], [0, 1]]


@pytest.mark.asyncio
@pytest.mark.parametrize(("status", "name"), [(6, "ncclRemoteError"), (8, "ncclTimeout"), (1, "ncclUnhandledCuda")])
async def test_an_error_of_nccl_while_an_op_is_pending(cuda: FakeCuda, status: int, name: str) -> None:
    async with world(2) as comms:
        work = comms[0].all_reduce(torch.ones(3))
        fake_comm(comms[0]).shared.async_error = status
        with pytest.raises(CommError, match=name):
            await work
        assert comms[0].aborted


@pytest.mark.asyncio
async def test_a_communicator_that_is_still_forming_is_no_error(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        fake_comm(comms[0]).shared.async_error = 7
        await asyncio.gather(*(comm.barrier() for comm in comms))


@pytest.mark.asyncio
async def test_every_status_has_words(cuda: FakeCuda) -> None:
    for status in range(1, 9):
        error = names.explain("all_reduce", failed(status))
        assert "all_reduce" in str(error)
        assert "ncc" in str(error)
        assert error.__cause__ is not None
    assert "status 99" in str(names.explain("send", failed(99)))


@pytest.mark.asyncio
async def test_a_call_that_nccl_refuses(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as (comm,):

        def refuse(*_: object) -> None:
            raise failed(8)

        monkeypatch.setattr(fake_comm(comm), "allReduce", refuse)
        with pytest.raises(CommError, match="ncclTimeout"):
            await comm.all_reduce(torch.ones(3))
        assert comm.aborted


@pytest.mark.asyncio
async def test_a_device_that_is_broken(cuda: FakeCuda) -> None:
    """A device as it is after an assertion in a kernel: every call fails. The op says so, and closing does not hang."""
    async with world(1) as (comm,):
        Gate(cuda.current_stream())
        work = comm.all_reduce(torch.ones(3))
        cuda.gpu.broken = True
        with pytest.raises(CommError, match="CUDA has failed"):
            await work


@pytest.mark.asyncio
async def test_the_loop_rests_after_a_device_has_broken(cuda: FakeCuda) -> None:
    """The outcomes that native threads still report keep no descriptor readable."""
    async with world(1) as (comm,):
        gate, here = Gate(cuda.current_stream()), transport(comm)
        works = [comm.all_reduce(torch.ones(3), op) for op in (ReduceOp.SUM, ReduceOp.PREMUL_SUM(2.0), ReduceOp.SUM)]
        await parked(cuda)
        cuda.gpu.broken = True
        gate.open()
        for work in works:
            with pytest.raises(CommError, match="CUDA has failed"):
                await work
        while cuda.gpu.sleeping or len(getattr(here.launcher, "_ops", ())):  # noqa: ASYNC110 - threads tell the loop
            await asyncio.sleep(0)
        await at_rest(comm)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not select.select([here.fileno()], [], [], 0)[0]


@pytest.mark.asyncio
async def test_a_device_that_is_found_broken_at_a_call(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        cuda.gpu.broken = True
        with pytest.raises(CommError, match="CUDA has failed, and this process must end"):
            await comms[0].all_reduce(torch.ones(3))
        with pytest.raises(CommError, match="CUDA has failed, and this process must end"):
            await comms[1].send(torch.ones(3), 0)


@pytest.mark.asyncio
async def test_a_broken_device_of_which_nccl_tells_first(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for no event, because each is only another error. A native thread may see that first."""
    async with world(1) as (comm,):
        gate = Gate(cuda.current_stream())
        comm.barrier()

        def refuse(*_: object) -> None:
            cuda.gpu.broken = True
            raise failed(1)

        monkeypatch.setattr(fake_comm(comm), "allReduce", refuse)
        with pytest.raises(CommError, match=r"ncclUnhandledCudaError|CUDA has failed"):
            await comm.all_reduce(torch.ones(3))
    gate.open()


# ------------------------------------------------------------------------------------------------------- the end


@pytest.mark.asyncio
async def test_abort_gives_up_in_a_thread_and_calls_nothing_afterwards(cuda: FakeCuda) -> None:
    """The fake refuses calls with a communicator that is aborted."""
    async with world(2) as comms:
        works = [comms[0].all_reduce(torch.ones(3)), comms[0].send(torch.ones(3), 1)]
        comms[0].abort("enough")
        for work in works:
            with pytest.raises(CommAbortedError, match="enough"):
                await work
        with pytest.raises(CommAbortedError, match="enough"):
            await comms[1].recv(torch.ones(3), 0)
    assert {comm.state for comm in nccl().comms} == {"aborted"}


@pytest.mark.asyncio
async def test_a_split_that_fails_calls_nothing_beside_nccls_split(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is still within that call, which is no other call's to disturb."""
    split, entered, may_split = FakeComm.commSplit, threading.Event(), threading.Event()

    def late(self: FakeComm, color: int, key: int) -> FakeComm | None:
        if self.rank == 0:
            entered.set()
        else:
            may_split.wait(PATIENCE)
        return split(self, color, key)

    monkeypatch.setattr(FakeComm, "commSplit", late)
    async with world(2) as comms:
        tasks = [asyncio.ensure_future(comm.split([0, 1])) for comm in comms]
        await anyio.to_thread.run_sync(entered.wait)
        work, before = comms[0].all_reduce(torch.ones(3)), list(fake_comm(comms[0]).calls)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        with pytest.raises(CommError):
            await work
        transport(comms[0]).launcher.settle()
        may_split.set()
        with pytest.raises(CommError):
            await tasks[1]
        assert fake_comm(comms[0]).calls == before


@pytest.mark.asyncio
async def test_a_split_that_is_cancelled_while_it_connects_closes_the_connections(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_all, entered, may_return = bringup._connect_all, threading.Event(), threading.Event()
    sockets: list[Any] = []

    def late(rendezvous: Any, *rest: Any) -> Any:
        found = connect_all(rendezvous, *rest)
        sockets.extend(found.values())
        if rendezvous.rank == 0:
            entered.set()
            may_return.wait(PATIENCE)
        return found

    async with world(2) as comms:
        monkeypatch.setattr(bringup, "_connect_all", late)
        tasks = [asyncio.ensure_future(comm.split([0, 1])) for comm in comms]
        await anyio.to_thread.run_sync(entered.wait)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        with pytest.raises(CommError):
            await tasks[1]
        may_return.set()
        await until(lambda: all(it.fileno() < 0 for it in sockets))
        assert len(sockets) == 2


@pytest.mark.asyncio
async def test_a_split_without_its_store_goes_on_with_what_was_held(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2) as comms:
        held: list[Any] = []

        async def lost(rendezvous: Any, *_: object) -> None:
            held.append(comms[rendezvous.rank].all_reduce(torch.ones(3)))
            raise StoreLostError("for the test")

        monkeypatch.setattr(bringup, "connect", lost)
        for error in await asyncio.gather(*(comm.split([0, 1]) for comm in comms), return_exceptions=True):
            assert isinstance(error, StoreLostError)
        assert [result.tolist() for result in await asyncio.gather(*held)] == [[2] * 3] * 2


@pytest.mark.asyncio
async def test_closing_destroys_every_communicator(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        works = [comms[0].send(torch.ones(3), 1), comms[1].recv(torch.ones(3), 0)]
        for work in works:
            await work
    assert len(nccl().comms) == 4  # the direction's communicators are among them
    assert {comm.state for comm in nccl().comms} == {"destroyed"}


async def _with_directions(comms: Any) -> None:
    """Have both directions between two ranks, each rank its own first."""
    for source in (0, 1):
        works = [comms[source].send(torch.ones(3), 1 - source), comms[1 - source].recv(torch.ones(3), source)]
        for work in works:
            await work


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["abort", "destroy"])
async def test_communicators_end_at_once(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """NCCL's end may have to wait: for a graph that lives, for other ranks, for the kernel of another communicator."""
    gone = threading.Event()
    async with world(2) as comms:
        await _with_directions(comms)
        for comm in comms:
            monkeypatch.setattr(fake_comm(comm), end, lambda: gone.wait(PATIENCE))
        directions = [comm_stream.comm for comm in comms for comm_stream in transport(comm)._matcher.comm_streams()]
        assert len(directions) == 4
        for comm in comms if end == "abort" else ():
            comm.abort("for the test")
    assert {it.state for it in directions} == {"aborted" if end == "abort" else "destroyed"}
    gone.set()


class Inner:
    """A message of the core's own, such as the end of a lane: closing does not wait for it."""

    def __init__(self, comm: Any, op: ops.Send | ops.Recv) -> None:
        self.op = op
        self.ended = asyncio.Event()
        self.error: CommError | None = None
        transport(comm).post(op, self)

    def done(self) -> bool:
        return self.ended.is_set()

    def complete(self, value: Any = None) -> None:
        self.ended.set()

    def fail(self, error: CommError) -> None:
        self.error = error
        self.ended.set()


def forming() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiocomms nccl forms a communicator"]


@pytest.mark.asyncio
@pytest.mark.parametrize("hears", ["of the end", "nothing"])
async def test_a_rank_that_closes_before_it_joins_a_direction(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, hears: str
) -> None:
    """The message fails once the other rank hears of it, and the thread that joins ends, with its communicator."""
    asked, may_ask, ask = threading.Event(), threading.Event(), FakeNccl.unique_id

    def unique_id(self: FakeNccl) -> bytes:
        asked.set()
        may_ask.wait()
        return ask(self)

    async with world(2) as (receiver, sender):
        monkeypatch.setattr(FakeNccl, "unique_id", unique_id)
        if hears == "nothing":
            monkeypatch.setattr(transport(receiver)._agreement, "_handle_bye", lambda *_: None)
        received = Inner(receiver, ops.Recv(torch.zeros(5), 1, 0))
        Inner(sender, ops.Send(torch.ones(5), 0, 0))
        await anyio.to_thread.run_sync(asked.wait)
        await sender.aclose()
        if hears == "of the end":
            await received.ended.wait()
            assert "closed by rank 1" in str(received.error)
        may_ask.set()
        await receiver.aclose()
        assert not forming()
    assert {comm.state for comm in nccl().comms} <= {"aborted", "destroyed"}


@pytest.mark.asyncio
async def test_a_direction_that_a_close_finds_formed_is_ended_beside_captures(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, abort = [], FakeComm.abort

    def noted(self: FakeComm) -> None:
        modes.append(cuda.gpu.mode)
        abort(self)

    monkeypatch.setattr(FakeComm, "abort", noted)
    async with world(2) as (receiver, sender):
        here = transport(receiver)
        Inner(receiver, ops.Recv(torch.zeros(5), 1, 0))
        Inner(sender, ops.Send(torch.ones(5), 0, 0))
        while not any(direction.begun for direction in here._matcher._directions.values()):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)
        monkeypatch.setattr(here, "progress", lambda: False)
        while not here._threads.returned:  # noqa: ASYNC110 - the loop does not hear of it
            await asyncio.sleep(0)
        await receiver.aclose()
    assert modes
    assert set(modes) == {THREAD_LOCAL}


@pytest.mark.asyncio
@pytest.mark.parametrize("closes", ["sender", "receiver"])
async def test_a_rank_that_closes_before_it_calls_nccl(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, closes: str
) -> None:
    """NCCL would wait for it for ever. What it has carried arrives, and the communicator goes on."""
    async with world(2) as comms:
        sender, receiver = comms
        await _with_directions(comms)
        closing, other = (sender, receiver) if closes == "sender" else (receiver, sender)
        direction = transport(closing)._matcher._directions[other.rank, closes == "sender"]
        monkeypatch.setattr(direction, "_flush", lambda: None)
        slot = torch.zeros(3)
        ends = Inner(sender, ops.Send(torch.ones(3), 1, 0)), Inner(receiver, ops.Recv(slot, 0, 0))
        there = transport(other)._matcher._directions[closing.rank, closes != "sender"]
        while there.carried < 2:  # noqa: ASYNC110 - nothing tells when a message is given to NCCL
            await asyncio.sleep(0)
        await closing.aclose()
        await ends[other.rank].ended.wait()
        assert f"closed by rank {closing.rank}" in str(ends[other.rank].error)
        assert slot.tolist() == [0, 0, 0]
        assert not other.aborted
    assert [comm.state for comm in nccl().comms].count("aborted") == 1


@pytest.mark.asyncio
async def test_what_a_rank_has_carried_before_it_closes_arrives(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2) as (sender, receiver):
        await _with_directions((sender, receiver))
        direction = transport(receiver)._matcher._directions[0, False]
        there = transport(sender)._matcher._directions[1, True].comm_stream
        assert there is not None
        slots = [torch.zeros(3) for _ in range(2)]
        with monkeypatch.context() as patch:
            # The direction acts as if NCCL had as many of its messages as it may have.
            patch.setattr(direction, "_flush", lambda: None)
            received = [Inner(receiver, ops.Recv(slot, 0, 0)) for slot in slots]
            sent = Inner(sender, ops.Send(torch.ones(3), 1, 0))
            sends = there.comm.shared.sends  # type: ignore[attr-defined]  # the attribute is the fake's
            while not sends[0, 1]:  # noqa: ASYNC110 - nothing tells when the GPU has come to it
                await asyncio.sleep(0)
            await sender.aclose()
            await received[1].ended.wait()
        direction._flush()
        while not received[0].done():
            transport(receiver).progress()  # progress would have called _flush, and so runs again
            await asyncio.sleep(0)
        assert received[0].error is None
        assert slots[0].tolist() == [1, 1, 1]
        assert "closed by rank 0" in str(received[1].error)
        assert sent.op.tensor.tolist() == [1, 1, 1]  # the tensor lives for as long as the GPU may read it


@pytest.mark.asyncio
@pytest.mark.parametrize("late", ["the loop", "the thread"])
async def test_a_message_arrives_whose_sender_closes_before_the_receiver_has_the_direction(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The receiver has not noted that the direction is formed, or its thread has not returned from NCCL."""
    form, may_return, slot = FakeNccl.communicator, threading.Event(), torch.zeros(3)

    def communicator(self: FakeNccl, size: int, unique_id: bytes, rank: int) -> FakeComm:
        made = form(self, size, unique_id, rank)
        if rank == 1 and late == "the thread":
            may_return.wait(PATIENCE)
        return made

    async with world(2) as (sender, receiver):
        nccl().buffer = 1000
        monkeypatch.setattr(FakeNccl, "communicator", communicator)
        here = transport(receiver)
        received, sent = receiver.recv(slot, 0), sender.send(torch.full((3,), 7.0), 1)
        while not any(direction.begun for direction in here._matcher._directions.values()):  # noqa: ASYNC110 - nothing tells when a thread begins
            await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            if late == "the loop":
                patch.setattr(here, "progress", lambda: False)
            await sent
            await sender.aclose()
        here.control.wake()
        while here.closed_by(0) is None:  # noqa: ASYNC110 - nothing tells when a rank has heard of an end
            await asyncio.sleep(0)
        may_return.set()
        await received
        assert slot.tolist() == [7, 7, 7]


@pytest.mark.real
@pytest.mark.asyncio
async def test_a_rank_that_never_comes(cuda: FakeCuda) -> None:
    store = HashStore()
    with pytest.raises(CommTimeoutError, match="ranks had not joined: 1"):
        await aiocomms.new_comm("nccl_fake", store=store, rank=0, size=2, timeout=0.2)


@pytest.mark.real
@pytest.mark.asyncio
async def test_a_rank_that_does_not_connect(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that waits for it says which one it is, before its time is up."""

    def refused(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("nobody is in")

    monkeypatch.setattr(bringup.socket, "create_connection", refused)
    store = HashStore()
    forming = [aiocomms.new_comm("nccl_fake", store=store, rank=rank, size=2, timeout=3) for rank in range(2)]
    waits, fails = await asyncio.gather(*forming, return_exceptions=True)
    assert "did not connect: [1] (timed out)" in str(waits)
    assert "did not connect: [0] (nobody is in)" in str(fails)


@pytest.mark.real
@pytest.mark.asyncio
async def test_nccl_that_does_not_come_back(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on meanwhile, and the thread is left behind."""
    stuck, callers = threading.Event(), list[threading.Thread]()

    def communicator(*_: object) -> None:
        callers.append(threading.current_thread())
        stuck.wait(PATIENCE)

    monkeypatch.setattr(FakeNccl, "communicator", communicator)
    with pytest.raises(CommTimeoutError, match="forming NCCL's communicator"):
        await aiocomms.new_comm("nccl_fake", rank=0, size=1, timeout=2)
    stuck.set()
    assert callers
    assert threading.current_thread() not in callers


@pytest.mark.asyncio
async def test_a_rank_that_dies(cuda: FakeCuda) -> None:
    async with world(2) as comms:
        work = comms[0].all_reduce(torch.ones(3))
        for peer in list(transport(comms[1]).control.peers):
            transport(comms[1]).control._disconnect(peer)  # a connection that breaks, without an end of its process
        with pytest.raises(PeerDiedError, match="rank 1 has died"):
            await work


@pytest.mark.asyncio
async def test_who_is_missing(cuda: FakeCuda) -> None:
    async with world(3) as comms:
        comms[1].barrier()
        while transport(comms[0])._agreement._log.waiting_for(0) != [2]:  # noqa: ASYNC110 - rank 1 says so when it parks
            await asyncio.sleep(0)
        work = comms[0].barrier(timeout=0.3)
        with pytest.raises(CommTimeoutError, match="waiting for rank 2"):
            await work


# ----------------------------------------------------------------------------------------------------- bad input


def hello(**other: Any) -> bringup.NcclHello:
    usual = bringup.NcclHello("little", "host", "name", "gpu", 23203, False, "", b"")
    for name, value in other.items():
        setattr(usual, name, value)
    return usual


@pytest.mark.asyncio
async def test_ranks_that_cannot_work_together() -> None:
    bringup.check([hello(gpu="a"), hello(gpu="b")])
    with pytest.raises(ArgumentError, match=r"ranks 0 and 1 are on the same GPU.*NCCL_MULTI_RANK_GPU_ENABLE=1"):
        bringup.check([hello(), hello()])
    with pytest.raises(ArgumentError, match="NCCL_HOSTID to a value of its own"):
        bringup.check([hello(nccl=22907, several=True), hello(nccl=22907, several=True)])
    bringup.check([hello(several=True), hello(several=True)])
    bringup.check([hello(nccl=22907, host_override="a"), hello(nccl=22907, host_override="b")])
    with pytest.raises(ArgumentError, match=r"rank 1 has NCCL 2\.29\.7, rank 0 has 2\.32\.3"):
        bringup.check([hello(gpu="a"), hello(gpu="b", nccl=22907)])


@pytest.mark.asyncio
async def test_auto_takes_nccl_for_collectives_and_others_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiocomms import ops
    from aiocomms.transport import Capabilities

    class Wire(FakeNcclTransport):
        capabilities = Capabilities(ops=ops.P2P | ops.COLLECTIVES | ops.RMA, devices=frozenset({"cuda"}))

        @classmethod
        def preference(cls, device: torch.device, size: int, family: Any) -> int:
            return 50

    found = {"nccl": NcclTransport, "wire": Wire}
    monkeypatch.setattr(NcclTransport, "probe", classmethod(lambda cls, device: None))
    monkeypatch.setattr(registry, "entries", lambda: dict.fromkeys(found))
    monkeypatch.setattr(registry, "find", lambda name, device: found[name])
    plan = registry.choose("auto", torch.device("cuda", 0), 2, {})
    assert plan.names == {"p2p": "wire", "collectives": "nccl", "rma": "wire"}
    plan = registry.choose({"collectives": "wire", "p2p": "nccl"}, torch.device("cuda", 0), 2, {})
    assert plan.names == {"collectives": "wire", "p2p": "nccl"}


# --------------------------------------------------------------------------------------------- the native launcher

native_only = pytest.mark.parametrize("cuda", ["native"], indirect=True)


class Held:
    """A call of NCCL that CUDA holds, as where its queue is full."""

    def __init__(self, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self._call = fake_comm(comm).allReduce
        monkeypatch.setattr(fake_comm(comm), "allReduce", self)

    def __call__(self, *arguments: int) -> None:
        self.reached.set()
        self.let_go.wait(PATIENCE)
        self._call(*arguments)


@native_only
@pytest.mark.asyncio
async def test_a_full_queue_does_not_hold_the_loop(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as (comm,):
        held = Held(comm, monkeypatch)
        works = [comm.all_reduce(torch.ones(3)) for _ in range(3)]
        await anyio.to_thread.run_sync(held.reached.wait)
        assert not any(work.done() for work in works)
        held.let_go.set()
        await asyncio.gather(*(work.wait() for work in works))


@native_only
@pytest.mark.asyncio
async def test_kernels_of_torch_keep_their_order(cuda: FakeCuda) -> None:
    """Start ops on one tensor, and await none of them before the next."""
    async with world(2) as comms:
        numbers, truths = [torch.ones(3) for _ in comms], [torch.tensor([True, comm.rank == 0]) for comm in comms]
        works = []
        for comm, number, truth in zip(comms, numbers, truths, strict=True):
            works += [comm.all_reduce(number), comm.all_reduce(number, ReduceOp.PREMUL_SUM(2.0))]
            works += [comm.all_reduce(number), comm.all_reduce(truth, ReduceOp.BXOR)]
            works += [comm.all_reduce(truth, ReduceOp.BOR)]
        await asyncio.gather(*(work.wait() for work in works))
        assert all(number.tolist() == [16.0] * 3 for number in numbers)
        assert all(truth.tolist() == [False, True] for truth in truths)


@pytest.mark.asyncio
@pytest.mark.parametrize("launched", ["together", "while a thread sleeps"])
async def test_each_op_with_kernels_of_torch_ends(cuda: FakeCuda, launched: str) -> None:
    """A thread sleeps on the next event of a stream after each event that has fired."""
    async with world(1) as (comm,):
        gates, works = [], []
        for op in (ReduceOp.PREMUL_SUM(2.0), ReduceOp.BXOR, ReduceOp.PREMUL_SUM(2.0)):
            gates.append(Gate(cuda.current_stream()))
            works.append(comm.all_reduce(torch.ones(3, dtype=torch.bool if op == ReduceOp.BXOR else None), op))
            if launched != "together":
                await parked(cuda)
        for gate, work in zip(gates, works, strict=True):
            await parked(cuda)
            await at_rest(comm)
            gate.open()
            await work


@pytest.mark.asyncio
async def test_different_calls_with_kernels_of_torch_are_reported(cuda: FakeCuda) -> None:
    """A rank that waits with such an op describes it, as any other."""
    async with world(2) as comms:
        works = [comm.all_reduce(torch.ones(3 + comm.rank), ReduceOp.PREMUL_SUM(2.0)) for comm in comms]
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(error, MismatchError)


@native_only
@pytest.mark.asyncio
async def test_a_stream_waits_for_an_op_that_is_not_called_yet(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as (comm,):
        held = Held(comm, monkeypatch)
        tensor, seen, mine = torch.ones(3), torch.zeros(3), FakeStream(cuda.gpu)
        cuda.enqueue(cuda.current_stream(), lambda: tensor.fill_(5))
        work = comm.all_reduce(tensor)
        await anyio.to_thread.run_sync(held.reached.wait)
        waits = threading.Thread(target=held.let_go.set)  # while the loop's thread waits for the call
        waits.start()
        work.wait_stream(mine)
        cuda.enqueue(mine, lambda: seen.copy_(tensor))
        await recorded(mine, cuda=cuda)
        assert seen.tolist() == [5, 5, 5]
        await work
        waits.join()


@native_only
@pytest.mark.asyncio
async def test_an_abort_while_nccl_is_called(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The works end at once. NCCL is aborted when the call is back, and called no more."""
    async with world(2) as comms:
        held = Held(comms[0], monkeypatch)
        works = [comms[0].all_reduce(torch.ones(3)) for _ in range(3)]
        await anyio.to_thread.run_sync(held.reached.wait)
        comms[0].abort("enough")
        for work in works:
            with pytest.raises(CommAbortedError, match="enough"):
                await work
        called = fake_comm(comms[0])
        assert called.state == "open"
        held.let_go.set()
    assert called.state == "aborted"
    assert [what.kind for what in called.calls].count("all_reduce") == 2  # one of which is the bring-up's


@native_only
@pytest.mark.asyncio
async def test_a_deadline_while_nccl_is_called(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as (comm,):
        held = Held(comm, monkeypatch)
        with pytest.raises(CommTimeoutError):
            await comm.all_reduce(torch.ones(3), timeout=0.1)
        held.let_go.set()


@native_only
@pytest.mark.asyncio
async def test_closing_leaves_no_thread_and_no_descriptor(cuda: FakeCuda) -> None:
    names = ("aiocomms nccl", "aiocomms sleeps")
    # The listing opens a descriptor, too.
    before, others = len(os.listdir("/proc/self/fd")), native_threads(*names)  # noqa: PTH208
    async with world(2) as comms:
        gate = Gate(cuda.current_stream())
        works = [comm.all_reduce(torch.ones(3)) for comm in comms]
        await parked(cuda, 2)
        assert len(native_threads(*names) - others) == 4  # one calls, one looks, and one sleeps for each rank
        gate.open()
        await asyncio.gather(*(work.wait() for work in works))
    while native_threads(*names) - others:  # the last step of each
        pass
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@native_only
@pytest.mark.real
@pytest.mark.search
@pytest.mark.asyncio
async def test_a_forked_child_has_no_launcher(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        await comm.barrier()
        with warnings.catch_warnings(action="ignore"):  # Python's own, of a fork among threads
            child = os.fork()
        if not child:
            os._exit(len(native._shared._users))
        assert (await anyio.to_thread.run_sync(os.waitpid, child, 0))[1] == 0
        await comm.barrier()


@native_only
@pytest.mark.asyncio
@pytest.mark.parametrize("why", ["no module", "another version", "no functions"])
async def test_without_the_native_one_it_is_the_one_in_python(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no module":
        monkeypatch.setitem(sys.modules, "aiocomms_launcher", None)
    elif why == "another version":
        monkeypatch.setattr(aiocomms, "__version__", "9.0")
    else:
        monkeypatch.setattr(FakeNccl, "functions", lambda self: None)
    async with world(1) as (comm,):
        assert isinstance(transport(comm).launcher, PythonLauncher)
        await comm.barrier()


# --------------------------------------------------------------------------------------------------- conformance


@pytest.mark.real
@pytest.mark.timeout(2 * SUITE_HANGS)
@pytest.mark.parametrize(
    ("name", "ranks", "chosen", "pure"),
    [
        ("nccl_fake", "2", "not moved_during", "0"),  # a storage that moves frees the fake's memory, and not a GPU's
        pytest.param("nccl_fake", "1,4", "", "0", marks=pytest.mark.search),
        pytest.param("nccl_fake", "2", "not moved_during", "1", marks=pytest.mark.search),
        ("nccl_fake_debug", "2,3", "mismatch or different_ones", "0"),
    ],
)
def test_conformance(distribution: Path, name: str, ranks: str, chosen: str, pure: str) -> None:
    """The whole suite over the fake, with either launcher; and what ranks that disagree are told, in debug mode."""
    options = [f"--transport={name}", f"--ranks={ranks}", "--loops=asyncio", *(["-k", chosen] if chosen else [])]
    quick = ["-q", "--deadline=100", "--assert=plain", "-pno:cacheprovider", "-pno:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", "--pyargs", "aiocomms.testing.conformance", *quick, *options]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(distribution), str(Path(__file__).parents[2] / "support"))),
        "PYTEST_ADDOPTS": "",
        "AIOCOMMS_PURE": pure,
    }
    done = subprocess.run(
        command, cwd=distribution, env=environment, capture_output=True, text=True, timeout=SUITE_HANGS, check=False
    )
    assert done.returncode == pytest.ExitCode.OK, done.stdout
