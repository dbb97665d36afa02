"""The function ``run_ranks``, which runs one async function on every rank of a world."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from aiocomms.bootstrap import directory
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentTypeError
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
    (comm, first), *others = failures
    first.add_note(f"it was raised on rank {comm.rank} of {comm.size}")
    for other, error in others:
        if error is not first:
            first.add_note(f"rank {other.rank} failed too: {type(error).__name__}: {error}")
    return first
