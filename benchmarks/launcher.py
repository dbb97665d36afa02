"""Costs of an op of the nccl transport to the loop's thread: by the launcher in Python, and by the native one.

There is no GPU, and nothing is moved: each call of CUDA and NCCL returns at once. So the figures are those of the code
above these calls, and say nothing of a GPU. Both launchers run in turn in one process, round after round. What is
measured is the time for which the loop's thread computes. Run it with ``python -m benchmarks.launcher [--json FILE]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import ctypes.util
import json
import os
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import torch
from aiocomms_nccl import NcclTransport
from aiocomms_nccl.nccl import FUNCTIONS as NCCL
from aiocomms_nccl.nccl import Nccl

import aiocomms
from aiocomms.bootstrap import registry
from aiocomms.communicator.communicator import Communicator
from aiocomms.cuda import Cuda
from aiocomms.cuda.runtime import FUNCTIONS as RUNTIME
from aiocomms.transport import Capabilities

OPS = 200
ROUNDS = 40
PURE = {"python": "1", "native": "0"}
"""The value of ``AIOCOMMS_PURE`` for each launcher."""


def returns_0() -> int:
    """The address of a function in C that returns 0 at once, and stands for each of CUDA's and NCCL's."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    address = ctypes.cast(library.fegetround, ctypes.c_void_p).value
    assert address is not None
    assert library.fegetround() == 0
    return address


class NoStream:
    cuda_stream = 1

    def wait_event(self, event: Any) -> None:
        pass


class NoEvent:
    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class NoCuda:
    index = 0
    current = NoStream()

    def activate(self) -> None:
        pass

    def functions(self) -> Mapping[str, int]:
        return dict.fromkeys(RUNTIME, returns_0())

    def stream(self, priority: int) -> NoStream:
        return NoStream()

    def current_stream(self) -> NoStream:
        return self.current

    def current_handle(self) -> int:
        return 1

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def event(self) -> NoEvent:
        return NoEvent()

    def capturing(self, stream: Any = None) -> bool:
        return False

    def enqueue(self, stream: Any, call: Callable[[], object]) -> None:
        pass

    def copy(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        pass

    def empty_like(self, stream: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        yield


class NoComm:
    comm = 1

    def call(self, *arguments: int) -> None:
        pass

    allReduce = reduce = broadcast = allGather = reduceScatter = send = recv = commSplit = call  # noqa: N815
    check_async_error = abort = destroy = call


class NoNccl:
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def version(self) -> int:
        return 23203

    def unique_id(self) -> bytes:
        return bytes(128)

    def communicator(self, size: int, unique_id: bytes, rank: int) -> NoComm:
        return NoComm()

    def group_start(self) -> None:
        pass

    def group_end(self) -> None:
        pass

    def functions(self) -> Mapping[str, int]:
        return dict.fromkeys(NCCL, returns_0())


class NoNcclTransport(NcclTransport):
    """The real transport above calls that do nothing."""

    capabilities = Capabilities(
        ops=NcclTransport.capabilities.ops,
        reductions=NcclTransport.capabilities.reductions,
        in_process=True,
        detects_mismatch=False,
        spin=NcclTransport.capabilities.spin,
    )

    @classmethod
    def layers(cls, device: torch.device) -> tuple[Cuda, Nccl]:
        return NoCuda(), NoNccl()

    @classmethod
    def gpu(cls, device: torch.device) -> str:
        return uuid.uuid4().hex

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        return None


async def post(comm: Communicator, tensor: torch.Tensor) -> float:
    """Call ops and then await them; the time of the calls alone."""
    start = time.thread_time_ns()
    works = [comm.all_reduce(tensor) for _ in range(OPS)]
    took = time.thread_time_ns() - start
    for work in works:
        await work
    return took / OPS / 1000


async def whole(comm: Communicator, tensor: torch.Tensor) -> float:
    """Call ops and await them, all at once."""
    start = time.thread_time_ns()
    for work in [comm.all_reduce(tensor) for _ in range(OPS)]:
        await work
    return (time.thread_time_ns() - start) / OPS / 1000


async def one_by_one(comm: Communicator, tensor: torch.Tensor) -> float:
    """Await each op before the next is called."""
    start = time.thread_time_ns()
    for _ in range(OPS):
        await comm.all_reduce(tensor)
    return (time.thread_time_ns() - start) / OPS / 1000


SUBJECTS = {"the call": post, "call and end": whole, "awaited one by one": one_by_one}


@contextlib.asynccontextmanager
async def communicator(pure: str) -> AsyncIterator[Communicator]:
    os.environ["AIOCOMMS_PURE"] = pure
    async with aiocomms.new_comm("nccl_none", rank=0, size=1) as comm:
        yield comm


async def run(rounds: int) -> dict[str, dict[str, float]]:
    """Medians, in µs, by subject and launcher."""
    tensor = torch.ones(2)
    samples: dict[str, dict[str, list[float]]] = {what: {name: [] for name in PURE} for what in SUBJECTS}
    async with communicator(PURE["python"]) as python, communicator(PURE["native"]) as native:
        comms = {"python": python, "native": native}
        for turn in range(rounds + 2):
            for what, subject in SUBJECTS.items():
                for name, comm in comms.items():
                    took = await subject(comm, tensor)
                    if turn > 1:
                        samples[what][name].append(took)
    return {what: {name: statistics.median(all_) for name, all_ in of.items()} for what, of in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    entry = EntryPoint("nccl_none", "benchmarks.launcher:NoNcclTransport", registry.GROUP)
    registry.entries = lambda: {"nccl_none": entry}
    result = asyncio.run(run(arguments.rounds))
    print(f"{'µs of the loop thread, per op':32}" + "".join(f"{name:>10}" for name in PURE))
    for what, medians in result.items():
        print(f"{what:32}" + "".join(f"{value:10.1f}" for value in medians.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
