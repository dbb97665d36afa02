"""Faults for tests of programs that use aiocomms: late calls, lost calls, calls that disagree, and ranks that die.

``with inject(world, drop(ranks=[1], op="all_reduce"), kill(ranks=[2], nth=3), seed=7) as injected:`` injects faults
into the calls in the block, over any transport. The list ``injected`` has the faults that were injected.
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
from aiocomms.testing.together import communicators

__all__ = ["Fault", "Injected", "delay", "drop", "inject", "kill", "mismatch", "slow_link"]

_ALL = frozenset({cls.name for cls in (*ops.P2P, *ops.COLLECTIVES, *ops.RMA, *SCHEDULES)} | {STREAM})
_DISAGREE = frozenset({"send", "recv", "batch"} | {cls.name for cls in (ops.COLLECTIVES | ops.SCANS) - {ops.Barrier}})
_MAY_DIFFER = {
    "dtype": _DISAGREE,
    "size": _DISAGREE - {ops.AllToAllVSingle.name},  # This op also takes its sizes as lists.
    "root": frozenset({ops.Broadcast.name, ops.Reduce.name}),
}


@contextmanager
def inject(world: Communicator | Sequence[Communicator], *faults: Fault, seed: int = 0) -> Iterator[list[Injected]]:
    """Inject faults into the calls in a ``with`` block. Enter and leave the block on the loop's thread.

    Several faults can affect one call. If one of them is :func:`kill` or :func:`drop`, the call is not delayed. At the
    end of the block, all delayed ops start. Dropped ops never start.

    :param world: a communicator, or the communicators of a test's world.
    :param faults: faults from :func:`delay`, :func:`drop`, :func:`kill`, :func:`mismatch` and :func:`slow_link`.
    :param seed: the seed of the random draws for ``probability``. Each rank and fault has its own random draws.
        So every run with this seed affects the same calls of a rank, independently of other ranks.
    :returns: the faults that were injected so far, in the order of injection.
    :raises ArgumentError: an argument is wrong, or a fault names a rank that a communicator does not have.
    """
    comms = communicators([world] if isinstance(world, Communicator) else world)
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
    """Start an op late. Later ops that must not overtake this op wait, too. The event loop keeps running.

    :param seconds: the delay in seconds, by the event loop's clock. Give either ``seconds`` or ``until``.
    :param until: an event. The op starts when the event is set, so the test needs no fixed delay.
    :param ranks: the ranks whose calls are affected; None means all ranks.
    :param op: the name of the affected method, or ``"stream"`` for messages of streams; None means any operation.
    :param nth: the number of a call, counted from 1 among the calls of ``op`` on each rank. Only this call is affected.
        None means all calls.
    :param probability: the probability with which each of these calls is affected, above 0 and at most 1.
    :raises ArgumentError: an argument is wrong, or the fault could never affect a call.
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
    """Never start an op, so that the op fails at its deadline. The parameters are those of :func:`delay`.

    A dropped receive fails only on this rank, like a receive without a message. After a dropped collective, the rank's
    later collectives in the same lane are dropped, too. Otherwise this rank's next collective would match the
    other ranks' calls of the dropped collective.

    :raises ArgumentError: an argument is wrong, or the fault could never affect a call.
    """
    return _fault("drop", ranks, op, nth, probability)


def kill(
    *, ranks: Sequence[int] | None = None, op: str | None = None, nth: int | None = None, probability: float = 1.0
) -> Fault:
    """Kill the process of a rank with SIGKILL, during a call. The parameters are those of :func:`delay`.

    In a simulation, the fault has the same effect as a call of ``here().world.kill``. If ranks share a process, as in
    ``local_world``, the death is only simulated: on the killed rank, every op of the communicator fails with a
    :class:`~aiocomms.errors.CommAbortedError`. The other ranks always get a :class:`~aiocomms.errors.PeerDiedError`.

    :raises ArgumentError: an argument is wrong, or the fault could never affect a call.
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
    """Change an op of a rank, so that the other ranks get a :class:`~aiocomms.errors.MismatchError`.

    A collective or a message with a wrong dtype causes this error. A message with a wrong size only makes the receive
    fail. For a wrong dtype or size, the op uses copies, so the caller's tensors do not change. The other parameters are
    those of :func:`delay`.

    :param differs: the wrong property. ``"dtype"`` changes the dtype of the op's tensors, ``"size"`` doubles their
        number of elements, and ``"root"`` changes the root of ``broadcast`` and ``reduce``. ``"root"`` needs a
        transport that implements these ops itself.
    :raises ArgumentError: an argument is wrong, or the fault could never affect a call.
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
    """Delay each op or message of a rank in proportion to its bytes, like a slow network link.

    The link carries one op or message at a time. If a transport implements an op itself, the delay counts the bytes of
    all tensors that the rank passes. If the op is made of messages, the delay counts the bytes of each message. The
    other parameters are those of :func:`delay`.

    :param bytes_per_second: the rate of the link, by the event loop's clock.
    :raises ArgumentError: an argument is wrong, or the fault could never affect a call.
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
    """Check the arguments of a fault, and return the fault."""
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
