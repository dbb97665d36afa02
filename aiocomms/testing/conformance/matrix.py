"""The matrix: the places in which a check runs. By default, places that cannot change the result are left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

PROCESSES = "@processes"
"""The suffix of a transport's name with which each rank is a process."""

APART = (2, 3)
"""The numbers of ranks for a transport in processes that also runs in one process."""


class Marks(NamedTuple):
    """The properties that a check declares."""

    sizes: tuple[int, ...]
    """The numbers of ranks on which the check runs."""
    more: tuple[int, ...] = ()
    """The numbers of ranks on which the check runs with ``--full`` only."""
    loops: bool = False
    """True if the check exercises differences between the event loops."""
    core: bool = False
    """True if the core decides the outcome before the core calls a transport."""
    memory: bool = False
    """True if the outcome can differ when the ranks are processes, and so share no memory."""


class Subject(NamedTuple):
    """A transport that is tested."""

    name: str
    """The name of the transport in the id of a check."""
    transport: str | dict[str, str]
    processes: bool = False
    """True if each rank is a process."""
    native: bool = False
    """True if the transport has native shortcuts, which replace parts of the core."""


class Cell(NamedTuple):
    """A place in which a check runs."""

    subject: Subject
    loop: str
    size: int


def cells(
    marks: Marks, subjects: Sequence[Subject], loops: Sequence[str], sizes: Collection[int] | None, full: bool
) -> list[Cell]:
    """Return the places in which a check runs.

    :param subjects: the chosen transports.
    :param loops: the chosen loops.
    :param sizes: the chosen numbers of ranks; None: all numbers that the check names.
    :param full: True if the check runs in every chosen place, even if the place cannot change the result.
    """
    return [
        Cell(subject, loop, size)
        for subject in subjects
        if full or _decides(marks, subject, subjects)
        for loop in (loops if full or marks.loops else loops[:1])
        for size in sorted({*marks.sizes, *(marks.more if full else ())})
        if sizes is None or size in sizes
        if full or size in APART or not _again(subject, subjects)
    ]


def _decides(marks: Marks, subject: Subject, subjects: Sequence[Subject]) -> bool:
    """Return True if a check can find a fault on this transport that it cannot find on the other chosen transports."""
    if _again(subject, subjects):
        return marks.memory
    first = next(other for other in subjects if not _again(other, subjects))
    return not marks.core or subject.native or subject is first


def _again(subject: Subject, subjects: Sequence[Subject]) -> bool:
    """Return True if a transport with ``@processes`` was also chosen without ``@processes``."""
    plain = subject.name.removesuffix(PROCESSES)
    return plain != subject.name and any(other.name == plain for other in subjects)
