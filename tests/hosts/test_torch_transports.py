"""The transport in torch's registry of one-sided transports. The registry is that of a newer torch on the index."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import newest_torch
import pytest
import torch
import torch.distributed as dist
from processes import HANGS, KILLED, Rank, Run

from aiocomms.errors import CommClosedError, CommError, PeerDiedError, RegionError, UnsupportedOperation

pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs" / "torch-transports.md"
LARGE = 2**20
"""The elements of a tensor that is too large for a transport to buffer."""


@pytest.fixture(scope="module", autouse=True)
def registry() -> Any:
    """Return the module torch.distributed._transport."""
    newest_torch.use(newest_torch.fetched())
    from torch.distributed import _transport

    return _transport


@pytest.fixture
def transport() -> str:
    """Return the transport of the endpoints."""
    return "ucx"


class Pair(NamedTuple):
    """Two transports of this process, connected with each other."""

    one: Any
    two: Any


@pytest.fixture(params=["ucx", "local"])
def pair(registry: Any, request: pytest.FixtureRequest) -> Iterator[Pair]:
    options = {"transport": request.param}
    before = loops()  # Ray's transport in this process may have one
    with (
        registry.new_transport("aiocomms", "cpu", **options) as one,
        registry.new_transport("aiocomms", **options) as two,
    ):
        urls = one.bind(), two.bind()
        assert not one.connected()
        with ThreadPoolExecutor(2) as threads:  # the ends connect at the same time
            assert list(threads.map(lambda end, url: end.connect(url), (one, two), urls[::-1])) == [0, 0]
        assert one.connected()
        assert two.connected()
        yield Pair(one, two)
    assert not one.connected()
    assert loops() <= before


def loops() -> set[int | None]:
    """Return the threads of blocking endpoints."""
    return {it.ident for it in threading.enumerate() if it.name == "aiocomms blocking"}


def buffer(memory: Any) -> Any:
    """Return the remote buffer of a memory as the other end receives it."""
    told = memory.to_remote_buffer()
    return type(told).deserialize(told.serialize())


# --------------------------------------------------------------------------------------------------------- the registry


def test_torch_finds_it_by_its_name(registry: Any, pair: Pair):
    assert "aiocomms" in registry.available_transports()
    memory = pair.one.register_memory(torch.ones(3))
    assert isinstance(pair.one, registry.Transport)
    assert isinstance(memory, registry.Memory)
    assert isinstance(memory.to_view(), registry.MemoryView)
    assert not isinstance(memory.to_view(), registry.MutableMemoryView)
    assert isinstance(memory.to_mutable_view(), registry.MutableMemoryView)
    assert isinstance(memory.to_remote_buffer(), registry.RemoteBuffer)
    assert pair.one.supported()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"transport": "nobody"}, ValueError, "nobody"),
        ({"timeout": -1}, ValueError, "timeout is -1"),
        ({"device": "cuda"}, UnsupportedOperation, "device is cuda, wanted cpu"),
        ({"hints": 3}, TypeError, "hints is 3"),
    ],
)
def test_what_is_wrong_when_it_is_made(registry: Any, options: dict[str, Any], kind: type[Exception], text: str):
    with pytest.raises(RuntimeError, match="failed to create transport 'aiocomms'") as caught:
        registry.new_transport("aiocomms", **options)
    assert isinstance(caught.value.__cause__, kind)
    assert text in str(caught.value.__cause__)


def test_the_page_runs(registry: Any, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(PAGE), "exec"), {"__name__": "page"})


# ------------------------------------------------------------------------------------------------------------ transfers


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (LARGE,)], ids=str)
def test_bytes_there_and_back(pair: Pair, dtype: torch.dtype, shape: tuple[int, ...]):
    content = torch.randint(0, 2, shape).to(dtype)
    here, there, back = content.clone(), torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    source, target, last = (
        pair.one.register_memory(here),
        pair.two.register_memory(there),
        pair.one.register_memory(back),
    )
    assert pair.one.write(source.to_view(), buffer(target)) == 0
    assert torch.equal(there, content)
    assert pair.one.read(last.to_mutable_view(), buffer(target)) == 0
    assert torch.equal(back, content)


def test_some_bytes(pair: Pair):
    """A view may begin anywhere, remote memory only at its first byte. Bytes behind the transfer stay."""
    source = pair.one.register_memory(torch.arange(10, dtype=torch.uint8))
    there = torch.full((6,), 99, dtype=torch.uint8)
    target = pair.two.register_memory(there)
    pair.one.write(source.to_view(3, 4), buffer(target))
    assert there.tolist() == [3, 4, 5, 6, 99, 99]
    pair.one.read(source.to_mutable_view(offset=8), buffer(target))
    assert source._registration.tensor.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 3, 4]
    assert source.to_view(10).size() == source.to_view(length=0).size() == 0
    assert pair.one.write(source.to_view(10), buffer(target)) == 0


def test_a_parameter_and_one_of_inference_mode(pair: Pair):
    weights = torch.nn.Parameter(torch.ones(4))
    with torch.inference_mode():
        there = torch.zeros(4)
    pair.one.write(pair.one.register_memory(weights).to_view(), buffer(pair.two.register_memory(there)))
    assert there.tolist() == [1, 1, 1, 1]


def test_works(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Every way to wait for a work ends without a call of time.sleep: the engine completes the work."""
    monkeypatch.setattr(time, "sleep", None)
    source, target = pair.one.register_memory(torch.arange(float(LARGE))), pair.two.register_memory(torch.zeros(LARGE))
    work = pair.one.write(source.to_view(), buffer(target), async_op=True)
    assert isinstance(work, dist.Work)
    ended = threading.Event()
    future = work.get_future()
    assert future is work.get_future()
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(HANGS)
    assert future.value() == []
    assert (work.is_completed(), work.is_success(), work.exception(), work.result()) == (True, True, None, [])
    assert work.wait()
    assert work.wait(timedelta(seconds=1))
    work.synchronize()
    assert torch.equal(target._registration.tensor, source._registration.tensor)


def test_wait_all_and_the_async_forms(registry: Any, pair: Pair):
    parts = [torch.full((LARGE // 8,), float(i)) for i in range(8)]
    there = [torch.zeros(LARGE // 8) for _ in parts]
    views = [pair.one.register_memory(part).to_mutable_view() for part in parts]
    remotes = [buffer(pair.two.register_memory(part)) for part in there]

    async def main() -> None:
        await registry.wait_all(
            [pair.one.write(view, remote, async_op=True) for view, remote in zip(views, remotes, strict=True)]
        )
        assert all(map(torch.equal, there, parts))
        for part in there:
            part.add_(10)
        async with asyncio.TaskGroup() as tasks:
            for view, remote in zip(views, remotes, strict=True):
                tasks.create_task(pair.one.read_async(view, remote, timeout=HANGS))
        assert all(map(torch.equal, there, parts))
        await pair.one.write_async(views[0], remotes[1])
        assert torch.equal(there[1], parts[0])
        await pair.one.close_async()
        await pair.one.close_async(timeout=1)

    asyncio.run(main())


def test_many_threads(pair: Pair):
    sources = [pair.one.register_memory(torch.full((100,), float(i))) for i in range(20)]
    there = [torch.zeros(100) for _ in sources]
    targets = [buffer(pair.two.register_memory(part)) for part in there]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda source, target: pair.one.write(source.to_view(), target), sources, targets))
    assert [part[0].item() for part in there] == list(range(20))


# ------------------------------------------------------------------------------------------------------------- memory


def test_the_same_memory_is_registered_once(pair: Pair):
    tensor = torch.zeros(2, 3)
    first, second, other = (pair.two.register_memory(it) for it in (tensor, tensor.view(-1), tensor[1]))
    assert first.to_remote_buffer().serialize() == second.to_remote_buffer().serialize()
    assert first.to_remote_buffer().serialize() != other.to_remote_buffer().serialize()
    source, told, view = pair.one.register_memory(torch.ones(6)), buffer(first), first.to_view()
    pair.one.write(source.to_view(), told)
    pair.two.unregister_memory(second)
    pair.two.unregister_memory(first)
    for use in (first.to_view, first.to_remote_buffer, lambda: pair.two.write(view, buffer(source))):
        with pytest.raises(ValueError, match="was unregistered"):
            use()
    for call in (pair.one.write, pair.one.read):
        with pytest.raises(RegionError, match="revoked"):
            call(source.to_mutable_view(), told)
    tensor.zero_()
    pair.one.write(source.to_view(), buffer(pair.two.register_memory(tensor)))
    assert tensor.sum() == 6


def test_what_the_other_end_has_taken_back_is_not_kept(pair: Pair):
    source = pair.one.register_memory(torch.ones(4))
    kept = buffer(pair.two.register_memory(torch.zeros(4)))
    pair.one.write(source.to_view(), kept)
    for _ in range(3):
        target = pair.two.register_memory(torch.zeros(4))
        pair.one.write(source.to_view(), buffer(target))
        pair.two.unregister_memory(target)
    last = buffer(pair.two.register_memory(torch.zeros(4)))
    pair.one.write(source.to_view(), last)
    assert pair.one._remotes.keys() == {kept.serialize(), last.serialize()}


def test_memory_moves_when_it_is_registered_and_not_again(pair: Pair):
    """A tensor's memory stays in place after its registration. Memory that torch does not own never moves."""
    own, bytes_ = torch.ones(5), bytearray(8)
    foreign = torch.frombuffer(bytes_, dtype=torch.uint8)
    kept, view = foreign.data_ptr(), own[1:]
    targets = [pair.two.register_memory(tensor) for tensor in (own, foreign)]
    places = [tensor.data_ptr() for tensor in (own, foreign)]
    source = pair.one.register_memory(torch.full((20,), 3, dtype=torch.uint8))
    for target in targets:
        pair.one.write(source.to_view(0, 8), buffer(target))
    assert [tensor.data_ptr() for tensor in (own, foreign)] == places
    assert view.data_ptr() == places[0] + 4
    assert places[1] == kept
    assert bytes_ == bytearray([3] * 8)


def test_memory_that_is_in_use_or_has_moved(pair: Pair):
    tensor = torch.ones(4)
    memory, target = pair.one.register_memory(tensor), buffer(pair.two.register_memory(torch.zeros(8)))
    view, work = memory.to_view(), SimpleNamespace(is_completed=lambda: False)
    pair.one._pending.append((work, memory._registration))
    with pytest.raises(ValueError, match="in use by a transfer that has not ended"):
        pair.one.unregister_memory(memory)
    pair.one._pending.clear()
    tensor.set_(torch.ones(6).untyped_storage())
    with pytest.raises(ValueError, match="was resized, or has another storage"):
        pair.one.write(view, target)
    pair.one.unregister_memory(memory)


def test_wrong_arguments(pair: Pair):
    """Each wrong call raises before any data is sent, and a valid write works afterwards."""
    one, two = pair
    source, target = one.register_memory(torch.ones(4)), two.register_memory(torch.zeros(4))
    view, told = source.to_mutable_view(), buffer(target)
    strange = type(told)(two._endpoint.register(torch.zeros(9, dtype=torch.uint8)).descriptor)
    larger = one.register_memory(torch.ones(5)).to_mutable_view()
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: one.connect(two.bind()), ValueError, "connected already"),
        (lambda: one.register_memory([1.0]), TypeError, "tensor is"),
        (lambda: one.register_memory(torch.ones(4, 4).t()[1:]), ValueError, "contiguous"),
        (lambda: one.register_memory(torch.ones(0)), ValueError, "not empty"),
        (lambda: one.register_memory(torch.ones(3, device="meta")), ValueError, "expected a tensor on cpu"),
        (lambda: one.register_memory(torch.ones(3), timeout=-1), ValueError, "timeout is -1"),
        (lambda: one.unregister_memory(target), TypeError, "memory is"),
        (lambda: one.unregister_memory(3), TypeError, "memory is 3"),
        (lambda: source.to_view(17), ValueError, "offset is 17"),
        (lambda: source.to_view(-1), ValueError, "offset is -1"),
        (lambda: source.to_view(8, 9), ValueError, "length is 9"),
        (lambda: source.to_view(1.5), TypeError, "integer"),
        (lambda: one.write(torch.ones(4), told), TypeError, "local_buffer is"),
        (lambda: one.write(target.to_view(), told), TypeError, "local_buffer is"),
        (lambda: one.read(source.to_view(), told), TypeError, "local_buffer is .* MutableMemoryView"),
        (lambda: one.write(view, told.serialize()), TypeError, "remote_buffer is"),
        (lambda: one.write(larger, told), ValueError, "local_buffer has 20 bytes, and remote_buffer 16"),
        (lambda: one.write(view, told, timeout=float("nan")), ValueError, "timeout is nan"),
        (lambda: one.write(view, told, timeout="1"), TypeError, "timeout is '1'"),
        (lambda: two.write(target.to_view(), told), RegionError, "this peer is"),
        (lambda: type(told).deserialize("text"), TypeError, "descriptor is 'text'"),
        (lambda: type(told).deserialize(b"{}"), ValueError, "no remote buffer of aiocomms"),
        (lambda: type(told).deserialize(told.serialize()[:-1]), ValueError, "no remote buffer of aiocomms"),
        (lambda: type(told)(two._endpoint.register(torch.zeros(4)).descriptor), ValueError, "region of torch.float32"),
    ]
    for call, kind, text in calls:
        with pytest.raises(kind, match=text):
            call()
    forged = bytearray(strange.serialize())
    forged[20] ^= 1
    with pytest.raises(RegionError, match="has not made this descriptor, or it was changed"):
        one.write(source.to_view(0, 9), type(told).deserialize(bytes(forged)))
    assert one.write(view, told) == 0
    assert target._registration.tensor.tolist() == [1, 1, 1, 1]


def test_without_a_peer_and_after_the_end(registry: Any):
    one = registry.new_transport("aiocomms", transport="local")
    memory = one.register_memory(torch.ones(3))
    told, view = memory.to_remote_buffer(), memory.to_view()
    with pytest.raises(ValueError, match="is not connected"):
        one.write(view, told)
    with pytest.raises(ValueError, match="not an endpoint's"):
        one.connect(b"elsewhere")
    with pytest.raises(TypeError, match="address is None"):
        one.connect(None)
    one._pending.append((late := Late(), memory._registration))
    with pytest.raises(TimeoutError):
        one.close(timeout=0)
    for call in (one.bind, lambda: one.register_memory(torch.ones(1)), lambda: one.write(view, told)):
        with pytest.raises(CommClosedError, match="the transport is closed"):
            call()
    late.ended = True
    one.close()
    one.close()
    with pytest.raises(ValueError, match="was unregistered"):
        memory.to_view()


class Late:
    """A work that has not ended."""

    ended = False

    def is_completed(self) -> bool:
        return self.ended

    def wait_for(self, patience: float) -> None:
        raise TimeoutError


# ------------------------------------------------------------------------------------------------------ two processes


def open_transport(place: Rank, folder: str) -> tuple[Any, dist.Store]:
    """Open the transport as a host does, over the store of its processes; return both."""
    newest_torch.use(folder)
    from torch.distributed._transport import new_transport_rank

    store = place.store()
    return new_transport_rank("aiocomms", "cpu", store=store, rank=place.rank, peer_rank=1 - place.rank), store


def exchange(place: Rank, folder: str) -> list[float]:
    """Write to the other process and read from it; return an element of each result."""
    transport, store = open_transport(place, folder)
    with transport:
        mine, theirs, copy = (torch.full((LARGE,), value) for value in (place.rank + 1.0, 0.0, 0.0))
        source, target, last = map(transport.register_memory, (mine, theirs, copy))
        for name, memory in (("source", source), ("target", target)):
            store.set(f"{name} {place.rank}", memory.to_remote_buffer().serialize())
        kind = type(source.to_remote_buffer())
        remote, to_read = (kind.deserialize(store.get(f"{name} {1 - place.rank}")) for name in ("target", "source"))
        works = [
            transport.write(source.to_view(), remote, async_op=True),
            transport.read(last.to_mutable_view(), to_read, async_op=True),
        ]
        for work in works:
            work.wait()
        place.tell(f"written {place.rank}")
        place.told(f"written {1 - place.rank}")
        assert (theirs == 2.0 - place.rank).all()
        assert (copy == 2.0 - place.rank).all()
        transport.unregister_memory(target)
        place.tell(f"through {place.rank}")
        place.told(f"through {1 - place.rank}")
    return [theirs[0].item(), copy[-1].item()]


async def in_a_thread(place: Rank, body: Any, folder: str) -> Any:
    """Run a function in a thread, because a host has no event loop."""
    return await asyncio.to_thread(body, place, folder)


def test_two_processes(ranks: Run):
    assert ranks(2, in_a_thread, exchange, str(newest_torch.fetched())) == [[2.0, 2.0], [1.0, 1.0]]


def stop(pid: int) -> None:
    """Stop a process, and wait until all of its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    ends = time.monotonic() + HANGS
    while set(states(pid)) != {"T"}:
        assert time.monotonic() < ends, "it goes on"


def states(pid: int) -> Iterator[str]:
    """Yield the states of a process's threads."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            yield file.read_text().rpartition(")")[2].split()[0]


def outlive(place: Rank, folder: str) -> list[str]:
    """Stop, continue, stop and kill rank 1 while rank 0 writes to it; return the messages of rank 0's errors."""
    transport, store = open_transport(place, folder)
    memory, names = transport.register_memory(torch.zeros(8)), ("first", "second", "third")
    if place.rank == 1:
        for name in names:
            store.set(name, transport.register_memory(torch.zeros(8)).to_remote_buffer().serialize())
        store.set("pid", str(os.getpid()))
        threading.Event().wait()
    kind, pid = type(memory.to_remote_buffer()), int(store.get("pid"))
    first, second, third = (kind.deserialize(store.get(name)) for name in names)
    assert transport.write(memory.to_view(), first) == 0
    stop(pid)
    with pytest.raises(TimeoutError):
        transport.write(memory.to_view(), second, timeout=0.2)
    os.kill(pid, signal.SIGCONT)
    assert transport.write(memory.to_view(), second) == 0
    stop(pid)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(transport.write, memory.to_view(), third, timeout=HANGS)
        os.kill(pid, signal.SIGKILL)
        errors = [waiting.exception()]
    assert isinstance(transport._peer.lost(timeout=HANGS), PeerDiedError)
    assert not transport.connected()
    for call in (transport.write, transport.read):
        with pytest.raises(CommError) as caught:
            call(memory.to_mutable_view(), first)
        errors.append(caught.value)
    with pytest.raises(PeerDiedError):
        transport.connect(transport._peer.address, timeout=HANGS)
    transport.close()
    return [str(error) for error in errors]


def test_a_peer_that_is_killed(ranks: Run):
    said, killed = ranks(2, in_a_thread, outlive, str(newest_torch.fetched()))
    assert killed is KILLED
    assert all("was cut off: its connection broke" in text for text in said), said
