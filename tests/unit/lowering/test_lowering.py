"""Every collective over a transport that has send and recv alone."""

from __future__ import annotations

import anyio
import msgspec
import pytest
import torch
from aiocomms_local import LocalTransport
from concurrency import ranks, run_on, turns

from aiocomms import ReduceOp, ops
from aiocomms.errors import CommAbortedError, MessageTruncatedError, MismatchError, UnsupportedOperation
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities

pytestmark = pytest.mark.deterministic

SIZES = [1, 2, 3, 4, 5, 7, 8]


class Plain(LocalTransport):
    """A transport that only sends and receives."""

    capabilities = Capabilities(ops=frozenset({ops.Send, ops.Recv}), in_process=True)

    def __init__(self, matcher, rank):
        super().__init__(matcher, rank)
        self._solo = False

    def post(self, op, work):
        assert type(op) in self.capabilities.ops, f"{op.name} was not lowered"
        super().post(op, work)


@pytest.fixture(autouse=True)
def plain(install):
    install(plain=Plain)


def values(rank, n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)


REDUCED = {
    ReduceOp.SUM: lambda stack: stack.sum(0),
    ReduceOp.AVG: lambda stack: stack.mean(0),
    ReduceOp.MAX: lambda stack: stack.amax(0),
    ReduceOp.MIN: lambda stack: stack.amin(0),
    ReduceOp.PRODUCT: lambda stack: stack.prod(0),
    ReduceOp.PREMUL_SUM(0.5): lambda stack: stack.sum(0) * 0.5,
}


def on_ranks(size, each, loop="asyncio"):
    async def main():
        async with local_world(size, "plain") as world:
            assert world[0].transports == {
                "p2p": "plain", "collectives": "plain", "rma": "two-sided over plain"
            }  # fmt: skip
            return await ranks(world, each)

    return run_on(loop, main)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [0, 1, 7, 20_000])
def test_lowered_reductions_are_right(size, n):
    stack = torch.stack([values(r, n) for r in range(size)])
    cases = {op: reduce(stack) for op, reduce in REDUCED.items()}
    blocks = torch.stack([values(r, n * size) for r in range(size)]).sum(0)

    async def each(comm):
        results = []
        for op, wanted in cases.items():
            for root in {0, size // 2, size - 1}:
                got = values(comm.rank, n)
                assert await comm.reduce(got, root, op) is got
                torch.testing.assert_close(got, wanted if comm.rank == root else values(comm.rank, n))
            got = values(comm.rank, n)
            await comm.all_reduce(got, op)
            torch.testing.assert_close(got, wanted)
            results.append(got)
            for scan, end in ((comm.scan, comm.rank + 1), (comm.exscan, comm.rank)):
                got = values(comm.rank, n)
                assert await scan(got, op) is got
                if end:
                    torch.testing.assert_close(got, REDUCED[op](stack[:end]))
        out = torch.full((n,), torch.nan, dtype=torch.float64)
        await comm.reduce_scatter_single(out, values(comm.rank, n * size))
        torch.testing.assert_close(out, blocks[comm.rank * n : (comm.rank + 1) * n])
        return results

    first, *others = on_ranks(size, each)
    for results in others:  # All results have the same bits.
        assert all(a.equal(b) for a, b in zip(first, results, strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [0, 1, 7, 5_000])
def test_lowered_data_movement_delivers_unchanged(size, n):
    async def each(comm):
        me, mine = comm.rank, values(comm.rank, n)
        for root in {0, size // 2, size - 1}:
            got = mine.clone()
            await comm.broadcast(got, root)
            assert got.equal(values(root, n))
            outputs = [torch.empty(n, dtype=torch.float64) for _ in range(size)] if me == root else None
            await comm.gather(outputs, mine, root)
            if outputs:
                assert all(t.equal(values(r, n)) for r, t in enumerate(outputs))
            chunk = torch.empty(n, dtype=torch.float64)
            await comm.scatter(chunk, [values(r, n) for r in range(size)] if me == root else None, root)
            assert chunk.equal(mine)
        out = torch.empty(size, n, dtype=torch.float64)
        await comm.all_gather_single(out, mine)
        assert all(out[r].equal(values(r, n)) for r in range(size))
        ragged = [torch.empty(n + r, dtype=torch.float64) for r in range(size)]
        await comm.all_gather_v(ragged, values(me, n + me))
        assert all(t.equal(values(r, n + r)) for r, t in enumerate(ragged))
        ins = [values(me * size + r, n + me + r) for r in range(size)]
        outs = [torch.empty(n + me + r, dtype=torch.float64) for r in range(size)]
        await comm.all_to_all(outs, ins)
        assert all(t.equal(values(r * size + me, n + me + r)) for r, t in enumerate(outs))
        await comm.barrier()

    on_ranks(size, each)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lowered_half_precision_accumulates_in_float32(dtype):
    async def each(comm):
        got = torch.full((3,), 1.0 if comm.rank else 2048.0, dtype=torch.float16).to(dtype)
        await comm.all_reduce(got)  # in half precision 2048 + 1 is 2048
        return got

    for got in on_ranks(5, each):
        assert got.equal(torch.full((3,), 2052.0).to(dtype))


@pytest.mark.parametrize("size", [2, 5])
def test_lowered_barrier_waits_for_all_ranks(size, loop):
    arrived = []

    async def each(comm):
        for round_ in range(3):
            await turns(comm.rank * 3)
            arrived.append(round_)
            await comm.barrier()
            assert arrived.count(round_) == size

    on_ranks(size, each, loop)


def test_overlapping_lowered_ops_stay_apart(loop):
    async def each(comm):
        small = [torch.full((4,), float(10 * i + comm.rank)) for i in range(5)]
        large = [torch.full((30_000,), float(i + comm.rank)) for i in range(3)]
        works = [comm.all_reduce(t) for pair in zip(small, large, strict=False) for t in pair]
        works += [comm.all_reduce(t) for t in small[3:]]
        works.append(comm.barrier())
        for work in reversed(works):
            await work
        assert [t[0].item() for t in small] == [10 * i * 4 + 6 for i in range(5)]
        assert all(t.eq(4 * i + 6).all() for i, t in enumerate(large))

    on_ranks(4, each, loop)


def test_user_messages_never_match_lowered_ones(loop):
    async def each(comm):
        peer = 1 - comm.rank
        got = [torch.empty(1) for _ in range(4)]
        receives = [comm.recv(t, peer, tag) for tag, t in enumerate(got)]
        total = comm.all_reduce(torch.ones(1))
        sends = [comm.send(torch.tensor([float(tag)]), peer, tag) for tag in range(4)]
        assert (await total).item() == 2
        for work in (*receives, *sends):
            await work
        assert [t.item() for t in got] == [0, 1, 2, 3]

    on_ranks(2, each, loop)


def test_lowered_collective_with_sizes_that_differ_raises_mismatch_error():
    async def each(comm):
        with pytest.raises((MismatchError, CommAbortedError)) as caught:
            await comm.all_reduce(torch.ones(3 + comm.rank))
        return caught.value

    errors = on_ranks(2, each)
    assert any(isinstance(error, MismatchError) and "size" in str(error) for error in errors)


def test_lowered_batch_completes_all_its_parts(loop):
    async def each(comm):
        n, me = comm.size, comm.rank
        into = torch.empty(2)
        work = comm.batch().send(torch.full((2,), float(me)), (me + 1) % n).recv(into, (me - 1) % n).issue()
        result = await work
        assert result[1] is into
        assert into.eq((me - 1) % n).all()

    on_ranks(3, each, loop)


@pytest.mark.parametrize("first", ["batch", "message"])
def test_lowered_batch_that_fails_withdraws_its_recvs(loop, first):
    """Part 1 fails; nothing has matched part 2, and part 3 is complete."""

    async def main():
        async with local_world(2) as (one, two):
            buffers = [torch.zeros(2) for _ in range(3)]
            if first == "message":
                one.send(torch.ones(3), 1, tag=0)
            batch = two.batch()
            for tag, buffer in enumerate(buffers):
                batch.recv(buffer, 0, tag)
            one.send(torch.ones(2), 1, tag=2)
            work = batch.issue()
            if first == "batch":
                one.send(torch.ones(3), 1, tag=0)
            with pytest.raises(MessageTruncatedError):
                await work
            got = two.recv(torch.zeros(2), 0, tag=1, timeout=5)
            one.send(torch.full((2,), 7.0), 1, tag=1)
            assert (await got).tolist() == [7, 7]
            assert buffers[1].tolist() == [0, 0]
            assert buffers[2].tolist() == [1, 1]
            sent = one.batch().send(torch.ones(2), 1, tag=3).recv(torch.zeros(2), 1, tag=3).issue()
            await two.recv(torch.zeros(2), 0, tag=3)
            assert not sent.done()
            await two.send(torch.ones(2), 0, tag=3)
            assert [tensor.tolist() for tensor in await sent] == [[1, 1], [1, 1]]

    run_on(loop, main)


def test_map_remote_tensor_over_messages_is_refused():
    async def each(comm):
        window = await comm.new_window(torch.zeros(4))
        with pytest.raises(UnsupportedOperation, match="share no memory"):
            window.map_remote_tensor(1 - comm.rank)
        await comm.barrier()
        await window.aclose()

    on_ranks(2, each)


def test_windows_over_messages_put_get_and_signal(loop):
    async def each(comm):
        mine = torch.zeros(8, dtype=torch.int64)
        window = await comm.new_window(mine)
        peer = (comm.rank + 1) % comm.size
        await window.put(torch.arange(3) + 10 * comm.rank, peer, 2)
        window.signal(peer)
        source = (comm.rank - 1) % comm.size
        await window.wait_signal(source)
        assert mine[:7].tolist() == [0, 0, *(torch.arange(3) + 10 * source).tolist(), 0, 0]
        got = torch.empty(3, dtype=torch.int64)
        await window.get(got, peer, 2)
        assert got.equal(torch.arange(3) + 10 * comm.rank)
        for dst in range(comm.size):
            await window.fetch_add(dst, 7, 1)
        await window.flush()
        await comm.barrier()
        assert mine[7] == comm.size
        before = [await window.compare_swap(0, 0, 0, comm.rank + 1) for _ in range(1)]
        await comm.barrier()
        winner = await window.fetch_add(0, 0, 0)
        assert 1 <= winner <= comm.size
        assert (before[0] == 0) == (winner == comm.rank + 1)
        await window.aclose()
        await window.aclose()

    on_ranks(3, each, loop)


def test_window_close_by_an_error_completes_the_puts_of_others(loop, monkeypatch):
    """Rank 0 leaves its block with an error, and takes the data of rank 1's put only later; sends are done at once."""
    late = []

    class Sent:
        hints = None

        def __init__(self, op):
            self.op = op

        def done(self):
            return False

        def complete(self, value=None):
            pass

        fail = complete

    def post(self, op, work):
        if isinstance(op, ops.Recv) and op.channel == ops.RMA_DATA:
            late.append(lambda: LocalTransport.post(self, op, work))
        elif isinstance(op, ops.Send):
            copy = msgspec.structs.replace(op, tensor=op.tensor.clone())
            LocalTransport.post(self, copy, Sent(copy))
            work.complete(op.tensor)
        else:
            LocalTransport.post(self, op, work)

    monkeypatch.setattr(Plain, "post", post)

    async def each(comm):
        slot, word = torch.zeros(3), torch.zeros(1)
        win = await comm.new_window(slot)
        if comm.rank == 0:
            with pytest.raises(ZeroDivisionError):
                async with win:
                    raise ZeroDivisionError
            await comm.send(word, 1)  # This message follows the close of the window.
            await comm.recv(word, 1)
            assert not slot.any()
            for take in late:
                take()
        else:
            await comm.recv(word, 0)
            put = win.put(torch.ones(3), 0)
            closing = win._start_closing()
            await turns(5)
            assert not closing.done()
            await comm.send(word, 0)
            await closing
            await put
        await comm.barrier()
        assert slot.all() or comm.rank == 1

    on_ranks(2, each, loop)


def test_put_to_a_closed_rank_fails_alone(loop):
    async def main():
        async with local_world(2, "plain") as (one, two):
            windows = await ranks([one, two], lambda comm: comm.new_window(torch.zeros(2)))
            await two.aclose()
            with pytest.raises(CommAbortedError, match="closed by rank 1"):
                await windows[0].put(torch.ones(1), 1)
            assert not one.aborted
            work = windows[0].wait_signal(0)
            assert await work.cancel()

    run_on(loop, main)


def test_lowered_op_fails_when_its_communicator_aborts(loop):
    async def main():
        async with local_world(3, "plain") as (one, two, _):
            works = [one.all_reduce(torch.ones(1)), two.all_reduce(torch.ones(1))]
            async with anyio.create_task_group() as tasks:

                async def fails(work):
                    with pytest.raises(CommAbortedError, match="enough"):
                        await work

                for work in works:
                    tasks.start_soon(fails, work)
                await turns()
                two.abort("enough")

    run_on(loop, main)
