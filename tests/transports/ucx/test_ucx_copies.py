"""Windows of GPU memory that CUDA maps into the other processes of a host: what the GPU copies, and what waits for it.

Over a fake GPU (fake_cuda, fake_ucx), which is stopped between two steps. What does not depend on who carries a put is
tested where CUDA maps nothing, too, and UCX carries it.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aiocomms_ucx import cuda_windows
from concurrency import until
from fake_cuda import FakeCuda, FakeStream, Gate
from fake_ucx import FakeUcxTransport
from inside import transport_of
from processes import PATIENCE

from aiocomms import Communicator, Window
from aiocomms.errors import (
    ArgumentError,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    PeerDiedError,
    ProtocolError,
    UnsupportedOperation,
)
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

PART = 4


@pytest.fixture
def cuda(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A GPU whose memory other ranks map."""
    cuda = FakeCuda()
    monkeypatch.setattr(FakeUcxTransport, "cuda_layer", cuda)
    install(ucx_fake=FakeUcxTransport)
    return cuda


@pytest.fixture(params=[True, False], ids=["copied", "by ucx"])
def either(request: pytest.FixtureRequest, cuda: FakeCuda) -> FakeCuda:
    """The same, and one whose memory nobody maps."""
    cuda.shares = request.param
    return cuda


def world(size: int = 2, **options: Any) -> Any:
    return local_world(size, "ucx_fake", **options)


async def opened(*comms: Communicator, dtype: torch.dtype = torch.float32) -> list[Window]:
    return await asyncio.gather(*(comm.new_window(torch.zeros(PART, dtype=dtype)) for comm in comms))


async def all_of(*works: Any) -> None:
    for work in works:
        await work


async def parked(cuda: FakeCuda) -> None:
    """Wait until a thread sleeps on the GPU: the loop has done all that it could."""
    await until(lambda: cuda.gpu.sleeping)


def copies(comm: Communicator) -> cuda_windows.Copies:
    found: cuda_windows.Copies = transport_of(comm, "rma")._windows.copies
    return found


def stopped(comm: Communicator) -> Gate:
    """Stop the stream that copies for a rank."""
    stream: Any = copies(comm).stream
    return Gate(stream)


def noted(event: asyncio.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    """Set an event when something is called."""

    def noting(*args: Any) -> Any:
        event.set()
        return call(*args)

    return noting


def ones(value: float = 1, count: int = PART) -> torch.Tensor:
    return torch.full((count,), float(value))


# ------------------------------------------------------------------------------------------------------- opening


@pytest.mark.asyncio
async def test_window_memory_is_mapped_and_unmapped_off_the_loop(cuda: FakeCuda) -> None:
    """The driver takes its time, and everything else goes on."""
    async with world() as (a, b):
        cuda.mappable.clear()
        opening = asyncio.ensure_future(opened(a, b))
        await until(lambda: len(cuda.ipc_threads) == 2)
        slot = torch.zeros(3)
        await all_of(a.send(torch.ones(3), 1), b.recv(slot, 0), a.barrier(), b.barrier())
        assert slot.eq(1).all()
        assert not opening.done()
        cuda.mappable.set()
        windows = await opening
        assert [window.mapped(rank) for window in windows for rank in range(2)] == [True] * 4
        assert len(cuda.mapped) == 2
        await asyncio.gather(*(window.aclose() for window in windows))
        await until(lambda: not cuda.mapped)
        assert threading.get_ident() not in cuda.ipc_threads


@pytest.mark.asyncio
async def test_ucx_maps_only_parts_that_cuda_does_not(either: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would map a part on the loop's thread where both could map it."""
    keys: list[bool] = []
    entered = cuda_windows.CudaWindows._entered

    def noting(self: Any, handle: Any, parts: Any, *rest: Any) -> None:
        keys.extend(part.rkey != b"" for part in parts)
        entered(self, handle, parts, *rest)

    monkeypatch.setattr(cuda_windows.CudaWindows, "_entered", noting)
    async with world() as (a, b):
        windows = await opened(a, b)
        assert sorted(keys) == [False, False, not either.shares, not either.shares]
        works: list[Any] = [window.put_signal(ones(), rank) for window in windows for rank in range(2)]
        await all_of(*works, *(window.flush() for window in windows))
        await all_of(*(window.wait_signal(rank) for window in windows for rank in range(2)))


@pytest.mark.asyncio
async def test_unmapped_window_refuses_map_remote_tensor(cuda: FakeCuda) -> None:
    cuda.shares = False
    async with world() as (a, b):
        windows = await opened(a, b)
        assert not windows[0].mapped(1)
        with pytest.raises(UnsupportedOperation, match="CUDA does not map here"):
            await windows[0].map_remote_tensor(1)
        assert not cuda.mapped


@pytest.mark.asyncio
@pytest.mark.parametrize("failure", [RuntimeError("no room"), ProtocolError("no sense")])
async def test_failed_mapping_fails_new_window(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(shared: object) -> None:
        raise failure

    monkeypatch.setattr(cuda, "map", fail)
    async with asyncio.timeout(PATIENCE):
        async with world() as (a, b):
            with pytest.raises(CommError, match=str(failure)):
                await opened(a, b)


@pytest.mark.asyncio
async def test_window_memory_that_is_not_the_ranks_own_is_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = cuda.share
    monkeypatch.setattr(cuda, "share", lambda storage: share(torch.zeros(1).untyped_storage()))
    async with world() as (a, b):
        with pytest.raises(ProtocolError, match="not its own"):
            await opened(a, b)
    await until(lambda: not cuda.mapped)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["abort", "deadline"])
async def test_communicator_ending_amid_the_mapping_unmaps_and_returns_at_once(cuda: FakeCuda, how: str) -> None:
    """No rank waits for the driver, and what it has mapped is given back."""
    async with asyncio.timeout(PATIENCE):
        async with world() as (a, b):
            cuda.mappable.clear()
            opening = [asyncio.ensure_future(comm.new_window(torch.zeros(PART), timeout=None)) for comm in (a, b)]
            await until(lambda: len(cuda.ipc_threads) == 2)
            if how == "abort":
                a.abort("enough")
            else:
                with pytest.raises(CommTimeoutError):
                    await a.barrier(timeout=0.05)
            for end in opening:
                with pytest.raises((CommAbortedError, CommTimeoutError)):
                    await end
        cuda.mappable.set()
        await until(lambda: cuda.ever_mapped == 2 and not cuda.mapped)
        assert threading.get_ident() not in cuda.ipc_threads


@pytest.mark.asyncio
async def test_new_window_completes_after_a_graph_capture(cuda: FakeCuda) -> None:
    """Nothing is looked at during one, and nothing but the loop may tell of its end."""
    async with world() as (a, b):
        cuda.mappable.clear()
        opening = asyncio.ensure_future(opened(a, b))
        await until(lambda: len(cuda.ipc_threads) == 2)
        with cuda.graph():
            cuda.mappable.set()
            await until(lambda: len(cuda.mapped) == 2)
            for _ in range(50):
                await asyncio.sleep(0)
            assert not opening.done()
        assert len(await opening) == 2


# --------------------------------------------------------------------------------------------------------- order


@pytest.mark.asyncio
async def test_put_and_get_run_behind_the_callers_stream(either: FakeCuda) -> None:
    async with world() as (a, b):
        mine, _ = windows = await opened(a, b)
        gate = Gate(either.current_stream())
        source, got = torch.zeros(PART), torch.zeros(PART)
        either.enqueue(either.current_stream(), lambda: source.fill_(3))
        works = [mine.put(source, 1), mine.get(got, 1)]
        await parked(either)
        assert windows[1].tensor.eq(0).all()
        assert not any(work.done() for work in works)
        gate.open()
        await all_of(*works)
        assert windows[1].tensor.eq(3).all()
        assert got.eq(3).all()


@pytest.mark.asyncio
async def test_window_calls_on_different_streams_take_effect_in_call_order(either: FakeCuda) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        slow, got = FakeStream(either.gpu), [torch.zeros(PART) for _ in range(2)]
        gate = Gate(slow)
        with either.on(slow):
            works = [windows[0].put(ones(1), 1)]
        works += [windows[0].get(got[0], 1), windows[0].put(ones(2), 1)]
        with either.on(FakeStream(either.gpu)):
            works.append(windows[0].get(got[1], 1))
        await parked(either)
        assert not any(work.done() for work in works)
        gate.open()
        await all_of(*works)
        assert [slot[0].item() for slot in got] == [1, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["put and signal", "put_signal"])
async def test_signal_arrives_after_its_put_is_complete(cuda: FakeCuda, how: str) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        gate = stopped(a)
        if how == "put_signal":
            works: list[Any] = [windows[0].put_signal(ones(), 1)]
        else:
            works = [windows[0].put(ones(), 1), windows[0].signal(1)]
        told = windows[1].wait_signal(0)
        await parked(cuda)
        assert not told.done()
        assert not any(work.done() for work in works)
        gate.open()
        await told
        assert windows[1].tensor.eq(1).all()
        await all_of(*works)


@pytest.mark.asyncio
async def test_signal_does_not_overtake_one_behind_a_slow_stream(either: FakeCuda) -> None:
    """The signal says that the stream has done what it was given."""
    async with world() as (a, b):
        windows = await opened(a, b)
        slow = FakeStream(either.gpu)
        gate = Gate(slow)
        with either.on(slow):
            works: list[Any] = [windows[0].signal(1)]
        works.append(windows[0].put_signal(ones(), 1))
        told = [windows[1].wait_signal(0) for _ in range(2)]
        await parked(either)
        assert not any(work.done() for work in told)
        gate.open()
        await all_of(*works, *told)


@pytest.mark.asyncio
async def test_flush_waits_for_earlier_puts_only(cuda: FakeCuda) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        gate = stopped(a)
        first = windows[0].put(ones(), 1)
        flushing = [windows[0].flush(1), windows[0].flush()]
        slow = FakeStream(cuda.gpu)
        behind = Gate(slow)
        with cuda.on(slow):
            second = windows[0].put(ones(2), 1)
        await parked(cuda)
        assert not any(work.done() for work in flushing)
        gate.open()
        await all_of(first, *flushing)
        assert windows[1].tensor.eq(1).all()
        assert not second.done()
        behind.open()
        await second


@pytest.mark.asyncio
async def test_pending_copy_delays_no_message_or_signal_to_others(cuda: FakeCuda) -> None:
    """Neither a message, nor what another rank is told, for whom nothing is copied."""
    async with world(3) as comms:
        a, b, _ = comms
        windows = await opened(*comms)
        gate = stopped(a)
        works: list[Any] = [windows[0].put(ones(), 1), windows[0].signal(1), windows[0].flush(1)]
        slot = torch.zeros(3)
        passing = [a.send(torch.ones(3), 1), b.recv(slot, 0), windows[0].signal(2), windows[2].wait_signal(0)]
        await all_of(*passing, windows[0].flush(2))
        assert not any(work.done() for work in works)
        gate.open()
        await all_of(*works, windows[1].wait_signal(0))
        assert slot.eq(1).all()


@pytest.mark.asyncio
async def test_empty_put_signal_arrives_behind_earlier_puts(either: FakeCuda) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        gate = Gate(either.current_stream())
        works = [windows[0].put(ones(), 1), windows[0].put_signal(torch.empty(0), 1, PART)]
        works += [windows[0].put(torch.empty(0), 1), windows[0].get(torch.empty(0), 1)]
        told = windows[1].wait_signal(0)
        await parked(either)
        assert not told.done()
        gate.open()
        await told
        assert windows[1].tensor.eq(1).all()
        await all_of(*works)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.complex64], ids=str)
async def test_window_offsets_are_in_elements(either: FakeCuda, dtype: torch.dtype) -> None:
    """Count in elements also where a window is a part of a tensor, and has several dimensions."""
    async with world() as (a, b):
        whole = torch.zeros(5, 2, dtype=dtype)
        windows = await asyncio.gather(*(comm.new_window(whole[1:4] if comm is b else whole[:1]) for comm in (a, b)))
        await windows[0].put(torch.full((2,), 7, dtype=dtype), 1, 3)
        got = torch.zeros(3, dtype=dtype)
        await windows[0].get(got, 1, 2)
        assert got.tolist() == [0, 7, 7]
        assert whole.view(-1).tolist() == [0, 0, 0, 0, 0, 7, 7, 0, 0, 0]


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.asyncio
async def test_refused_window_access_moves_nothing(either: FakeCuda) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        for call, why in (
            (lambda: windows[0].put(ones(), 1, 1), "offset is 1"),
            (lambda: windows[0].get(ones(count=PART + 1), 1), "offset is 0"),
            (lambda: windows[0].put_signal(ones().double(), 1), "dtype"),
            (lambda: windows[0].put(ones(), 2), "dst is 2"),
        ):
            with pytest.raises(ArgumentError, match=why):
                call()
        with either.graph():
            for call in (
                lambda: windows[0].put(ones(), 1),
                lambda: windows[0].get(ones(), 1),
                lambda: windows[0].put_signal(ones(), 1),
                windows[0].flush,
            ):
                with pytest.raises(UnsupportedOperation, match="captur"):
                    call()
        await windows[0].flush()
        assert windows[1].tensor.eq(0).all()
        assert copies(a).last(None) == 0


@pytest.mark.asyncio
async def test_copy_that_cuda_refuses_fails_alone(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "copy", lambda *_: (_ for _ in ()).throw(RuntimeError("invalid argument")))
            with pytest.raises(CommError, match="CUDA could not begin the op: invalid argument"):
                windows[0].put_signal(ones(), 1)
        await windows[0].put_signal(ones(2), 1)
        await windows[1].wait_signal(0)
        assert windows[1].tensor.eq(2).all()


@pytest.mark.asyncio
async def test_mapped_part_smaller_than_announced_raises_protocol_error(cuda: FakeCuda) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        windows[0]._info.handle.mapped[1] = windows[0]._info.handle.mapped[1][:2]
        with pytest.raises(ProtocolError, match="smaller"):
            windows[0].put(ones(), 1)


# --------------------------------------------------------------------------------------------------------- the end


@pytest.mark.asyncio
async def test_window_close_waits_for_all_its_copies(cuda: FakeCuda) -> None:
    """The copies are those of both ranks.

    The owner's next collective comes behind them, and nothing is given back before.
    """
    async with world() as (a, b):
        windows = await opened(a, b)
        gate, got = stopped(a), torch.zeros(PART)
        works: list[Any] = [windows[0].put(ones(), 1), windows[0].get(got, 1)]
        ends = [asyncio.ensure_future(window.aclose()) for window in windows]
        await asyncio.sleep(0)
        barriers = [comm.barrier() for comm in (a, b)]
        await parked(cuda)
        assert not any(end.done() for end in (*ends, *barriers))
        assert len(cuda.mapped) == 2
        gate.open()
        await all_of(*ends, *barriers)
        assert all(work.done() for work in works)
        assert got.eq(1).all()
        await until(lambda: not cuda.mapped)


@pytest.mark.asyncio
async def test_window_close_does_not_wait_for_copies_of_another(cuda: FakeCuda) -> None:
    async with world() as (a, b):
        used, idle = [await opened(a, b) for _ in range(2)]
        gate = stopped(a)
        work = used[0].put(ones(), 1)
        await asyncio.gather(*(window.aclose() for window in idle))
        assert not work.done()
        gate.open()
        await work


LOSSES: dict[str, tuple[type[CommError], Callable[[Communicator], object]]] = {
    "abort": (CommAbortedError, lambda comm: comm.abort("enough")),
    "death": (PeerDiedError, lambda comm: transport_of(comm).lost(transport_of(comm).peers[1])),
    "deadline": (CommTimeoutError, lambda comm: None),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["caller", "copies"])
@pytest.mark.parametrize("loss", LOSSES)
async def test_loss_amid_a_copy_ends_works_and_keeps_memory_until_the_copy_ends(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, loss: str, where: str
) -> None:
    """The works end, nobody is told, and nobody waits for long. Both sides' memory stays until it is made."""
    monkeypatch.setattr(cuda_windows, "_LAST_COPIES", 0)
    kind, lose = LOSSES[loss]
    async with asyncio.timeout(PATIENCE):
        async with world() as (a, b):
            windows = await opened(a, b)
            theirs, source = windows[1].tensor, ones()
            gone = weakref.ref(source)
            gate = stopped(a) if where == "copies" else Gate(cuda.current_stream())
            deadline = 0.05 if loss == "deadline" else None
            works: list[Any] = [windows[0].put_signal(source, 1, timeout=deadline), windows[0].flush()]
            told = windows[1].wait_signal(0)
            if deadline is None:  # a deadline may have passed before a thread parks
                await parked(cuda)
            lose(a)
            for work in works:
                with pytest.raises(kind):
                    await work
            with pytest.raises(CommError):
                await told
        assert cuda.mapped
        del source, works, work, told, windows, a, b
        gc.collect()
        assert gone() is not None
        assert theirs.eq(0).all()
        gate.open()
        await until(lambda: not cuda.mapped)
        assert theirs.eq(1).all()
        while gone() is not None:
            gc.collect()
            await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_lost_communicator_closes_after_its_copies(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close where nothing holds the copies up: none of a rank's copies writes after it has closed."""
    async with asyncio.timeout(PATIENCE):
        async with world() as (a, b):
            windows = await opened(a, b)
            theirs, gate = windows[1].tensor, stopped(a)
            work = windows[0].put(ones(), 1)
            await parked(cuda)
            a.abort("enough")
            with pytest.raises(CommAbortedError):
                await work
            carrier, left = transport_of(a, "rma"), asyncio.Event()
            monkeypatch.setattr(carrier.shared, "leave", noted(left, carrier.shared.leave))
            closing = asyncio.ensure_future(a.aclose())
            await until(lambda: cuda.gpu.sleeping == 2)  # beside the thread that waits for it as for any copy
            assert not left.is_set()
            gate.open()
            await closing
            assert left.is_set()
            assert theirs.eq(1).all()


@pytest.mark.asyncio
async def test_copy_completed_after_a_loss_sends_no_signal(cuda: FakeCuda) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        gate, stop = stopped(a), Gate(cuda.current_stream())
        work = windows[0].put_signal(ones(), 1)
        told = windows[1].wait_signal(0)
        stop.open()
        a.abort("enough")
        gate.open()
        for end in (work, told):
            with pytest.raises(CommAbortedError):
                await end


@pytest.mark.asyncio
async def test_put_aborted_by_a_hook_copies_nothing(either: FakeCuda) -> None:
    async with asyncio.timeout(PATIENCE):
        async with world() as (a, b):
            windows = await opened(a, b)
            theirs = windows[1].tensor
            a.register_pre_hook(lambda *_: a.abort("enough"))
            with pytest.raises(CommAbortedError):
                await windows[0].put(ones(), 1)
        assert theirs.eq(0).all()


@pytest.mark.asyncio
async def test_put_whose_awaiter_is_cancelled_completes(either: FakeCuda) -> None:
    async with world() as (a, b):
        windows = await opened(a, b)
        gate = Gate(either.current_stream())
        work = windows[0].put_signal(ones(), 1)
        waiting = asyncio.ensure_future(work.wait())
        await parked(either)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        assert not await work.cancel()
        await windows[1].wait_signal(0)
        assert windows[1].tensor.eq(1).all()
