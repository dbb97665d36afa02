"""A fake NCCL for the fake GPU. It moves data, waits for ever where ranks' calls differ, and refuses what NCCL refuses.

The transport ``nccl_fake`` is the real one above these two layers. All ranks may be tasks of one process.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import secrets
import socket
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from aiocomms_nccl import NcclTransport, bringup
from aiocomms_nccl import nccl as names
from aiocomms_nccl.nccl import Nccl
from fake_cuda import FakeCuda, FakeStream, Gpu, Task
from fake_functions import PerThread, nccl_functions
from inside import transport_of
from torch import Tensor

from aiocomms.cuda import Cuda
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities

DTYPES = {
    names.INT8: torch.int8,
    names.UINT8: torch.uint8,
    names.INT32: torch.int32,
    names.UINT32: torch.uint32,
    names.INT64: torch.int64,
    names.UINT64: torch.uint64,
    names.FLOAT16: torch.float16,
    names.FLOAT32: torch.float32,
    names.FLOAT64: torch.float64,
    names.BFLOAT16: torch.bfloat16,
}
REDUCE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    names.SUM: torch.add,
    names.PROD: torch.mul,
    names.MAX: torch.maximum,
    names.MIN: torch.minimum,
    names.AVG: torch.add,
}
UNSIGNED = {names.SUM: np.add, names.PROD: np.multiply, names.MAX: np.maximum, names.MIN: np.minimum}
P2P = ("send", "recv")


class FakeNcclError(RuntimeError):
    """The error of a call, as ``cupy.cuda.nccl.NcclError``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR number {status}")
        self.status = status


def failed(status: int) -> Exception:
    """Return the exception that CuPy raises. For 7 and 8 CuPy has no text, and raises a KeyError."""
    return KeyError(status) if status in (7, 8) else FakeNcclError(status)


class What(NamedTuple):
    """The arguments of a call, without the addresses of its data."""

    kind: str
    count: int
    dtype: int
    op: int = -1
    root: int = -1


class Call:
    """One call of one rank that is under way."""

    def __init__(self, comm: FakeComm, what: What, send: int, recv: int) -> None:
        self.comm, self.what, self.send, self.recv = comm, what, send, recv
        self.done = False
        self.kept: Tensor | None = None

    def buffer(self) -> None:
        """Keep the data of a send, which then is done before its receive comes."""
        self.kept = memory(self.send, self.what).clone()
        self.send, self.done = self.kept.data_ptr(), True


class Shared:
    """The state that the ranks of one communicator share."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        self.gpu = gpu
        self.size = size
        self.here: set[int] = set()
        self.meetings: defaultdict[int, dict[int, Call]] = defaultdict(dict)
        self.sends: defaultdict[tuple[int, int], deque[Call]] = defaultdict(deque)
        self.recvs: defaultdict[tuple[int, int], deque[Call]] = defaultdict(deque)
        self.splits: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.children: dict[tuple[int, int], Shared] = {}
        self.async_error = 0

    def arrive(self, call: Call, number: int) -> None:
        """Run a call to which a rank's stream has come, together with the calls that match it."""
        rank, what = call.comm.rank, call.what
        if what.kind in P2P:
            pair = (rank, what.root) if what.kind == "send" else (what.root, rank)
            (self.sends if what.kind == "send" else self.recvs)[pair].append(call)
            if what.kind == "send" and what.count <= call.comm.library.buffer:
                call.buffer()
            sends, recvs = self.sends[pair], self.recvs[pair]
            while sends and recvs and sends[0].what[1:3] == recvs[0].what[1:3]:  # if they differ, both wait for ever
                given, taken = sends.popleft(), recvs.popleft()
                memory(taken.recv, what).copy_(memory(given.send, what))
                given.done = taken.done = True
            return
        meeting = self.meetings[number]
        meeting[rank] = call
        if len(meeting) == self.size and len({other.what for other in meeting.values()}) == 1:
            del self.meetings[number]
            calls = [meeting[r] for r in range(self.size)]
            perform(what, calls)
            for other in calls:
                other.done = True


def memory(pointer: int, what: What, times: int = 1) -> Tensor:
    """Return the memory that a call names, as a tensor."""
    dtype = DTYPES[what.dtype]
    size = what.count * times * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=dtype)


def perform(what: What, calls: Sequence[Call]) -> None:
    """Perform a collective to which all ranks have come."""
    n = len(calls)
    if what.kind == "broadcast":
        given = memory(calls[what.root].send, what).clone()
        for call in calls:
            memory(call.recv, what).copy_(given)
    elif what.kind == "all_gather":
        parts = [memory(call.send, what).clone() for call in calls]
        for call in calls:
            memory(call.recv, what, n).copy_(torch.cat(parts))
    elif what.kind == "reduce_scatter":
        result = reduced(what, [memory(call.send, what, n) for call in calls])
        for call, part in zip(calls, result.chunk(n), strict=True):
            memory(call.recv, what).copy_(part)
    else:
        result = reduced(what, [memory(call.send, what) for call in calls])
        for call in calls if what.kind == "all_reduce" else [calls[what.root]]:
            memory(call.recv, what).copy_(result)


def reduced(what: What, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors, and round after each rank's contribution as NCCL does."""
    if what.dtype in (names.UINT32, names.UINT64):  # torch lacks the operators for these
        return torch.from_numpy(functools.reduce(UNSIGNED[what.op], [tensor.numpy() for tensor in tensors]))
    result = functools.reduce(REDUCE[what.op], tensors).clone()
    if what.op == names.AVG:
        result = (result / len(tensors)).to(result.dtype)
    return result


class FakeComm:
    """See :class:`aiocomms_nccl.nccl.NcclComm`."""

    def __init__(self, library: FakeNccl, shared: Shared, rank: int) -> None:
        self.library, self.shared, self.rank = library, shared, rank
        self.state = "open"
        self.outstanding = 0
        self._numbers = itertools.count()
        self._splits = itertools.count()
        self.calls: list[What] = []
        library.comms.append(self)
        self.comm = len(library.comms)

    def allReduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call(What("all_reduce", count, dtype, op), send, recv, stream)

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        self._call(What("reduce", count, dtype, op, root), send, recv, stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._call(What("broadcast", count, dtype, -1, root), send, recv, stream)

    def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        self._call(What("all_gather", count, dtype), send, recv, stream)

    def reduceScatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call(What("reduce_scatter", count, dtype, op), send, recv, stream)

    def send(self, send: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call(What("send", count, dtype, -1, peer), send, 0, stream)

    def recv(self, recv: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call(What("recv", count, dtype, -1, peer), 0, recv, stream)

    def _call(self, what: What, send: int, recv: int, stream: int) -> None:
        self._check()
        bad_op = what.op != -1 and what.op not in REDUCE
        bad_root = what.root != -1 and not 0 <= what.root < self.shared.size
        if what.dtype not in DTYPES or what.count < 0 or bad_op or bad_root:
            raise FakeNcclError(4)
        self.calls.append(what)
        if what.count:  # NCCL ignores an empty call, which synchronises nothing
            self.library.give(self, Call(self, what, send, recv), self.library.cuda.gpu.streams[stream])

    def issue(self, calls: Sequence[Call]) -> Task:
        """Return the task that runs the calls of one group, in the order in which NCCL was called."""
        numbered = [(call, -1 if call.what.kind in P2P else next(self._numbers)) for call in calls]
        arrived = False
        self.outstanding += 1

        def task() -> bool:
            nonlocal arrived
            if not arrived and self.state != "aborted":
                arrived = True
                for call, number in numbered:
                    self.shared.arrive(call, number)
                self.shared.gpu.kick()
            done = self.state == "aborted" or all(call.done for call in calls)
            self.outstanding -= done
            return done

        return task

    def commSplit(self, color: int, key: int) -> FakeComm | None:
        self._check()
        if self.outstanding:
            raise FakeNcclError(5)
        shared, number = self.shared, next(self._splits)
        with shared.gpu.changed:
            claims = shared.splits[number]
            claims[self.rank] = (color, key)
            shared.gpu.changed.notify_all()
            while len(claims) < shared.size and self.state == "open":
                shared.gpu.changed.wait()
            self._check()
            if color < 0:
                return None
            members = sorted((k, r) for r, (c, k) in claims.items() if c == color)
            child = shared.children.setdefault((number, color), Shared(shared.gpu, len(members)))
            return FakeComm(self.library, child, members.index((key, self.rank)))

    def check_async_error(self) -> None:
        self._check()
        if self.shared.async_error:
            raise failed(self.shared.async_error)

    def abort(self) -> None:
        self._check()
        with self.shared.gpu.changed:
            self.state = "aborted"
            self.shared.gpu.kick()

    def destroy(self) -> None:
        self._check()
        self.state = "destroyed"

    def _check(self) -> None:
        if self.state != "open":
            raise AssertionError(f"NCCL was called with a communicator that is {self.state}; the real one crashes")


class FakeNccl:
    """See :class:`aiocomms_nccl.nccl.Nccl`."""

    errors = (FakeNcclError, KeyError)

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.comms: list[FakeComm] = []
        self.buffer = 0
        """The most bytes of a send that NCCL buffers. The real one does so with small sends, depending on the way."""
        self.groups: list[int] = []
        """The number of calls in each group."""
        self._shared: dict[bytes, Shared] = {}
        self._groups: PerThread[list[dict[tuple[FakeComm, FakeStream], list[Call]]]] = PerThread(list)

    def version(self) -> int:
        return 23203

    def unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def communicator(self, size: int, unique_id: bytes, rank: int) -> FakeComm:
        if len(unique_id) != 128 or not 0 <= rank < size:
            raise FakeNcclError(4)
        gpu = self.cuda.gpu
        with gpu.changed:
            shared = self._shared.setdefault(unique_id, Shared(gpu, size))
            if rank in shared.here or shared.size != size:
                raise FakeNcclError(5)
            shared.here.add(rank)
            gpu.changed.notify_all()
            while len(shared.here) < size:
                gpu.changed.wait()
        return FakeComm(self, shared, rank)

    def functions(self) -> dict[str, int]:
        return self._functions

    @functools.cached_property
    def _functions(self) -> dict[str, int]:
        return nccl_functions(self)

    def group_start(self) -> None:
        self._groups.get().append({})

    def group_end(self) -> None:
        groups = self._groups.get()
        if not groups:
            raise FakeNcclError(5)
        given = groups.pop()
        if groups:
            groups[-1].update(given)
            return
        for (comm, stream), calls in given.items():
            self.groups.append(len(calls))
            stream.add(functools.partial(self._node, comm, calls))

    def give(self, comm: FakeComm, call: Call, stream: FakeStream) -> None:
        """Enqueue a call: with its group if there is one, else alone."""
        if groups := self._groups.get():
            groups[-1].setdefault((comm, stream), []).append(call)
        else:
            stream.add(functools.partial(self._node, comm, [call]))

    @staticmethod
    def _node(comm: FakeComm, calls: Sequence[Call]) -> Task:
        """Return a task with new calls: a graph makes its calls again in each replay."""
        return comm.issue([Call(comm, call.what, call.send, call.recv) for call in calls])


class FakeNcclTransport(NcclTransport):
    """The real transport above the fake layers."""

    capabilities = Capabilities(
        ops=NcclTransport.capabilities.ops,
        reductions=NcclTransport.capabilities.reductions,
        rounds_each_step=NcclTransport.capabilities.rounds_each_step,
        in_process=True,
        lanes=NcclTransport.capabilities.lanes,
        detects_mismatch=False,
        spin=NcclTransport.capabilities.spin,
    )
    cuda_layer = FakeCuda()
    nccl_layer = FakeNccl(cuda_layer)

    @classmethod
    def layers(cls, device: torch.device) -> tuple[Cuda, Nccl]:
        return cls.cuda_layer, cls.nccl_layer

    @classmethod
    def gpu(cls, device: torch.device) -> str:
        return uuid.uuid4().hex

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        return None

    @classmethod
    def preference(cls, device: torch.device, size: int, family: Any) -> int:
        return 0


class FakeNcclDebugTransport(FakeNcclTransport):
    """The same transport in debug mode."""

    capabilities = msgspec.structs.replace(FakeNcclTransport.capabilities, detects_mismatch=True)


class _Listener(socket.socket):
    """A Unix socket that listens at a name which the kernel chooses, and says so as one of the network does."""

    def __init__(self, address: str, backlog: int) -> None:
        super().__init__(socket.AF_UNIX)
        self.bind("")
        self.listen(backlog)

    def getsockname(self) -> tuple[str, int]:
        name: bytes = super().getsockname()
        return name.decode(), 0


def connect_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks' control connections be Unix sockets, which deterministic tests may use."""

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        connection.connect(address[0].encode())
        return connection

    sockets = SimpleNamespace(**{**vars(socket), "create_connection": create_connection})
    monkeypatch.setattr(bringup, "socket", sockets)
    monkeypatch.setattr(bringup, "listen_at", _Listener)


def world(size: int, **options: Any) -> Any:
    """Return a world of ranks over the fake."""
    return local_world(size, "nccl_fake", **options)


def transport(comm: Any) -> Any:
    """Return the transport of a communicator."""
    return transport_of(comm, "collectives")
