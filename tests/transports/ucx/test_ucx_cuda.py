"""UCX on GPU memory, over a fake GPU (fake_cuda, fake_ucx): what waits for the GPU, in which order; what is refused."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiocomms_ucx import UcxTransport, bringup
from aiocomms_ucx._engine import CUDA
from aiocomms_ucx.cuda_transport import CudaUcxTransport
from aiocomms_ucx.loading import no_cuda_in_ucx
from fake_cuda import FakeCuda, FakeStream, Gate, streams_at
from fake_ucx import FakeUcxTransport
from inside import transport_of
from plugins import installed
from processes import PATIENCE, SUITE_HANGS

import aiocomms
from aiocomms.bootstrap import registry
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    MessageTruncatedError,
    UnsupportedOperation,
)
from aiocomms.ops import reductions
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metadata by which the fake transport is found."""
    return installed(
        tmp_path_factory.mktemp("fake"),
        ucx_fake="fake_ucx:FakeUcxTransport",
        ucx_fake_unmapped="fake_ucx:UnmappedUcxTransport",
    )


@pytest.fixture
def cuda(distribution: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU for one test."""
    monkeypatch.syspath_prepend(str(distribution))
    cuda = FakeCuda()
    monkeypatch.setattr(FakeUcxTransport, "cuda_layer", cuda)
    return cuda


def world(size: int, **options: Any) -> Any:
    return local_world(size, "ucx_fake", **options)


def transport(comm: Any) -> FakeUcxTransport:
    return transport_of(comm)


def queued(comm: Any) -> Any:
    """Return the ops that wait for their stream before the engine gets them; to others both look pending."""
    return transport(comm)._queue


async def parked(cuda: FakeCuda, count: int = 1) -> None:
    while cuda.gpu.sleeping < count:  # noqa: ASYNC110 - the fake knows no loop
        await asyncio.sleep(0)


async def all_of(*works: Any) -> None:
    for work in works:
        await work


# -------------------------------------------------------------------------------------------------------- order


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [3, 100_000])
async def test_send_waits_for_its_producer_stream(cuda: FakeCuda, count: int) -> None:
    async with world(2) as (a, b):
        tensor, slot = torch.zeros(count), torch.zeros(count)
        receiving = b.recv(slot, 0)
        while queued(b):  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        gate = Gate(cuda.current_stream())
        cuda.enqueue(cuda.current_stream(), lambda: tensor.fill_(2))
        sending = a.send(tensor, 1)
        await parked(cuda)
        assert not sending.done()
        assert not receiving.done()
        assert len(queued(a)) == 1  # the engine has not got it
        gate.open()
        await all_of(sending, receiving)
        assert slot.eq(2).all()


@pytest.mark.asyncio
async def test_recv_writes_after_the_stream_has_read(cuda: FakeCuda) -> None:
    async with world(2) as (a, b):
        slot, seen = torch.full((4,), 7.0), torch.zeros(4)
        sending = a.send(torch.ones(4), 1)
        gate = Gate(cuda.current_stream())
        cuda.enqueue(cuda.current_stream(), lambda: seen.copy_(slot))
        receiving = b.recv(slot, 0)
        await parked(cuda)
        assert slot.eq(7).all()
        gate.open()
        await all_of(sending, receiving)
        assert seen.eq(7).all()
        assert slot.eq(1).all()


@pytest.mark.asyncio
async def test_messages_on_different_streams_match_in_call_order(cuda: FakeCuda) -> None:
    async with world(2) as (a, b):
        slow = FakeStream(cuda.gpu)
        gate = Gate(slow)
        slots = [torch.zeros(2), torch.zeros(2)]
        with cuda.on(slow):
            first = a.send(torch.full((2,), 1.0), 1)
        second = a.send(torch.full((2,), 2.0), 1)  # its own stream has nothing to do
        works = [b.recv(slot, 0) for slot in slots]
        queue = queued(a)
        while not queue[1].fired:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        assert [waiting.fired for waiting in queue] == [False, True]
        assert not any(work.done() for work in works)
        gate.open()
        await all_of(first, second, *works)
        assert [slot[0].item() for slot in slots] == [1, 2]


@pytest.mark.asyncio
async def test_window_ops_run_behind_the_callers_stream(cuda: FakeCuda) -> None:
    """Opening, put, signal and barrier come after what the stream was given before."""
    async with world(2) as (a, b):
        mine, theirs, value = torch.zeros(4), torch.zeros(4), torch.zeros(4)
        gate = Gate(cuda.current_stream())
        cuda.enqueue(cuda.current_stream(), lambda: theirs.fill_(5))
        opening = asyncio.gather(a.new_window(mine), b.new_window(theirs))
        await parked(cuda)
        assert not opening.done()
        gate.open()
        wins = await opening
        got = torch.zeros(4)
        await wins[0].get(got, 1)
        assert got.eq(5).all()
        gate = Gate(cuda.current_stream())
        cuda.enqueue(cuda.current_stream(), lambda: value.fill_(3))
        works = [wins[0].put(value, 1), wins[0].signal(1), wins[1].wait_signal(0)]
        await parked(cuda)
        assert theirs.eq(5).all()
        gate.open()
        await all_of(*works)
        assert theirs.eq(3).all()
        gate = Gate(cuda.current_stream())
        meeting = [a.barrier(), b.barrier()]
        await parked(cuda)
        assert not any(work.done() for work in meeting)
        gate.open()
        await all_of(*meeting)


@pytest.mark.asyncio
async def test_put_to_its_own_window_goes_by_ucx(cuda: FakeCuda) -> None:
    """The engine has no pointer to it that it would follow; the signal comes behind the put."""
    async with world(1) as (comm,):
        win = await comm.new_window(torch.zeros(8))
        works = [win.put(torch.ones(3), 0, 2), win.signal(0), win.wait_signal(0)]
        await all_of(*works)
        assert win.tensor.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
        assert (await win.map_remote_tensor(0)).data_ptr() == win.tensor.data_ptr()


# --------------------------------------------------------------------------------------------- polling and parking


@pytest.mark.asyncio
async def test_idle_cuda_transport_makes_no_progress_calls(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a receive that nothing matches, nor while a thread sleeps on an event."""
    calls = 0
    progress = FakeUcxTransport.progress

    def counted(self: FakeUcxTransport) -> bool | None:
        nonlocal calls
        calls += 1
        return progress(self)

    monkeypatch.setattr(FakeUcxTransport, "progress", counted)
    async with world(2) as (a, b):
        receiving = b.recv(torch.zeros(3), 0)
        gate = Gate(cuda.current_stream())
        sending = a.send(torch.ones(3), 1)
        await parked(cuda)
        made = [-1]
        while calls != made[-1]:  # UCX may still be connecting, which wakes it some times more.
            made.append(calls)
            assert len(made) < 50
            for _ in range(100):
                await asyncio.sleep(0)
        gate.open()
        await all_of(sending, receiving)


@pytest.mark.asyncio
async def test_progress_of_one_communicator_may_post_for_another(cuda: FakeCuda) -> None:
    """One engine serves both: what one collects may go on with the other's collective."""
    async with world(2) as (a, b):
        split = await asyncio.gather(a.split([0, 1]), b.split([0, 1]))
        for _ in range(20):
            tensors = [torch.ones(300) for _ in range(4)]
            works = [comm.all_reduce(tensor) for comm, tensor in zip((a, *split, b), tensors, strict=True)]
            await all_of(*works)
            assert all(tensor.eq(2).all() for tensor in tensors)
        for comm in split:
            await comm.aclose()


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.asyncio
@pytest.mark.fault(118, transport="ucx")
async def test_every_step_of_a_collective_uses_the_stream_of_its_call(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stream is current on the loop's thread when a step's messages have come."""
    own = FakeStream(cuda.gpu)
    streams = streams_at(cuda, monkeypatch, (CudaUcxTransport, "post"), (reductions, "combine"))
    async with world(3) as comms:
        tensors = [torch.full((3,), float(comm.rank)) for comm in comms]
        with cuda.on(own):
            works = [comm.all_reduce(tensor) for comm, tensor in zip(comms, tensors, strict=True)]
        await all_of(*works)
        assert all(tensor.tolist() == [3.0] * 3 for tensor in tensors)
        assert len(streams) > 6
        assert set(streams) == {own}


@pytest.mark.asyncio
@pytest.mark.fault(119, transport="ucx")
async def test_op_within_a_graph_capture_is_refused_and_the_capture_goes_on(cuda: FakeCuda) -> None:
    async with world(2) as (comm, other):
        win, _ = await asyncio.gather(comm.new_window(torch.zeros(4)), other.new_window(torch.zeros(4)))
        done = torch.zeros(1)
        with cuda.graph() as graph:
            for call in (
                lambda: win.put(torch.ones(4), 0),
                lambda: comm.recv(torch.ones(4), 1),
                lambda: comm.broadcast_object(torch.ones(4), 0),
                comm.barrier,
            ):
                with pytest.raises(UnsupportedOperation, match="captur"):
                    call()
            cuda.enqueue(cuda.current_stream(), lambda: done.add_(1))
        graph.replay(cuda.current_stream())
        await win.put(torch.ones(4), 0)
        await win.flush()
        assert win.tensor.eq(1).all()
        assert done.item() == 1


@pytest.mark.asyncio
async def test_no_event_is_queried_during_a_graph_capture(cuda: FakeCuda) -> None:
    """Global capture: a query of this thread would break it. What was posted before ends after it."""
    async with world(2) as (a, b):
        slot = torch.zeros(3)
        works = [a.send(torch.ones(3), 1), b.recv(slot, 0)]
        with cuda.graph():
            for _ in range(50):
                await asyncio.sleep(0)
            assert not any(work.done() for work in works)
        await all_of(*works)
        assert slot.eq(1).all()


@pytest.mark.asyncio
async def test_atomics_on_a_cuda_window_are_refused(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        win = await comm.new_window(torch.zeros(4, dtype=torch.int64))
        with pytest.raises(UnsupportedOperation, match=r"fetch_add.*no atomics in windows on"):
            win.fetch_add(0, 0, 1)
        with pytest.raises(UnsupportedOperation, match=r"compare_swap.*no atomics in windows on"):
            win.compare_swap(0, 0, 0, 1)


@pytest.mark.asyncio
async def test_tensor_of_another_device_is_refused(cuda: FakeCuda) -> None:
    async with world(1) as (comm,):
        with pytest.raises(ArgumentError, match=r"on meta, wanted it on cpu"):
            comm.send(torch.ones(3, device="meta"), 0)


@pytest.mark.asyncio
@pytest.mark.parametrize(("tls", "text"), [(None, "install libucx-cu12 or"), ("self,posix,tcp", "UCX_TLS=self,posix")])
async def test_ucx_without_cuda_transports_is_refused_at_open(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tls: str | None, text: str
) -> None:
    """Said when the communicator opens. (With a GPU: tests/gpu/test_faults.py.)"""
    if tls is None and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(FakeUcxTransport, "layer", classmethod(lambda cls, device: (cuda, CUDA)))
    (monkeypatch.delenv("UCX_TLS", raising=False) if tls is None else monkeypatch.setenv("UCX_TLS", tls))
    with pytest.raises(UnsupportedOperation, match="cuda_copy and cuda_ipc.*" + text):
        await aiocomms.new_comm("ucx_fake", timeout=10)


@pytest.mark.asyncio
async def test_op_whose_begin_fails_fails_alone(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2) as (a, b):
        with monkeypatch.context() as patch:
            patch.setattr(
                UcxTransport, "hand_over", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
            )
            with pytest.raises(CommError, match="no memory"):
                await a.send(torch.ones(3), 1)
        assert not a.aborted
        slot = torch.zeros(3)
        await all_of(a.send(torch.ones(3), 1), b.recv(slot, 0))


# ------------------------------------------------------------------------------------------------- giving up, the end


@pytest.mark.asyncio
async def test_abort_while_the_producer_runs_sends_nothing_and_returns_at_once(cuda: FakeCuda) -> None:
    """No rank waits for the GPU, and what the GPU holds up is never sent."""
    async with asyncio.timeout(PATIENCE):
        async with world(2) as (a, b):
            tensor = torch.ones(3)
            gone = weakref.ref(tensor)
            gate = Gate(cuda.current_stream())
            works = [a.send(tensor, 1), a.barrier(), b.recv(torch.zeros(3), 0)]
            await parked(cuda)
            a.abort("enough")
            for work in works:
                with pytest.raises(CommAbortedError, match="enough"):
                    await work
        gate.open()
        del tensor, work, works, a, b
        while gone() is not None:
            gc.collect()
            await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_recv_past_its_deadline_is_withdrawn_before_the_engine_has_it(cuda: FakeCuda) -> None:
    """The deadline withdraws it alone; those behind it go on."""
    async with world(2) as (a, b):
        slow = FakeStream(cuda.gpu)
        gate = Gate(slow)
        with cuda.on(slow):
            late = b.recv(torch.zeros(3), 0, timeout=0.05)
        slot = torch.zeros(3)
        works = [b.recv(slot, 0), a.send(torch.ones(3), 1)]
        with pytest.raises(CommTimeoutError):
            await late
        await all_of(*works)
        assert slot.eq(1).all()
        assert not b.aborted
        gate.open()


@pytest.mark.asyncio
async def test_truncated_message_fills_the_buffer_through_the_host(cuda: FakeCuda) -> None:
    """Comes through the host, for the engine cannot write to a GPU's memory; complex numbers as their bytes."""
    async with world(2) as (a, b):
        slot = torch.zeros(5, dtype=torch.complex64)
        sent = torch.arange(100_000).to(torch.complex64)
        works = [a.send(sent, 1), b.recv(slot, 0)]
        with pytest.raises(MessageTruncatedError):
            await works[1]
        await works[0]
        assert slot.equal(sent[:5])


# ------------------------------------------------------------------------------------------------------- choosing


def test_auto_chooses_ucx_for_messages_and_windows_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice has no collectives: where there is no NCCL, its part is made of UCX's messages."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(registry, "no_gpu", lambda device: None)
    monkeypatch.setattr(registry, "entries", lambda: {"ucx": None})
    # A transport on the GPU, where there is none: its class would not be found to be available.
    monkeypatch.setattr(registry, "_load", lambda entry: UcxTransport)
    assert registry.choose("auto", device, 2, {}).names == {"p2p": "ucx", "rma": "ucx"}
    assert UcxTransport.preference(device, 2, "collectives") == 0
    assert min(UcxTransport.preference(device, 2, family) for family in ("p2p", "rma")) > 10
    assert UcxTransport.preference(torch.device("cpu"), 2, "collectives") == 50


def test_ucx_loads_cuda_transports_only_for_a_gpu() -> None:
    """A communicator on the CPU does not look for GPUs; one on a GPU may use all that UCX has for it.

    Of the options themselves: what UCX makes of them needs a GPU.
    """
    assert dict(bringup._options(None, gpu=False))["TLS"] == "^sysv,cuda,tcp"
    assert dict(bringup._options(None, gpu=True))["TLS"] == "^sysv,tcp"
    assert CudaUcxTransport.fast_check is None  # a fast check would take a tensor on the CPU for one on the GPU


def test_ucx_wheel_without_cuda_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert no_cuda_in_ucx() is None
    (tmp_path / "libucx" / "lib").mkdir(parents=True)
    (tmp_path / "libucx" / "__init__.py").touch()
    (tmp_path / "libucx" / "lib" / "libucp.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "libucx")
    assert "libucx-cu13" in str(UcxTransport.probe(torch.device("cuda", 0)))


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["auto", "ucx", "local", "nccl", "c10d"])
@pytest.mark.parametrize("device", ["cuda", "cuda:99"])
async def test_missing_gpu_is_refused_by_every_transport(transport: str, device: str) -> None:
    """Refused by every transport, also in a world of one."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedOperation, match=f"for device {device}") as caught:
        await aiocomms.new_comm(transport, device, timeout=5)
    assert "  local: available" not in str(caught.value)


# --------------------------------------------------------------------------------------------------- conformance


@pytest.mark.real
@pytest.mark.timeout(2 * SUITE_HANGS)
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("", ["--ranks=2", "--transport=ucx_fake_unmapped", "-k", "not unmapped or test_windows or test_endpoints"]),
        pytest.param("", ["--ranks=1", "--transport=ucx_fake_unmapped"], marks=pytest.mark.search),
        pytest.param("", ["--ranks=4", "-k", "collectives or split"], marks=pytest.mark.search),
        # The fake moves what processes share, and an array stays where it was.
        pytest.param(
            "@processes", ["--ranks=2", "-k", "(windows or messages) and not arrays"], marks=pytest.mark.search
        ),
    ],
)
def test_ucx_on_fake_cuda_passes_the_conformance_suite(distribution: Path, where: str, options: list[str]) -> None:
    """The whole suite with ranks that are tasks; what more ranks do otherwise; and processes, which map windows."""
    quick = ["-q", "--assert=plain", "-pno:cacheprovider", "-pno:hypothesispytest"]
    suite = [
        "--pyargs",
        "aiocomms.testing.conformance",
        f"--transport=ucx_fake{where}",
        "--loops=asyncio",
        "--deadline=100",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(distribution), str(Path(__file__).parents[2] / "support"))),
        "PYTEST_ADDOPTS": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *suite, *quick, *options],
        cwd=distribution, env=environment, capture_output=True, text=True, timeout=SUITE_HANGS, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.OK, done.stdout
