"""The function ``run_ranks``, which runs one async function on every rank of a world."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import anyio

from aiocomms import arguments
from aiocomms.bootstrap import directory
from aiocomms.communicator.communicator import Communicator
from aiocomms.core.lifecycle import LOST
from aiocomms.errors import ArgumentTypeError, CommError, CommTimeoutError
from aiocomms.progress.guard import ends_task

T = TypeVar("T")


async def run_ranks(world: Sequence[Communicator], fn: Callable[[Communicator], Awaitable[T]]) -> list[T]:
    """Run ``fn(comm)`` on all ranks at the same time, each in its own task.

    In each task, ``get_comm`` returns the rank's communicator. When one rank fails, all other ranks are cancelled. The
    error of the failed rank is raised unchanged, with a note that names the rank. So
    ``pytest.raises(CommTimeoutError)`` catches a timeout.

    :param world: the communicators, one for each rank.
    :param fn: an async function.
    :returns: the results of ``fn``, in the order of ``world``.
    :raises ArgumentTypeError: an item of ``world`` is not a communicator, or ``fn`` does not return an awaitable.
    """
    world = communicators(world)
    results: list[Any] = [None] * len(world)
    failures: list[tuple[Communicator, BaseException]] = []

    async def one(place: int, comm: Communicator) -> None:
        directory.enter(comm)
        try:
            results[place] = await _awaitable(fn(comm))
        except BaseException as error:  # pytest.fail and pytest.skip raise no Exception.
            if ends_task(error):
                raise
            failures.append((comm, error))
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for place, comm in enumerate(world):
            tasks.start_soon(one, place, comm)
    if failures:
        raise _noted(failures)
    return results


def communicators(world: object) -> list[Communicator]:
    """Return the communicators of a world as a list.

    :raises ArgumentTypeError: ``world`` is not iterable, or one of its items is not a communicator.
    """
    if not isinstance(world, Iterable):
        raise arguments.wrong_type("world", world, "a list of communicators")
    comms = list(world)
    for i, comm in enumerate(comms):
        if not isinstance(comm, Communicator):
            raise arguments.wrong_type(f"world[{i}]", comm, "a Communicator")
    return comms


def _awaitable(given: Awaitable[T]) -> Awaitable[T]:
    if not isinstance(given, Awaitable):
        raise ArgumentTypeError(f"fn returned {given!r}, wanted an awaitable: write 'async def'")
    return given


def _noted(failures: Sequence[tuple[Communicator, BaseException]]) -> BaseException:
    """Return the first failure, with notes that name all failed ranks.

    Failures that have the same cause share a note.
    """
    comm, first = failures[0]
    groups: list[tuple[BaseException, list[int]]] = []
    for other, error in failures:
        ranks = next((ranks for known, ranks in groups if _is_same(error, known)), None)
        if ranks is None:
            groups.append((error, [other.rank]))
        else:
            ranks.append(other.rank)
    first.add_note(f"it was raised on rank {comm.rank} of {comm.size}")
    if alike := groups[0][1][1:]:
        first.add_note(f"{_named(alike)} failed too, for the same reason")
    for error, ranks in groups[1:]:
        first.add_note(f"{_named(ranks)} failed too: {type(error).__name__}: {error}")
    return first


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _is_same(one: BaseException, other: BaseException) -> bool:
    """Return whether the errors of two ranks have the same cause, such as the loss of their communicator."""
    if isinstance(one, CommTimeoutError) and isinstance(other, CommTimeoutError) and one.late:
        return one.late == other.late
    mine, theirs = _text(one), _text(other)
    if isinstance(one, CommError) and isinstance(other, CommError):
        return mine in theirs or theirs in mine
    return type(one) is type(other) and mine == theirs


def _text(error: BaseException) -> str:
    """Return the text of an error without the parts that differ from rank to rank."""
    said = error.message.removeprefix(LOST) if isinstance(error, CommError) else str(error)
    return re.sub(r" at 0x[0-9a-f]+", "", said)
