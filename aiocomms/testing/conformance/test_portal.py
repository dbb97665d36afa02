"""Operations of threads without an event loop: through a portal, or through a communicator of a synchronous program."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from aiocomms import Portal, ReduceOp, blocking
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommAbortedError,
    CommClosedError,
    CommTimeoutError,
    LaneAbortedError,
    MessageTruncatedError,
)
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.trials import EVERY, Setting

FORMS = ["portal", "blocking"]

Body = Callable[[Portal, Case], None]


async def in_thread(body: Body, form: str, comm: Communicator, case: Case) -> None:
    """Run a synchronous check in a thread, with a portal or with a new communicator."""
    await anyio.to_thread.run_sync(functools.partial(_with_portal if form == "portal" else _alone, body, comm, case))


def _with_portal(body: Body, comm: Communicator, case: Case) -> None:
    body(comm.portal(), case)


def _alone(body: Body, comm: Communicator, case: Case) -> None:
    place = case.place
    torch.set_num_threads(1)
    with blocking.new_comm(
        place.transport, place.device, store=case._store, rank=case.rank, size=case.size, name="blocking",
        timeout=place.deadline,
    ) as own:  # fmt: skip
        body(own, case)
        own.barrier().wait()


def synchronous(body: Body) -> Any:
    """Turn a synchronous function into a check, which runs once with a portal and once with a new communicator."""

    @functools.wraps(body)
    async def check(comm: Communicator, case: Case, form: str) -> None:
        await in_thread(body, form, comm, case)

    del check.__wrapped__  # pytest would read the arguments of the wrapped function.
    return pytest.mark.parametrize("form", FORMS)(check)


def ones(comm: Portal, *shape: int) -> torch.Tensor:
    return torch.ones(shape or (4,), device=comm.device)


@pytest.mark.loops
@ranks(2, more=(3,))
@synchronous
def test_portal_matches_every_collective_in_call_order(comm: Portal, case: Case) -> None:
    """The thread calls all collectives before it waits for the first one.

    The collectives match in the order of the calls.
    """
    whole: Any = comm
    trials = []
    for index, start in enumerate(EVERY.values()):
        setting = Setting(torch.float32, (3, 2), index % comm.size, ReduceOp.SUM, index)
        trials.append(start(whole, case, setting))
    barrier = comm.barrier()
    for trial in trials:
        trial.verify(trial.work.wait())
    assert barrier.wait() is None and barrier.done()


@ranks(2)
@synchronous
def test_portal_calls_of_one_thread_start_in_order(comm: Portal, case: Case) -> None:
    case.need("p2p")
    peer, count = 1 - comm.rank, 200
    got = [torch.full((1,), -1, device=comm.device) for _ in range(count)]
    works = [comm.send(torch.tensor([i], device=comm.device), peer) for i in range(count)]
    receives = [comm.recv(tensor, peer) for tensor in got]
    for work in [*works, *receives]:
        work.wait()
    assert [int(tensor) for tensor in got] == list(range(count))


@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
@synchronous
def test_threads_of_one_portal_use_their_own_tags(comm: Portal, case: Case) -> None:
    """Each thread has its own tag, and waits for its own works."""
    case.need_any_order()
    peer = 1 - comm.rank
    failed: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for i in range(10):
                sent = comm.send(torch.tensor([tag, i], device=comm.device), peer, tag)
                got = comm.recv(torch.zeros(2, dtype=torch.int64, device=comm.device), peer, tag).wait()
                assert got.tolist() == [tag, i]
                sent.wait()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.mark.core
@ranks(2)
@synchronous
def test_portal_exchanges_objects_and_batches(comm: Portal, case: Case) -> None:
    case.need("p2p")
    peer = 1 - comm.rank
    mine = {"rank": comm.rank}
    gathered = comm.all_gather_object(mine)
    mine["rank"] = 7  # the call has already encoded the object
    assert gathered.wait() == [{"rank": 0}, {"rank": 1}]
    assert comm.broadcast_object([comm.rank], 1).wait() == [1]
    buffer = torch.zeros(2, device=comm.device)
    assert comm.batch().send(ones(comm, 2) * comm.rank, peer).recv(buffer, peer).issue().wait()[1] is buffer
    assert buffer.tolist() == [peer, peer]


def send_all(stream: blocking.BlockingStream[torch.Tensor], comm: Portal) -> None:
    for i in range(5):
        stream.send(ones(comm, i))
    stream.send_eof()


@pytest.mark.loops
@ranks(2)
@synchronous
def test_portal_opens_windows_and_streams(comm: Portal, case: Case) -> None:
    case.need("p2p")
    peer = 1 - comm.rank
    with comm.new_window(torch.zeros(4, device=comm.device)) as window:
        window.put(ones(comm, 2) * (comm.rank + 1), peer, 1).wait()
        window.signal(peer).wait()
        window.wait_signal(peer).wait()
        assert window.tensor.tolist() == [0, peer + 1, peer + 1, 0] and window.sizes == [4, 4]
    assert window.closed
    with comm.open_stream(peer, 2) as stream:
        sender = threading.Thread(target=send_all, args=(stream, comm))
        sender.start()
        assert [item.numel() for item in stream] == list(range(5))
        sender.join()


@dataclasses.dataclass
class StreamStep:
    """An item of a stream."""

    number: int
    logits: torch.Tensor


@pytest.mark.core
@ranks(2)
@synchronous
def test_portal_stream_carries_structured_items(comm: Portal, case: Case) -> None:
    case.need("p2p")
    with comm.open_stream(1 - comm.rank, items=StreamStep, capacity_bytes=1 << 20) as stream:
        stream.send(StreamStep(comm.rank, torch.ones(comm.rank + 1)), timeout=case.place.deadline)
        stream.send_eof()
        (step,) = stream
        assert step.number == 1 - comm.rank and step.logits.numel() == step.number + 1


@pytest.mark.core
@ranks(2, more=(3,))
@synchronous
def test_portal_lanes_of_threads_overtake_each_other(comm: Portal, case: Case) -> None:
    """Each thread has its own lane, and lanes overtake each other.

    The last rank starts the threads in reverse order.
    """
    case.need_any_order()
    failed: list[BaseException] = []

    def request(key: int) -> None:
        def value() -> torch.Tensor:
            return ones(comm) * (key + comm.rank)

        want = [float(comm.size * key + sum(range(comm.size)))] * 4
        try:
            lane = comm.lane(key)
            works = [lane.all_reduce(value()) for _ in range(3)]
            for work in works:
                assert work.wait().tolist() == want, work
            with comm.lane(f"inner {key}") as inner:
                assert inner.key == f"inner {key}" and not inner.closed
                assert comm.all_reduce(value()).wait().tolist() == want
                assert comm.broadcast_object(key, key % comm.size).wait() == key
            lane.close()
            with pytest.raises(CommClosedError, match=f"lane {key}"):
                lane.barrier().wait()
        except BaseException as error:
            failed.append(error)

    keys = range(8) if comm.rank < comm.size - 1 else reversed(range(8))
    threads = [threading.Thread(target=request, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    comm.barrier().wait()


@pytest.mark.core
@pytest.mark.clock
@ranks(2)
@synchronous
def test_portal_lane_names_itself_in_repr_and_errors(comm: Portal, case: Case) -> None:
    case.need_any_order()
    lane = comm.lane("req-17")
    assert lane.rank == comm.rank and lane.size == comm.size and lane.timeout == comm.timeout
    lane.set_timeout(0.2)
    assert lane.timeout == 0.2 != comm.timeout and "req-17" in repr(lane)
    with pytest.raises(ArgumentError, match="root is 2") as wrong:
        lane.broadcast(ones(comm), 2)
    assert "lane req-17" in str(wrong.value)
    work = lane.recv(ones(comm), 1 - comm.rank, 3)
    assert "lane req-17" in repr(work)
    with pytest.raises(CommTimeoutError, match="lane req-17"):
        work.wait()
    with pytest.raises(ArgumentTypeError, match="wanted a str, bytes or an int"):
        comm.lane(None)  # type: ignore[arg-type]
    comm.barrier().wait()


@pytest.mark.core
@ranks(2)
@synchronous
def test_portal_split_forms_a_portal(comm: Portal, case: Case) -> None:
    half = comm.split([comm.rank], "alone")
    assert half is not None and half.size == 1 and type(half) is type(comm)
    assert half.all_reduce(ones(half)).wait().tolist() == [1.0] * 4
    half.close()
    half.close()
    assert half.closed and not comm.closed


@pytest.mark.core
@ranks(2)
@synchronous
def test_portal_call_raises_for_a_wrong_argument(comm: Portal, case: Case) -> None:
    with pytest.raises(ArgumentError, match="tensor is None"):
        comm.all_reduce(None)  # type: ignore[type-var]
    with pytest.raises(ArgumentError, match="root is 2"):
        comm.broadcast(ones(comm), 2)
    comm.barrier().wait()


@pytest.mark.core
@ranks(2)
@synchronous
def test_portal_op_that_fails_raises_and_the_communicator_goes_on(comm: Portal, case: Case) -> None:
    """The op raises its own error, and the communicator stays usable."""
    case.need("p2p")
    if comm.rank == 0:
        comm.send(ones(comm, 9), 1).wait()
    else:
        with pytest.raises(MessageTruncatedError, match="recv #"):
            comm.recv(ones(comm), 0).wait()
    comm.barrier().wait()


@pytest.mark.loops
@ranks(2)
@synchronous
def test_portal_wait_timeout_leaves_the_op_and_cancel_withdraws_it(comm: Portal, case: Case) -> None:
    case.need_any_order()
    if comm.rank == 1:
        comm.recv_object(0).wait()
        comm.send(ones(comm), 0, 1).wait()
        return
    work = comm.recv(ones(comm), 1, 9)
    with pytest.raises(TimeoutError, match="it goes on"):
        work.wait(0)
    assert not work.done() and work.cancel() and work.done()
    buffer = torch.zeros(4, device=comm.device)
    work = comm.recv(buffer, 1, 1)
    comm.send_object("go", 1).wait()
    assert work.wait(case.place.deadline) is buffer and not work.cancel()
    assert buffer.tolist() == [1.0] * 4


@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("form", FORMS)
async def test_portal_wait_raises_on_abort(comm: Communicator, case: Case, form: str) -> None:
    case.need("p2p")

    def body(own: Portal, case: Case) -> None:
        if case.rank == 0:
            own.recv_object(1).wait()
            own.abort("for the test")
        else:
            work = own.all_reduce(ones(own))
            own.send_object("waits", 0)
            with pytest.raises(CommAbortedError, match="for the test"):
                work.wait()
            assert "for the test" in str(own.lost(timeout=case.place.deadline))
        with pytest.raises(CommAbortedError, match="for the test"):
            own.barrier().wait()
        raise _OverError

    with pytest.raises(_OverError):
        await in_thread(body, form, comm, case)


@ranks(2)
@pytest.mark.parametrize("form", FORMS)
async def test_portal_wait_raises_on_a_lane_abort(comm: Communicator, case: Case, form: str) -> None:
    case.need("p2p")
    case.need_any_order()

    def body(own: Portal, case: Case) -> None:
        lane = own.lane("given up")
        if case.rank == 0:
            own.recv_object(1).wait()
            lane.abort("by a thread")
        else:
            work = lane.all_reduce(ones(own))
            own.send_object("waits", 0).wait()
            with pytest.raises(LaneAbortedError, match="by rank 0: by a thread"):
                work.wait()
        assert own.lane("another").all_reduce(ones(own)).wait().tolist() == [2.0] * 4

    await in_thread(body, form, comm, case)
    assert not comm.aborted


@pytest.mark.loops
@pytest.mark.memory
@ranks(2)
@pytest.mark.parametrize("form", FORMS)
async def test_portal_closed_during_a_wait_raises_in_the_waiting_thread(
    comm: Communicator, case: Case, form: str
) -> None:
    """The waiting thread gets an error. Every later call raises an error, too."""
    case.need("p2p")

    def body(own: Portal, case: Case) -> None:
        if case.rank == 1:
            case.wait_blocking("over")
            raise _OverError
        work = own.recv(ones(own), 1)
        closer = threading.Thread(target=own.close)
        closer.start()
        with pytest.raises(CommClosedError):
            work.wait()
        closer.join()
        with pytest.raises(CommClosedError):
            own.barrier()
        case.tell_blocking("over")
        raise _OverError

    if form == "portal":
        async with await case.open("other") as other:
            with pytest.raises(_OverError):
                await in_thread(body, form, other, case)
    else:
        with pytest.raises(_OverError):
            await in_thread(body, form, comm, case)
        await comm.barrier()


class _OverError(Exception):
    """The error that a check raises after it has ended its communicator.

    The error prevents later calls on the ended communicator.
    """
