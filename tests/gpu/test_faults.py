"""The faults G1 to G12 on one real GPU: each raises an error or ends by itself, without wrong data or a hang.

A fault that breaks its process runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import CUDA, ROOT, busy, on_a_gpu, on_two_gpus, share
from processes import Rank, Run

import aiocomms
from aiocomms import functional
from aiocomms.communicator.communicator import Communicator
from aiocomms.cuda import recorded
from aiocomms.errors import ArgumentError, CommAbortedError, CommError, CommTimeoutError, UnsupportedOperation
from benchmarks.gpu.targets import percentile
from benchmarks.gpu.ticks import ticking

pytestmark = [pytest.mark.real, pytest.mark.search, on_a_gpu, pytest.mark.timeout(180)]

MANY = 4 * 2**20
"""The elements of 16 MiB of float32: the allocator does not take such a tensor from a shared block."""


@pytest.fixture
def transport() -> str:
    return "nccl"


@asynccontextmanager
async def alone(transport: str = "nccl", **options: Any) -> AsyncIterator[Communicator]:
    """Open a world of one rank."""
    async with asyncio.timeout(90), aiocomms.new_comm(transport, CUDA, **{"timeout": 60, **options}) as comm:
        yield comm


def full(value: float, count: int = MANY) -> torch.Tensor:
    return torch.full((count,), value, device=CUDA)


async def works(comm: Communicator) -> None:
    """Check that the communicator and the GPU work."""
    output = await comm.all_gather_single(torch.empty(comm.size * 5, device=CUDA), full(3.0, 5))
    assert output.eq(3).all()


def script(source: str, seconds: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may crash; its last line of output is JSON."""
    header = (
        "import asyncio, gc, json, os, sys, torch, aiocomms\n"
        "from aiocomms.errors import CommError\n"
        f"CUDA = {CUDA!r}\n"
        "def busy(seconds): torch.cuda._sleep(int(2e9 * seconds))\n"
        "def say(**what): print(json.dumps(what), flush=True)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, "-c", header + textwrap.dedent(source)], env=env, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the last message of a script."""
    lines = done.stdout.strip().splitlines()
    assert lines, f"it ended with {done.returncode} and has said nothing:\n{done.stderr}"
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# --------------------------------------------------------------------------------------------- G1: ranks on one GPU


def separate(rank: int) -> None:
    """Remove the variables that let ranks share a GPU from the environment."""
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"):
        os.environ.pop(name, None)


async def refused(place: Rank) -> str:
    try:
        async with place.open(device=CUDA, timeout=60) as comm:
            await comm.all_reduce(full(1.0))
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return "it worked"


def test_g1_one_rank() -> None:
    async def main() -> None:
        async with alone() as comm:
            assert comm.size == 1
            await works(comm)

    asyncio.run(main())


def test_g1_two_ranks_on_one_gpu_without_the_switch(ranks: Run) -> None:
    """Both ranks raise an error that names the variable to set."""
    for told in ranks(2, refused, before=separate):
        assert "NCCL_MULTI_RANK_GPU_ENABLE" in told or "NCCL_HOSTID" in told, told


async def summed(place: Rank) -> float:
    async with place.open(device=CUDA, timeout=60) as comm:
        return (await comm.all_reduce(full(1.0 + comm.rank)))[-1].item()


@pytest.mark.parametrize("size", [2, 4])
def test_g1_ranks_on_one_gpu_with_the_switch(ranks: Run, size: int) -> None:
    assert ranks(size, summed, before=share) == [size * (size + 1) / 2] * size


# --------------------------------------------------------------------------------- G2: an abort while a kernel spins


def test_g2_a_rank_that_never_comes(tmp_path: Path) -> None:
    """Opening fails at its deadline, and the GPU still works."""

    async def main() -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        began = time.monotonic()
        with pytest.raises(CommError):
            await aiocomms.new_comm("nccl", CUDA, store=store, rank=0, size=2, timeout=5)
        assert time.monotonic() - began < 15
        async with alone(name="another") as comm:
            await works(comm)

    asyncio.run(main())


async def never_called(place: Rank, by: str) -> float:
    """Let rank 0's kernel wait for rank 1, which calls no op; return the seconds until rank 0's op fails."""
    async with asyncio.timeout(100):
        comm = await place.open(device=CUDA, timeout=60)
        await comm.all_reduce(full(1.0))
        took = 0.0
        if place.rank == 0:
            work = comm.all_reduce(full(1.0), timeout=3 if by == "deadline" else None)
            if by == "abort":
                await asyncio.sleep(0.5)  # until the kernel spins
                comm.abort("for the test")
            began = time.monotonic()
            with pytest.raises(CommTimeoutError if by == "deadline" else CommAbortedError):
                await work
            took = time.monotonic() - began
            place.tell("over 0")
        else:
            await place.all_told("over", 0)
        await comm.aclose()
        torch.cuda.synchronize()
        async with alone(name="another", store=dist.HashStore(), rank=0, size=1) as another:
            await works(another)
        return took


def test_g2_an_abort_while_a_kernel_spins(ranks: Run) -> None:
    took, _ = ranks(2, never_called, "abort", before=share)
    assert took < 2


def test_g2_a_deadline_while_a_kernel_spins(ranks: Run) -> None:
    took, _ = ranks(2, never_called, "deadline", before=share)
    assert 2 < took < 6


# --------------------------------------------------------------- G3: a cancelled await does not give the tensors away


def test_g3_a_cancelled_awaits_tensors_stay_until_the_gpu_is_done() -> None:
    """The allocator does not reuse their memory before the op is done, and gets it back afterwards."""

    async def main() -> None:
        async with alone() as comm:
            await works(comm)
            before = torch.cuda.memory_allocated()
            source, target = full(1.0), full(0.0)
            places = {source.data_ptr(), target.data_ptr()}
            busy(2.0)
            work = comm.all_gather_single(target, source)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await work
            del source, target, work
            gc.collect()
            others = [full(-7.0) for _ in range(4)]
            assert not places & {other.data_ptr() for other in others}
            await works(comm)  # runs after the op and the fills
            torch.cuda.synchronize()
            assert all(other.eq(-7).all() for other in others)
            del others
            async with asyncio.timeout(5):
                while torch.cuda.memory_allocated() > before:  # noqa: ASYNC110 - freed by the driver's next turns
                    await asyncio.sleep(0.01)

    asyncio.run(main())


# ------------------------------------------------------------------------------------------- G4: three streams, no sync


def test_g4_streams_are_ordered_by_events() -> None:
    """One stream produces, the communicator's stream gathers, and a third consumes. The host waits for none."""

    async def main() -> None:
        async with alone() as comm:
            producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
            results = []
            for turn in range(50):
                with torch.cuda.stream(producer):
                    busy(0.002)
                    source, target = full(float(turn)), full(-1.0)
                    work = comm.all_gather_single(target, source)
                work.wait_stream(consumer)
                with torch.cuda.stream(consumer):
                    results.append(target.clone())
                target.record_stream(consumer)  # the allocator then keeps the memory until the consumer has read it
            torch.cuda.synchronize()
            for turn, result in enumerate(results):
                assert result.eq(turn).all(), turn

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------- G5: wrong devices


def test_g5_tensors_on_the_wrong_device() -> None:
    """Each call raises before any data is sent, and the communicator still works."""

    async def main() -> None:
        async with alone() as comm:
            host = torch.ones(5)
            for call in (
                lambda: comm.all_reduce(host),
                lambda: comm.all_gather_single(full(0.0, 5), host),
                lambda: comm.all_gather([host], full(0.0, 5)),
                lambda: comm.broadcast(host.pin_memory(), 0),
            ):
                with pytest.raises(ArgumentError, match=r"on cpu, wanted it on cuda:0"):
                    call()
            await works(comm)
        async with aiocomms.new_comm("local") as comm:
            with pytest.raises(ArgumentError, match=r"on cuda:0, wanted it on cpu"):
                comm.all_reduce(full(1.0))

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["nccl", "ucx", "auto"])
def test_g5_a_gpu_that_is_not_there(transport: str) -> None:
    async def main() -> None:
        with pytest.raises(CommError, match="99"):
            await aiocomms.new_comm(transport, "cuda:99", timeout=20)

    asyncio.run(main())


@on_two_gpus
def test_g5_another_gpu_than_the_current_one() -> None:
    """The communicator's device counts, not the current one; tensors on other devices are refused."""

    async def main() -> None:
        async with asyncio.timeout(90), aiocomms.new_comm("nccl", "cuda:1", timeout=60) as comm:
            tensor = torch.ones(5, device="cuda:1")
            with torch.cuda.device(0):
                assert (await comm.all_gather_single(torch.empty_like(tensor), tensor)).eq(1).all()
                with pytest.raises(ArgumentError, match="cuda:0"):
                    comm.all_reduce(torch.ones(5, device="cuda:0"))

    asyncio.run(main())


# -------------------------------------------------------------------------------- G6: out of memory, and a lost context


@pytest.mark.parametrize("op", ["all_gather", "all_gather_object", "premul_sum", "gather"])
def test_g6_out_of_memory_fails_the_op_alone(op: str) -> None:
    """An op that allocates nothing may succeed, but only with the right result."""

    async def main() -> None:
        async with alone() as comm:
            await works(comm)
            tensor, large = full(1.0), os.urandom(8 * 2**20)
            calls = {
                "all_gather": lambda: functional.all_gather(tensor, comm),
                "gather": lambda: functional.gather(tensor, 0, comm),
                "all_gather_object": lambda: comm.all_gather_object(large),
                "premul_sum": lambda: comm.all_reduce(tensor, aiocomms.ReduceOp.PREMUL_SUM(0.5)),
            }
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            try:
                result = await calls[op]()
            except (torch.OutOfMemoryError, CommError):
                result = None
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            if op in ("all_gather", "gather"):
                assert result is None  # these ops allocate 16 MiB
            elif result is not None:
                assert result == [large] if op == "all_gather_object" else result.eq(0.5).all()
            assert not comm.aborted
            await works(comm)

    asyncio.run(main())


def test_g6_a_lost_context_fails_what_is_pending() -> None:
    """A user's kernel fails an assertion, which breaks the context. The op fails, and closing does not hang."""
    done = script("""
        async def main():
            comm = await aiocomms.new_comm("nccl", CUDA, timeout=20)
            out, tensor = torch.empty(8, device=CUDA), torch.ones(8, device=CUDA)
            await comm.all_gather_single(out, tensor)
            beyond = torch.tensor([99], device=CUDA)  # a copy, for which the host would wait
            busy(0.2)
            wrong = tensor[beyond]
            try:
                await comm.all_gather_single(out, tensor)
                say(what="no error")
                os._exit(0)
            except CommError as error:
                told = f"{type(error).__name__}: {error}"
            try:
                await asyncio.wait_for(comm.aclose(), 10)
                say(what=told, closed=True)
            except CommError:
                say(what=told, closed=True)
            except TimeoutError:
                say(what=told, closed=False)
            os._exit(0)
        asyncio.run(main())
    """)
    answer = said(done)
    assert answer["closed"], answer
    assert any(word in answer["what"].lower() for word in ("assert", "cuda")), answer


# ----------------------------------------------------------------------------------------------------- G7: a fork


def test_g7_a_forked_child_refuses() -> None:
    """The inherited communicator and a new one raise an error in the child, and neither hangs."""
    done = script("""
        import threading
        async def again():
            async with aiocomms.new_comm("nccl", CUDA, name="child", timeout=10) as comm:
                await comm.all_reduce(torch.ones(3, device=CUDA))
        async def main():
            comm = await aiocomms.new_comm("nccl", CUDA, timeout=20)
            tensor = torch.ones(3, device=CUDA)
            await comm.all_reduce(tensor)
            child = os.fork()
            if child == 0:
                told = []
                try:
                    comm.all_reduce(tensor)
                except (CommError, RuntimeError) as error:
                    told.append(str(error))
                def target():
                    try:
                        asyncio.run(again())
                    except (CommError, RuntimeError) as error:
                        told.append(str(error))
                thread = threading.Thread(target=target, daemon=True)
                thread.start()
                thread.join(20)
                say(told=told)
                os._exit(0)
            os.waitpid(child, 0)
            await comm.all_reduce(tensor)
            await comm.aclose()
        asyncio.run(main())
    """)
    assert done.returncode == 0, done.stderr
    told = said(done)["told"]
    assert len(told) == 2, told
    assert "fork" in told[0], told


# --------------------------------------------------------------------------------- G8: see also test_graphs.py


def test_g8_what_cannot_be_captured_is_refused() -> None:
    """A graph cannot contain a UCX message. The put raises before any data is sent, and the capture continues."""

    async def main() -> None:
        async with alone("ucx") as comm:
            window = await comm.new_window(full(0.0, 8))
            tensor, graph = full(1.0, 8), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                with pytest.raises(UnsupportedOperation, match="captur"):
                    window.put(tensor, 0)
                doubled = tensor * 2
            graph.replay()
            torch.cuda.synchronize()
            assert doubled.eq(2).all()
            await window.put(tensor, 0)
            await window.flush()
            assert window.tensor.eq(1).all()
            await window.aclose()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ G9: the loop is free


def test_g9_the_loop_is_free_while_ops_are_pending() -> None:
    """The ops are fewer than CUDA queues before a call blocks: on an H200, the 57th all-gather of one rank does."""

    async def main() -> list[float]:
        late: list[float] = []
        async with alone() as comm:
            await works(comm)
            tensors = [full(1.0, 256) for _ in range(40)]
            outputs = [torch.empty_like(tensor) for tensor in tensors]
            busy(1.0)
            pending = []
            for output, tensor in zip(outputs, tensors, strict=True):
                pending.append(comm.all_gather_single(output, tensor))
                if len(pending) % 10 == 0:
                    await asyncio.sleep(0)
            with ticking(1e-3, late):
                for work in pending:
                    await work
            assert all(output.eq(1).all() for output in outputs)
        return late

    late = asyncio.run(main())
    assert len(late) > 100, "the ops were done before they could be waited for"
    assert percentile(late, 99) < 5e-3


def test_g9_the_loop_is_free_while_objects_and_windows_wait_for_the_stream() -> None:
    """Their copies between the host and the GPU are not in the caller's stream, which a kernel keeps busy."""

    async def calls(comm: Communicator) -> None:
        obj = {"name": "x" * 1000, "number": comm.rank}
        assert await comm.all_gather_object(obj) == [obj] * comm.size
        window = await comm.new_window(full(1.0, 256))
        assert window.sizes == [256] * comm.size
        await window.aclose()

    async def main() -> list[float]:
        late: list[float] = []
        async with alone() as comm:
            await calls(comm)
            busy(1.0)
            with ticking(1e-3, late):
                await calls(comm)
                await recorded()
        return late

    late = asyncio.run(main())
    assert len(late) > 100, "the kernel ended before the calls"
    assert percentile(late, 99) < 5e-3


# ------------------------------------------------------------------------------------------- G10: the interpreter's end


@pytest.mark.parametrize(
    "end",
    [
        "",
        "await asyncio.sleep(0.2)",
        "del comm, work; gc.collect()",
        "sys.exit(0)",
        "comm.abort('leaving')",
        "torch.cuda.synchronize()",
    ],
)
def test_g10_the_interpreter_ends_with_an_op_pending(end: str) -> None:
    """The interpreter neither crashes nor hangs, whichever references are left."""
    done = script(f"""
        keep = []
        async def main():
            comm = await aiocomms.new_comm("nccl", CUDA, timeout=20)
            keep.append(comm)
            tensor = torch.ones(1000, device=CUDA)
            await comm.all_reduce(tensor)
            busy(1.0)
            work = comm.all_gather_single(torch.empty_like(tensor), tensor)
            keep.append(work)
            say(what="leaving")
            {end or "pass"}
        asyncio.run(main())
    """)
    assert said(done) == {"what": "leaving"}
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


def test_g10_closing_and_aborting_twice() -> None:
    async def main() -> None:
        for last in ("close", "abort"):
            async with alone(name=last) as comm:
                await works(comm)
                await comm.aclose()
                await comm.aclose()
                comm.abort("too late")
                if last == "abort":
                    comm.abort("later still")
                await comm.aclose()

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------- G11: GPU memory and UCX


def test_g11_a_ucx_that_cannot_reach_gpu_memory() -> None:
    """UCX without its CUDA transports refuses a CUDA tensor by an error, or moves it correctly, and does not crash."""
    done = script(
        """
        async def main():
            try:
                async with aiocomms.new_comm("ucx", CUDA, timeout=20) as comm:
                    window = await comm.new_window(torch.zeros(1000, device=CUDA))
                    await window.put(torch.ones(1000, device=CUDA), 0)
                    await window.flush()
                    say(told="", value=window.tensor[0].item())
            except CommError as error:
                say(told=str(error))
        asyncio.run(main())
        """,
        UCX_TLS="self,posix,tcp",
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    answer = said(done)
    assert "cuda" in answer["told"].lower() or answer.get("value") == 1.0, answer


async def reallocating(place: Rank) -> int:
    """Send tensors from rank 0 to rank 1, and free each to CUDA; return how many have the right values."""
    async with (
        asyncio.timeout(100),
        aiocomms.new_comm("ucx", CUDA, store=place.store(), rank=place.rank, size=place.size, timeout=60) as comm,
    ):
        right, places = 0, set()
        for turn in range(30):
            count = MANY // (1 + turn % 3)
            tensor = full(float(turn) if comm.rank == 0 else -1.0, count)
            places.add(tensor.data_ptr())
            await (comm.send(tensor, 1) if comm.rank == 0 else comm.recv(tensor, 0))
            right += bool(tensor.eq(turn).all())
            del tensor
            gc.collect()
            torch.cuda.empty_cache()  # calls cudaFree: another allocation may then get the address
        assert len(places) < 30, "no address came again, so nothing was tested"
        return right


def test_g11_no_stale_mapping_after_memory_is_freed(ranks: Run) -> None:
    assert ranks(2, reallocating) == [30, 30]


# ------------------------------------------------------------------------------------------------ G12: gloo and the GPU


def test_g12_gloo_does_not_take_gpu_memory() -> None:
    """The c10d transport raises an error that names the device, and does not stage data through the host."""

    async def main() -> None:
        with pytest.raises(UnsupportedOperation, match="cuda"):
            await aiocomms.new_comm("c10d", CUDA, timeout=20)

    asyncio.run(main())
