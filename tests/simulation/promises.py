"""Hold every history to the promises: run it from its seed, and judge what it has shown on all ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import traffic
from ledger import Ledger
from place import BrokenPromiseError
from random_programs import Program, Report, run

from aiocomms.errors import CommTimeoutError, PeerDiedError
from aiocomms.testing.simulation import History, simulate

SILENCE = 4.4
"""Seconds of silence after which a rank may be taken for dead: the heartbeat's 5, less what passes between two."""


def check(seed: int, **options: Any) -> History:
    """Run the history of a seed, and judge it.

    :raises BrokenPromiseError: it shows what must not happen.
    """
    program = Program.drawn(seed, **options)
    ledger = Ledger()
    try:
        history = simulate(
            lambda: run(program, ledger),
            program.ranks,
            seed=seed,
            faults=program.faults,
            latency=program.latency,
            longest=600,
        )
        reports = [it for it in history.results if it is not None]
        judge(program, reports)
        if wrong := ledger.wrong({report.process for report in reports}):
            raise BrokenPromiseError("; ".join(wrong[:5]))
    except BaseException as error:
        error.add_note(str(program))
        raise
    return history


def judge(program: Program, reports: list[Report]) -> None:
    """Compare what the ranks say that live."""
    losses: dict[str, list[tuple[Report, Any]]] = defaultdict(list)
    for report in reports:
        for loss in report.losses:
            losses[loss.comm].append((report, loss))
            for error in (loss.error, loss.lost):
                if error is not None:
                    _names(program, reports, report, error, loss.comm)
    if not program.struck():
        for report in reports:
            _is_unharmed(program, report)
    for report in reports:
        _recovers(program, report)
    for comm, lost in losses.items():
        _agree(program, reports, comm, lost)


def _is_unharmed(program: Program, report: Report) -> None:
    """Check that without a fault every step succeeds, and the ranks that did not leave recover."""
    if report.ended not in ("done", "left"):
        raise BrokenPromiseError(f"rank {report.rank} ended by {report.error!r}, and nothing had gone wrong")
    if report.losses and all(one is None for one in program.endings):
        raise BrokenPromiseError(f"rank {report.rank} saw {report.losses[0].error!r}, and nothing had gone wrong")


def _recovers(program: Program, report: Report) -> None:
    """Check that, where ranks only die, the others go on without them, or know who has not come."""
    if (
        any(fault.kind != "deaths" for fault in program.struck())
        or program.replacing
        or report.ended in ("done", "left")
    ):
        return
    dead = {fault.arguments[0] for fault in program.struck()}
    if report.members:
        raise BrokenPromiseError(f"rank {report.rank} has not recovered: {report.error!r}: {report.error}")
    if not set(getattr(report.error, "late", [])) <= dead:
        raise BrokenPromiseError(f"rank {report.rank} blames others than {dead}: {report.error!r}: {report.error}")


def _generation(name: str) -> int:
    """Return which communicator of a program it is, from 1 on."""
    return int(name.partition("@")[2] or 1)


def _phase_on(program: Program, comm: str) -> tuple[Any, ...]:
    """Return the steps that run on a communicator."""
    return program.phases[_generation(comm) - 1]


def _harmed(program: Program) -> dict[int, float]:
    """Return for each rank that a fault struck the seconds for which others did not hear of it."""
    silent: dict[int, float] = defaultdict(float)
    for fault in program.struck():
        match fault.kind, fault.arguments:
            case "deaths", (rank, *_):
                silent[rank] = float("inf")
            case "cuts", (one, other):
                silent[one] = silent[other] = float("inf")
            case "pauses", (rank, seconds):
                silent[rank] += seconds
            case "slow", (rank, seconds):
                silent[rank] += 20 * seconds
            case "partitions", (one, other, seconds, _):
                silent[one] += seconds
                silent[other] += seconds
    return silent


def _names(program: Program, reports: list[Report], report: Report, error: Any, lost: str) -> None:
    """Look whether an error names who it should."""
    text = f"rank {report.rank} of the world: {error!r}: {error}"
    comm = (error.comm or lost).split(", lane ")[0]  # The error of ``lost()`` names none.
    if comm not in report.members and comm.startswith(f"{lost}/"):
        return  # A split that has not been formed.
    if comm not in report.members:
        raise BrokenPromiseError(f"the error names no communicator of this rank: {text}")
    mine = report.members[comm]
    if error.rank not in (mine, None) or (error.rank is None and error.op is not None):
        raise BrokenPromiseError(f"the error names another rank than that on which it is: {text}")
    known = {one.members[comm]: one.rank for one in reports if comm in one.members}
    if isinstance(error, CommTimeoutError):
        teller = mine if error.teller is None else error.teller
        stood = {it.arguments[0] for it in program.struck() if it.kind in ("pauses", "slow")}
        # A thread may tell of the loop of a rank that has stood still.
        itself = "its event loop" in text and (report.rank if error.teller is None else known.get(teller)) in stood
        if teller in error.late and not itself:
            raise BrokenPromiseError(f"the rank whose deadline has passed is late itself: {text}")
    if isinstance(error, PeerDiedError) and error.peer is not None:
        silent = _harmed(program)
        rank = known.get(error.peer)  # A rank that has died says nothing.
        if rank is not None and silent[rank] < SILENCE:
            raise BrokenPromiseError(f"rank {rank} of the world is named, which nothing has struck: {text}")


def _agree(program: Program, reports: list[Report], comm: str, lost: list[tuple[Report, Any]]) -> None:
    """Check that, with one cause at most, all ranks that no fault struck tell the same failure.

    A part of it that is lost is a cause of its own, if a rank has aborted the whole for that. So is the deadline of a
    message for which a rank has done so, where that of a collective has passed on another rank at the same moment.
    """
    silent = _harmed(program)
    told = {
        (type(loss.lost).__name__, loss.lost.peer)
        for report, loss in lost
        if loss.lost is not None and not silent[report.rank]
    }
    causes = len(program.struck()) + sum(one is not None for one in program.endings)
    kinds = {kind for kind, _ in told}
    aborted = any(comm in report.aborted for report in reports)
    causes += aborted and (
        traffic.split in _phase_on(program, comm) or kinds == {"CommAbortedError", "CommTimeoutError"}
    )
    if causes == 1 and len(kinds) > 1:
        raise BrokenPromiseError(f"'{comm}' was lost by {sorted(map(str, told))}: not the same on all ranks")
