"""Collectives of a live group, by lanes: each lane has its own order of calls."""

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
from aiocomms.live.rounds import BEGIN, MOST_HEADER, Into, Round, Rounds, Use
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
    """The ranks that contributed, in ascending order. This rank is missing if it was late."""
    number: int
    """The number of the call in its lane, from 0."""


class LivePlace:
    """The place of this process in a group, for checks of tensors and for errors."""

    fast_check: Callable[[object, bool], bool] | None = None
    device: torch.device = _CPU

    def __init__(self, name: str, rank: int, size: int, timeout: float, capacity: int) -> None:
        self.name, self.rank, self.size, self.timeout, self.capacity = name, rank, size, timeout, capacity
        self.closed = False
        self._thread = get_ident()

    @property
    def usable(self) -> bool:
        """True if :meth:`check` raises no error."""
        return not self.closed and get_ident() == self._thread

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
    """A call that cannot contribute at once. The call contributes later, even if its task is cancelled in between.

    :param parts: the tensors of the contribution, as bytes. If the task is cancelled, copies replace them.
    """

    def __init__(self, header: bytes, parts: list[Tensor], ends: float, use: Use[Any], into: Into | None) -> None:
        self.parts, self.ends = parts, ends
        self._header, self._use, self._into = header, use, into
        self._abandoned = False
        self._begun, self._ended = anyio.Event(), anyio.Event()
        self._result: tuple[Any, Round] | None = None
        self._error: Exception | None = None

    async def run(self, rounds: Rounds) -> None:
        """Take part in the next round."""
        self._begun.set()
        try:
            self._result = await rounds.take_part(self._header, self.parts, self.ends, self._used, self._into)
        except Exception as error:
            # The error refers to this frame, and so to this object, until a caller takes the error.
            self._error = None if self._abandoned else error
        finally:
            self._ended.set()

    async def _used(self, given: dict[int, tuple[bytes, Tensor]]) -> Any:
        return None if self._abandoned else await self._use(given)

    def close(self) -> None:
        """End a call that has not contributed, because its group is closed."""
        self._begun.set()
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
                await self._begun.wait()
            if not self._begun.is_set():
                raise CommTimeoutError("the deadline has passed, and the lane's earlier calls have not ended")
            await self._ended.wait()
        except BaseException as error:
            self._abandoned, self._error = True, None
            if self._into is not None:
                self._into.tensor = None
            if not self._ended.is_set() and not isinstance(error, GeneratorExit):  # A closed coroutine cannot await.
                await shielded(partial(self._keep, rounds))
            raise

    async def _keep(self, rounds: Rounds) -> None:
        """Replace the parts by copies, because the program may change its tensors from now on."""

        def copied() -> list[Tensor]:
            return [part.clone() for part in self.parts]

        long = sum(map(len, self.parts)) > LONG
        self.parts[:] = await run_in_thread(copied, anyhow=True) if long else copied()
        await rounds.written()


class LiveLane(Handle):
    """A lane of a live group, made by :meth:`LiveGroup.lane`. Its collectives match in the order of calls.

    Until its deadline, a call waits for the ranks of the lane's last call and for ranks that join again. Then the call
    completes with the contributions of all ranks that have called. No call waits for dead ranks. A late rank gets the
    result without its own contribution. A rank that is two calls late gets :class:`~aiocomms.errors.LeftBehindError`,
    and its next call joins the lane's current collective. The first call of a process that replaces a dead process also
    joins the current collective.

    Tensors must be contiguous and on the CPU. ``all_reduce`` works in place; the other collectives return new tensors.
    Calls of several tasks run one after the other.
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
        """Reduce one tensor per rank in place, in rank order. The results on all ranks are bit-identical.

        :param tensor: a tensor of the same dtype and shape on all ranks. After an error the tensor is unchanged, but
            after a LeftBehindError its content is undefined.
        :param op: the operator; AVG divides by the number of ranks that contributed.
        :param timeout: the seconds to wait for earlier calls of the lane and for other ranks. None: wait for all live
            ranks without a deadline. The default is the group's timeout.
        :returns: ``tensor``, with the reduction.
        :raises ArgumentError: an argument is wrong; nothing was contributed.
        :raises MismatchError: ranks have called different ops, or have passed different shapes; the lane stays usable.
        :raises LeftBehindError: the other ranks have completed this call and later calls without this rank.
        :raises CommTimeoutError: the lane's earlier calls have not ended in time; the contribution still counts.
        :raises CommClosedError: the group is closed, or another process has replaced this process.
        """
        word = 0
        if self._place.usable and not self._busy and _is_plain(timeout):
            found = self._rounds.all_reduce(tensor, op)
            if type(found) is Partial:
                return found
            word = found or 0
        operator = self._operator(op, tensor)

        def result(given: dict[int, Contribution]) -> Tensor:
            return _reduced(operator, tensor, [next(it.tensors()) for it in given.values()])

        into = Into(tensor, op, operator, word)
        done = await self._call(f"all_reduce({operator})", [tensor], result, timeout, alike=True, into=into)
        if done.value is not tensor:
            await _write(tensor, done.value)
        return done._replace(value=tensor)

    async def reduce_scatter(
        self, inputs: Sequence[Tensor], op: ReduceOp | str = ReduceOp.SUM, *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Partial[Tensor]:
        """Reduce ``inputs[r]`` of all ranks for each rank ``r``, and return the reduction for this rank.

        :param inputs: one tensor for each rank of the group. ``inputs[i]`` has the same dtype and shape on all ranks.
        :param op: as for :meth:`all_reduce`.
        :param timeout: as for :meth:`all_reduce`.
        :returns: the reduction of all ``inputs[rank]``.
        :raises CommError: as :meth:`all_reduce` does.
        """
        inputs = self._one_each(inputs)
        mine, operator = self._place.rank, self._operator(op, inputs[0])

        def result(given: dict[int, Contribution]) -> Tensor:
            return _reduced(operator, inputs[mine], [list(it.tensors())[mine] for it in given.values()])

        return await self._call(f"reduce_scatter({operator})", inputs, result, timeout, alike=True)

    async def all_gather(self, tensor: Tensor, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[dict[int, Tensor]]:
        """Gather every rank's tensor on all ranks.

        :param tensor: a tensor of any shape, with the same dtype on all ranks.
        :param timeout: as for :meth:`all_reduce`.
        :returns: the tensors, by rank.
        :raises CommError: as :meth:`all_reduce` does.
        """

        def result(given: dict[int, Contribution]) -> dict[int, Tensor]:
            return {rank: _copy(next(it.tensors())) for rank, it in given.items()}

        return await self._call("all_gather", [tensor], result, timeout)

    async def all_to_all(
        self, inputs: Sequence[Tensor], *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Partial[dict[int, Tensor]]:
        """Send ``inputs[r]`` to each rank ``r``. Tensors for dead ranks are dropped.

        :param inputs: one tensor for each rank of the group, of any shapes, with the same dtype on all ranks.
        :param timeout: as for :meth:`all_reduce`.
        :returns: the tensors that the ranks have sent to this rank, by rank.
        :raises CommError: as :meth:`all_reduce` does.
        """
        inputs, mine = self._one_each(inputs), self._place.rank

        def result(given: dict[int, Contribution]) -> dict[int, Tensor]:
            return {rank: _copy(list(it.tensors())[mine]) for rank, it in given.items()}

        return await self._call("all_to_all", inputs, result, timeout)

    async def broadcast(self, tensor: Tensor, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[Tensor]:
        """Return the tensor of the lowest rank that takes part: ``ranks[0]`` of the result.

        :param tensor: this rank's tensor, of any shape, with the same dtype on all ranks.
        :param timeout: as for :meth:`all_reduce`.
        :returns: the tensor of ``ranks[0]``.
        :raises CommError: as :meth:`all_reduce` does.
        """

        def result(given: dict[int, Contribution]) -> Tensor:
            return _copy(next(given[min(given)].tensors()))

        return await self._call("broadcast", [tensor], result, timeout)

    async def barrier(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[None]:
        """Wait until all live ranks have called this.

        :param timeout: as for :meth:`all_reduce`.
        :raises CommError: as :meth:`all_reduce` does.
        """
        return await self._call("barrier", [], lambda given: None, timeout)

    # ------------------------------------------------------------------------------------------------------------------

    async def _call(
        self, op: str, tensors: Sequence[Tensor], result: Callable[[dict[int, Contribution]], T],
        timeout: OpTimeout, alike: bool = False, into: Into | None = None,
    ) -> Partial[T]:  # fmt: skip
        place, name = self._place, op.partition("(")[0]
        try:
            place.check(name)
            ends = clock.now() + arguments.op_deadline(timeout, place.timeout)
            long = self._bytes(tensors, write=into is not None) > LONG
            called = Called.of(op, tensors, alike)
            header = CALLED.encode(called)
            if len(header) > MOST_HEADER:
                raise ArgumentError(f"the shapes take {len(header)} bytes, wanted at most {MOST_HEADER}")

            async def use(given: dict[int, tuple[bytes, Tensor]]) -> T:
                def make() -> T:
                    return result(contributions(called, header, given))

                return await run_in_thread(make) if long else make()

            value, round_ = await self._in_turn(header, flat(tensors), ends, use, into)
        except CommError as error:
            raise error.about(comm=place.name, op=name, rank=place.rank) from error.__cause__
        return Partial(value, round_.ranks, round_.number - BEGIN)

    async def _in_turn(
        self, header: bytes, parts: list[Tensor], ends: float, use: Use[T], into: Into | None
    ) -> tuple[T, Round]:
        """Take part in the next round: at once if possible, otherwise in a background task that no caller cancels."""
        begun = None if self._busy else self._rounds.at_once(header, parts, 0 if into is None else into.word)
        if begun is None:
            call = QueuedCall(header, parts, ends, use, into)
            self._queue.append(call)
            self._start_queue()
            return await call.ended(self._rounds)
        self._busy = True
        try:
            return await self._rounds.take_part(header, parts, ends, use, into, begun)
        finally:
            self._busy = False
            self._start_queue()

    def _start_queue(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            self._background.start(self._run_queue)

    async def _run_queue(self) -> None:
        try:
            while self._queue:
                await self._queue.popleft().run(self._rounds)
        finally:
            self._busy = False

    def close(self) -> None:
        """End the calls that have not contributed, because the group is closed."""
        while self._queue:
            self._queue.popleft().close()

    def _bytes(self, tensors: Sequence[Tensor], write: bool) -> int:
        """Check tensors, and return their total bytes."""
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


def _reduced(op: ReduceOp, like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    out = buffers.empty(like.shape, dtype=like.dtype, device=_CPU)
    reduce(op, tensors, out)
    return out


def _is_plain(timeout: OpTimeout) -> bool:
    """Return whether a timeout is valid without further checks."""
    if type(timeout) is float or type(timeout) is int:
        return 0 < timeout <= arguments.TIMEOUT_MAX
    return timeout is COMM_TIMEOUT


async def _write(out: Tensor, value: Tensor) -> None:
    """Copy a result in pieces, and yield to the event loop in between. A copy in a thread cannot be cancelled."""
    to, source = octets(out), octets(value)
    for begin in range(0, len(to), LONG):
        with writing(out):
            to[begin : begin + LONG].copy_(source[begin : begin + LONG])
        if len(to) > LONG:
            await anyio.lowlevel.checkpoint()


def _copy(tensor: Tensor) -> Tensor:
    out = buffers.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
    write(out, tensor)
    return out
