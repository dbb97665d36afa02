"""Measurements of :mod:`benchmarks.compare` and their limits: times as ratios to a peer's in the same run."""

from __future__ import annotations

from typing import NamedTuple

KIB, MIB = 2**10, 2**20
GLOO, AWAITED_GLOO, MPICH, UCXX, PERFTEST = "gloo", "gloo awaited", "MPICH", "UCXX", "ucx_perftest"
NAMES = {
    "mpich": "MPICH blocking", "ucxx": "UCXX asyncio", "gloo": "gloo blocking",
    "gloo:executor": "gloo awaited by executor", "gloo:polling": "gloo awaited by polling",
    "gloo:future": "gloo awaited by future",
}  # fmt: skip
"""The report's name of each library that ``aiocomms bench --vs`` measures."""


class Versus(NamedTuple):
    """Ours takes at most ``must`` (``aim``) times as long as the quickest whose name begins with ``against``."""

    against: str
    must: float | None = None
    aim: float | None = None
    of: str = "median"
    """The figure that is compared: the median, the mean or the 99th percentile of all iterations."""


class Row(NamedTuple):
    """One run of ``aiocomms bench``."""

    title: str
    op: str
    nbytes: int
    targets: tuple[Versus, ...]
    vs: tuple[str, ...] = tuple(NAMES)
    ranks: int = 2
    bound: bool = True
    """A flag: each rank has a core of its own, where there are as many cores."""
    neighbours: int = 0
    """The number of processes beside the ranks that want a core all the time."""
    patience: int = 1
    """The factor by which it is measured longer than usual: where the scheduler decides, a stall is of 4 ms."""
    late: tuple[float, float] | None = None
    """The lateness in ms, at p99, that a task that sleeps for 1 ms may have beside it: must, and aim."""
    beside: str = ""
    """Another operation of ours in the same run."""


def reducing(
    nbytes: int, title: str, must: float = 1.0, aim: float = 0.5, late: tuple[float, float] | None = None
) -> Row:
    """An all_reduce of 2 ranks that is not tiny."""
    targets = (Versus(GLOO, must=1 / 5), Versus(MPICH, must=must, aim=aim))
    return Row(f"all_reduce {title}", "all_reduce", nbytes, targets, late=late)


def crowded(nbytes: int, title: str) -> Row:
    """An all_reduce with more ranks than cores."""
    targets = (Versus(GLOO, must=1 / 15), Versus(MPICH, must=1.5, aim=0.6))
    return Row(f"all_reduce {title}, 4 ranks on 2 cores", "all_reduce", nbytes, targets, ranks=4)


def contended(title: str, ranks: int = 2, neighbours: int = 0) -> Row:
    """An all_reduce of 8 B where the scheduler decides who runs: no median tells of a stall, so the mean counts.

    gloo is not measured: polled with ``sleep(0)`` it takes 10 ms an operation where ranks outnumber cores.
    """
    mean = 1.3 if ranks > 2 else 2.0 if neighbours else 1.5
    targets = [Versus(MPICH, must=mean, aim=1.2 if neighbours else 1.0, of="mean")]
    if ranks == 2:
        most = (3.0, 1.5) if neighbours > 1 else (4.0, 2.0)
        targets.append(Versus(MPICH, must=most[0], aim=most[1], of="p99"))
    name = f"all_reduce 8 B, {title}"
    return Row(name, "all_reduce", 8, tuple(targets), ("mpich",), ranks, False, neighbours, 4)


def moving(op: str, must: float = 1.2, aim: float = 0.6) -> Row:
    """Another collective, 1 MiB."""
    targets = (Versus(GLOO, must=1 / 4), Versus(MPICH, must=must, aim=aim))
    return Row(f"{op.removesuffix('_single')} 1 MiB", op, MIB, targets)


ROWS = (
    Row(
        "send/recv 8 B, one way", "send", 8,
        (Versus(UCXX, must=1 / 3), Versus(GLOO, must=1 / 10), Versus(MPICH, must=0.9, aim=0.6)),
    ),
    Row(
        "send/recv 8 MiB, one way", "send_burst", 8 * MIB,
        (
            Versus(UCXX, must=1 / 5), Versus(GLOO, must=1 / 2), Versus(MPICH, must=0.8, aim=0.5),
            Versus(PERFTEST, aim=1 / 0.9),
        ),
    ),
    Row(
        "all_reduce 8 B", "all_reduce", 8,
        (Versus(AWAITED_GLOO, must=1 / 40), Versus(MPICH, must=0.6, aim=0.4)),
    ),
    reducing(64 * KIB, "64 KiB"),
    reducing(MIB, "1 MiB"),
    reducing(8 * MIB, "8 MiB", must=0.6, aim=0.3),
    reducing(64 * MIB, "64 MiB", late=(2.0, 1.0)),
    moving("all_gather_single", must=0.7, aim=0.5),
    moving("reduce_scatter_single"),
    moving("broadcast"),
    moving("all_to_all_single", must=0.7, aim=0.5),
    Row(
        "put 8 B + signal, until the waiter runs", "put_signal", 8,
        (Versus("send", must=1.2, aim=1.0),), vs=(), beside="send",
    ),
    Row("get 8 MiB", "get", 8 * MIB, (Versus(PERFTEST, must=1 / 0.8, aim=1 / 0.95),), vs=()),
    crowded(8, "8 B"),
    crowded(MIB, "1 MiB"),
    contended("not bound"),
    contended("not bound, 1 busy neighbour", neighbours=1),
    contended("not bound, 2 busy neighbours", neighbours=2),
    contended("8 ranks on 2 cores", ranks=8),
    contended("16 ranks on 2 cores", ranks=16),
)  # fmt: skip
