"""The collectives of a live group, by the lanes of which each has an order of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Final, Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.errors import ArgumentError, CommClosedError, CommError, wrong_thread
from aiocomms.live.contributions import CALLED, Called, Contribution, contributions, flat
from aiocomms.live.registers import LONG
from aiocomms.live.rounds import BEGIN, Into, Rounds
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import buffers, checks
from aiocomms.ops.reductions import ReduceOp, reduce
from aiocomms.ops.writing import octets, write, writing

_CPU: Final = torch.device("cpu")

T = TypeVar("T")


class Partial(NamedTuple, Generic[T]):
    """The result of a collective with whom it had.

    The ranks and the number are the same on all ranks that have a result of this call.
    """

    value: T
    ranks: tuple[int, ...]
    """The ranks whose contributions are in it, in ascending order; perhaps without this one, if it was late."""
    number: int
    """The number of the call in its lane, from 0."""


class LivePlace:
    """The place of this process in a group, as checks of tensors and errors need it."""

    fast_check: Callable[[object, bool], bool] | None = None
    device: torch.device = _CPU

    def __init__(self, name: str, rank: int, size: int, timeout: float, capacity: int) -> None:
        self.name, self.rank, self.size, self.timeout, self.capacity = name, rank, size, timeout, capacity
        self.closed = False
        self._thread = get_ident()

    @property
    def usable(self) -> bool:
        """True if :meth:`check` has nothing to say."""
        return not self.closed and get_ident() == self._thread

    def check(self, op: str) -> None:
        """Check that a call is on the group's thread, and that the group is open.

        :raises RuntimeError: it is on another thread.
        :raises CommClosedError: the group is closed.
        """
        if get_ident() != self._thread:
            raise wrong_thread(f"{op} on '{self.name}'")
        if self.closed:
            raise CommClosedError("the group was closed")


class LiveLane(Handle):
    """One lane of a live group: its collectives match by the order of their calls; made by :meth:`LiveGroup.lane`.

    Each waits for the ranks that were in the lane's last call and for those that come back, until its deadline, and
    ends with those that have called it by then. Nobody waits for a rank that has died, and nothing else ends by that.
    A rank that comes late to a call gets the result without its own contribution; one that is late by two calls gets
    :class:`~aiocomms.errors.LeftBehindError`, and its next call is the one that is open then. So is the first of a
    process that has taken a dead one's place.

    Tensors are contiguous and on the CPU. all_reduce works in place, as a communicator's does; the other results are
    new tensors. Calls of several tasks take turns.
    """

    name: str

    def __init__(self, name: str, place: LivePlace, rounds: Rounds) -> None:
        self.name, self._place, self._rounds = name, place, rounds
        self._turn = anyio.Lock()

    def __repr__(self) -> str:
        return f"<LiveLane '{self.name}' of '{self._place.name}', rank {self._place.rank} of {self._place.size}>"

    async def all_reduce(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Partial[Tensor]:
        """Reduce one tensor per rank in place, in the order of the ranks: bit by bit the same on all.

        :param tensor: of the same dtype and shape on all ranks. An error leaves it as it is, but for LeftBehindError:
            then it may hold anything.
        :param op: the operator; AVG divides by how many ranks there are in the result.
        :param timeout: the seconds for which it waits for other ranks; None: as long as they live; by default the
            group's.
        :returns: ``tensor``, with the reduction.
        :raises ArgumentError: an argument is wrong; nothing was contributed.
        :raises MismatchError: ranks have called different ops, or with other shapes; the lane stays usable.
        :raises LeftBehindError: the others have gone on without this rank.
        :raises CommClosedError: the group is closed, or another process has this place.
        """
        word = 0
        if self._place.usable and not self._turn.locked() and _is_plain(timeout):
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
        """Reduce one tensor per rank and target, and return this rank's.

        :param inputs: one tensor for each rank of the group, those of one number alike on all ranks.
        :param op: as of :meth:`all_reduce`.
        :param timeout: as of :meth:`all_reduce`.
        :returns: the reduction of all ``inputs[rank]``.
        :raises CommError: as :meth:`all_reduce` does.
        """
        inputs = self._one_each(inputs)
        mine, operator = self._place.rank, self._operator(op, inputs[0])

        def result(given: dict[int, Contribution]) -> Tensor:
            return _reduced(operator, inputs[mine], [list(it.tensors())[mine] for it in given.values()])

        return await self._call(f"reduce_scatter({operator})", inputs, result, timeout, alike=True)

    async def all_gather(self, tensor: Tensor, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[dict[int, Tensor]]:
        """Gather one tensor per rank.

        :param tensor: of the same dtype on all ranks, of whatever shape.
        :param timeout: as of :meth:`all_reduce`.
        :returns: the tensors, by rank.
        :raises CommError: as :meth:`all_reduce` does.
        """

        def result(given: dict[int, Contribution]) -> dict[int, Tensor]:
            return {rank: _copy(next(it.tensors())) for rank, it in given.items()}

        return await self._call("all_gather", [tensor], result, timeout)

    async def all_to_all(
        self, inputs: Sequence[Tensor], *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Partial[dict[int, Tensor]]:
        """Give each rank a tensor of its own. Those that are gone get nothing.

        :param inputs: one tensor for each rank of the group, of one dtype, of whatever shapes.
        :param timeout: as of :meth:`all_reduce`.
        :returns: what the others have given this rank, by rank.
        :raises CommError: as :meth:`all_reduce` does.
        """
        inputs, mine = self._one_each(inputs), self._place.rank

        def result(given: dict[int, Contribution]) -> dict[int, Tensor]:
            return {rank: _copy(list(it.tensors())[mine]) for rank, it in given.items()}

        return await self._call("all_to_all", inputs, result, timeout)

    async def broadcast(self, tensor: Tensor, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[Tensor]:
        """Give all ranks the tensor of the first that lives: of ``ranks[0]`` of the result.

        :param tensor: what this rank would give, of the same dtype on all ranks, of whatever shape.
        :param timeout: as of :meth:`all_reduce`.
        :returns: that rank's tensor.
        :raises CommError: as :meth:`all_reduce` does.
        """

        def result(given: dict[int, Contribution]) -> Tensor:
            return _copy(next(given[min(given)].tensors()))

        return await self._call("broadcast", [tensor], result, timeout)

    async def barrier(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> Partial[None]:
        """Wait until all that live have called it.

        :param timeout: as of :meth:`all_reduce`.
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
            seconds = arguments.op_deadline(timeout, place.timeout)
            long = self._bytes(tensors, write=into is not None) > LONG
            called = Called.of(op, tensors, alike)
            header = CALLED.encode(called)

            async def use(given: dict[int, tuple[bytes, Tensor]]) -> T:
                def make() -> T:
                    return result(contributions(called, header, given))

                return await run_in_thread(make) if long else make()

            if self._turn.locked():
                await self._turn.acquire()
            else:
                self._turn.acquire_nowait()  # An acquire that need not wait gives the loop a turn.
            try:
                place.check(name)
                ends = clock.now() + seconds
                value, round_ = await self._rounds.take_part(header, flat(tensors), ends, use, into)
            finally:
                self._turn.release()
        except CommError as error:
            raise error.about(comm=place.name, op=name, rank=place.rank) from error.__cause__
        return Partial(value, round_.ranks, round_.number - BEGIN)

    def _bytes(self, tensors: Sequence[Tensor], write: bool) -> int:
        """Check tensors, and return their bytes."""
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
            raise ArgumentError(f"op is {operator}, which there is not for {tensor.dtype}")
        return operator


def _reduced(op: ReduceOp, like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    out = buffers.empty(like.shape, dtype=like.dtype, device=_CPU)
    reduce(op, tensors, out)
    return out


def _is_plain(timeout: OpTimeout) -> bool:
    """Return whether a timeout certainly has nothing wrong with it."""
    if type(timeout) is float or type(timeout) is int:
        return 0 < timeout <= arguments.TIMEOUT_MAX
    return timeout is COMM_TIMEOUT


async def _write(out: Tensor, value: Tensor) -> None:
    """Copy a result in pieces between which the loop has its turn: a thread would go on when the call is cancelled."""
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
