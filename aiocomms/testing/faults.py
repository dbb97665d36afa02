"""Faults for tests of programs that use aiocomms: calls that are late, or lost, or disagree, and ranks that die.

``with inject(world, drop(ranks=[1], op="all_reduce"), kill(ranks=[2], nth=3), seed=7) as injected:`` has the calls go
wrong that are made in the block, over any transport, and lists what has.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import anyio

from aiocomms import arguments, ops
from aiocomms.arguments import as_int
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.lowering.schedules import SCHEDULES
from aiocomms.testing.injecting import STREAM, Differs, Fault, Injected, Injection, Kind, link_of

__all__ = ["Fault", "Injected", "delay", "drop", "inject", "kill", "mismatch", "slow_link"]

_ALL = frozenset({cls.name for cls in (*ops.P2P, *ops.COLLECTIVES, *ops.RMA, *SCHEDULES)} | {STREAM})
_DISAGREE = frozenset({"send", "recv", "batch"} | {cls.name for cls in (ops.COLLECTIVES | ops.SCANS) - {ops.Barrier}})
_MAY_DIFFER = {
    "dtype": _DISAGREE,
    "size": _DISAGREE - {ops.AllToAllVSingle.name},  # The sizes of this op are written twice.
    "root": frozenset({ops.Broadcast.name, ops.Reduce.name}),
}


@contextmanager
def inject(world: Communicator | Sequence[Communicator], *faults: Fault, seed: int = 0) -> Iterator[list[Injected]]:
    """Have calls go wrong that are made in a ``with`` block.

    Of two faults that hit one call both are injected; a call that is killed or dropped is not delayed. When the block
    ends, what faults still hold back is posted; what was dropped stays dropped. On the loop's thread.

    :param world: a communicator, or several: those of a test's world.
    :param faults: what :func:`delay`, :func:`drop`, :func:`kill`, :func:`mismatch` and :func:`slow_link` return.
    :param seed: of what is decided by ``probability``, anew for each rank and fault: so that the same calls of a rank
        are hit in each run, whatever other ranks do meanwhile.
    :returns: what was injected by now, in that order.
    :raises ArgumentError: a fault is none, or names a rank that a communicator has not.
    """
    comms = [world] if isinstance(world, Communicator) else list(world)
    seed = as_int(seed)
    _check(comms, faults, seed)
    log: list[Injected] = []
    begun = [(link_of(comm), Injection(faults, seed, comm, log)) for comm in comms]
    for link, injection in begun:
        link.begin(injection)
    try:
        yield log
    finally:
        for link, injection in begun:
            link.end(injection)


def delay(
    seconds: float | None = None,
    *,
    until: anyio.Event | None = None,
    ranks: Sequence[int] | None = None,
    op: str | None = None,
    nth: int | None = None,
    probability: float = 1.0,
) -> Fault:
    """Post an op late, and behind it what must not overtake it; the loop goes on meanwhile.

    :param seconds: how late, by the event loop's clock.
    :param until: or until this is set, which takes no time that a test would have to guess.
    :param ranks: on which ranks; None: on all.
    :param op: the name of an operation, that of the method which starts it; ``"stream"``: of streams; None: any.
    :param nth: only the n-th of these calls on each rank, from 1 on; None: each.
    :param probability: each of them with this probability, above 0 and at most 1.
    :raises ArgumentError: an argument is wrong, or the fault could never hit anything.
    """
    if (seconds is None) == (until is None):
        raise ArgumentError(f"seconds is {seconds!r} and until is {until!r}, wanted one of them")
    if until is not None and not isinstance(until, anyio.Event):
        raise arguments.wrong_type("until", until, "an anyio.Event")
    late = 0.0 if seconds is None else arguments.seconds("seconds", seconds)
    return _fault("delay", ranks, op, nth, probability, seconds=late, until=until)


def drop(
    *, ranks: Sequence[int] | None = None, op: str | None = None, nth: int | None = None, probability: float = 1.0
) -> Fault:
    """Never post an op, so that its deadline must end it. The parameters are those of :func:`delay`.

    A receive fails alone then, as it does which no message comes for. Behind a collective the rank's later ones are
    dropped, too, for the other ranks would take the next for this one.

    :raises ArgumentError: an argument is wrong, or the fault could never hit anything.
    """
    return _fault("drop", ranks, op, nth, probability)


def kill(
    *, ranks: Sequence[int] | None = None, op: str | None = None, nth: int | None = None, probability: float = 1.0
) -> Fault:
    """Kill a rank in a call: its process, by SIGKILL. The parameters are those of :func:`delay`.

    Where the ranks have met in memory, as those of ``local_world`` do, the process is the others', too. There the
    others get the :class:`~aiocomms.errors.PeerDiedError` that they would get, and on the rank itself every op, of
    this communicator alone, fails with a :class:`~aiocomms.errors.CommAbortedError`.

    :raises ArgumentError: an argument is wrong, or the fault could never hit anything.
    """
    return _fault("kill", ranks, op, nth, probability)


def mismatch(
    differs: Differs = "dtype",
    *,
    ranks: Sequence[int] | None = None,
    op: str | None = None,
    nth: int | None = None,
    probability: float = 1.0,
) -> Fault:
    """Have a rank call an op otherwise than the others, which get a :class:`~aiocomms.errors.MismatchError`.

    So they have of a message of another dtype; one of another size fails its receive alone. The op works on copies, and
    the tensors given to it do not change. The other parameters are those of :func:`delay`.

    :param differs: ``"dtype"`` of the op's tensors; ``"size"``: they have twice the elements; ``"root"``, of
        ``broadcast`` and ``reduce`` where a transport carries these itself.
    :raises ArgumentError: an argument is wrong, or the fault could never hit anything.
    """
    if differs not in get_args(Differs):
        raise ArgumentError(f"differs is {differs!r}, wanted one of {', '.join(map(repr, get_args(Differs)))}")
    return _fault("mismatch", ranks, op, nth, probability, differs=differs)


def slow_link(
    bytes_per_second: float,
    *,
    ranks: Sequence[int] | None = None,
    op: str | None = None,
    nth: int | None = None,
    probability: float = 1.0,
) -> Fault:
    """Have what a rank sends take time in proportion to its bytes, one op or message after the other.

    Of an op that a transport carries itself the bytes are those of the tensors that the rank gives; of one that is made
    of messages, those of each message. The other parameters are those of :func:`delay`.

    :param bytes_per_second: by the event loop's clock.
    :raises ArgumentError: an argument is wrong, or the fault could never hit anything.
    """
    bytes_per_second = as_int(bytes_per_second)
    if type(bytes_per_second) not in (int, float):
        raise arguments.wrong_type("bytes_per_second", bytes_per_second, "a number")
    if not bytes_per_second > 0:
        raise ArgumentError(f"bytes_per_second is {bytes_per_second}, wanted more than 0")
    return _fault("slow_link", ranks, op, nth, probability, bytes_per_second=float(bytes_per_second))


def _fault(
    kind: Kind, ranks: Sequence[int] | None, op: str | None, nth: int | None, probability: float,
    seconds: float = 0.0, until: anyio.Event | None = None, differs: Differs = "dtype",
    bytes_per_second: float = 1.0,
) -> Fault:  # fmt: skip
    """Check which calls a fault hits."""
    ranks = list(map(as_int, ranks)) if isinstance(ranks, Sequence) else ranks
    nth, probability = as_int(nth), as_int(probability)
    if ranks is not None and (
        not isinstance(ranks, Sequence) or not ranks or any(type(rank) is not int or rank < 0 for rank in ranks)
    ):
        raise ArgumentError(f"ranks is {ranks!r}, wanted a list of ranks, or None for all")
    if nth is not None and (type(nth) is not int or nth < 1):
        raise ArgumentError(f"nth is {nth!r}, wanted the number of a call, from 1 on, or None for each")
    if type(probability) not in (int, float) or not 0 < probability <= 1:
        raise ArgumentError(f"probability is {probability!r}, wanted a number above 0 and at most 1")
    able = _MAY_DIFFER[differs] if kind == "mismatch" else _ALL
    return Fault(
        kind, None if ranks is None else tuple(ranks), able if op is None else _named(op, able, kind, differs),
        nth, float(probability), seconds, until, differs, bytes_per_second,
    )  # fmt: skip


def _named(op: str, able: frozenset[str], kind: Kind, differs: Differs) -> frozenset[str]:
    if op not in _ALL:
        near = difflib.get_close_matches(str(op), _ALL, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"op is {op!r}, which is the name of no operation{hint}")
    if op not in able:
        raise ArgumentError(
            f"op is {op!r}, on whose {differs} ranks cannot disagree; wanted one of {', '.join(sorted(able))}"
        )
    return frozenset({op})


def _check(comms: Sequence[Communicator], faults: Sequence[Fault], seed: int) -> None:
    for i, comm in enumerate(comms):
        if not isinstance(comm, Communicator):
            raise arguments.wrong_type(f"world[{i}]", comm, "a Communicator")
    if type(seed) is not int:
        raise arguments.wrong_type("seed", seed, "an int")
    if not comms or not faults:
        raise ArgumentError("wanted at least one communicator and one fault")
    for fault in faults:
        if not isinstance(fault, Fault):
            raise ArgumentTypeError(f"{fault!r} is no fault, wanted what delay(...), drop(...) and the like return")
        for comm in comms:
            absent = [rank for rank in fault.ranks or () if rank >= comm.size]
            if absent:
                raise ArgumentError(
                    f"ranks of a {fault.kind} has {absent}, wanted ranks of '{comm.name}', from 0 to {comm.size - 1}"
                )
