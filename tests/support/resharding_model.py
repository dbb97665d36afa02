"""A model of a move: two source ranks and two target ranks, by the state machines that the library runs.

Messages between two ranks come in their order, and at any later time. Buffers are what was written to them last: while
a source rank may write to one, its part there is junk, and so it stays if the rank never says that all has arrived. At
any time a process dies, a connection is cut, or a source rank gives up (cancelled, or late); who is concerned notices
at any later time. A source rank whose connection is cut may write to the buffers that it knows for as long as it lives.
A rank may be closed: it says so to the other rank of its side, its connections with the other side end, and it drops
what it hears from then on. The target takes steps meanwhile, rank 1 some time after rank 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from aiocomms.resharding.protocol import (
    DOUBT,
    LATE,
    Action,
    Held,
    Notify,
    Offer,
    Return,
    SourceLeader,
    SourceRank,
    Stop,
    Switch,
    TargetLeader,
    TargetRank,
    Write,
)
from aiocomms.resharding.words import (
    Admit,
    Broken,
    Clear,
    Cleared,
    Enter,
    Falter,
    Propose,
    RankClosed,
    Settled,
    Whole,
    Withdraw,
    Written,
)

RANKS = (0, 1)
Node = str
"""A rank: "s0", "s1", "t0" or "t1"."""
SOURCES, TARGETS = ("s0", "s1"), ("t0", "t1")
WRITERS = (RANKS, RANKS)
VERSIONS = (1, 2, 3)
"""The versions that the source ranks move, one after the other; the last is for a source in the place of a lost one."""


class Grant(NamedTuple):
    """A source rank may write to a buffer."""

    source: int
    target: int
    buffer: int
    version: int
    move: int


class State(NamedTuple):
    leader: TargetLeader = TargetLeader(2, 0, 0)
    targets: tuple[TargetRank, ...] = tuple(TargetRank(rank, (Held(0, 0),)) for rank in RANKS)
    speaker: SourceLeader = SourceLeader(2, WRITERS)
    sources: tuple[SourceRank, ...] = tuple(SourceRank(rank, RANKS) for rank in RANKS)
    links: tuple[tuple[tuple[Node, Node], tuple[Any, ...]], ...] = ()
    """The words under way, by sender and receiver."""
    grants: frozenset[Grant] = frozenset()
    """The buffers that source ranks write to now."""
    stray: frozenset[Grant] = frozenset()
    """The buffers that they may still write to, as their connections were lost amid that."""
    whole: frozenset[Grant] = frozenset()
    """The parts that have arrived as a whole, and were not written to since."""
    dead: frozenset[Node] = frozenset()
    closed: frozenset[Node] = frozenset()
    cut: frozenset[tuple[int, int]] = frozenset()
    """Connections of a source rank and a target rank that are cut."""
    noticed: frozenset[tuple[Node, Node]] = frozenset()
    """The ranks that have noticed that they do not reach another one, and that one."""
    steps: tuple[int, ...] = ()
    """The versions of the steps that rank 0 has begun."""
    reading: tuple[int | None, ...] = (None, None)
    """The version of the step that each target rank takes now."""
    followed: int = 0
    """The number of these steps that rank 1 has begun."""
    calls: tuple[int, ...] = (0, 0)
    """The number of calls of each source rank."""
    refused: frozenset[int] = frozenset()
    """Versions of which a source rank was told that they are not current."""
    faults: int = 0
    given_up: int = 0
    closes: int = 0
    anew: bool = False
    """True if another source has taken the place of the first."""


class Model:
    """The protocol, and what may happen around it.

    :param faults: how many processes die and connections are cut, at most.
    :param given_up: how many times a source rank gives up, at most.
    :param steps: how many steps the target takes, at most.
    :param closes: how many ranks are closed, at most.
    """

    def __init__(
        self, faults: int = 1, given_up: int = 1, steps: int = 2, closes: int = 0, versions: tuple[int, ...] = VERSIONS
    ) -> None:
        self.faults, self.given_up, self.steps, self.closes, self.versions = faults, given_up, steps, closes, versions

    # ----------------------------------------------------------------------------------------------- exploring

    def explore(self) -> int:
        """Go to every state, and count them.

        :raises AssertionError: the protocol is wrong in one, or somebody waits for ever.
        """
        seen, left = {State()}, deque([State()])
        while left:
            state = left.popleft()  # The shortest way to a wrong state comes first.
            steps = {*self.happens(state)} - {state}
            if not steps:
                self.check_end(state)
            following = (steps | {*self.harm(state)}) - seen
            for after in following:
                self.check(after)
            left += following
            seen |= following
        return len(seen)

    def check(self, state: State) -> None:
        """Look at what can be read."""
        writing = {(grant.target, grant.buffer) for grant in state.grants | state.stray}
        for rank in RANKS:
            if TARGETS[rank] in state.dead:
                continue
            version = state.reading[rank]
            assert version is None or state.targets[rank].holds(version), (
                f"rank {rank} reads what it does not hold: {state}"
            )
            for held in state.targets[rank].held:
                assert (rank, held.buffer) not in writing, f"target rank {rank} holds what is written: {state}"
                parts = {it.source for it in state.whole if it[1:4] == (rank, held.buffer, held.version)}
                assert not held.version or parts == {*RANKS}, f"target rank {rank} holds half of it: {state}"

    def check_end(self, state: State) -> None:
        """Nothing happens any more: nobody waits."""
        for rank in self.alive(state, SOURCES):
            place = state.sources[rank]
            over = place.phase == "idle" and (place.lost or self.next_version(state, rank) is None)
            assert over, f"source rank {rank} waits for ever: {state}"
        if not gone(state) & {*TARGETS}:
            over = state.reading == (None, None) and state.followed == len(state.steps)
            assert over, f"a step waits for ever: {state}"

    # ------------------------------------------------------------------------------------------- what happens

    def happens(self, state: State) -> Iterator[State]:
        """All that happens next by itself, sooner or later."""
        for (sender, receiver), words in state.links:
            yield self.hear(taken(state, sender, receiver), sender, receiver, words[0])
        yield from self.call(state)
        yield from self.write(state)
        yield from self.notice(state)
        yield from self.step(state)
        yield from self.replace(state)

    def alive(self, state: State, side: tuple[Node, ...]) -> list[int]:
        return [rank for rank in RANKS if side[rank] not in state.dead]

    def next_version(self, state: State, rank: int) -> int | None:
        left = self.versions[state.calls[rank] : None if state.anew else -1]
        return left[0] if left else None

    def call(self, state: State) -> Iterator[State]:
        """A source rank calls ``move``."""
        for rank in self.alive(state, SOURCES):
            place, version = state.sources[rank], self.next_version(state, rank)
            writes = any(grant.source == rank for grant in state.grants)
            if place.phase == "idle" and not place.lost and not writes and version is not None:
                calls = replaced(state.calls, rank, state.calls[rank] + 1)
                yield self.source(state._replace(calls=calls), rank, place.start(version))

    def write(self, state: State) -> Iterator[State]:
        """A source rank has written all, or cannot; or has stopped."""
        for rank in self.alive(state, SOURCES):
            mine = frozenset(grant for grant in state.grants if grant.source == rank)
            if not mine:
                continue
            place = state.sources[rank]
            lost = frozenset(grant for grant in mine if unreachable(state, rank, grant.target))
            stopped = state._replace(grants=state.grants - mine, stray=state.stray | lost)
            if place.phase != "writing":
                yield stopped
            elif lost:
                yield self.source(stopped, rank, place.falter("lost", "a connection"))
            else:
                whole = state._replace(grants=state.grants - mine, whole=state.whole | mine)
                yield self.source(whole, rank, place.wrote(min(mine).move))

    def notice(self, state: State) -> Iterator[State]:
        """A rank notices that another one is gone."""
        for one, other in pairs(state):
            if (one, other) in state.noticed or one in gone(state):
                continue
            links = tuple(it for it in state.links if it[0] != (other, one))
            after = state._replace(noticed=state.noticed | {(one, other)}, links=links)
            me, rank = int(one[1]), int(other[1])
            if one[0] == other[0] == "t":
                yield self.lead(after, after.leader.lose(other)) if me == 0 else after
            elif one[0] == other[0]:
                if me == 0:
                    after = self.speak(after, after.speaker.lose(other))
                yield self.source(after, me, after.sources[me].lose(other))
            elif one[0] == "s":
                yield self.speak(after, after.speaker.target_gone(other)) if (me, rank) == (0, 0) else after
            else:
                after = self.target(after, me, after.targets[me].lose(rank, other))
                yield self.lead(after, after.leader.leave(other)) if (me, rank) == (0, 0) else after

    def step(self, state: State) -> Iterator[State]:
        """The target takes steps; each ends some time."""
        if gone(state) & {*TARGETS}:
            return
        for rank in RANKS:
            version = state.reading[rank]
            if version is not None:
                after = state._replace(reading=replaced(state.reading, rank, None))
                yield self.target(after, rank, after.targets[rank].release(version))
        if state.reading[1] is None and state.followed < len(state.steps):
            version = state.steps[state.followed]
            yield self.begin(state._replace(followed=state.followed + 1), 1, version)

    def begin(self, state: State, rank: int, version: int) -> State:
        assert state.targets[rank].holds(version), f"rank {rank} takes a step with {version}, which is gone: {state}"
        targets = replaced(state.targets, rank, state.targets[rank].use(version, True))
        return state._replace(targets=targets, reading=replaced(state.reading, rank, version))

    def replace(self, state: State) -> Iterator[State]:
        """Another source takes the place of one that is lost, and moves the last version."""
        alive = self.alive(state, SOURCES)
        over = all(state.sources[rank].lost and state.sources[rank].phase == "idle" for rank in alive)
        if state.anew or not gone(state) & {*SOURCES} or not over or gone(state) & {*TARGETS}:
            return
        leader = state.leader.leave("another source")[0]
        links = tuple(it for it in state.links if not {*it[0]} & {*SOURCES})
        yield state._replace(
            leader=leader, speaker=SourceLeader(2, WRITERS), sources=State().sources, links=links, anew=True,
            grants=frozenset(), stray=state.stray | state.grants, dead=state.dead - {*SOURCES}, cut=frozenset(),
            closed=state.closed - {*SOURCES},
            noticed=frozenset(it for it in state.noticed if not {*it} & {*SOURCES}),
            calls=(len(self.versions) - 1,) * 2,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------------- faults

    def harm(self, state: State) -> Iterator[State]:
        """Yield what may happen, and cannot be waited for."""
        if state.faults < self.faults:
            worse = state._replace(faults=state.faults + 1)
            for node in (*SOURCES, *TARGETS):
                if node not in state.dead:
                    yield died(worse, node)
            for pair in ((s, t) for s in RANKS for t in RANKS):
                if pair not in state.cut:
                    yield cut(worse, *pair)
        if state.given_up < self.given_up:
            for rank in self.alive(state, SOURCES):
                after = state._replace(given_up=state.given_up + 1)
                yield self.source(after, rank, after.sources[rank].falter(LATE, f"source rank {rank}"))
        if state.closes < self.closes:
            for node in {*SOURCES, *TARGETS} - gone(state):
                yield self.close(state._replace(closes=state.closes + 1), node)
        if state.reading[0] is None and len(state.steps) < self.steps and not gone(state) & {*TARGETS}:
            version = state.leader.current
            assert version is not None
            yield self.begin(state._replace(steps=(*state.steps, version)), 0, version)

    def close(self, state: State, node: Node) -> State:
        rank = int(node[1])
        if node in SOURCES:
            state = self.source(state, rank, state.sources[rank].falter("lost", node))
            state = self.source(state, rank, state.sources[rank].lose(node))
        elif rank == 0:
            state = self.lead(state, state.leader.lose(node))
        state = told(state, node, f"{node[0]}{1 - rank}", RankClosed())
        for other in RANKS:
            state = cut(state, *((rank, other) if node in SOURCES else (other, rank)))
        return state._replace(closed=state.closed | {node})

    # ------------------------------------------------------------------------------------------------- actions

    def source(self, state: State, rank: int, step: tuple[SourceRank, list[Action]]) -> State:
        state = state._replace(sources=replaced(state.sources, rank, step[0]))
        return self.act(state, f"s{rank}", step[1])

    def target(self, state: State, rank: int, step: tuple[TargetRank, list[Action]]) -> State:
        state = state._replace(targets=replaced(state.targets, rank, step[0]))
        return self.act(state, f"t{rank}", step[1])

    def speak(self, state: State, step: tuple[SourceLeader, list[Action]]) -> State:
        return self.act(state._replace(speaker=step[0]), "s0", step[1])

    def lead(self, state: State, step: tuple[TargetLeader, list[Action]]) -> State:
        return self.act(state._replace(leader=step[0]), "t0", step[1])

    def act(self, state: State, node: Node, actions: Iterable[Action]) -> State:
        for action in actions:
            state = self.do(state, node, action)
        return state

    def do(self, state: State, node: Node, action: Action) -> State:
        rank = int(node[1])
        match action:
            case Notify(side, to, word):
                other = f"{side[0]}{to}"
                if other == node:
                    return self.hear(state, node, node, word)
                state = told(state, node, other, word)
                if (node, other) == ("s0", "t0") and unreachable(state, 0, 0) and ("s0", "t0") in state.noticed:
                    return self.speak(state, state.speaker.target_gone(other))
                return state
            case Offer(move, buffer, steps):
                return told(state, node, node, Cleared(move, b"%d" % buffer, steps))
            case Switch(version):
                assert version not in state.refused, (
                    f"{version} is current, and a source was told that it is not: {state}"
                )
            case Write(move, descriptors):
                version = self.versions[state.calls[rank] - 1]
                grants = frozenset(Grant(rank, t, int(descriptors[t]), version, move) for t in RANKS)
                places = {grant[:3] for grant in grants}
                whole = frozenset(it for it in state.whole if it[:3] not in places)
                return state._replace(grants=state.grants | grants, whole=whole)
            case Return(kind, why):
                version = self.versions[state.calls[rank] - 1]
                if not kind:
                    assert state.leader.newest >= version, f"{version} is not current: {state}"
                elif DOUBT not in why:
                    assert state.leader.current != version, f"{version} is current: {state}"
                    return state._replace(refused=state.refused | {version})
            case Stop():
                pass
        return state

    def hear(self, state: State, sender: Node, receiver: Node, word: Any) -> State:
        """A rank hears a word, and drops it if it is closed."""
        rank, by = int(receiver[1]), int(sender[1])
        if receiver in state.closed:
            return state
        if isinstance(word, Cleared) and rank:  # Its buffer is ready now.
            return told(state, receiver, "t0", word)
        if isinstance(word, Clear):
            state = self.target(state, rank, state.targets[rank].clear(word))
            for writer in (it for it in word.writers if (receiver, f"s{it}") in state.noticed):
                state = self.target(state, rank, state.targets[rank].lose(writer, f"s{writer}"))
            return state
        leader, target, speaker, source = state.leader, state.targets[rank], state.speaker, state.sources[rank]
        takes: dict[type, tuple[Callable[..., State], Callable[[], Any]]] = {
            Propose: (self.lead, lambda: leader.propose(b"", word)),
            Withdraw: (self.lead, lambda: leader.withdraw(word)),
            Cleared: (self.lead, lambda: leader.cleared_by(by, word)),
            Whole: (self.lead, lambda: leader.whole_on(by, word)),
            Broken: (self.lead, lambda: leader.broken_on(word)),
            Written: (partial(self.target, rank=rank), lambda: target.written(by, word)),
            Enter: (self.speak, lambda: speaker.enter(by, word)),
            Falter: (self.speak, lambda: speaker.falter(word)),
            RankClosed: (self.lead, lambda: leader.lose(sender)),
        }
        if (sender, receiver) == ("s1", "s0"):
            takes[RankClosed] = self.speak, lambda: speaker.closed_by(by)
        if sender == "t0":
            takes |= {
                Admit: (self.speak, lambda: speaker.admit(word)),
                Settled: (self.speak, lambda: speaker.settled(word)),
            }
        elif sender == "s0":
            own = partial(self.source, rank=rank)
            takes |= {
                Admit: (own, lambda: source.admit(word)),
                Settled: (own, lambda: source.settled(word)),
                RankClosed: (own, lambda: source.lose(sender)),
            }
        act, step = takes[type(word)]
        return act(state, step=step())


def replaced(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def told(state: State, sender: Node, receiver: Node, word: Any) -> State:
    """The state with one more word under way, unless it leads nowhere."""
    if {sender, receiver} & state.dead or sender in state.closed or is_cut(state, sender, receiver):
        return state
    links = dict(state.links)
    links[sender, receiver] = (*links.get((sender, receiver), ()), word)
    return state._replace(links=tuple(sorted(links.items(), key=lambda it: it[0])))


def taken(state: State, sender: Node, receiver: Node) -> State:
    """The state without the first word from a rank to another one."""
    links = dict(state.links)
    rest = links.pop((sender, receiver))[1:]
    if rest:
        links[sender, receiver] = rest
    return state._replace(links=tuple(sorted(links.items(), key=lambda it: it[0])))


def died(state: State, node: Node) -> State:
    """A process dies. What it has said may arrive, until that is noticed."""
    rank = int(node[1])
    links = tuple(it for it in state.links if it[0][1] != node)
    gone = frozenset(it for it in state.grants if node[0] == "s" and it.source == rank)
    return state._replace(dead=state.dead | {node}, links=links, grants=state.grants - gone)


def cut(state: State, source: int, target: int) -> State:
    """A connection between the sides is cut. What was said over it may arrive, until that is noticed."""
    return state._replace(cut=state.cut | {(source, target)})


def is_cut(state: State, one: Node, other: Node) -> bool:
    source, target = sorted((one, other))
    return source[0] == "s" and target[0] == "t" and (int(source[1]), int(target[1])) in state.cut


def gone(state: State) -> frozenset[Node]:
    """The ranks that take no further part."""
    return state.dead | state.closed


def unreachable(state: State, source: int, target: int) -> bool:
    return (source, target) in state.cut or f"t{target}" in state.dead


def pairs(state: State) -> Iterator[tuple[Node, Node]]:
    """Yield who may notice that it does not reach whom."""
    for node in state.dead:
        yield from ((one, node) for one in (*SOURCES, *TARGETS) if one != node)
    for source, target in state.cut:
        yield f"s{source}", f"t{target}"
        yield f"t{target}", f"s{source}"
