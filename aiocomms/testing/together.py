"""The function ``run_ranks``, which runs one async function on every rank of a world."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from aiocomms.bootstrap import directory
from aiocomms.communicator.communicator import Communicator
from aiocomms.core.lifecycle import LOST
from aiocomms.errors import ArgumentTypeError, CommError, CommTimeoutError
from aiocomms.progress.guard import ends_task

T = TypeVar("T")


async def run_ranks(world: Sequence[Communicator], fn: Callable[[Communicator], Awaitable[T]]) -> list[T]:
    """Run ``fn(comm)`` on every rank at once, each in a task of its own, where ``get_comm`` finds that rank's.

    When one rank fails the others are cancelled, and its error is raised as it is, with a note that says which rank it
    was. So ``pytest.raises(CommTimeoutError)`` and the like find it.

    :param world: the communicators, one for each rank.
    :param fn: an async function.
    :returns: what ``fn`` returns, in the order of ``world``.
    :raises ArgumentTypeError: ``fn`` is no async function.
    """
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


def _awaitable(given: Awaitable[T]) -> Awaitable[T]:
    if not isinstance(given, Awaitable):
        raise ArgumentTypeError(f"fn returned {given!r}, wanted an awaitable: write 'async def'")
    return given


def _noted(failures: Sequence[tuple[Communicator, BaseException]]) -> BaseException:
    """Note on the first failure which ranks have failed; the text of each failure stands there once."""
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
    """Return whether two ranks have met one failure, as ranks do whose communicator is lost."""
    if isinstance(one, CommTimeoutError) and isinstance(other, CommTimeoutError) and one.late:
        return one.late == other.late
    mine, theirs = _text(one), _text(other)
    if isinstance(one, CommError) and isinstance(other, CommError):
        return mine in theirs or theirs in mine
    return type(one) is type(other) and mine == theirs


def _text(error: BaseException) -> str:
    """Return the words of an error without what each rank adds to them."""
    said = error.message.removeprefix(LOST) if isinstance(error, CommError) else str(error)
    return re.sub(r" at 0x[0-9a-f]+", "", said)
