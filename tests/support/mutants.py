"""The local transport with one fault each, for the conformance suite to catch.

A mutant changes the local transport in the whole process, so a process loads one of them at most. It changes private
parts too, for a fault lies behind what a transport offers to others.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from typing import Any
from unittest import mock

import aiocomms_local.matching as matching
import aiocomms_local.semantics as semantics
import aiocomms_local.transport as transports
import aiocomms_local.window as windows
import msgspec
import torch
from aiocomms_local import LocalTransport
from aiocomms_local.matching import SharedMatcher
from aiocomms_local.window import LocalWindow

import aiocomms.communicator.lane as views
import aiocomms.communicator.portal.works as blocking_works
import aiocomms.lowering.lane_messages as lanes
from aiocomms import ops
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.operations import BlockingLane
from aiocomms.communicator.portal.works import BlockingWork
from aiocomms.errors import CommAbortedError, CommTimeoutError
from aiocomms.lowlevel import Waker
from aiocomms.ops import reductions
from aiocomms.progress.inflight import LaneWork
from aiocomms.transport import OP_RESULT

MUTANTS: dict[str, Any] = {}
"""Functions that break the local transport."""

OPTIONS: dict[str, str] = {}
"""The module of the suite that must catch each."""


def caught_by(module: str) -> Any:
    """Register a mutant."""

    def register(fault: Any) -> Any:
        MUTANTS[fault.__name__] = fault
        OPTIONS[fault.__name__] = module
        return fault

    return register


def __getattr__(name: str) -> type[LocalTransport]:
    """An entry point's attribute: break the transport, and hand it over."""
    fault = MUTANTS.get(name.removeprefix("with_"))
    if fault is None:
        raise AttributeError(name)
    fault()
    return LocalTransport


def wrap(owner: Any, name: str, replacement: Any) -> None:
    """Replace ``owner.name`` by ``replacement(original, ...)``."""
    original = getattr(owner, name)
    replace(owner, name, lambda *args: replacement(original, *args))


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Replace ``owner.name``, which must exist: a mutant of what is called otherwise now would change nothing."""
    mock.patch.object(owner, name, replacement).start()


def on_messages(change: Any) -> None:
    """Change the record of every message before it is matched, and that by which it is withdrawn."""
    for name in ("send", "recv", "withdraw"):
        wrap(SharedMatcher, name, lambda original, matcher, rank, op, work: original(matcher, rank, change(op), work))


def control() -> None:
    """No fault."""


MUTANTS["control"] = control


# ---------------------------------------------------------------------------------------------------- matching


@caught_by("test_messages")
def ignored_tag() -> None:
    on_messages(lambda op: msgspec.structs.replace(op, tag=0) if getattr(op, "channel", 1) == ops.USER else op)


@caught_by("test_messages")
def tag_of_16_bits() -> None:
    on_messages(lambda op: msgspec.structs.replace(op, tag=op.tag & 0xFFFF) if hasattr(op, "tag") else op)


@caught_by("test_messages")
def ignored_channel() -> None:
    on_messages(lambda op: msgspec.structs.replace(op, channel=0) if hasattr(op, "channel") else op)


class _Stack(deque):
    popleft = deque.pop


@caught_by("test_messages")
def last_message_first() -> None:
    def make(original: Any, matcher: SharedMatcher, size: int) -> None:
        original(matcher, size)
        matcher._sends.default_factory = _Stack

    wrap(SharedMatcher, "__init__", make)


@caught_by("test_messages")
def lost_message() -> None:
    count = iter(range(10**9))

    def send(original: Any, matcher: SharedMatcher, rank: int, op: Any, work: Any) -> Any:
        return [(rank, work, OP_RESULT)] if next(count) % 100 == 99 else original(matcher, rank, op, work)

    wrap(SharedMatcher, "send", send)


# -------------------------------------------------------------------------------------------------------- data


@caught_by("test_messages")
def uncopied_data() -> None:
    """A send is done at once, and its tensor is read when the receive comes."""

    class Ignored:
        def done(self) -> bool:
            return True

    def send(original: Any, matcher: SharedMatcher, rank: int, op: Any, work: Any) -> Any:
        done = original(matcher, rank, op, Ignored())
        return [(rank, work, OP_RESULT), *done]

    wrap(SharedMatcher, "send", send)


@caught_by("test_messages")
def completion_before_data() -> None:
    """A receive is done one turn of the loop before its data is there."""

    def transfer(original: Any, send: Any, recv: Any, src: int) -> Any:
        given = send.tensor.clone()
        if given.shape != recv.tensor.shape or given.dtype != recv.tensor.dtype:
            return original(send, recv, src)
        asyncio.get_running_loop().call_soon(recv.tensor.copy_, given)
        return OP_RESULT

    wrap(matching, "_transfer", transfer)


@caught_by("test_messages")
def short_message_is_fine() -> None:
    def transfer(original: Any, send: Any, recv: Any, src: int) -> Any:
        original(send, recv, src)
        return OP_RESULT

    wrap(matching, "_transfer", transfer)


@caught_by("test_messages")
def end_of_large_messages_is_lost() -> None:
    def transfer(original: Any, send: Any, recv: Any, src: int) -> Any:
        if send.tensor.nbytes <= 65536:
            return original(send, recv, src)
        n = 65536 // send.tensor.itemsize
        recv.tensor.view(-1)[:n].copy_(send.tensor.view(-1)[:n])
        return OP_RESULT

    wrap(matching, "_transfer", transfer)


@caught_by("test_objects")
def end_of_an_objects_tensor_is_lost() -> None:
    def transfer(original: Any, send: Any, recv: Any, src: int) -> Any:
        outcome = original(send, recv, src)
        if send.channel == ops.OBJECT_DATA and recv.tensor.numel() > 4096:
            recv.tensor[4096:].zero_()
        return outcome

    wrap(matching, "_transfer", transfer)


@caught_by("test_messages")
def double_completion() -> None:
    def complete(original: Any, work: Any, value: Any) -> None:
        original(work, value)
        if isinstance(work.op, ops.Recv):
            work.complete(value)

    wrap(transports, "conclude", complete)


# ------------------------------------------------------------------------------------------------- collectives


@caught_by("test_collectives")
def wrong_rank_order() -> None:
    def gather(original: Any, records: Any) -> None:
        original([*records[1:], records[0]] if records[0].name == "all_gather_single" else records)

    wrap_semantics("all_gather", gather)


@caught_by("test_collectives")
def wrong_reduction() -> None:
    replace(semantics, "reductions", type(semantics)("reductions"))
    semantics.reductions.reduce = lambda op, tensors, out: reductions.reduce(
        reductions.ReduceOp.SUM if op.kind == "avg" else op, tensors, out
    )


@caught_by("test_collectives")
def half_precision_throughout() -> None:
    def combine(op: Any, accumulator: Any, tensor: Any) -> None:
        rounded = torch.add(accumulator, tensor)
        accumulator.copy_(rounded.to(torch.float16 if tensor.dtype == torch.float16 else rounded.dtype))

    wrap(
        reductions,
        "combine",
        lambda original, op, accumulator, tensor: (combine if op.kind == "sum" else original)(op, accumulator, tensor),
    )


@caught_by("test_collectives")
def root_is_rank_0() -> None:
    def broadcast(original: Any, records: Any) -> None:
        original([msgspec.structs.replace(record, root=0) for record in records])

    wrap_semantics("broadcast", broadcast)


@caught_by("test_collectives")
def reduce_changes_the_others() -> None:
    def reduce(original: Any, records: Any) -> None:
        original(records)
        for record in records:
            record.tensor.copy_(records[records[0].root].tensor)

    wrap_semantics("reduce", reduce)


@caught_by("test_collectives")
def one_byte_too_many() -> None:
    def copy(original: Any, out: Any, source: Any) -> None:
        original(out, source)
        memory = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
        end = out.storage_offset() * out.itemsize + out.nbytes
        memory[end : end + 1] = 0

    wrap(semantics, "_copy", copy)


@caught_by("test_collectives")
def float8_goes_by_value() -> None:
    """Convert float8, so that its NaNs lose their bits, as where a backend has no such dtype."""

    def copy(original: Any, out: Any, source: Any) -> None:
        original(out, source)
        if str(out.dtype).startswith("torch.float8"):
            out.copy_(out.float())

    wrap(semantics, "_copy", copy)


@caught_by("test_arguments")
def float8_is_summed() -> None:
    reductions.SUPPORTED["sum"] |= {torch.float8_e5m2}


@caught_by("test_collectives")
def unsigned_integers_are_in_the_order_of_signed_ones() -> None:
    def combine(original: Any, op: Any, accumulator: Any, tensor: Any) -> None:
        reductions._COMBINE[op.kind](accumulator, tensor, out=accumulator)

    wrap(reductions, "_combine_signed", combine)


@caught_by("test_collectives")
def barrier_waits_for_nobody() -> None:
    def join(original: Any, matcher: SharedMatcher, rank: int, index: int, op: Any, work: Any) -> Any:
        return [(rank, work, OP_RESULT)] if isinstance(op, ops.Barrier) else original(matcher, rank, index, op, work)

    wrap(SharedMatcher, "join", join)


@caught_by("test_collectives")
def empty_tensors_do_not_synchronise() -> None:
    def join(original: Any, matcher: SharedMatcher, rank: int, index: int, op: Any, work: Any) -> Any:
        if isinstance(op, ops.AllReduce) and not op.tensor.numel():
            return [(rank, work, OP_RESULT)]
        return original(matcher, rank, index, op, work)

    wrap(SharedMatcher, "join", join)


@caught_by("test_mismatch")
def nothing_is_compared() -> None:
    def join(original: Any, matcher: SharedMatcher, rank: int, index: int, op: Any, work: Any) -> Any:
        type(op).signature = lambda op: ("any", type(op).kind)
        return original(matcher, rank, index, op, work)

    wrap(SharedMatcher, "join", join)


@caught_by("test_mismatch")
def dtype_is_not_compared() -> None:
    def transfer(original: Any, send: Any, recv: Any, src: int) -> Any:
        if send.tensor.dtype != recv.tensor.dtype and send.tensor.itemsize == recv.tensor.itemsize:
            recv.tensor.copy_(send.tensor.view(recv.tensor.dtype))
            return OP_RESULT
        return original(send, recv, src)

    wrap(matching, "_transfer", transfer)


# --------------------------------------------------------------------------------------- cancelling and closing


@caught_by("test_cancellation")
def lying_cancel() -> None:
    """Say that the receive has not happened, and let it happen."""
    wrap(LocalTransport, "try_cancel", lambda original, transport, work: True)


@caught_by("test_cancellation")
def cancel_that_never_withdraws() -> None:
    wrap(LocalTransport, "try_cancel", lambda original, transport, work: False)


@caught_by("test_cancellation")
def cancel_withdraws_the_wrong_one() -> None:
    def withdraw(original: Any, matcher: SharedMatcher, rank: int, op: Any, work: Any) -> bool:
        recvs = matcher._recvs.get((op.src, rank, op.channel, op.tag)) if isinstance(op, ops.Recv) else None
        if not recvs or (op, work) not in recvs:
            return original(matcher, rank, op, work)
        recvs.popleft()
        if not recvs:
            del matcher._recvs[op.src, rank, op.channel, op.tag]
        return True

    wrap(SharedMatcher, "withdraw", withdraw)


@caught_by("test_closing")
def swallowed_close() -> None:
    wrap(SharedMatcher, "leave", lambda original, matcher, rank: [])


@caught_by("test_closing")
def abort_tells_nobody() -> None:
    wrap(LocalTransport, "abort", lambda original, transport, error: None)


@caught_by("test_closing")
def reason_is_forgotten() -> None:
    wrap(LocalTransport, "abort", lambda original, transport, error: original(transport, CommAbortedError("aborted")))


@caught_by("test_closing")
def descriptor_stays_open() -> None:
    wrap(Waker, "close", lambda original, waker: None)


@caught_by("test_timeouts")
def nobody_is_missing() -> None:
    wrap(LocalTransport, "waiting_for", lambda original, transport, work: [])


@caught_by("test_timeouts")
def deadline_of_its_own() -> None:
    """A collective that is not done after 0.05 s fails, whatever its deadline."""

    def post(original: Any, transport: LocalTransport, op: Any, work: Any) -> Any:
        at = original(transport, op, work)
        if op.family == "collectives":
            late = CommTimeoutError("the transport has lost its patience")
            asyncio.get_running_loop().call_later(0.05, lambda: work.done() or work.fail(late))
        return at

    wrap(LocalTransport, "post", post)


# ------------------------------------------------------------------------------------------------------- lanes


LANES = 2**62  # the least tag of a lane


@caught_by("test_lanes")
def mixed_lanes() -> None:
    on_messages(lambda op: msgspec.structs.replace(op, tag=min(op.tag, LANES)) if hasattr(op, "tag") else op)


@caught_by("test_lanes_messages")
def lanes_among_the_communicators_messages() -> None:
    """A lane's messages have their user's tags, and so match those that are of no lane."""
    wrap(lanes, "tag_of", lambda original, number, tag: tag)


@caught_by("test_lanes_messages")
def tags_of_32_bits() -> None:
    on_messages(lambda op: msgspec.structs.replace(op, tag=op.tag & 0xFFFFFFFF) if hasattr(op, "tag") else op)


@caught_by("test_lanes_messages")
def tags_without_their_last_32_bits() -> None:
    on_messages(lambda op: msgspec.structs.replace(op, tag=op.tag >> 32) if getattr(op, "tag", 0) >= LANES else op)


@caught_by("test_lanes")
def lost_lane() -> None:
    """Lose the messages of one lane in a hundred."""

    def send(original: Any, matcher: SharedMatcher, rank: int, op: Any, work: Any) -> Any:
        lost = op.tag >= LANES and op.tag % 100 == 0
        return [(rank, work, OP_RESULT)] if lost else original(matcher, rank, op, work)

    wrap(SharedMatcher, "send", send)


@caught_by("test_lanes_messages")
def last_of_a_lane_first() -> None:
    """A message overtakes those of its lane that nobody has received yet."""

    def send(original: Any, matcher: SharedMatcher, rank: int, op: Any, work: Any) -> Any:
        done = original(matcher, rank, op, work)
        queue = matcher._sends.get((rank, op.dst, op.channel, op.tag))
        if op.tag >= LANES and queue:
            queue.rotate(1)
        return done

    wrap(SharedMatcher, "send", send)


@caught_by("test_lanes")
def no_turns() -> None:
    """The collectives of one lane run at the same time."""
    wrap(lanes._Turn, "call", lambda original, turn, run: run.advance())


@caught_by("test_lanes")
def lost_collective_of_a_lane() -> None:
    """One that waits for its turn behind two others never begins on the last rank."""

    def look(original: Any, turn: Any) -> None:
        if len(turn) > 2 and turn[0].work.done() and turn[0].work._owner.rank:
            del turn[2]
        original(turn)

    wrap(lanes._Turn, "look", look)


@caught_by("test_lanes_ending")
def closing_a_lane_closes_all() -> None:
    """Withdraw the receives of other lanes, too."""

    def names(original: Any, lane: Any) -> Any:
        number, words = original(lane)
        for work in lane._core.in_flight if lane.closed or lane.key == "closing" else ():
            if isinstance(work, LaneWork):
                work.number = number
        return number, words

    wrap(views.Lane, "_names", names)


@caught_by("test_lanes")
def untyped_keys() -> None:
    wrap(views, "number_of", lambda original, key: original(key.decode("latin1") if isinstance(key, bytes) else key))


@caught_by("test_lanes")
def a_lane_for_all_tasks() -> None:
    """The current lane is the process's, and not the task's."""

    class Everybodys:
        value = None

        def get(self) -> Any:
            return self.value

        def set(self, value: Any) -> None:
            self.value = value

    replace(views, "CURRENT", Everybodys())


# ---------------------------------------------------------------------------------------------------- and beyond


@caught_by("test_windows")
def put_is_off_by_one() -> None:
    def act(original: Any, window: LocalWindow, op: Any, rank: int, work: Any) -> Any:
        room = isinstance(op, ops.Put) and op.offset + op.tensor.numel() < window.tensors[op.dst].numel()
        return original(window, msgspec.structs.replace(op, offset=op.offset + 1) if room else op, rank, work)

    wrap(windows.LocalWindow, "act", act)


@caught_by("test_signals")
def put_signal_does_not_signal() -> None:
    def act(original: Any, window: LocalWindow, op: Any, rank: int, work: Any) -> Any:
        if isinstance(op, ops.PutSignal):
            op = ops.Put(op.window, op.tensor, op.dst, op.offset)
        return original(window, op, rank, work)

    wrap(windows.LocalWindow, "act", act)


@caught_by("test_signals")
def signals_are_not_counted() -> None:
    def signal(original: Any, window: LocalWindow, src: int, dst: int) -> Any:
        done = original(window, src, dst)
        window.signals[src, dst] = min(window.signals[src, dst], 1)
        return done

    wrap(windows.LocalWindow, "_signal", signal)


@caught_by("test_windows")
def counts_come_afterwards() -> None:
    def act(original: Any, window: LocalWindow, op: Any, rank: int, work: Any) -> Any:
        done = original(window, op, rank, work)
        return [(r, w, v + op.value) for r, w, v in done] if isinstance(op, ops.FetchAdd) else done

    wrap(windows.LocalWindow, "act", act)


@caught_by("test_idle")
def wakes_up_all_the_time() -> None:
    def make(original: Any, transport: LocalTransport, matcher: SharedMatcher, rank: int) -> None:
        original(transport, matcher, rank)
        ended = threading.Event()
        put = transport._inbox.put
        threading.Thread(target=lambda: [put(int) for _ in iter(lambda: ended.wait(0.002), True)], daemon=True).start()
        transport._matcher.__dict__.setdefault("ends", []).append(ended)

    def leave(original: Any, matcher: SharedMatcher, rank: int) -> Any:
        for ended in matcher.__dict__["ends"]:
            ended.set()
        return original(matcher, rank)

    wrap(LocalTransport, "__init__", make)
    wrap(SharedMatcher, "leave", leave)


@caught_by("test_portal")
def threads_calls_start_in_any_order() -> None:
    def progress(original: Any, door: Door) -> bool | None:
        calls = [door._calls.popleft() for _ in range(len(door._calls))]
        door._calls.extend(reversed(calls))
        return original(door)

    wrap(Door, "progress", progress)


@caught_by("test_portal")
def threads_calls_start_in_the_loops_context() -> None:
    """Start calls outside the context of the thread which has called, so that its current lane is forgotten."""
    loops = contextvars.copy_context()
    replace(blocking_works, "copy_context", loops.copy)


@caught_by("test_portal")
def threads_do_not_wait() -> None:
    """A thread goes on before the op has ended, with the buffer that was given."""

    def wait(original: Any, work: BlockingWork[Any], *patience: Any) -> Any:
        return work.op.result() if not work.done() and not patience else original(work, *patience)

    wrap(BlockingWork, "wait", wait)


@caught_by("test_portal")
def threads_lanes_are_the_communicators() -> None:
    """Issue a thread's calls on a lane without the lane."""

    def issue(original: Any, lane: BlockingLane, *args: Any) -> Any:
        own, lane._target = lane._target, lane._target._comm
        try:
            return original(lane, *args)
        finally:
            lane._target = own

    wrap(BlockingLane, "_issue", issue)


@caught_by("test_portal")
def threads_that_wait_are_forgotten() -> None:
    """Only those that wait before the op ends go on; what ends with an error wakes nobody."""
    wrap(BlockingWork, "_ended", lambda original, work: None if work._work.error is not None else original(work))


@caught_by("test_timeouts")
def notes_are_lost() -> None:
    """Drop notes, while the transport says that it carries them."""
    wrap(LocalTransport, "say", lambda original, transport, rank, note: True)


@caught_by("test_timeouts")
def notes_come_from_another_rank() -> None:
    def say(original: Any, transport: LocalTransport, rank: int, note: bytes) -> bool:
        matcher, sender = transport._matcher, (transport._rank + 1) % transport._matcher.size
        if (other := matcher.ranks[rank]) is not None:
            other.on_note(sender, note)
        return True

    wrap(LocalTransport, "say", say)


def wrap_semantics(kind: str, replacement: Any) -> None:
    """Replace what a kind of collective means."""
    original = semantics._SEMANTICS[kind]
    semantics._SEMANTICS[kind] = lambda records: replacement(original, records)
