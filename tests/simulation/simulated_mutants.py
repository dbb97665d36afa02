"""The project's mutants where a simulation can see them: as they are, or the same fault in what carries its messages.

``tests/support/mutants.py`` breaks the transport `local`, which no simulation uses, and parts of the library, which it
does. ``SAME`` names the latter. The others are made anew here, under the same names, in the transport `net` and in the
library's own collectives and windows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import aiocomms_net.transport as net
import msgspec
import mutants
import torch
from aiocomms_net.transport import NetPeer, NetTransport
from mutants import LANES, replace, wrap

import aiocomms.lowering.schedules as schedules
import aiocomms.lowering.windows as windows
from aiocomms import lowlevel, ops
from aiocomms.errors import CommAbortedError, CommTimeoutError
from aiocomms.ops import reductions
from aiocomms.transport import OP_RESULT, conclude

SAME = (
    *("float8_is_summed", "unsigned_integers_are_in_the_order_of_signed_ones"),
    *("lanes_among_the_communicators_messages", "no_turns", "lost_collective_of_a_lane"),
    *("closing_a_lane_closes_all", "untyped_keys", "a_lane_for_all_tasks"),
    *("threads_calls_start_in_any_order", "threads_calls_start_in_the_loops_context", "threads_do_not_wait"),
    *("threads_lanes_are_the_communicators", "threads_that_wait_are_forgotten"),
)
IN_THE_LIBRARY: dict[str, Any] = {}
IN_NET: dict[str, Any] = {}


def in_the_library(fault: Any) -> Any:
    """Register a fault of the library, which has the name of one of the project's mutants of the transport `local`."""
    assert fault.__name__ in mutants.MUTANTS, fault.__name__
    IN_THE_LIBRARY[fault.__name__] = fault
    return fault


def in_net(fault: Any) -> Any:
    """Register the like, of the transport `net`."""
    assert fault.__name__ in mutants.MUTANTS, fault.__name__
    IN_NET[fault.__name__] = fault
    return fault


def apply(name: str) -> None:
    """Break this process."""
    (mutants.MUTANTS if name in SAME else IN_THE_LIBRARY | IN_NET)[name]()


def on_ops(change: Any) -> None:
    """Change the record of every message before it is sent or matched, and that by which it is withdrawn."""

    def post(original: Any, transport: Any, op: Any, work: Any) -> Any:
        return original(transport, change(op) if hasattr(op, "tag") else op, work)

    class Changed:
        def __init__(self, work: Any) -> None:
            self.op, self._work = change(work.op), work

        def __eq__(self, other: object) -> bool:
            return other is self._work

    def cancel(original: Any, transport: Any, work: Any) -> Any:
        for entries in [*transport._posted.values(), *transport._probes.values()]:
            for entry in entries:
                if entry[1] is work:
                    entries.remove(entry)
                    return True
        return False

    wrap(NetTransport, "post", post)
    wrap(NetTransport, "try_cancel", cancel)


def altered(**how: Any) -> Any:
    return lambda op: msgspec.structs.replace(op, **{name: value(op) for name, value in how.items()})


@in_the_library
def half_precision_throughout() -> None:
    def lift(original: Any, op: Any, tensor: Any) -> Any:
        return tensor.clone() if tensor.dtype == torch.float16 else original(op, tensor)

    wrap(reductions, "lift", lift)


@in_net
def ignored_tag() -> None:
    on_ops(altered(tag=lambda op: 0 if op.channel == ops.USER else op.tag))


@in_net
def tag_of_16_bits() -> None:
    on_ops(altered(tag=lambda op: op.tag & 0xFFFF))


@in_net
def ignored_channel() -> None:
    on_ops(altered(channel=lambda op: 0))


class _Stack(deque[Any]):
    popleft = deque.pop


@in_net
def last_message_first() -> None:
    def match(original: Any, transport: Any, key: Any, message: Any) -> None:
        transport._arrived.setdefault(key, _Stack())
        original(transport, key, message)

    wrap(NetTransport, "_match", match)


@in_net
def lost_message() -> None:
    count = iter(range(10**9))

    def send(original: Any, transport: Any, op: Any, work: Any) -> None:
        conclude(work, OP_RESULT) if next(count) % 100 == 99 else original(transport, op, work)

    wrap(NetTransport, "_send", send)


@in_net
def uncopied_data() -> None:
    class Ignored:
        def done(self) -> bool:
            return True

    def send(original: Any, transport: Any, op: Any, work: Any) -> None:
        original(transport, op, Ignored())
        if not transport._peers[op.dst].over:
            conclude(work, OP_RESULT)

    wrap(NetTransport, "_send", send)


def on_copies(change: Any) -> None:
    wrap(lowlevel, "copy_message", change)


@in_the_library
def completion_before_data() -> None:
    def copy(original: Any, given: Any, wanted: Any, src: int) -> Any:
        kept = given.clone()
        if kept.shape != wanted.shape or kept.dtype != wanted.dtype:
            return original(given, wanted, src)
        asyncio.get_running_loop().call_later(1e-6, wanted.copy_, kept)
        return None

    on_copies(copy)


@in_the_library
def short_message_is_fine() -> None:
    on_copies(lambda original, *args: original(*args) and None)


@in_the_library
def end_of_large_messages_is_lost() -> None:
    def copy(original: Any, given: Any, wanted: Any, src: int) -> Any:
        if given.nbytes <= 65536:
            return original(given, wanted, src)
        n = 65536 // given.itemsize
        wanted.view(-1)[:n].copy_(given.view(-1)[:n])
        return None

    on_copies(copy)


@in_net
def end_of_an_objects_tensor_is_lost() -> None:
    def take(original: Any, transport: Any, key: Any, message: Any, op: Any, work: Any) -> None:
        if message.channel == ops.OBJECT_DATA and message.tensor.numel() > 4096:
            message.tensor = message.tensor.clone()
            message.tensor[4096:].zero_()
        original(transport, key, message, op, work)

    wrap(NetTransport, "_take", take)


@in_net
def double_completion() -> None:
    def complete(original: Any, work: Any, *value: Any) -> None:
        original(work, *value)
        if isinstance(getattr(work, "op", None), ops.Recv):
            work.complete(OP_RESULT)

    wrap(net, "conclude", complete)


def on_schedule(kind: type[ops.Op], change: Any) -> None:
    """Change how a collective is made of messages."""
    original = schedules.SCHEDULES[kind]
    schedules.SCHEDULES[kind] = lambda g, op: change(original, g, op)


@in_the_library
def wrong_rank_order() -> None:
    def gather(original: Any, g: Any, op: Any) -> Any:
        yield from original(g, op)
        outs = [out.clone() for out in op.outs(g.size)]
        for index, out in enumerate(op.outs(g.size)):
            out.copy_(outs[index - 1])

    on_schedule(ops.AllGatherSingle, gather)


@in_the_library
def wrong_reduction() -> None:
    wrap(
        reductions,
        "lower",
        lambda original, op, acc, size, out: original(op, acc, 1 if op.kind == "avg" else size, out),
    )


@in_the_library
def root_is_rank_0() -> None:
    on_schedule(ops.Broadcast, lambda original, g, op: original(g, msgspec.structs.replace(op, root=0)))


@in_the_library
def reduce_changes_the_others() -> None:
    def reduce(original: Any, g: Any, op: Any) -> Any:
        yield from original(g, op)
        if g.rank != op.root:
            op.tensor.fill_(1)

    on_schedule(ops.Reduce, reduce)


@in_the_library
def one_byte_too_many() -> None:
    def copy(original: Any, given: Any, wanted: Any, src: int) -> Any:
        outcome = original(given, wanted, src)
        memory = torch.empty(0, dtype=torch.uint8).set_(wanted.untyped_storage())
        end = wanted.storage_offset() * wanted.itemsize + wanted.nbytes
        memory[end : end + 1] = 0
        return outcome

    on_copies(copy)


@in_the_library
def barrier_waits_for_nobody() -> None:
    on_schedule(ops.Barrier, lambda original, g, op: iter(()))


@in_the_library
def empty_tensors_do_not_synchronise() -> None:
    on_schedule(ops.AllReduce, lambda original, g, op: original(g, op) if op.tensor.numel() else iter(()))


@in_the_library
def nothing_is_compared() -> None:
    replace(net.lowlevel, "copy_message", lambda given, wanted, src: None)


@in_net
def lying_cancel() -> None:
    wrap(NetTransport, "try_cancel", lambda original, transport, work: True)


@in_net
def cancel_that_never_withdraws() -> None:
    wrap(NetTransport, "try_cancel", lambda original, transport, work: False)


@in_net
def cancel_withdraws_the_wrong_one() -> None:
    def cancel(original: Any, transport: Any, work: Any) -> Any:
        entries = (
            transport._posted.get((work.op.src, work.op.channel, work.op.tag)) if hasattr(work.op, "tag") else None
        )
        if not entries:
            return original(transport, work)
        entries.popleft()
        return True

    def post(original: Any, transport: Any, op: Any, work: Any) -> None:
        original(transport, op, work)

    wrap(NetTransport, "try_cancel", cancel)
    wrap(NetTransport, "post", post)


@in_net
def swallowed_close() -> None:
    wrap(NetTransport, "_leave", lambda original, transport, peer: setattr(peer, "over", True))


@in_net
def abort_tells_nobody() -> None:
    wrap(NetTransport, "abort", lambda original, transport, error: transport._end())


@in_net
def reason_is_forgotten() -> None:
    wrap(NetTransport, "abort", lambda original, transport, error: original(transport, CommAbortedError("aborted")))


@in_net
def descriptor_stays_open() -> None:
    """A connection stays open that belongs to the communicator."""

    async def close(transport: Any) -> None:
        transport._tell(net.Closed())

    replace(NetTransport, "aclose", close)


@in_net
def nobody_is_missing() -> None:
    wrap(NetTransport, "waiting_for", lambda original, transport, work: [])


@in_net
def deadline_of_its_own() -> None:
    def post(original: Any, transport: Any, op: Any, work: Any) -> None:
        original(transport, op, work)
        late = CommTimeoutError("the transport has lost its patience")
        asyncio.get_running_loop().call_later(0.004, lambda: work.done() or work.fail(late))

    wrap(NetTransport, "post", post)


@in_net
def mixed_lanes() -> None:
    on_ops(altered(tag=lambda op: min(op.tag, LANES)))


@in_net
def tags_of_32_bits() -> None:
    on_ops(altered(tag=lambda op: op.tag & 0xFFFFFFFF))


@in_net
def tags_without_their_last_32_bits() -> None:
    on_ops(altered(tag=lambda op: op.tag >> 32 if op.tag >= LANES else op.tag))


@in_net
def lost_lane() -> None:
    def send(original: Any, transport: Any, op: Any, work: Any) -> None:
        lost = op.tag >= LANES and op.tag % 100 == 0
        conclude(work, OP_RESULT) if lost else original(transport, op, work)

    wrap(NetTransport, "_send", send)


@in_net
def last_of_a_lane_first() -> None:
    def match(original: Any, transport: Any, key: Any, message: Any) -> None:
        original(transport, key, message)
        queue = transport._arrived.get(key)
        if message.tag >= LANES and queue:
            queue.rotate(1)

    wrap(NetTransport, "_match", match)


@in_the_library
def put_is_off_by_one() -> None:
    def packed(op: Any) -> bytes:
        room = isinstance(op, ops.Put) and op.offset + op.tensor.numel() < op.window.sizes[op.dst]
        return original(msgspec.structs.replace(op, offset=op.offset + 1) if room else op)

    original = windows.TwoSided._packed
    replace(windows.TwoSided, "_packed", staticmethod(packed))


@in_the_library
def put_signal_does_not_signal() -> None:
    def packed(op: Any) -> bytes:
        return original(ops.Put(op.window, op.tensor, op.dst, op.offset) if isinstance(op, ops.PutSignal) else op)

    original = windows.TwoSided._packed
    replace(windows.TwoSided, "_packed", staticmethod(packed))


@in_the_library
def signals_are_not_counted() -> None:
    def signal(original: Any, window: Any, src: int) -> None:
        original(window, src)
        window.signals[src] = min(window.signals[src], 1)

    wrap(windows._Window, "signal", signal)


@in_the_library
def counts_come_afterwards() -> None:
    def atomic(original: Any, window: Any, what: int, offset: int, first: int, second: int) -> int:
        before = original(window, what, offset, first, second)
        return before + first if what == windows._ADD else before

    wrap(windows._Window, "atomic", atomic)


@in_net
def notes_are_lost() -> None:
    wrap(NetTransport, "say", lambda original, transport, rank, note: True)


@in_net
def notes_come_from_another_rank() -> None:
    def hear(original: Any, transport: Any, peer: NetPeer, frame: Any) -> None:
        if isinstance(frame, net.NetNote):
            transport.on_note((peer.rank + 1) % transport._size, frame.what)
        else:
            original(transport, peer, frame)

    wrap(NetTransport, "_hear", hear)


@in_the_library
def dtype_is_not_compared() -> None:
    def misfit(original: Any, src: int, dtype: Any, nbytes: int, wanted: Any, *shape: Any) -> Any:
        return None if nbytes == wanted.nbytes else original(src, dtype, nbytes, wanted, *shape)

    import aiocomms.lowlevel.copying as copying

    wrap(copying, "misfit", misfit)


KINDS = {"as it is": SAME, "anew, in the library": tuple(IN_THE_LIBRARY), "anew, in net": tuple(IN_NET)}
