"""The target: the server's side. Each rank has two buffers, and all ranks switch to a version at the same step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any, Self

import anyio
from torch import Tensor

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, as_int, op_deadline, short
from aiocomms.communicator.communicator import Communicator
from aiocomms.endpoints.endpoint import Endpoint
from aiocomms.endpoints.peer import Peer
from aiocomms.errors import ArgumentError, CommClosedError, CommError, MoveLostError, ProtocolError
from aiocomms.lowlevel import run_in_thread
from aiocomms.progress.driver import Bell
from aiocomms.progress.work import Work
from aiocomms.resharding.chunks import Chunk, chunks_of, records_of
from aiocomms.resharding.party import Left, Party, check_open, hear, say
from aiocomms.resharding.protocol import LOST, Action, Held, Notify, Offer, Switch, TargetLeader, TargetRank
from aiocomms.resharding.versions import VersionMemory, Weights
from aiocomms.resharding.words import (
    WORDS,
    Broken,
    Clear,
    Cleared,
    Inquire,
    Inventory,
    Known,
    Present,
    Propose,
    RankClosed,
    Settled,
    TargetRecord,
    Whole,
    Withdraw,
    Word,
    Written,
    inventory,
)

Tensors = Mapping[str, Tensor | Chunk]
REPLACED = "another source has taken its place"
MOST = 1 << 62
"""The upper bound of versions. Every version is below this number."""


def checked_version(version: Any) -> int:
    """Return a version as an int.

    :raises ArgumentError: the value is no int, or out of range.
    """
    version = as_int(version)
    if type(version) is not int or not 0 <= version < MOST:
        raise ArgumentError(f"version is {short(version)}, wanted an int: 0 <= version < 2**62")
    return version


class Target(Party):
    """One rank of a server whose weights a source replaces while the server runs; created by :meth:`open`.

    A target belongs to the event loop and thread that created it. The end of an ``async with`` block closes the target.
    If the block ends with an error, the target also aborts the connections to the source.
    """

    _inventory: Inventory

    def __init__(self, comm: Communicator, here: Endpoint, tensors: Tensors, version: int) -> None:
        super().__init__(comm, "target")
        self._here, self._memory = here, VersionMemory(here)
        self._tensors = tensors
        """The program's tensors, until :meth:`open` has copied them."""
        self._state = TargetRank(comm.rank, (Held(version, 0),))
        self._leader = TargetLeader(comm.size, None, version)
        self._switched = Bell(self._driver)
        self._peers: dict[tuple[bytes, int], Peer] = {}
        """The connections to source ranks. The key is the pair of the source's number and the source rank."""
        self._speaker: tuple[bytes, Peer] | None = None
        """The number of the source that moves versions, and the connection to rank 0 of this source."""

    @classmethod
    async def open(
        cls,
        comm: Communicator,
        tensors: Tensors,
        here: Endpoint,
        *,
        version: int = 0,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Self:
        """Prepare the ranks of a server for moves of new weights from a source. Collective.

        The call copies the values of the tensors. The server reads the copies through :meth:`step`, or through
        :meth:`pin` and :meth:`at`. The target needs twice the memory of the tensors: once for the current version and
        once for the next version.

        :param comm: the communicator of the server's ranks.
        :param tensors: this rank's parts of the weights, by name. Each is a whole tensor, a DTensor or a
            :class:`Chunk`, of any dtype. All must be dense and on the endpoint's device. A name must mean the same
            tensor on all ranks and at the source.
        :param here: an endpoint of this rank that only this target uses. Keep the endpoint open until this target is
            closed.
        :param version: the version of the tensors' values, at least 0. The ranks may pass different versions,
            for example because a rank is new. If the versions differ, no version is current until a source has moved
            a version.
        :param timeout: the deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :raises ArgumentError: an argument is wrong, or another rank opens a source.
        :raises MoveLostError: another rank has failed or was cancelled.
        :raises CommError: the communicator is lost or closed.
        """
        check_open(comm, here, timeout)
        self = cls(comm, here, tensors, checked_version(version))
        await self._run_open(partial(self._meet, timeout))
        self._background.start(self._accept)  # A cancelled open leaves all connections to the endpoint's next target.
        return self

    async def _meet(self, timeout: OpTimeout) -> None:
        """Prepare the buffers, exchange the inventories of all ranks, and start to receive messages."""
        await self._meet_sides(timeout)

        async def prepare(_: Left) -> bytes:
            chunks = await run_in_thread(partial(chunks_of, self._tensors, self._here.device))
            self._memory.records = records_of(chunks)
            await self._memory.make(0)
            await self._memory.fill(0, chunks)
            self._tensors = {}
            await self._memory.make(1)
            mine = TargetRecord(self._here.address, self._memory.records)
            return WORDS.encode(Inventory(self._leader.newest, (mine,)))

        told = await self._together(prepare, timeout)
        all_of = [inventory(word, rank) for rank, word in enumerate(told)]
        versions = [it.version for it in all_of]
        self._inventory = Inventory(max(versions), tuple(it.ranks[0] for it in all_of))
        current = versions[0] if len({*versions}) == 1 else None
        self._leader = self._leader._replace(current=current, newest=max(versions))
        self._start_hearing()

    def __repr__(self) -> str:
        versions = [it.version for it in self._state.held]
        return f"<Target of '{self._comm.name}' rank {self._rank}: versions {versions}>"

    @property
    def address(self) -> bytes:
        """The address to which a source connects. The address is the same on all ranks, and has at most 1,024 bytes."""
        return self._inventory.ranks[0].address

    @property
    def version(self) -> int | None:
        """The current version (on rank 0), or the highest version that is complete on this rank (on any other rank).

        The value is None if there is no such version.
        """
        if self._rank == 0:
            return self._leader.current
        return max((it.version for it in self._state.held), default=None)

    # ------------------------------------------------------------------------------------------------------ reading

    @contextlib.asynccontextmanager
    async def step(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> AsyncIterator[Weights]:
        """Take a step with the same version on all ranks: ``async with target.step() as weights``. Collective.

        The method broadcasts an object from rank 0 on the communicator. So all ranks must call this method at the
        same place in the order of collectives. The weights stay unchanged until the end of the ``async with`` block.

        :param timeout: the deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :raises MoveLostError: no version has become current before rank 0's deadline. The error is also raised if no
            version is current and none can become current any more, because a rank was closed.
        :raises CommError: the communicator is lost or closed.
        """
        self._check("step")
        step, seconds = _Step(self), op_deadline(timeout, self._comm._seconds)
        found = await self._current(seconds) if self._rank == 0 else ""
        work = self._comm.broadcast_object(found, 0, timeout=timeout)
        work.add_done_callback(step.hear)
        if isinstance(found, int):  # Other ranks may begin this step even if the broadcast fails here.
            step.begin(found)
        try:
            step.begin(self._version_of(await work, "step"))
            yield self._weights(step.version)
        finally:
            step.end()

    @contextlib.asynccontextmanager
    async def pin(self) -> AsyncIterator[Weights]:
        """Keep the current version unchanged until the ``async with`` block ends. Call this method on rank 0.

        Send ``weights.version`` to the other ranks, for example in a plan. The other ranks read this version through
        :meth:`at`. The call waits until there is a current version.

        :raises ArgumentError: this rank is not rank 0.
        :raises MoveLostError: no version is current, and none can become current, because a rank was closed or lost.
        :raises CommError: the communicator is lost or closed.
        """
        if self._rank:
            raise ArgumentError(f"pin was called on rank {self._rank}, wanted at(version): rank 0 says which one")
        with self.at(self._version_of(await self._current(math.inf), "pin")) as weights:
            yield weights

    @contextlib.contextmanager
    def at(self, version: int) -> Iterator[Weights]:
        """Read a version that rank 0 has pinned: ``with target.at(version) as weights``. The call does not communicate.

        :param version: the pinned version of rank 0.
        :raises ArgumentError: this rank does not hold the version, because the version was never current or because
            rank 0 no longer pins it.
        """
        self._check("at")
        if not self._state.holds(version):
            held = " and ".join(str(it.version) for it in self._state.held)
            raise ArgumentError(
                f"version is {short(version)}, wanted one that rank 0 has pinned; this rank holds {held}"
            )
        self._state = self._state.use(version, step=False)
        try:
            yield self._weights(version)
        finally:
            self._release(version)

    async def _current(self, seconds: float) -> int | str:
        """Wait until a version is current on rank 0. Return the version, or the reason why no version is current."""
        with anyio.move_on_after(seconds):
            while self._leader.current is None and not self._leader.lost:
                await self._switched
                self._check("step")
        if self._leader.current is not None:
            return self._leader.current
        return self._leader.lost or f"rank 0 has waited {seconds:g} s for one"

    def _version_of(self, found: int | str, op: str) -> int:
        if isinstance(found, int):
            return found
        raise MoveLostError(f"no version is current: {found}", comm=self._comm.name, op=op, rank=self._rank)

    def _check(self, op: str) -> None:
        if self._closed:
            raise CommClosedError("the target is closed", comm=self._comm.name, op=op, rank=self._rank)

    def _weights(self, version: int) -> Weights:
        buffer = next(it.buffer for it in self._state.held if it.version == version)
        return Weights(version, self._memory.tensors(buffer))

    def _begin_step(self, version: int) -> None:
        if not self._state.holds(version):
            raise ProtocolError(f"rank 0 takes a step with version {version}, which this rank does not hold", peer=0)
        self._state = self._state.use(version, step=True)

    def _release(self, version: int) -> None:
        self._state, actions = self._state.release(version)
        self._act(actions)

    # --------------------------------------------------------------------------------------- the other target ranks

    def _heard(self, rank: int, word: Word) -> None:
        actions: list[Action]
        match word:
            case Clear() if rank == 0:
                self._state, actions = self._state.clear(word)
                for writer in word.writers:
                    if (word.source, writer) not in self._peers:
                        self._state, more = self._state.lose(
                            writer, f"target rank {self._rank} has lost source rank {writer}"
                        )
                        actions += more
            case Cleared() if self._rank == 0:
                self._leader, actions = self._leader.cleared_by(rank, word)
            case Whole() if self._rank == 0:
                self._leader, actions = self._leader.whole_on(rank, word)
            case Broken() if self._rank == 0:
                self._leader, actions = self._leader.broken_on(word)
            case RankClosed():  # Rank 0 decides for all ranks. A source itself notices that rank 0 is closed.
                actions = self._lose(f"target rank {rank} was closed")
            case _:
                raise ProtocolError(f"rank {rank} says {type(word).__name__}, which is not for it to say", peer=rank)
        self._act(actions)

    def _do(self, action: Action) -> None:
        match action:
            case Notify("target", rank, word):
                self._tell(rank, word)
            case Notify(_, _, word):
                if self._speaker is not None:
                    say(self._speaker[1], word)
            case Offer():
                self._background.start(partial(self._offer, action))
            case Switch():
                self._switched.ring()

    async def _offer(self, offer: Offer) -> None:
        """Prepare a buffer. At the same time, background tasks revoke the regions of dropped buffers."""
        state = self._state
        named = {*(it.buffer for it in state.held), *state.free, offer.buffer}
        for region in self._memory.drop(named):
            self._background.start(region.revoke)
        try:
            await self._memory.make(offer.buffer)
        except Exception as error:
            self._tell(0, Broken(offer.move, f"target rank {self._rank} has no memory for it: {error}"))
        else:
            self._tell(0, Cleared(offer.move, self._memory.descriptor(offer.buffer), offer.steps))

    def _lose(self, why: str) -> list[Action]:
        """Record that no further version will become current."""
        self._leader, actions = self._leader.lose(why)
        self._switched.ring()
        return actions

    def _lost(self, error: CommError) -> None:
        self._act(self._lose(f"the target is lost: {error}"))

    # ------------------------------------------------------------------------------------------------- source ranks

    async def _accept(self) -> None:
        while True:
            peer = await self._here.accept()
            self._background.start(partial(self._serve, peer))

    async def _serve(self, peer: Peer) -> None:
        """Receive the messages of a source rank."""
        who: tuple[bytes, int] | None = None
        try:
            while True:
                word = await hear(peer)
                if isinstance(word, Present):
                    who = word.source, word.rank
                    self._peers[who] = peer
                    say(peer, Known())
                else:
                    self._hear_source(peer, who, word)
        except CommError as error:
            self._gone(peer, who, error)
            await peer.aclose()

    def _hear_source(self, peer: Peer, who: tuple[bytes, int] | None, word: Word) -> None:
        speaks = self._speaker is not None and self._speaker[1] is peer
        actions: list[Action] = []
        match word:
            case Inquire() if self._rank == 0:
                self._leader, actions = self._leader.leave(REPLACED)
                self._act(actions)
                self._speaker, actions = (word.source, peer), []
                say(peer, Inventory(self._leader.newest, self._inventory.ranks))
            case Written() if who is not None:
                self._state, actions = self._state.written(who[1], word)
            case Propose() if len(word.writers) != self._comm.size:
                raise ProtocolError(f"a source speaks of {len(word.writers)} target ranks, wanted {self._comm.size}")
            case Propose() if speaks and self._speaker is not None:
                self._leader, actions = self._leader.propose(self._speaker[0], word)
            case Withdraw() if speaks:
                self._leader, actions = self._leader.withdraw(word)
            case Propose():
                say(peer, Settled(word.call, LOST, REPLACED))
            case Withdraw():
                pass  # The source already knows that another one has replaced it.
            case _:
                raise ProtocolError(f"a source rank says {type(word).__name__}, which is not for it to say")
        self._act(actions)

    def _gone(self, peer: Peer, who: tuple[bytes, int] | None, error: CommError) -> None:
        """Record that the connection with a source rank is over."""
        actions: list[Action] = []
        rank = 0 if who is None else who[1]
        why = f"source rank {rank}: {error.message}"
        if who is not None and self._peers.get(who) is peer:
            del self._peers[who]
            if self._state.move is not None and self._state.move.source == who[0]:
                self._state, actions = self._state.lose(rank, why)
        if self._speaker is not None and self._speaker[1] is peer:
            self._leader, more = self._leader.leave(why)
            self._speaker, actions = None, actions + more
        self._act(actions)

    async def _close(self) -> None:
        """See :meth:`Party._close`."""
        if not self._closed:
            self._act(self._lose("the target is closed"))
        await self._leave()
        await self._free()

    async def _free(self) -> None:
        """See :meth:`Party._free`."""
        self._tensors = {}
        await super()._free()
        if self._speaker is not None:
            await self._speaker[1].aclose()
        for region in self._memory.drop(set()):
            with contextlib.suppress(CommError):
                await region.revoke()


class _Step:
    """A step on this rank. The step gets its version from rank 0's broadcast, even if the step's task is cancelled."""

    version: int

    def __init__(self, target: Target) -> None:
        self._target, self._begun, self._over = target, False, False

    def hear(self, work: Work[Any]) -> None:
        """Begin the step with the version from rank 0's broadcast. Do nothing if the broadcast delivers no version."""
        if work.exception() is None and isinstance(work.result(), int):
            self.begin(work.result())

    def begin(self, version: int) -> None:
        """Begin the step, if it has not begun yet."""
        if self._begun:
            return
        self._target._begin_step(version)
        self.version, self._begun = version, True
        if self._over:
            self._target._release(version)

    def end(self) -> None:
        """End the step. A step that has not begun ends as soon as it begins."""
        self._over = True
        if self._begun:
            self._target._release(self.version)
