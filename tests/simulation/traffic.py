"""Steps of a program: messages, windows, streams, lanes, splits, threads, and receives that are given up."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import collectives
import torch
from place import BrokenPromiseError, Place, spoil
from torch import Tensor

from aiocomms.errors import CommClosedError, CommTimeoutError, LaneAbortedError, WorkCancelledError

SILENCE = 6.0
"""Seconds after which a silent rank counts as dead. What has no deadline ends by that."""
FORMING = 8.0
"""Seconds that ranks have to form a communicator."""


async def messages(at: Place) -> None:
    """Several messages between any ranks, of several tags, that are received in another order than they were sent."""
    plan = []
    least = at.draw.randrange(12)  # Among the tags of collectives, which are not messages of the program's.
    for index in range(at.draw.randint(1, 6)):
        src, dst, lane = at.someone(), at.someone(), (at.draw.randrange(3) << 24) + least
        plan.append((index, src, dst, lane, at.count(), at.dtype(), at.draw.random() < 0.3))
    posted: list[Any] = []
    mixed = sorted(plan, key=lambda it: (it[3] * 7 + at.number) % 5)  # By tags: within one the order is kept.
    receives = [it for it in mixed if it[2] == at.rank]
    first = at.draw.random() < 0.5
    if first:
        posted += [_receive(at, it) for it in receives]
    for index, src, dst, lane, count, dtype, late in plan:
        if src == at.rank:
            if late and src != dst:
                await asyncio.sleep(0.001)
            mine = at.numbers(count, dtype, src, dst, index)
            work = at.sends(lambda it, to=dst, tag=lane: at.comm.send(it, to, tag), mine, dst, index)
            work.add_done_callback(spoil)  # From then on the program may write into it.
            posted.append(work)
    if not first:
        posted += [_receive(at, it) for it in receives]
    await at.all_end(posted)
    got = posted[: len(receives)] if first else posted[len(posted) - len(receives) :]
    for work, (index, src, dst, _, count, dtype, _late) in zip(got, receives, strict=True):
        wanted = at.sent(at.numbers(count, dtype, src, dst, index), index)
        at.same(work.result(), wanted, f"message {index} of {plan}")


def _receive(at: Place, message: Any) -> Any:
    index, src, _, lane, count, dtype, _ = message
    buffer = torch.full((count,), 7, dtype=dtype)
    return at.takes(at.comm.recv(buffer, src, lane), buffer, index)


async def exchange(at: Place) -> None:
    """A batch: each rank sends to the next, and receives from the one before."""
    count, dtype, far = at.count(), at.dtype(), at.draw.randint(1, at.size)
    dst, src = (at.rank + far) % at.size, (at.rank - far) % at.size
    buffer = torch.full((count,), -1, dtype=dtype)
    mine = at.numbers(count, dtype, at.rank)
    with at.giving(mine, dst) as entry:
        entry.end = "left"  # A batch that fails may have received its message.
        batch = at.comm.batch().send(mine, dst, at.tag()).recv(buffer, src, at.tag())
        await at.end(at.takes(batch.issue(), buffer))
    at.same(buffer, at.sent(at.numbers(count, dtype, src)), "batch")


async def from_anybody(at: Place) -> None:
    """One rank receives from all others in the order of arrival: each message once."""
    root, count, how = at.someone(), at.count(), at.draw.choice(("any", "message", "probe"))
    if at.rank != root:
        mine = at.numbers(count + at.rank, torch.int64, at.rank)
        await at.end(at.sends(lambda it: at.comm.send(it, root, at.tag()), mine, root, at.rank))
        return
    heard = []
    for _ in range(at.size - 1):
        if how == "any":
            message = await at.end(at.comm.probe(tag=at.tag()))
            buffer = torch.empty(message.numel, dtype=torch.int64)
            src = await at.end(at.comm.recv_any(buffer, message.src, tag=at.tag()))
        elif how == "message":
            src, buffer = await at.end(at.comm.recv_message(tag=at.tag()))
        else:
            message = await at.end(at.comm.probe(tag=at.tag()))
            at.same(message.nbytes, (count + message.src) * 8, "size of a message that was probed")
            src, buffer = message.src, torch.empty(message.numel, dtype=message.dtype)
            await at.end(at.comm.recv(buffer, src, at.tag()))
        at.got(buffer, src)
        at.same(buffer, at.sent(at.numbers(count + src, torch.int64, src), src), f"message of rank {src}, by {how}")
        heard.append(src)
    at.same(sorted(heard), [r for r in range(at.size) if r != root], "sources of messages from anybody")


async def object_messages(at: Place) -> None:
    """Objects with tensors around a ring, and one to another tag."""
    dst, src = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    count, dtype = at.draw.choice((0, 3, 5, 9000)), at.dtype()
    sent = {"t": at.numbers(count, dtype, at.rank), "it": collectives.thing(at, at.rank)[0]}
    works = [
        at.comm.recv_object(src, at.tag()),
        at.sends(lambda _: at.comm.send_object(sent, dst, at.tag()), sent["t"], dst),
        at.comm.send_object(at.rank, dst, at.tag(1)),
        at.comm.recv_object(src, at.tag(1)),
    ]
    works[0].add_done_callback(lambda work: at.got(work.result()["t"]) if work.error is None else None)
    got, _, _, other = await at.all_end(works)
    at.same(got["t"], at.sent(at.numbers(count, dtype, src)), "tensor of an object")
    at.same(got["it"], collectives.thing(at, src)[0], "object")
    at.same(other, src, "object of another tag")


async def given_up(at: Place) -> None:
    """A receive whose wait is cancelled: withdrawn, or it has the message. The next receive gets the next message."""
    if at.size == 1:
        return
    dst, seconds = at.someone(), at.draw.choice((0.0, 0.0005, 0.001, 0.003))
    src, how = (dst + 1) % at.size, at.draw.choice(("timeout", "cancel", "deadline"))
    sent = [at.numbers(4, torch.int64, index) for index in range(2)]
    if at.rank == src:
        await asyncio.sleep(at.draw.choice((0.0, 0.001)))
        await _both_sent(at, sent, dst)
        return
    if at.rank != dst:
        return
    buffer = torch.full((4,), -1)
    happened = await _given_up(at, buffer, src, seconds, how)
    if not happened:
        at.same(buffer, torch.full((4,), -1), "buffer of a withdrawn receive")
        await at.end(at.takes(at.comm.recv(buffer, src, at.tag()), buffer, 0))
    at.same(buffer, at.sent(sent[0], 0), "first message, of two, around a receive that was given up")
    other = torch.full((4,), -1)  # The ledger may not have read the first one yet.
    await at.end(at.takes(at.comm.recv(other, src, at.tag()), other, 1))
    at.same(other, at.sent(sent[1], 1), "second message, after a receive that was given up")


async def _both_sent(at: Place, tensors: list[Tensor], dst: int) -> None:
    """Send two messages of one tag."""
    works = [at.sends(lambda it: at.comm.send(it, dst, at.tag()), it, dst, index) for index, it in enumerate(tensors)]
    await at.all_end(works)


async def _given_up(at: Place, buffer: Tensor, src: int, seconds: float, how: str) -> bool:
    """Return whether the receive has happened."""
    if how == "deadline":
        work = at.takes(at.comm.recv(buffer, src, at.tag(), timeout=max(seconds, 1e-6)), buffer, 0)
        try:
            with at.timely(seconds, "a receive with a deadline"):
                await work
        except CommTimeoutError as error:
            if at.comm.aborted:
                raise
            at.same(error.late in ((src,), ()), True, f"late ranks {error.late} of a receive from rank {src}")
            return False
        return True
    work = at.takes(at.comm.recv(buffer, src, at.tag()), buffer, 0)
    if how == "cancel":
        await asyncio.sleep(seconds)
        if await at.end(work.cancel()):
            return False
    else:
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError as error:
            if isinstance(error, CommTimeoutError):
                raise
    try:
        await at.end(work)
    except WorkCancelledError:
        return False
    return True


async def second_given_up(at: Place) -> None:
    """Withdraw the second of two receives of the same messages: the first gets the first message."""
    if at.size == 1:
        return
    dst = at.someone()
    src, sent = (dst + 1) % at.size, [at.numbers(2, torch.int64, index) for index in range(2)]
    if at.rank == src:
        await at.end(at.comm.recv(torch.zeros(1), dst, at.tag(1)))
        await _both_sent(at, sent, dst)
    elif at.rank == dst:
        first, second = (torch.full((2,), -1) for _ in sent)
        works = [at.takes(at.comm.recv(it, src, at.tag()), it, index) for index, it in enumerate((first, second))]
        at.same(await at.end(works[1].cancel()), True, "withdrawal of a receive that nothing has matched")
        await at.end(at.comm.send(torch.zeros(1), src, at.tag(1)))
        await at.end(works[0])
        at.same(first, at.sent(sent[0], 0), "message of the receive that was not withdrawn")
        at.same(second, torch.full((2,), -1), "buffer of the receive that was withdrawn")
        await at.end(at.takes(at.comm.recv(second, src, at.tag()), second, 1))
        at.same(second, at.sent(sent[1], 1), "message after a receive that was withdrawn")


async def window(at: Place) -> None:
    """Puts, gets, signals and atomic additions on a window."""
    room = 8
    memory = torch.zeros(room * at.size + 1, dtype=torch.int64)
    window = await at.end(at.comm.new_window(memory))
    far = at.draw.randrange(at.size)
    dst, src = (at.rank + far) % at.size, (at.rank - far) % at.size
    put = window.put_signal if at.draw.random() < 0.5 else window.put
    mine = at.numbers(room, torch.int64, at.rank)
    works: list[Any] = [put(mine, dst, at.rank * room)]
    if put == window.put:
        works.append(window.signal(dst))
    works.append(window.wait_signal(src))
    target = at.someone()
    adds = [window.fetch_add(target, room * at.size, 10**r) for r in [at.rank] * at.draw.randint(1, 3)]
    await at.all_end(works)
    at.same(memory[src * room : (src + 1) * room], at.numbers(room, torch.int64, src), "window after a signal")
    olds = await at.all_end(adds)
    at.same([old // 10**at.rank % 10 for old in olds], list(range(len(adds))), f"own additions in {olds}")
    await at.all_end([window.signal(dst), window.signal(dst)])
    await at.end(at.comm.barrier())
    await at.all_end([window.wait_signal(src), window.wait_signal(src)])
    got = torch.full((room,), -1)
    await at.end(window.get(got, dst, at.rank * room))
    at.same(got, mine, "get of what was put")
    if at.rank == target:
        at.same(int(memory[-1]), sum(len(adds) * 10**r for r in range(at.size)), "sum of atomic additions")
    if at.draw.random() < 0.5:
        old = await at.end(window.compare_swap(at.rank, at.rank * room, -5, 6))
        at.same(isinstance(old, int), True, "value before a compare_swap")
    await at.end(at.comm.barrier())
    await at.end(window.aclose())


async def stream(at: Place) -> None:
    """A stream with credits between two ranks, both ways: items come in order, each once, then the end."""
    one = at.someone()
    other = (one + 1) % at.size
    counts = [at.draw.randint(0, 6), at.draw.randint(0, 6)]
    capacity, sizes = at.draw.randint(1, 3), [at.count() for _ in range(12)]
    if at.rank not in (one, other) or one == other:
        return
    peer, mine = (other, 0) if at.rank == one else (one, 1)
    # A rank that has not formed the communicator yet may go on with that until its deadline.
    longest = SILENCE if at.ledger.formed(at.comm) else FORMING + SILENCE
    end = await at.end(at.comm.open_stream(peer, capacity, f"stream {at.number}"), longest)

    async def give() -> None:
        for index in range(counts[mine]):
            item = at.numbers(sizes[index], torch.int64, mine, index)
            with at.giving(item, peer, index) as entry:
                await at.end(end.send(item), 2 * SILENCE)
                # One without data is not waited for: it is lost if the communicator is, and nobody is told.
                entry.end = "sent" if sizes[index] else "left"
        await end.send_eof()

    async def take() -> None:
        for index in range(counts[1 - mine]):
            got = await at.end(end.receive(), SILENCE)
            at.got(got, index)
            wanted = at.sent(at.numbers(sizes[index], torch.int64, 1 - mine, index), index)
            at.same(got, wanted, f"item {index} of a stream")
        try:
            raise BrokenPromiseError(f"a stream has an item more: {await at.end(end.receive(), SILENCE)}")
        except anyio.EndOfStream:
            pass

    await _together(give(), take())
    await end.aclose()


async def _together(*parts: Any) -> None:
    """Run parts at the same time; when all have ended, raise the first error."""
    for found in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found


async def lanes(at: Place) -> None:
    """Requests in lanes of their own, that every rank begins in another order."""
    steps = [at.draw.choice(IN_LANES) for _ in range(at.draw.randint(2, 4))]
    order = list(range(len(steps)))
    at.draw.shuffle(order)
    order = order[at.rank % len(order) :] + order[: at.rank % len(order)]
    by_block = at.draw.random() < 0.3

    def placed(index: int) -> Place:
        key = (f"{at.number}", at.number, b"%d" % at.number, f"{at.number}.{index}")[index]
        return at.part(at.comm if by_block else at.comm.lane(key), index, key)

    async def one(part: Place, step: Any) -> None:
        if by_block:
            with at.comm.lane(part.key):
                await step(part)
        else:
            await step(part)

    parts = {index: placed(index) for index in range(len(steps))}
    await _together(*(one(parts[index], steps[index]) for index in order))


async def many(at: Place) -> None:
    """Collectives that begin at once, in one order on all ranks."""
    tensors = [at.numbers(at.count(), torch.int64, at.rank, index) for index in range(at.draw.randint(2, 5))]
    works = []
    roots = [at.draw.choice((None, at.someone())) for _ in tensors]
    for tensor, root in zip(tensors, roots, strict=True):
        works.append(at.comm.all_reduce(tensor) if root is None else at.comm.broadcast(tensor, root))
    for index, got in enumerate(await at.all_end(works)):
        whose = range(at.size) if roots[index] is None else [roots[index]]
        wanted = sum(at.numbers(got.numel(), torch.int64, r, index) for r in whose)
        at.same(got, wanted, f"collective {index} of several")


async def lane_ends(at: Place) -> None:
    """A lane is closed, or given up, while another one of the same rank waits for a message."""
    if at.size == 1:
        return
    dst = at.someone()
    src, abort = (dst + 1) % at.size, at.draw.random() < 0.5
    other, ending = at.comm.lane(f"{at.number} other"), at.comm.lane(f"{at.number} ending" if abort else "closing")
    await at.end(at.comm.barrier())
    if at.rank == dst:
        kept = other.recv(torch.zeros(2, dtype=torch.int64), src, 1)
        lost = ending.recv(torch.zeros(2, dtype=torch.int64), src, 1)
        if abort:
            ending.abort("it was drawn")
        else:
            await at.end(ending.aclose())
        try:
            raise BrokenPromiseError(f"a receive of a lane that has ended got {await at.end(lost)}")
        except (CommClosedError, LaneAbortedError):
            if at.comm.aborted:
                raise
        await at.end(at.comm.send(torch.zeros(1), src, at.tag()))
        at.same(await at.end(kept), at.numbers(2, torch.int64, src), "message of another lane than that which ended")
    elif at.rank == src:
        await at.end(at.comm.recv(torch.zeros(1), dst, at.tag()))
        await at.end(other.send(at.numbers(2, torch.int64, src), dst, 1))


async def split(at: Place) -> None:
    """A part of the ranks, or two, or all in another order, form a communicator, and use it."""
    ranks = list(range(at.size))
    at.draw.shuffle(ranks)
    cut = at.draw.randint(1, at.size)
    groups = [ranks[:cut], ranks[cut:] if at.draw.random() < 0.5 else []]
    mine = next((group for group in groups if at.rank in group), [])
    steps = [at.draw.choice(IN_LANES) for _ in range(at.draw.randint(0, 2))]
    name = f"{at.comm.name}/{at.number}.{mine[0]}" if mine else None
    child = await at.end(at.comm.split(mine, name, timeout=at.patience), 2 * at.patience)
    at.same(child is None, not mine, "communicator of a split that has not this rank")
    if child is None:
        return
    at.members[child.name] = child.rank
    at.ledger.join(child)
    try:
        at.same((child.rank, child.size), (mine.index(at.rank), len(mine)), "rank and size after a split")
        for index, step in enumerate(steps):
            await step(at.part(child, index + (4 if mine is groups[1] else 0), None))
        await at.end(child.barrier())
    finally:
        with at.timely(6, "close of a split"):
            await child.aclose()


async def threads(at: Place) -> None:
    """Two threads of each rank, each with a lane, reduce and exchange through a portal."""
    portal, count = at.comm.portal(), at.count()

    def work(index: int) -> Any:
        lane = portal.lane(f"{at.number} {index}")
        total = lane.all_reduce(at.numbers(count, torch.int64, at.rank, index)).wait()
        sent = lane.send(at.numbers(3, torch.int64, at.rank, index), (at.rank + 1) % at.size, 1)
        got = lane.recv(torch.zeros(3, dtype=torch.int64), (at.rank - 1) % at.size, 1).wait()
        sent.wait()
        return total, got

    async def one(index: int) -> None:
        total, got = await at.end(asyncio.to_thread(work, index), 3 * at.patience)
        at.same(total, sum(at.numbers(count, torch.int64, r, index) for r in range(at.size)), "all_reduce of a thread")
        at.same(got, at.numbers(3, torch.int64, (at.rank - 1) % at.size, index), "message of a thread")

    await _together(one(0), one(1))


STEPS = (
    messages,
    messages,
    exchange,
    from_anybody,
    object_messages,
    given_up,
    second_given_up,
    window,
    stream,
    lanes,
    lanes,
    lane_ends,
    many,
    split,
    threads,
)
IN_LANES = (*collectives.STEPS, messages, exchange, from_anybody, object_messages, messages, messages, many, many, many)
