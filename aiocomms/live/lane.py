"""The lanes of a live group, and their collectives. Each lane has its own order of calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Final, Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.errors import ArgumentError, CommClosedError, CommError, CommTimeoutError, wrong_thread
from aiocomms.live.contributions import CALLED, Called, Contribution, contributions, flat
from aiocomms.live.registers import LONG
from aiocomms.live.rounds import BEGIN, MOST_HEADER, NativeCall, Round, Rounds, Use
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.shielding import shielded
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import buffers, checks
from aiocomms.ops.reductions import ReduceOp, reduce
from aiocomms.ops.writing import octets, write, writing
from aiocomms.progress.background import Background

_CPU: Final = torch.device("cpu")

T = TypeVar("T")


class Partial(NamedTuple, Generic[T]):
    """The result of a collective, and the ranks that contributed to it.

    ``ranks`` and ``number`` are the same on all ranks that get a result of the call.
    """

    value: T
    ranks: tuple[int, ...]
    """The ranks that contributed, in ascending order. If this rank was late, the tuple does not contain it."""
    number: int
    """The number of the call in its lane, from 0."""


class LivePlace:
    """The rank of this process in a group, and the group's parameters.

    The checks of tensors and the error messages use this object.
    """

    fast_check: Callable[[object, bool], bool] | None = None
    device: torch.device = _CPU

    def __init__(self, name: str, rank: int, size: int, timeout: float, capacity: int) -> None:
        self.name, self.rank, self.size, self.timeout, self.capacity = name, rank, size, timeout, capacity
        self.closed = False
        self._thread = get_ident()

    def check(self, op: str) -> None:
        """Check that the caller runs on the group's thread, and that the group is open.

        :raises RuntimeError: the caller runs on another thread.
        :raises CommClosedError: the group is closed.
        """
        if get_ident() != self._thread:
            raise wrong_thread(f"{op} on '{self.name}'")
        if self.closed:
            raise CommClosedError("the group was closed")


class QueuedCall:
    """A call that cannot contribute at once. The call contributes later, even if its task is cancelled before that.

    :param parts: the tensors of the contribution, as byte tensors. If the task is cancelled, copies replace these
        tensors.
    :param begun: the round to which :meth:`Rounds.at_once` has contributed.
    """

    def __init__(
        self, header: bytes, parts: list[Tensor], ends: float, use: Use[Any], native: NativeCall, begun: Round | None
    ) -> None:
        self.parts, self.ends = parts, ends
        self._header, self._use, self._native, self._begun = header, use, native, begun
        self._abandoned = False
        self._started, self._ended = anyio.Event(), anyio.Event()
        self._result: tuple[Any, Round] | None = None
        self._error: Exception | None = None

    async def run(self, rounds: Rounds) -> None:
        """Take part in the next round (one collective)."""
        self._started.set()
        try:
            self._result = await rounds.take_part(
                self._header, self.parts, self.ends, self._used, self._native, self._begun
            )
        except GeneratorExit:  # The loop has ended, so there is no class of cancellations.
            raise
        except anyio.get_cancelled_exc_class():  # The group is closed.
            raise
        except Exception as error:
            # The error refers to this frame, and so to this object, until a caller takes the error.
            self._error = None if self._abandoned else error
        except BaseException as error:
            self._error = CommError(f"{type(error).__name__} has interrupted the call")
            raise
        finally:
            self._ended.set()

    async def _used(self, given: dict[int, tuple[bytes, Tensor]]) -> Any:
        return None if self._abandoned else await self._use(given)

    def close(self) -> None:
        """Fail this call, because the group is closed before the call has contributed."""
        self._started.set()
        self._ended.set()

    async def ended(self, rounds: Rounds) -> tuple[Any, Round]:
        """Wait for the result.

        :raises CommTimeoutError: the lane's earlier calls have not ended by this call's deadline.
        """
        await self._awaited(rounds)
        if self._result is not None:
            return self._result
        error, self._error = self._error or CommClosedError("the group was closed"), None
        try:
            raise error
        finally:
            del error

    async def _awaited(self, rounds: Rounds) -> None:
        try:
            with anyio.move_on_after(self.ends - clock.now()):
                await self._started.wait()
            if not self._started.is_set():
                raise CommTimeoutError("the deadline has passed, and the lane's earlier calls have not ended")
            await self._ended.wait()
        except BaseException as error:
            self._abandoned, self._error = True, None
            self._native.abandoned = True
            if not self._ended.is_set() and not isinstance(error, GeneratorExit):  # A closed coroutine cannot await.
                await shielded(partial(self._keep, rounds))
            raise

    async def _keep(self, rounds: Rounds) -> None:
        """Replace the parts by copies, because the program may change its tensors after the cancellation."""

        def copied() -> list[Tensor]:
            return [part.clone() for part in self.parts]

        long = sum(map(len, self.parts)) > LONG
        self.parts[:] = await run_in_thread(copied, anyhow=True) if long else copied()
        await rounds.written()


class LiveLane(Handle):
    """A lane of a live group.

    The lane matches the calls of different ranks by the order in which each rank makes its calls.

    :meth:`LiveGroup.lane` makes the lane. Until its deadline, a call waits for the ranks that took part in the lane's
        last call, and for ranks that rejoin the lane. Then the call completes with the contributions of all ranks that
        have called. No call waits for dead ranks. A late rank gets the result without its own contribution. If the
        other ranks have already completed a late rank's call and the next call, the late rank gets a
        :class:`~aiocomms.errors.LeftBehindError`. The next call of the late rank joins the lane's current collective.
        The first call of a process that replaces a dead process also joins the current collective.

    Tensors must be contiguous and on the CPU. ``all_reduce`` writes its result into the given tensor; the other
    collectives return new tensors. Calls of several tasks run one after the other.
    """

    name: str

    def __init__(self, name: str, place: LivePlace, rounds: Rounds, background: Background) -> None:
        self.name, self._place, self._rounds, self._background = name, place, rounds, background
        self._queue: deque[QueuedCall] = deque()
        self._busy = False
        """True while a call takes part in a round."""

    def __repr__(self) -> str:
        return f"<LiveLane '{self.name}' of '{self._place.name}', rank {self._place.rank} of {self._place.size}>"

    async def all_reduce(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Partial[Tensor]:
        """Reduce one tensor per rank, and write the result into each rank's tensor.

        The tensors are reduced in rank order. The results on all ranks are bit-identical.

        :param tensor: a tensor of the same dtype and shape on all ranks. After a LeftBehindError the tensor's content
            is undefined. After other errors the tensor is unchanged.
        :param op: the operator; AVG divides by the number of ranks that contributed.
        :param timeout: the seconds to wait for earlier calls of the lane and for other ranks. None: wait for all live
            ranks without a deadline. The default is the group's timeout.
        :returns: ``tensor``, with the reduction.
        :raises ArgumentError: an argument is wrong; nothing was contributed.
        :raises MismatchError: ranks have called different ops or have passed different shapes. The lane stays usable.
        :raises LeftBehindError: the other ranks have completed this call and later calls without this rank.
        :raises CommTimeoutError: the lane's earlier calls have not ended before the deadline. This rank still
            contributes ``tensor`` to the collective when the earlier calls have ended.
        :raises CommClosedError: the group is closed, or another process has replaced this process.
        """
        found = self._rounds.call("all_reduce", tensor, op, timeout)
        if type(found) is Partial:
            return found
        operator = self._operator(op, tensor)
        reduced = partial(_reduced, operator, 0)
        native = NativeCall("all_reduce", tensor, op, found)
        done = await self._call(f"all_reduce({operator})", [tensor], reduced, timeout, native, alike=True)
        if done.value is not tensor:
            await _write(tensor, done.value)
        return done._replace(value=tensor)

    async def reduce_scatter(
        self, inputs: Sequence[Tensor], op: ReduceOp | str = ReduceOp.SUM, *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Partial[Tensor]:
        """Reduce the tensors that all ranks pass for this rank, ``inputs[rank]``, and return the reduction.

        :param inputs: one tensor for each rank of the group. ``inputs[i]`` has the same dtype and shape on all ranks.
        :param op: see :meth:`all_reduce`.
        :param timeout: see :meth:`all_reduce`.
        :returns: the reduction for this rank.
        :raises CommError: see the errors of :meth:`all_reduce`.
        """
        found = self._rounds.call("reduce_scatter", inputs, op, timeout)
        if type(found) is Partial:
            return found
        inputs = self._one_each(inputs)
        operator = self._operator(op, inputs[0])
        reduced = partial(_reduced, operator, self._place.rank)
        native = NativeCall("reduce_scatter", inputs, op, found)
        return await self._call(f"reduce_scatter({operator})", inputs, reduced, timeout, native, alike=True)

    async def all_gather(self, tensor: Tensor, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[dict[int, Tensor]]:
        """Gather every rank's tensor on all ranks.

        :param tensor: a tensor of any shape, with the same dtype on all ranks.
        :param timeout: see :meth:`all_reduce`.
        :returns: the tensors, as a dict from ranks to tensors.
        :raises CommError: see the errors of :meth:`all_reduce`.
        """
        found = self._rounds.call("all_gather", tensor, None, timeout)
        if type(found) is Partial:
            return found
        native = NativeCall("all_gather", tensor, None, found)
        return await self._call("all_gather", [tensor], partial(_gathered, 0), timeout, native)

    async def all_to_all(
        self, inputs: Sequence[Tensor], *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Partial[dict[int, Tensor]]:
        """Send ``inputs[r]`` to each rank ``r``. The tensors for dead ranks are ignored.

        :param inputs: one tensor for each rank of the group, of any shapes, with the same dtype on all ranks.
        :param timeout: see :meth:`all_reduce`.
        :returns: the tensors that this rank has received, as a dict from senders to tensors.
        :raises CommError: see the errors of :meth:`all_reduce`.
        """
        found = self._rounds.call("all_to_all", inputs, None, timeout)
        if type(found) is Partial:
            return found
        native, gathered = NativeCall("all_to_all", inputs, None, found), partial(_gathered, self._place.rank)
        return await self._call("all_to_all", self._one_each(inputs), gathered, timeout, native)

    async def broadcast(self, tensor: Tensor, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[Tensor]:
        """Return the tensor of the lowest rank that contributes. The result's ``ranks[0]`` is this lowest rank.

        :param tensor: this rank's tensor, of any shape, with the same dtype on all ranks.
        :param timeout: see :meth:`all_reduce`.
        :returns: the tensor of ``ranks[0]``.
        :raises CommError: see the errors of :meth:`all_reduce`.
        """
        found = self._rounds.call("broadcast", tensor, None, timeout)
        if type(found) is Partial:
            return found
        native = NativeCall("broadcast", tensor, None, found)
        return await self._call("broadcast", [tensor], _of_lowest, timeout, native)

    async def barrier(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[None]:
        """Wait until all live ranks have called this method.

        :param timeout: see :meth:`all_reduce`.
        :raises CommError: see the errors of :meth:`all_reduce`.
        """
        found = self._rounds.call("barrier", None, None, timeout)
        if type(found) is Partial:
            return found
        native = NativeCall("barrier", None, None, found)
        return await self._call("barrier", [], lambda given: None, timeout, native)

    # ------------------------------------------------------------------------------------------------------------------

    async def _call(
        self, op: str, tensors: Sequence[Tensor], result: Callable[[dict[int, Contribution]], T],
        timeout: OpTimeout, native: NativeCall, alike: bool = False,
    ) -> Partial[T]:  # fmt: skip
        place, name = self._place, op.partition("(")[0]
        try:
            place.check(name)
            ends = clock.now() + arguments.op_deadline(timeout, place.timeout)
            long = self._bytes(tensors, write=native.kind == "all_reduce") > LONG
            called = Called.of(op, tensors, alike)
            header = CALLED.encode(called)
            if len(header) > MOST_HEADER:
                raise ArgumentError(f"the shapes take {len(header)} bytes, wanted at most {MOST_HEADER}")
            self._rounds.learn(native, header)

            async def use(given: dict[int, tuple[bytes, Tensor]]) -> T:
                def make() -> T:
                    return result(contributions(called, header, given))

                return await run_in_thread(make) if long else make()

            value, round_ = await self._in_turn(header, flat(tensors), ends, use, native)
        except CommError as error:
            raise error.about(comm=place.name, op=name, rank=place.rank) from error.__cause__
        return Partial(value, round_.ranks, round_.number - BEGIN)

    async def _in_turn(
        self, header: bytes, parts: list[Tensor], ends: float, use: Use[T], native: NativeCall
    ) -> tuple[T, Round]:
        """Take part in the next round. If this rank cannot contribute at once, a background task takes part.

        The cancellation of the caller does not affect the background task.
        """
        waits = self._busy and native.word is None
        begun = None if waits else self._rounds.at_once(header, parts, native.word)
        if begun is None or self._busy:
            call = QueuedCall(header, parts, ends, use, native, begun)
            if begun is None:
                self._queue.append(call)
            else:  # A finalizer has called the lane since native code has contributed, and its call has not begun.
                self._queue.appendleft(call)
            self._start_queue()
            return await call.ended(self._rounds)
        self._busy = True
        try:
            return await self._rounds.take_part(header, parts, ends, use, native, begun)
        finally:
            self._release()

    def _start_queue(self) -> None:
        if self._queue and not self._busy and not self._place.closed:
            self._busy = True
            self._background.start(self._run_queue)

    async def _run_queue(self) -> None:
        try:
            while self._queue:
                await self._queue.popleft().run(self._rounds)
        finally:
            self._release()

    def _release(self) -> None:
        """Start the queued calls. If there are none, let native code make the next call."""
        self._busy = False
        self._start_queue()
        if not self._busy:
            self._rounds.arm_native()

    def release_native(self) -> None:
        """Release the native code, which maps the group's memory. Later calls run in Python."""
        self._rounds.release_native()

    def close(self) -> None:
        """Fail all calls that have not contributed yet, because the group is closed."""
        while self._queue:
            self._queue.popleft().close()

    def _bytes(self, tensors: Sequence[Tensor], write: bool) -> int:
        """Check tensors, and return their total size in bytes."""
        check = checks.writable if write else checks.readable
        for tensor in tensors:
            check("tensor" if len(tensors) == 1 else "inputs", tensor, self._place)
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self._place.capacity:
            raise ArgumentError(f"{size} bytes are given, wanted at most the group's capacity: {self._place.capacity}")
        return size

    def _one_each(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        given = checks.sequence("inputs", inputs)
        checks.listed("inputs", given, self._place, write=False, equal=False)
        return given

    def _operator(self, op: ReduceOp | str, tensor: Tensor) -> ReduceOp:
        operator = ReduceOp.parse(op)
        checks.is_tensor("tensor", tensor)
        if not operator.supports(tensor.dtype):
            raise ArgumentError(f"op is {operator}, which is not defined for dtype {tensor.dtype}")
        return operator


def _reduced(op: ReduceOp, part: int, given: dict[int, Contribution]) -> Tensor:
    """Reduce one tensor of each contribution."""
    tensors = [it.tensor(part) for it in given.values()]
    out = buffers.like(tensors[0])
    reduce(op, tensors, out)
    return out


def _gathered(part: int, given: dict[int, Contribution]) -> dict[int, Tensor]:
    return {rank: _copy(it.tensor(part)) for rank, it in given.items()}


def _of_lowest(given: dict[int, Contribution]) -> Tensor:
    return _copy(given[min(given)].tensor(0))


async def _write(out: Tensor, value: Tensor) -> None:
    """Copy a result in pieces, and yield to the event loop after each piece.

    The copy does not run in a thread, because a copy in a thread cannot be cancelled.
    """
    to, source = octets(out), octets(value)
    for begin in range(0, len(to), LONG):
        with writing(out):
            to[begin : begin + LONG].copy_(source[begin : begin + LONG])
        if len(to) > LONG:
            await anyio.lowlevel.checkpoint()


def _copy(tensor: Tensor) -> Tensor:
    out = buffers.like(tensor)
    write(out, tensor)
    return out
