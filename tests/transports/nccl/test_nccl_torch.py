"""The backend of torch.distributed for tensors on the fake GPU: what waits for what, which communicators there are."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from concurrency import in_threads
from fake_cuda import FakeCuda, FakeStream, Gate
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import BarrierOptions

from aiocomms import blocking
from aiocomms.errors import ArgumentError, UnsupportedOperation
from aiocomms.integrations.torch_backend import Group, communicators

pytestmark = pytest.mark.deterministic
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Memory:
    """Notes the tensors of the CPU that stand for some of a GPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.streams = [FakeStream(cuda.gpu) for _ in range(3)]
        """One of each rank: on one stream for all, a rank's call would come after another one's wait for it."""
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        self.opened = 0
        """The number of communicators that were formed anew."""

    def put(self, tensor: Tensor, device: torch.device = GPU) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage, device
        return tensor

    def device_of(self, tensors: Sequence[Tensor]) -> torch.device:
        if not tensors or tensors[0].layout is not torch.strided:
            return GPU if tensors else CPU
        found = self._storages.get(tensors[0].untyped_storage().data_ptr())
        return CPU if found is None else found[1]

    def on_each(self, formed: Sequence[Group], call: Callable[[Group], Any]) -> list[Any]:
        """Call something for each rank, in a thread of its own, on the rank's stream."""

        def on(group: Group) -> Any:
            with self.cuda.on(self.streams[group.rank()]):
                return call(group)

        return in_threads(*(lambda group=group: on(group) for group in formed))

    def open_gpu(self, transport: Any, device: torch.device, **where: Any) -> blocking.Communicator:
        assert (transport, device) == ("auto", GPU)
        self.opened += 1
        return blocking.new_comm("nccl_fake", **where)


@pytest.fixture
def memory(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory(cuda)
    monkeypatch.setattr(communicators, "device_of", memory.device_of)
    monkeypatch.setattr(communicators, "open_gpu", memory.open_gpu)
    return memory


@contextlib.contextmanager
def groups(size: int = 2, *, eager: bool = True) -> Iterator[list[Group]]:
    """A group on each rank; ``eager`` as where ``init_process_group`` was given ``device_id``."""
    store = HashStore()

    def form(rank: int) -> Group:
        group = Group(blocking.new_comm("local", store=store, rank=rank, size=size), store)
        if eager:
            group.eager_connect_single_device(GPU)
        return group

    formed: list[Group] = in_threads(*(lambda rank=rank: form(rank) for rank in range(size)))
    try:
        yield formed
    finally:
        in_threads(*(group.shutdown for group in formed))


def done(cuda: FakeCuda, stream: FakeStream) -> None:
    """Block until a stream has done all that it has now."""
    event = cuda.event()
    event.record(stream)
    event.synchronize()


def test_a_collective_comes_after_its_callers_stream_which_waits_for_it_and_the_host_does_not(cuda, memory):
    with groups() as formed:
        seen: list[list[float]] = []
        streams = memory.streams[:2]
        tensors = [memory.put(torch.zeros(2, 2)) for _ in formed]
        gates = [Gate(stream) for stream in streams]

        def call(group: Group) -> dist.Work:
            rank = group.rank()
            cuda.enqueue(streams[rank], lambda: tensors[rank].fill_(rank + 1.0))
            work = group.allreduce([tensors[rank]])
            work.wait()
            work.synchronize()
            cuda.enqueue(streams[rank], lambda: seen.append(tensors[rank].flatten().tolist()))
            return work

        works = memory.on_each(formed, call)  # returns while the GPU is held
        assert [work.is_completed() for work in works] == [False, False]
        assert not seen
        for gate in gates:
            gate.open()
        for stream in streams:
            done(cuda, stream)
        assert seen == [[3.0] * 4] * 2


def test_who_awaits_and_the_future_go_on_when_the_gpu_has_done_it(cuda, memory):
    with groups() as (one, two):
        held = FakeStream(cuda.gpu)
        gate, tensor = Gate(held), memory.put(torch.ones(2))
        with cuda.on(held):
            work = one.allreduce([tensor])
        other = two.allreduce([memory.put(torch.ones(2))])
        ended = threading.Event()
        future = work.get_future()
        doubled = future.then(lambda future: (ended.set(), future.value()[0] * 2)[1])

        async def main() -> None:
            async def awaits() -> list[Tensor]:
                return await work

            task = asyncio.ensure_future(awaits())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done()
            assert not future.done()
            gate.open()
            assert (await task)[0].tolist() == [2.0, 2.0]

        asyncio.run(main())
        assert ended.wait(60)
        assert doubled.wait().tolist() == [4.0, 4.0]
        other.wait()


def test_a_patience_of_its_own_has_the_thread_wait_for_the_gpu(cuda, memory):
    with groups() as (one, two):
        held = FakeStream(cuda.gpu)
        gate = Gate(held)
        with cuda.on(held):
            work = one.allreduce([memory.put(torch.ones(2))])
        other = two.allreduce([memory.put(torch.ones(2))])
        with pytest.raises(dist.DistBackendError, match="was not done within"):
            work.wait(timedelta(milliseconds=1))
        gate.open()
        assert work.wait(timedelta(seconds=60))
        assert other.wait()


def test_a_barrier_has_the_thread_wait_for_the_gpu(cuda, memory):
    with groups() as (one, two):
        held = FakeStream(cuda.gpu)
        gate, options = Gate(held), BarrierOptions()
        options.device = GPU
        with cuda.on(held):
            work = one.barrier(opts=options)
        other = two.barrier(opts=options)
        waiting = threading.Thread(target=work.wait)
        waiting.start()
        assert not work.is_completed()
        assert waiting.is_alive()
        gate.open()
        waiting.join(60)
        assert work.is_completed()
        other.wait()
        memory.on_each([one, two], lambda group: group.barrier().wait())  # on the CPU


def test_the_first_collective_opens_the_communicator_and_a_message_does_not(cuda, memory):
    with groups(eager=False) as formed:
        for call in (
            lambda group: group.send([memory.put(torch.ones(1))], 1 - group.rank(), 0),
            lambda group: group.recv([memory.put(torch.ones(1))], 1 - group.rank(), 0),
            lambda group: group.recv_anysource([memory.put(torch.ones(1))], 0),
        ):
            with pytest.raises(ArgumentError, match=r"cuda:0.*give device_id= to init_process_group"):
                call(formed[0])
        assert memory.opened == 0
        memory.on_each(formed, lambda group: group.allreduce([torch.ones(1)]).wait())
        assert memory.opened == 0

        def call_first(group: Group) -> list[float]:
            tensor = memory.put(torch.ones(1))
            group.broadcast([memory.put(torch.ones(1))]).wait()
            if group.rank():
                group.send([memory.put(torch.full((1,), 5.0))], 0, 7).wait()
            else:
                group.recv([tensor], 1, 7).wait()
            return tensor.tolist()

        assert memory.on_each(formed, call_first)[0] == [5.0]
        assert memory.opened == 2


def test_messages_from_any_source(cuda, memory):
    with groups(3) as formed:

        def call(group: Group) -> list[int]:
            if group.rank():
                group.send([memory.put(torch.full((2,), float(group.rank())))], 0, 3).wait()
                return []
            tensors = [memory.put(torch.zeros(2)) for _ in range(2)]
            works = [group.recv_anysource([tensor], 3) for tensor in tensors]
            for work in works:
                work.wait()
            sources = [work._source_rank() for work in works]
            assert [tensor.tolist() for tensor in tensors] == [[float(source)] * 2 for source in sources]
            return sources

        assert sorted(memory.on_each(formed, call)[0]) == [1, 2]


def test_tensors_that_are_not_contiguous_are_written_when_a_wait_returns(cuda, memory):
    with groups() as formed:

        def call(group: Group) -> list[list[float]]:
            tensor = memory.put(torch.arange(4.0).view(2, 2)).t()
            group.allreduce([tensor]).wait()
            return tensor.tolist()

        assert memory.on_each(formed, call) == [[[0.0, 4.0], [2.0, 6.0]]] * 2


def test_the_tensors_of_a_call_are_on_the_groups_gpu(cuda, memory):
    with groups() as (one, _two):
        with pytest.raises(ArgumentError, match=r"on cuda:1, and the group has its communicator of GPUs on cuda:0"):
            one.allreduce([memory.put(torch.ones(1), torch.device("cuda", 1))])
        with pytest.raises(UnsupportedOperation, match=r"sparse tensor has it on cuda:0"):
            one.allreduce([torch.eye(2).to_sparse()])


def test_a_gpu_that_no_transport_carries_is_refused_with_the_reason_and_the_group_goes_on(monkeypatch):
    monkeypatch.setattr(communicators, "device_of", lambda tensors: GPU if tensors[0].dtype == torch.float64 else CPU)
    with groups(eager=False) as formed:
        with pytest.raises(UnsupportedOperation, match=r"torch was built without CUDA|torch finds no GPU"):
            formed[0].allreduce([torch.ones(1, dtype=torch.float64)])
        works = [group.allreduce([torch.ones(1)]) for group in formed]
        assert [work.result()[0].item() for work in works] == [2.0, 2.0]


def test_no_communicator_of_a_gpu_is_opened_in_a_group_that_has_ended(cuda, memory):
    with groups(eager=False) as formed:
        memory.on_each(formed, lambda group: group.shutdown())
        with pytest.raises(dist.DistBackendError, match="closed"):
            formed[0].allreduce([memory.put(torch.ones(1))])
        assert memory.opened == 0


@pytest.mark.parametrize("lost", ["cpu", "gpu"])
def test_a_group_that_has_lost_one_communicator_has_lost_both(cuda, memory, lost):
    with groups() as formed:
        sides = {"cpu": [torch.ones(1) for _ in formed], "gpu": [memory.put(torch.ones(1)) for _ in formed]}
        pending = [formed[1].recv([tensors[1]], 0, 0) for tensors in sides.values()]
        getattr(formed[0].comms, lost).comm.abort("enough")
        for work in pending:
            with pytest.raises(dist.DistBackendError, match="enough"):
                work.wait()
        for tensors in sides.values():
            with pytest.raises(dist.DistBackendError, match="enough"):
                formed[0].allreduce([tensors[0]]).wait()


def test_the_end_of_a_group_waits_for_what_is_under_way(cuda, memory):
    with groups() as formed:
        tensors, held = [memory.put(torch.ones(2)) for _ in formed], FakeStream(cuda.gpu)
        gate = Gate(held)

        def call(group: Group) -> dist.Work:
            with cuda.on(held):
                return group.allreduce([tensors[group.rank()]])

        works = memory.on_each(formed, call)
        ending = threading.Thread(target=lambda: memory.on_each(formed, lambda group: group.shutdown()))
        ending.start()
        while not all(group.comms.gpu.comm.closed for group in formed):
            threading.Event().wait(0.001)
        gate.open()
        ending.join(60)
        assert [work.is_success() for work in works] == [True, True]
        assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0]] * 2


@pytest.mark.real
@pytest.mark.search
def test_groups_that_are_split_off_share_what_their_parent_has(cuda, memory):
    with groups() as formed:

        def call(group: Group) -> list[float]:
            turned = cast("Group", group.split_group([1, 0], group_name="turned"))
            assert turned.comms.gpu is not None
            tensor = memory.put(torch.full((1,), float(group.rank())))
            turned.broadcast([tensor]).wait()
            turned.barrier().wait()
            turned.shutdown()
            return tensor.tolist()

        assert memory.on_each(formed, call) == [[1.0], [1.0]]
        assert memory.opened == 2  # the parent's
