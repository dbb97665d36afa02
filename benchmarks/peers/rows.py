"""What is raced, and what it must reach: times as ratios to a peer's in the same run."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.peers.cases import Case

KIB, MIB = 2**10, 2**20
GLOO, AWAITED_GLOO, MPICH, UCXX, PERFTEST = "gloo", "gloo awaited", "MPICH", "UCXX", "ucx_perftest"


class Versus(NamedTuple):
    """Ours takes at most ``must`` (``aim``) times as long as the quickest whose name begins with ``against``."""

    against: str
    must: float | None = None
    aim: float | None = None
    of: str = "median"
    """Which of the figures is compared: the median of the rounds, the mean of them, or p99 of all iterations."""


class Row(NamedTuple):
    """One race."""

    title: str
    case: Case
    targets: tuple[Versus, ...]
    size: int = 2
    bound: bool = True
    """Whether each rank has a core of its own, where there are as many cores."""
    neighbours: int = 0
    """How many processes beside the ranks want a core all the time."""
    patience: int = 1
    """How many times as long as usual a trial takes: where the scheduler decides, a stall is of 4 ms."""


def reducing(nbytes: int, title: str) -> Row:
    """An all_reduce of 2 ranks that is not tiny."""
    case = Case("all_reduce", nbytes)
    return Row(f"all_reduce {title}", case, (Versus(GLOO, must=1 / 5), Versus(MPICH, must=1.0, aim=0.5)))


def crowded(nbytes: int, title: str) -> Row:
    """An all_reduce with more ranks than cores."""
    targets = (Versus(GLOO, must=1 / 15), Versus(MPICH, must=1.5, aim=0.6))
    return Row(f"all_reduce {title}, 4 ranks on 2 cores", Case("all_reduce", nbytes), targets, size=4)


def contended(title: str, size: int = 2, neighbours: int = 0) -> Row:
    """An all_reduce of 8 B where the scheduler decides who runs: no median tells of a stall, so the mean counts."""
    mean = 1.3 if size > 2 else 2.0 if neighbours else 1.5
    targets = [Versus(MPICH, must=mean, aim=1.2 if neighbours else 1.0, of="mean")]
    if size == 2:
        targets.append(Versus(MPICH, must=4.0, aim=2.0, of="p99"))
    return Row(f"all_reduce 8 B, {title}", Case("all_reduce", 8), tuple(targets), size, False, neighbours, 5)


def moving(kind: str, must: float = 1.2, aim: float = 0.6) -> Row:
    """Another collective, 1 MiB."""
    return Row(f"{kind} 1 MiB", Case(kind, MIB), (Versus(GLOO, must=1 / 4), Versus(MPICH, must=must, aim=aim)))


def rows(transport: str) -> list[Row]:
    """All of them, for our transport of that name."""
    return [
        Row(
            "send/recv 8 B, one way",
            Case("ping_pong", 8),
            (Versus(UCXX, must=1 / 3), Versus(GLOO, must=1 / 10), Versus(MPICH, must=1.2, aim=0.8)),
        ),
        Row(
            "send/recv 8 MiB, one way",
            Case("stream", 8 * MIB),
            (
                Versus(UCXX, must=1 / 5),
                Versus(GLOO, must=1 / 2),
                Versus(MPICH, aim=1.0),
                Versus(PERFTEST, aim=1 / 0.9),
            ),
        ),
        Row(
            "all_reduce 8 B",
            Case("all_reduce", 8),
            (Versus(AWAITED_GLOO, must=1 / 40), Versus(MPICH, must=0.7, aim=0.4)),
        ),
        reducing(64 * KIB, "64 KiB"),
        reducing(MIB, "1 MiB"),
        reducing(8 * MIB, "8 MiB"),
        reducing(64 * MIB, "64 MiB"),
        moving("all_gather", must=0.7, aim=0.5),
        moving("reduce_scatter"),
        moving("broadcast"),
        moving("all_to_all", must=0.7, aim=0.5),
        Row(
            "put 8 B + signal, until the waiter runs",
            Case("put_signal", 8),
            (Versus(f"aiocomms {transport} send/recv", must=1.2, aim=1.0),),
        ),
        Row("get 8 MiB", Case("get", 8 * MIB), (Versus(PERFTEST, must=1 / 0.8, aim=1 / 0.95),)),
        crowded(8, "8 B"),
        crowded(MIB, "1 MiB"),
        contended("not bound"),
        contended("not bound, 1 busy neighbour", neighbours=1),
        contended("not bound, 2 busy neighbours", neighbours=2),
        contended("8 ranks on 2 cores", size=8),
        contended("16 ranks on 2 cores", size=16),
    ]
