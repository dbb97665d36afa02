"""The source: the side that has new weights. The ranks of the source write the weights into the buffers of a target."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Self

import anyio

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, wrong_type
from aiocomms.communicator.communicator import Communicator
from aiocomms.core.core import CLOSE_GRACE
from aiocomms.endpoints.endpoint import Endpoint
from aiocomms.endpoints.peer import Peer
from aiocomms.errors import (
    ArgumentError,
    CommClosedError,
    CommError,
    MismatchError,
    MoveLostError,
    MoveTimeoutError,
    ProtocolError,
    as_reason,
)
from aiocomms.lowlevel import clock, run_in_thread
from aiocomms.lowlevel.shielding import shielded
from aiocomms.progress.driver import Bell, Promise
from aiocomms.resharding.chunks import Chunk, chunks_of, records_of, unchanged
from aiocomms.resharding.party import Left, Party, check_open, hear, say
from aiocomms.resharding.plan import MovePlan, planned
from aiocomms.resharding.protocol import (
    DIFFERS,
    LATE,
    LOST,
    REFUSED,
    Action,
    Notify,
    Return,
    SourceLeader,
    SourceRank,
    Stop,
    Write,
)
from aiocomms.resharding.target import Tensors, checked_version
from aiocomms.resharding.words import (
    WORDS,
    Admit,
    ChunkRecord,
    Enter,
    Falter,
    Inquire,
    Inventory,
    Known,
    Present,
    RankClosed,
    Settled,
    TargetRecord,
    Word,
    inventory,
)
from aiocomms.resharding.writing import Convert, write

_ERRORS: Final[dict[str, type[CommError]]] = {
    LOST: MoveLostError, REFUSED: ArgumentError, DIFFERS: MismatchError, LATE: MoveTimeoutError
}  # fmt: skip
_LATER: Final = 1.0
"""The extra seconds for which ranks other than 0 wait for rank 0's error, because that error names the late ranks."""


class Source(Party):
    """One rank of the side that has new weights; created by :meth:`open`.

    A source belongs to the event loop and thread that created it. The end of an ``async with`` block closes the source.
    If the block ends with an error, the source also aborts the connections to the target.
    """

    _plan: MovePlan

    _chunks: Mapping[str, Chunk]
    _records: tuple[ChunkRecord, ...]

    def __init__(self, comm: Communicator, here: Endpoint, tensors: Tensors, convert: Convert | None) -> None:
        super().__init__(comm, "source")
        self._here, self._tensors, self._convert = here, tensors, convert
        self._peers: dict[int, Peer] = {}
        """The connections to the target ranks that this rank writes to. Rank 0 is also connected to target rank 0."""
        self._version = self._asked = 0
        self._returned: Return | None = None
        self._cause: BaseException | None = None
        """The error on this rank that made the last move fail."""
        self._gone = ""
        """The reason why target rank 0 is unreachable; empty if target rank 0 is reachable."""
        self._writing: anyio.CancelScope | None = None
        self._news = Bell(self._driver)

    @classmethod
    async def open(
        cls,
        comm: Communicator,
        tensors: Tensors,
        here: Endpoint,
        address: bytes,
        *,
        convert: Convert | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Self:
        """Connect to a target, and plan the moves. Collective. This source replaces the target's previous source.

        If the task is cancelled, rank 0 still waits up to 5 seconds for the target's answer.

        :param comm: the communicator of the ranks that have the weights.
        :param tensors: this rank's parts of the weights, by name. Each is a whole tensor, a DTensor or a
            :class:`Chunk`. All must be dense and on the endpoint's device. Together the ranks must hold everything that
            the target needs, and may hold more. Each move reads the values that the tensors have at the time of the
            move.
        :param here: an endpoint of this rank that only this source uses. Keep the endpoint open until this source is
            closed.
        :param address: the :attr:`Target.address`; only the value on rank 0 is used.
        :param convert: a function ``convert(name, part, dtype)``. The function converts ``part``, a part of the tensor
            ``name``, to the target's ``dtype``, and returns the result. The function runs in a thread, on parts of any
            shape, so the function must work elementwise. If None, torch converts and rounds the values.
        :param timeout: the deadline of each phase of this call in seconds; None: no deadline. The default is the
            communicator's timeout.
        :raises ArgumentError: an argument is wrong, the source lacks elements that the target needs, the shape of a
            whole tensor differs between ranks of either side, or another rank opens a target.
        :raises MoveLostError: another rank has failed or was cancelled.
        :raises CommError: this rank could not connect, or the communicator is lost or closed.
        """
        check_open(comm, here, timeout)
        if convert is not None and not callable(convert):
            raise wrong_type("convert", convert, "a function, or None")
        self = cls(comm, here, tensors, convert)
        await self._run_open(partial(self._meet, address, timeout))
        return self

    async def _meet(self, address: bytes, timeout: OpTimeout) -> None:
        """Compute the plan, and connect to the target.

        For the plan, the target and the other source ranks tell this rank which chunks they hold.
        """
        number = clock.token_bytes(16)
        await self._meet_sides(timeout)

        async def inquire(left: Left) -> tuple[bytes, bytes, bytes]:
            self._chunks = await run_in_thread(partial(chunks_of, self._tensors, self._here.device))
            self._tensors, self._records = dict(self._tensors), records_of(self._chunks)
            mine = WORDS.encode(Inventory(0, (TargetRecord(b"", self._records),)))
            return number, mine, b"" if self._rank else await self._inquire(address, number, left)

        told = await self._together(inquire, timeout)
        number, target = told[0][0], inventory(told[0][2])
        held = [inventory(word, rank).ranks[0].chunks for rank, (_, word, _) in enumerate(told)]
        self._version = target.version

        async def connect(left: Left) -> None:
            self._plan = await run_in_thread(partial(planned, self._rank, held, target.ranks))
            await self._connect(number, target, left)

        await self._together(connect, timeout)
        self._state = SourceRank(self._rank, self._plan.targets)
        self._leader = SourceLeader(self._comm.size, self._plan.writers)
        self._start_hearing()
        if self._rank == 0:
            self._background.start(self._hear_target)

    async def _inquire(self, address: bytes, number: bytes, left: Left) -> bytes:
        """Ask target rank 0 for the target's inventory, and return the encoded inventory."""
        peer = self._peers[0] = await self._here.connect(address, timeout=left())
        say(peer, Inquire(number))
        work, answered = peer.recv_object(timeout=left()), Promise(self._driver)
        work.add_done_callback(lambda _: answered.set())
        try:
            await answered
        except BaseException:  # The next source could otherwise overtake the inquiry, and would be replaced.
            with anyio.move_on_after(CLOSE_GRACE, shield=True):
                await answered
            raise
        word: bytes = work.result()
        inventory(word)
        return word

    async def _connect(self, number: bytes, target: Inventory, left: Left) -> None:
        """Connect to the target ranks that this rank writes to."""
        for rank in self._plan.targets:
            peer = self._peers[rank] = await self._here.connect(target.ranks[rank].address, timeout=left())
            say(peer, Present(number, self._rank))
            word = WORDS.decode(await peer.recv_object(timeout=left()))
            if not isinstance(word, Known):
                raise ProtocolError(f"target rank {rank} says {type(word).__name__}, wanted that it knows this rank")

    def __repr__(self) -> str:
        return f"<Source of '{self._comm.name}' rank {self._rank}: version {self._version}>"

    @property
    def version(self) -> int:
        """The highest version that the target has had, as far as this rank knows."""
        return self._version

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank writes for each version, in the target's dtypes."""
        return self._plan.nbytes[self._rank]

    # -------------------------------------------------------------------------------------------------------- moving

    async def move(self, version: int, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Move the values to the target as a new version. After this call, the target's next step uses that version.

        Collective. Do not change the tensors during the call. If the call fails or is cancelled on one rank, the call
        fails on all ranks, and the target keeps its current version.

        :param version: a number above every version that the target has had.
        :param timeout: the deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :raises ArgumentError: the version is not above all earlier versions. All ranks raise this error, and nothing
            was written. The error is also raised if a tensor of this rank has another shape, dtype or device than at
            the opening, or has no memory. In this case the other ranks raise MoveLostError.
        :raises MismatchError: the ranks' versions differ; nothing was written.
        :raises MoveTimeoutError: the deadline has passed on a rank; the message says what the move waited for.
        :raises MoveLostError: a rank of either side was lost, closed or cancelled, or ``convert`` has raised an error;
            the message names the rank.
        """
        version, seconds = checked_version(version), arguments.op_deadline(timeout, self._comm._seconds)
        self._check()
        self._asked, self._returned, self._cause = version, None, None
        self._state, actions = self._state.start(version)
        self._act(actions)
        try:
            self._chunks = unchanged(self._tensors, self._here.device, self._records)
            with anyio.move_on_after(seconds) as scope:
                await self._end()
            if scope.cancelled_caught:
                await self._give_up(LATE, f"its deadline of {seconds:g} s has passed on source rank {self._rank}")
        except ArgumentError as error:
            await shielded(partial(self._give_up, LOST, f"source rank {self._rank}: {as_reason(error)}"))
            raise error.about(comm=self._comm.name, op="move", rank=self._rank) from None
        except anyio.get_cancelled_exc_class():
            await shielded(partial(self._give_up, LOST, f"it was cancelled on source rank {self._rank}"))
            raise
        self._conclude()

    def _check(self) -> None:
        error: CommError | None = None
        if self._closed:
            error = CommClosedError("the source is closed")
        elif self._moving:
            error = ArgumentError("move was called while another one is under way; await that first")
        if error is not None:
            raise error.about(comm=self._comm.name, op="move", rank=self._rank)

    @property
    def _moving(self) -> bool:
        return self._state.phase != "idle" or self._writing is not None

    async def _end(self) -> None:
        """Wait until the move is over and this rank has stopped writing."""
        while self._moving:
            await self._news

    async def _give_up(self, kind: str, why: str) -> None:
        """End the move on all ranks, and wait until it has ended.

        If other ranks do not answer, stop waiting for them after some seconds.
        """
        self._falter(kind, why)
        seconds = CLOSE_GRACE + (_LATER if self._rank else 0.0)
        with anyio.move_on_after(seconds):
            await self._end()
            return
        if self._rank == 0:
            self._peers[0].abort(f"it has not answered for {seconds:g} s")
        else:
            why += f", and source rank 0 has not answered for {seconds:g} s"
            self._state, actions = self._state.lose(why, kind)
            self._act(actions)
        await self._end()

    def _falter(self, kind: str, why: str) -> None:
        self._state, actions = self._state.falter(kind, why)
        self._act(actions)

    def _conclude(self) -> None:
        returned = self._returned
        assert returned is not None
        if returned.kind:
            text = f"version {self._asked} is not current: {returned.why}"
            raise _ERRORS[returned.kind](text, comm=self._comm.name, op="move", rank=self._rank) from self._cause

    async def _write(self, action: Write, scope: anyio.CancelScope) -> None:
        actions: list[Action] = []
        try:
            with scope:
                buffers = {rank: (self._peers[rank], action.descriptors[rank]) for rank in self._plan.targets}
                await write(self._plan.copies, self._chunks, buffers, self._convert)
                self._state, actions = self._state.wrote(action.move)
        except (Exception, BaseExceptionGroup) as error:  # The function ``convert`` may raise an error of any class.
            self._cause = cause = first(error)
            why = cause.message if isinstance(cause, MoveLostError) else f"source rank {self._rank}: {as_reason(cause)}"
            self._state, actions = self._state.falter(LOST, why)
        finally:
            self._writing = None
            self._act(actions)
            self._news.ring()

    # ------------------------------------------------------------------------------------------ messages and actions

    def _heard(self, rank: int, word: Word) -> None:
        actions: list[Action]
        match word:
            case Enter() if self._rank == 0:
                self._leader, actions = self._leader.enter(rank, word)
            case Falter() if self._rank == 0:
                self._leader, actions = self._leader.falter(word)
            case Admit() if rank == 0:
                self._state, actions = self._state.admit(word)
            case Settled() if rank == 0:
                self._state, actions = self._state.settled(word)
            case RankClosed() if rank == 0:
                self._state, actions = self._state.lose("source rank 0 was closed")
            case RankClosed():
                self._leader, actions = self._leader.closed_by(rank)
            case _:
                raise ProtocolError(f"rank {rank} says {type(word).__name__}, which is not for it to say", peer=rank)
        self._act(actions)

    def _do(self, action: Action) -> None:
        match action:
            case Notify("source", rank, word):
                self._tell(rank, word)
            case Notify(_, rank, word):
                say(self._peers[rank], word)
                if rank == 0 and self._rank == 0 and self._gone:
                    self._target_gone()
            case Write():
                self._writing = anyio.CancelScope()
                self._background.start(partial(self._write, action, self._writing))
            case Stop():
                if self._writing is not None:
                    self._writing.cancel()
            case Return():
                self._returned = action
                if not action.kind:  # The version counts even if the caller was cancelled.
                    self._version = self._asked
                self._news.ring()

    async def _hear_target(self) -> None:
        """Receive the messages of target rank 0, on source rank 0."""
        peer = self._peers[0]
        try:
            while True:
                word = await hear(peer)
                actions: list[Action] = []
                match word:
                    case Admit():
                        self._leader, actions = self._leader.admit(word)
                    case Settled():
                        self._leader, actions = self._leader.settled(word)
                self._act(actions)
        except CommError as error:
            self._gone = f"target rank 0: {error.message}"
            self._target_gone()

    def _target_gone(self) -> None:
        self._leader, actions = self._leader.target_gone(self._gone)
        self._act(actions)

    def _lost(self, error: CommError) -> None:
        why = f"the source is lost: {error}"
        self._leader, actions = self._leader.lose(why)
        self._act(actions)
        self._state, actions = self._state.lose(why)
        self._act(actions)

    async def _close(self) -> None:
        """See :meth:`Party._close`."""
        if not self._closed and hasattr(self, "_state"):
            self._falter(LOST, f"source rank {self._rank} was closed")
            self._state, actions = self._state.lose("the source was closed")
            self._act(actions)
        await self._leave()
        await self._free()

    async def _free(self) -> None:
        """See :meth:`Party._free`."""
        self._tensors, self._chunks = {}, {}
        await super()._free()


def first(error: BaseException) -> BaseException:
    """Return the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
