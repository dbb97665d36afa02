"""The protocol that moves a version of the weights. Each rank is a state machine.

::

    source ranks  --Enter-->  source rank 0  --Propose-->  target rank 0  --Clear-->    target ranks
                  <--Admit--                 <--Admit---                  <--Cleared--
                  ---------------- the bytes, and then Written --------------------->
                  <-Settled--                <-Settled--                  <--Whole----

Rank 0 of the target decides: a version becomes current when all target ranks have the whole version. Until then the old
version stays current. If a move fails, the ranks never use the move's buffers again, because late bytes of a lost
process may arrive at any time. The protocol is a two-phase commit. A target rank votes for the commit when all bytes
have arrived (Gray, "Notes on Data Base Operating Systems", 1978).

A buffer is reused only when no rank reads the version in the buffer. First, target rank 0 drops the buffer's version,
so that no plan or step with this version begins any more. Then rank 0 asks the other ranks for their buffers, and tells
them how many steps with this version have begun.

Each transition is a pure function. The function takes a state and a message, and returns the next state and the actions
to carry out. :mod:`aiocomms.resharding.source` and :mod:`aiocomms.resharding.target` carry the actions out. The model
checker in the tests also carries the actions out.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeVar

from aiocomms.resharding.words import (
    Admit,
    Broken,
    Clear,
    Cleared,
    Enter,
    Falter,
    Propose,
    Settled,
    Whole,
    Withdraw,
    Word,
    Written,
)

Side = Literal["source", "target"]
LOST: Final = "lost"
REFUSED: Final = "refused"
DIFFERS: Final = "differs"
LATE: Final = "late"
"""The kind of a move's failure if a deadline has passed.

There are three other kinds. ``LOST``: a rank or connection was lost, or the move was given up. ``REFUSED``: the target
has already had this version or a higher version. ``DIFFERS``: the source ranks have passed different versions.
"""

DOUBT: Final = "; it may have become current before that"
"""The end of an error's message if target rank 0, which decides whether a version is current, has not answered."""


class Notify(NamedTuple):
    """The action to send a message to a rank. The receiver may be the sender itself."""

    side: Side
    rank: int
    word: Word


class Offer(NamedTuple):
    """An action: a target rank prepares a buffer, and then sends :class:`Cleared` to target rank 0."""

    move: int
    buffer: int
    """The number of the buffer.

    The action makes the buffer if it does not exist. The action drops all buffers that the rank's state does not name.
    """
    steps: int


class Switch(NamedTuple):
    """The action of target rank 0 to use only ``version`` in new steps and plans."""

    version: int


class Write(NamedTuple):
    """The action of a source rank to start writing."""

    move: int
    descriptors: tuple[bytes, ...]


class Stop(NamedTuple):
    """The action of a source rank to stop writing."""


class Return(NamedTuple):
    """The action of a source rank to return from ``move``."""

    kind: str
    why: str


Action = Notify | Offer | Switch | Write | Stop | Return
_S = TypeVar("_S")
Next = tuple[_S, list[Action]]
"""The type of a transition's result: the next state, and the actions to carry out."""


class Held(NamedTuple):
    """A version that can be read on a target rank."""

    version: int
    buffer: int
    uses: int = 0
    """The number of steps and plans that read the version now."""
    steps: int = 0
    """The number of steps that have begun with the version."""


class TargetRank(NamedTuple):
    """The state of a target rank."""

    rank: int
    held: tuple[Held, ...]
    free: tuple[int, ...] = (1,)
    """The numbers of the buffers that are not in use."""
    made: int = 2
    """The number of buffers that were ever made."""
    move: Clear | None = None
    """The pending move of this rank."""
    filling: int | None = None
    """The number of the buffer that this rank has offered for the last move; None: no buffer was offered."""
    missing: frozenset[int] = frozenset()
    """The source ranks that have not yet written all their parts of the version."""
    gone: int = 0
    """The number of steps that began with the version that this rank dropped last.

    If the move after the drop fails, the rank keeps this number.
    """

    def clear(self, word: Clear) -> Next[TargetRank]:
        """Provide a buffer for a version.

        If the last move has failed, drop its version. A move has failed if its version is not current.
        """
        held = tuple(it for it in self.held if it.version == word.keep or it.buffer != self.filling)
        return self._replace(held=held, move=word, filling=None, missing=frozenset(word.writers))._offered()

    def _offered(self) -> Next[TargetRank]:
        """Offer a buffer, if this rank reads no version except the current version."""
        move = self.move
        if move is None or self.filling is not None:
            return self, []
        old = [it for it in self.held if it.version != move.keep]
        if any(it.uses or it.steps < move.steps for it in old):
            return self, []
        held = tuple(it for it in self.held if it.version == move.keep)
        free, made = (*self.free, *(it.buffer for it in old)), self.made
        if not free:
            free, made = (made,), made + 1
        gone = old[0].steps if old else self.gone
        after = self._replace(held=held, free=free[1:], made=made, filling=free[0], gone=gone)
        after, actions = after._whole()
        return after, [Offer(move.move, free[0], gone), *actions]

    def written(self, writer: int, word: Written) -> Next[TargetRank]:
        """Record that a source rank has written all its parts of the version."""
        if self.move is None or self.move.move != word.move or writer not in self.missing:
            return self, []
        return self._replace(missing=self.missing - {writer})._whole()

    def _whole(self) -> Next[TargetRank]:
        if self.move is None or self.filling is None or self.missing:
            return self, []
        held = (*self.held, Held(self.move.version, self.filling))
        return self._replace(held=held, move=None), [Notify("target", 0, Whole(self.move.move))]

    def lose(self, writer: int, why: str) -> Next[TargetRank]:
        """Record that the connection with a source rank is lost, so that the rank's remaining writes cannot arrive."""
        if self.move is None or writer not in self.missing:
            return self, []
        return self._replace(move=None), [Notify("target", 0, Broken(self.move.move, why))]

    def holds(self, version: int) -> bool:
        """Return whether this rank holds a version."""
        return any(it.version == version for it in self.held)

    def use(self, version: int, step: bool) -> TargetRank:
        """Record that a step or plan begins to read a held version."""
        return self._counted(version, 1, int(step))

    def release(self, version: int) -> Next[TargetRank]:
        """Record that a step or plan has finished reading a version."""
        return self._counted(version, -1, 0)._offered()

    def _counted(self, version: int, uses: int, steps: int) -> TargetRank:
        counted = (
            it._replace(uses=it.uses + uses, steps=it.steps + steps) if it.version == version else it
            for it in self.held
        )
        return self._replace(held=tuple(counted))


class TargetLeader(NamedTuple):
    """The state of target rank 0 as the leader of the target ranks."""

    ranks: int
    current: int | None
    """The version of the next step; None if there is no version yet."""
    newest: int
    """The highest version that any target rank has had."""
    moves: int = 0
    move: Propose | None = None
    """The source's proposal for the pending move; None if no move is pending."""
    source: bytes = b""
    cleared: tuple[bytes, ...] = ()
    """The descriptors of the buffers that the target ranks offer, in rank order.

    The descriptor is empty if a rank has not offered a buffer yet.
    """
    whole: frozenset[int] = frozenset()
    """The ranks that have the whole version."""
    lost: str = ""
    """The reason why the target is lost; empty if the target is not lost."""

    def propose(self, source: bytes, word: Propose) -> Next[TargetLeader]:
        """Begin a move. The source proposes a move only when the source knows the result of its last move."""
        if self.lost:
            return self, [_to_source(Settled(word.call, LOST, self.lost))]
        if word.version <= self.newest:
            why = f"version is {word.version}, and the target has had {self.newest}, wanted a higher one"
            return self, [_to_source(Settled(word.call, REFUSED, why))]
        after = self._replace(
            moves=self.moves + 1, move=word, source=source, cleared=(b"",) * self.ranks, whole=frozenset()
        )
        return after, [after._clear(0, 0)]

    def _clear(self, rank: int, steps: int) -> Notify:
        assert self.move is not None
        asked = Clear(self.moves, self.source, self.move.version, self.current, steps, self.move.writers[rank])
        return Notify("target", rank, asked)

    def cleared_by(self, rank: int, word: Cleared) -> Next[TargetLeader]:
        """Record that a rank offers a buffer. Rank 0 is the first rank that offers a buffer."""
        if self.move is None or word.move != self.moves:
            return self, []
        cleared = (*self.cleared[:rank], word.descriptor, *self.cleared[rank + 1 :])
        after, actions = self._replace(cleared=cleared), list[Action]()
        if rank == 0:
            actions += [after._clear(other, word.steps) for other in range(1, self.ranks)]
        if all(cleared):
            actions.append(_to_source(Admit(self.move.call, self.moves, cleared)))
        return after, actions

    def whole_on(self, rank: int, word: Whole) -> Next[TargetLeader]:
        """Record that a rank has the whole version.

        When every rank has the whole version, the version becomes current.
        """
        if self.move is None or word.move != self.moves:
            return self, []
        whole = self.whole | {rank}
        if len(whole) < self.ranks:
            return self._replace(whole=whole), []
        version = self.move.version
        after = self._replace(current=version, newest=version, move=None)
        return after, [Switch(version), _to_source(Settled(self.move.call))]

    def broken_on(self, word: Broken) -> Next[TargetLeader]:
        """Record that a rank cannot get the whole version."""
        return self._give_up(LOST, word.why) if word.move == self.moves else (self, [])

    def withdraw(self, word: Withdraw) -> Next[TargetLeader]:
        """End the move at the source's request, unless the version is already current."""
        if self.move is None or word.call != self.move.call:
            return self, []
        return self._give_up(word.kind, f"{word.why}; {self.waits_for()}")

    def lose(self, why: str) -> Next[TargetLeader]:
        """Record that the target's communicator is lost, so that further moves fail."""
        after, actions = self._give_up(LOST, why)
        return after._replace(lost=self.lost or why), actions

    def leave(self, why: str) -> Next[TargetLeader]:
        """Record that the source is gone, or that another source has replaced it."""
        return self._give_up(LOST, why)

    def _give_up(self, kind: str, why: str) -> Next[TargetLeader]:
        if self.move is None:
            return self, []
        return self._replace(move=None), [_to_source(Settled(self.move.call, kind, why))]

    def waits_for(self) -> str:
        """Return a text for the source's error, which says for what the pending move waits."""
        using = [rank for rank in range(self.ranks) if not self.cleared[rank]]
        if not self.cleared[0]:
            return "target rank 0 still uses the version before the current one"
        if using:
            return f"{_ranks('target', using)} still {_verb('use', using)} the version before the current one"
        late = [rank for rank in range(self.ranks) if rank not in self.whole]
        return f"not all of it has arrived at {_ranks('target', late)}"


class SourceRank(NamedTuple):
    """The state of a source rank."""

    rank: int
    targets: tuple[int, ...]
    """The target ranks that this rank writes to."""
    call: int = 0
    """The number of the rank's last call of ``move``."""
    phase: Literal["idle", "entered", "writing", "written", "faltered"] = "idle"
    early: tuple[Settled, ...] = ()
    """The results of calls that this rank has not made yet. Another rank has already given up these calls."""
    lost: str = ""

    def start(self, version: int) -> Next[SourceRank]:
        """Begin a call of ``move``."""
        call = self.call + 1
        if self.lost:
            return self, [Return(LOST, self.lost)]
        after = self._replace(call=call, phase="entered")
        entering: list[Action] = [Notify("source", 0, Enter(call, version))]
        if self.early:
            after, actions = after._replace(early=self.early[1:]).settled(self.early[0])
            return after, entering + actions
        return after, entering

    def admit(self, word: Admit) -> Next[SourceRank]:
        """Begin to write into the target's buffers."""
        if self.phase != "entered" or word.call != self.call:
            return self, []
        return self._replace(phase="writing"), [Write(word.move, word.descriptors)]

    def wrote(self, move: int) -> Next[SourceRank]:
        """Record that all writes of this rank have arrived."""
        if self.phase != "writing":
            return self, []
        return self._replace(phase="written"), [Notify("target", rank, Written(move)) for rank in self.targets]

    def falter(self, kind: str, why: str) -> Next[SourceRank]:
        """Give up the move, because of a cancellation, a missed deadline, or a failed connection or conversion."""
        if self.phase in ("idle", "faltered"):
            return self, []
        return self._replace(phase="faltered"), [Stop(), Notify("source", 0, Falter(self.call, kind, why))]

    def settled(self, word: Settled) -> Next[SourceRank]:
        """Record that a move is over, perhaps before this rank has called ``move``."""
        if word.call > self.call:
            return self._replace(early=(*self.early, word)), []
        if self.phase == "idle" or word.call < self.call:
            return self, []
        return self._replace(phase="idle"), [Stop(), Return(word.kind, word.why)]

    def lose(self, why: str, kind: str = LOST) -> Next[SourceRank]:
        """Record that the source's communicator is lost, or that rank 0 of the source does not answer."""
        after = self._replace(phase="idle", lost=self.lost or why)
        return after, [] if self.phase == "idle" else [Stop(), Return(kind, why + DOUBT)]


class SourceLeader(NamedTuple):
    """The state of source rank 0 as the leader of the source ranks."""

    ranks: int
    writers: tuple[tuple[int, ...], ...]
    """The source ranks that write to each target rank."""
    call: int = 1
    """The number of the pending call, or of the next call if none is pending."""
    entered: tuple[tuple[int, int], ...] = ()
    """The ranks that have called ``move``, and their versions."""
    phase: Literal["gathering", "proposed", "withdrawn"] = "gathering"
    kind: str = LOST
    """The kind of the failure that made the source withdraw the version."""
    closed: str = ""
    """A text that says which rank was closed; empty if no rank was closed.

    After a rank was closed, all further moves fail for this reason.
    """

    def enter(self, rank: int, word: Enter) -> Next[SourceLeader]:
        """Record that a rank has called ``move``.

        When every rank has called ``move``, propose the version to the target.
        """
        if word.call != self.call:
            return self, []
        if self.closed:
            return self._settle(LOST, self.closed)
        entered = (*self.entered, (rank, word.version))
        after = self._replace(entered=entered)
        if len(entered) < self.ranks:
            return after, []
        if len({version for _, version in entered}) > 1:
            calls = ", ".join(f"source rank {who} for {version}" for who, version in sorted(entered))
            return after._settle(DIFFERS, f"the ranks call for different versions: {calls}")
        propose = Propose(self.call, word.version, self.writers)
        return after._replace(phase="proposed"), [Notify("target", 0, propose)]

    def falter(self, word: Falter) -> Next[SourceLeader]:
        """Record that a rank has given up the move.

        If the version is already current on the target, the target's answer to the withdrawal says this.
        """
        if word.call != self.call or self.phase == "withdrawn":
            return self, []
        if self.phase == "proposed":
            after = self._replace(phase="withdrawn", kind=word.kind)
            return after, [Notify("target", 0, Withdraw(self.call, word.kind, word.why))]
        here = {rank for rank, _ in self.entered}
        absent = [rank for rank in range(self.ranks) if rank not in here]
        called = f"; {_ranks('source', absent)} {_verb('have', absent)} not called move" if absent else ""
        return self._settle(word.kind, word.why + called)

    def closed_by(self, rank: int) -> Next[SourceLeader]:
        """Record that a rank was closed. The closed rank has already given up its own call of ``move``."""
        after = self._replace(closed=self.closed or f"source rank {rank} was closed")
        return after._settle(LOST, after.closed) if self.entered and self.phase == "gathering" else (after, [])

    def admit(self, word: Admit) -> Next[SourceLeader]:
        """Let all ranks write into the target's buffers."""
        if self.phase != "proposed" or word.call != self.call:
            return self, []
        return self, [Notify("source", rank, word) for rank in range(self.ranks)]

    def settled(self, word: Settled) -> Next[SourceLeader]:
        """Record that the target now uses the version, or has given the version up."""
        if self.phase == "gathering" or word.call != self.call:
            return self, []
        return self._settle(word.kind, word.why)

    def target_gone(self, why: str) -> Next[SourceLeader]:
        """Record that the connection with target rank 0 is lost."""
        return self._settle(self.kind, why + DOUBT) if self.phase != "gathering" else (self, [])

    def lose(self, why: str) -> Next[SourceLeader]:
        """Record that the source's communicator is lost."""
        if self.phase != "proposed":
            return self, []
        return self._replace(phase="withdrawn"), [Notify("target", 0, Withdraw(self.call, LOST, why))]

    def _settle(self, kind: str, why: str) -> Next[SourceLeader]:
        after = self._replace(call=self.call + 1, entered=(), phase="gathering", kind=LOST)
        settled = Settled(self.call, kind, why)
        return after, [Notify("source", rank, settled) for rank in range(self.ranks)]


def _to_source(word: Word) -> Notify:
    return Notify("source", 0, word)


def _ranks(side: Side, ranks: list[int]) -> str:
    """Return a phrase that names the given ranks."""
    names = ", ".join(map(str, ranks[:-1]))
    return f"{side} rank {ranks[0]}" if len(ranks) == 1 else f"{side} ranks {names} and {ranks[-1]}"


def _verb(verb: str, ranks: list[int]) -> str:
    if len(ranks) > 1:
        return verb
    return "has" if verb == "have" else f"{verb}s"
