"""A model check of the agreement of live groups: the real code, in every order of its steps.

The rounds run over registers whose every call is a step. A checker takes the steps of all ranks in every order, with a
death, a process that takes the dead one's place, and deadlines that pass, at each step. The state of a rank is where
its coroutines are, and their variables there. So the code must hold no value elsewhere across an await, as a
comprehension that awaits does. A write takes two steps, and so may be seen half done; contributions are read when they
are used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from aiocomms.errors import LeftBehindError
from aiocomms.live.registers import LEFT, place_of
from aiocomms.live.rounds import NativeCall, Round, Rounds

pytestmark = pytest.mark.deterministic

HALF = "half"
Given = tuple[int, int, int]
"""A rank, the number of its process, and the number of its call."""


class Wait(NamedTuple):
    """A wait for a register to hold something else."""

    register: int
    held: int
    told: int
    """The number of times that all waiters had been woken when it began."""


class Step:
    """One step of a rank, which the checker decides when to take."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._what)


class Shared:
    """The memory that all processes share: registers and areas."""

    def __init__(self) -> None:
        self.registers: dict[int, int] = {}
        self.areas: dict[int, Any] = {}
        self.dead: set[int] = set()
        self.told = 0

    def swap(self, register: int, expected: int, desired: int) -> int:
        held = self.registers.get(register, 0)
        if held == expected:
            self.registers[register] = desired
        return held


class BlindShared(Shared):
    """Registers whose swap does not compare."""

    def swap(self, register: int, expected: int, desired: int) -> int:
        self.registers[register] = desired
        return expected


class StepRegisters:
    """The registers of one process: each call is a step."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def load(self, register: int) -> int:
        return await Step(lambda: self._shared.registers.get(register, 0))

    async def swap(self, register: int, expected: int, desired: int) -> int:
        return await Step(lambda: self._shared.swap(register, expected, desired))

    async def write(self, area: int, header: bytes, parts: Sequence[Any]) -> None:
        await Step(lambda: self._shared.areas.update({area: (header, HALF)}))
        await Step(lambda: self._shared.areas.update({area: (header, parts[0])}))

    async def read(self, area: int) -> tuple[bytes, Any]:
        header, _ = await Step(lambda: self._shared.areas[area])
        return header, area

    def shortcut(self, *_: Any) -> None:
        return None

    async def changed(self, register: int, held: int, ends: float) -> bool:
        return await Step(Wait(register, held, self._shared.told))

    async def tell(self, register: int | None) -> None:
        self._shared.told += register is None

    def alive(self, holder: int) -> bool:
        return holder not in self._shared.dead

    def close(self) -> None: ...


CALL = NativeCall("barrier", None, None, None)
"""A call that has no native code here."""


class Process:
    """One process: a rank that makes some calls."""

    def __init__(self, world: World, rank: int, number: int, calls: int) -> None:
        self.rank, self.number = rank, number
        self.holder = 2 + rank + 100 * number
        self.wants: Any = None
        self._program = self._run(world, calls)
        self.go(None)

    async def _run(self, world: World, calls: int) -> None:
        rounds = world.rounds(StepRegisters(world.shared), 0, self.rank, world.size, self.holder)
        for call in range(calls):
            given = (self.rank, self.number, call)
            try:
                result, round_ = await rounds.take_part(b"", [given], 0.0, world.use, CALL)
            except LeftBehindError:
                world.left_behind += 1
            else:
                world.check(given, result, round_)
        place = place_of(self.rank)
        await Step(lambda: world.shared.swap(place, self.holder, LEFT))
        world.shared.told += 1

    def go(self, heard: Any) -> None:
        """Give the process the result of its step, and run it to its next step."""
        try:
            self.wants = self._program.send(heard)
        except StopIteration:
            self.wants = None

    def state(self) -> Any:
        """Return where its coroutines are, and their variables there."""
        found, inner = [], self._program
        while (frame := getattr(inner, "cr_frame", None)) is not None:
            found.append((frame.f_code.co_name, frame.f_lasti, frozen(frame.f_locals)))
            inner = inner.cr_await
        return self.rank, self.number, tuple(found), self.wants if isinstance(self.wants, Wait) else None

    def end(self) -> None:
        self._program.close()


def frozen(value: Any) -> Any:
    """Return a comparable form of a coroutine's variable; objects of the model are always the same, and become None."""
    if isinstance(value, Rounds):
        return frozen(vars(value))
    if isinstance(value, dict):
        return tuple((key, frozen(it)) for key, it in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    return value if isinstance(value, int | str | bytes | None) else None


class World:
    """One order of steps, from the start."""

    def __init__(self, calls: Sequence[int], rounds: type[Rounds] = Rounds, shared: type[Shared] = Shared) -> None:
        self.size, self.rounds, self.shared = len(calls), rounds, shared()
        self.left_behind = 0
        self.found: dict[int, tuple[Any, int]] = {}
        """The contributions and the bits of each round, by its number."""
        self.counted: dict[Given, int] = {}
        """The number of the round that used each contribution."""
        self._calls = calls
        self.deaths = self.late = 0
        for rank in range(self.size):
            self.shared.registers[place_of(rank)] = 2 + rank
        self.processes = [Process(self, rank, 0, calls[rank]) for rank in range(self.size)]

    async def use(self, given: dict[int, tuple[bytes, Any]]) -> dict[int, Any]:
        """Read the contributions."""
        result = {}
        for rank, (_, area) in given.items():
            result[rank] = await Step(lambda area=area: self.shared.areas[area][1])
        return result

    def check(self, mine: Given, result: dict[int, Any], round_: Round) -> None:
        """Check what a call has returned."""
        assert tuple(result) == round_.ranks, f"{result} of {round_}"
        for rank, given in result.items():
            assert given != HALF, f"{round_}: half of a contribution was used"
            assert given[0] == rank, f"{round_}: {given} is not of rank {rank}"
            assert self.counted.setdefault(given, round_.number) == round_.number, f"{given} is in two rounds"
        assert self.found.setdefault(round_.number, (result, round_.bits)) == (result, round_.bits), f"two {round_}"
        assert result.get(mine[0], mine)[:2] != mine[:2] or result.get(mine[0], mine) == mine, f"{mine}: {result}"

    def choices(self, deaths: int, late: int) -> Iterator[tuple[str, int]]:
        """Yield what may happen next: a step or wake-up of a process, a passed deadline, a death with a replacement."""
        for index, process in enumerate(self.processes):
            if process.wants is None:
                continue
            if not isinstance(process.wants, Wait):
                yield "step", index
            else:
                register, held, told = process.wants
                if self.shared.registers.get(register, 0) != held or self.shared.told > told:
                    yield "wake", index
                if self.late < late:
                    yield "late", index
            if self.deaths < deaths:
                yield "die", index

    def take(self, choice: tuple[str, int]) -> None:
        """Let one of the choices happen."""
        kind, index = choice
        process = self.processes[index]
        if kind == "die":
            self.deaths += 1
            self.shared.dead.add(process.holder)
            self.shared.told += 1
            process.wants = None
            process.end()
            self.shared.registers[place_of(process.rank)] = process.holder + 100
            self.processes.append(Process(self, process.rank, process.number + 1, 1))
            return
        heard = process.wants() if kind == "step" else kind == "wake"
        self.late += kind == "late"
        process.go(heard)

    def state(self) -> Any:
        """Return all that decides what may happen next."""
        return (
            tuple(sorted(self.shared.registers.items())),
            tuple(sorted(self.shared.areas.items())),
            tuple(process.state() for process in self.processes),
            self.late,
            self.shared.told,
        )


def explore(make: Callable[[], World], deaths: int, late: int) -> int:
    """Visit every order; return the number of states.

    :raises AssertionError: a state is wrong, or a rank waits in a state in which nothing can happen any more.
    """
    seen, orders = set(), [[]]
    while orders:
        order = orders.pop()
        world = make()
        for choice in order:
            world.take(choice)
        while (state := world.state()) not in seen:
            seen.add(state)
            coming = list(world.choices(deaths, late))
            waiting = [process for process in world.processes if process.wants is not None]
            assert coming or not waiting, f"ranks {[it.rank for it in waiting]} wait for ever"
            if coming:  # The last choice continues this order, and each other one starts a new order.
                orders += [[*order, choice] for choice in coming[:-1]]
                order = [*order, coming[-1]]
                world.take(coming[-1])
        for process in world.processes:
            process.end()
    return len(seen)


SMALL = [((2, 2), 0, 0), ((1, 1), 1, 0)]
"""The number of calls of each rank, of deaths, and of deadlines that pass."""
LARGE = [((2, 2), 0, 1), ((2, 1), 1, 0), ((3, 1), 0, 2), ((1, 1, 1), 0, 0), ((2, 1), 1, 1)]


def check(calls: tuple[int, ...], deaths: int, late: int) -> None:
    states = explore(lambda: World(calls), deaths, late)
    print(f"{states} states")
    assert states > 1_000, "the rounds are not what they were"


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "deaths", "late"), SMALL)
def test_no_order_of_steps_breaks_the_agreement(calls, deaths, late):
    check(calls, deaths, late)


@pytest.mark.search
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("calls", "deaths", "late"), LARGE)
def test_no_order_of_more_steps_breaks_the_agreement(calls, deaths, late):
    check(calls, deaths, late)


class TornRounds(Rounds):
    """Rounds that do not check whether a round's areas are used again."""

    async def _look(self, number: int) -> tuple[Round, int]:
        round_, held = await self._held(number)
        return round_._replace(number=number, decided=round_.number > number or round_.decided), held


class HeirRounds(Rounds):
    """Rounds in which a new process contributes in the place of a dead one that has contributed."""

    async def _held(self, number: int) -> tuple[Round, int]:
        round_, held = await super()._held(number)
        mine = 0 if self._next is None and not round_.decided else self._bit
        return round_._replace(bits=round_.bits & ~(self._bit & ~mine)), held


@pytest.mark.parametrize(
    ("calls", "deaths", "late", "rounds", "shared"),
    [
        ((1, 1), 0, 0, Rounds, BlindShared), ((3, 1), 0, 2, TornRounds, Shared), ((1, 1), 1, 0, HeirRounds, Shared),
    ],
    ids=["a swap that does not compare", "areas that are used again", "a contribution that is replaced"],
)  # fmt: skip
def test_checker_finds(calls, deaths, late, rounds, shared):
    with pytest.raises((AssertionError, KeyError)):
        explore(lambda: World(calls, rounds, shared), deaths, late)
