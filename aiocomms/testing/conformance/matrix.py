"""The test matrix. Each of its cells is a transport, an event loop and a number of ranks with which a check runs.

By default, a check does not run in cells that cannot change its result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

PROCESSES = "@processes"
"""The suffix of a transport's name. With this suffix, each rank runs in its own process."""

APART = (2, 3)
"""The numbers of ranks for a transport with ``@processes`` that was also chosen without ``@processes``."""


class Marks(NamedTuple):
    """The properties that a check declares."""

    sizes: tuple[int, ...]
    """The numbers of ranks on which the check runs."""
    more: tuple[int, ...] = ()
    """The numbers of ranks on which the check runs only if the option ``--full`` is given."""
    loops: bool = False
    """True if the result of the check can differ between the event loops."""
    core: bool = False
    """True if the core decides the outcome before the core calls a transport."""
    memory: bool = False
    """True if the outcome can differ when the ranks run in separate processes, which share no memory."""


class Subject(NamedTuple):
    """A transport that is tested."""

    name: str
    """The name of the transport in the id of a check."""
    transport: str | dict[str, str]
    processes: bool = False
    """True if each rank runs in its own process."""
    native: bool = False
    """True if the transport has native shortcuts, which replace parts of the core."""


class Cell(NamedTuple):
    """A cell of the matrix: a transport, an event loop and a number of ranks with which a check runs."""

    subject: Subject
    loop: str
    size: int


def cells(
    marks: Marks, subjects: Sequence[Subject], loops: Sequence[str], sizes: Collection[int] | None, full: bool
) -> list[Cell]:
    """Return the cells of the matrix in which a check runs.

    :param subjects: the chosen transports.
    :param loops: the chosen loops.
    :param sizes: the chosen numbers of ranks; None: all numbers that the check declares.
    :param full: True if the check runs in every chosen cell, even if the cell cannot change the result.
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
