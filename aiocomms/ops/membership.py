"""The check of the members of a new communicator."""

from __future__ import annotations

from collections.abc import Sequence

from aiocomms.arguments import as_int, wrong_type
from aiocomms.errors import ArgumentError
from aiocomms.ops.checks import Members, index


def members(ranks: Sequence[int], group: Members, op: str = "split", least: int = 0) -> list[int]:
    """Check the list of the members of a new communicator.

    The list must be empty, or consist of distinct ranks that include this rank.

    :param least: the smallest number of members that the list may have.
    """
    try:
        chosen = _members(ranks, group)
        if len(chosen) < least:
            raise ArgumentError(f"ranks is {chosen}, wanted this rank, {group.rank}, among them")
        return chosen
    except ArgumentError as error:
        raise error.about(op=op, rank=group.rank) from None


def _members(ranks: Sequence[int], group: Members) -> list[int]:
    if not isinstance(ranks, (list, tuple, range)):
        raise wrong_type("ranks", ranks, "a list of ranks")
    chosen = [as_int(rank) for rank in ranks]
    for i, rank in enumerate(chosen):
        index(f"ranks[{i}]", rank, group)
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"ranks is {chosen}, wanted each rank once")
    if chosen and group.rank not in chosen:
        raise ArgumentError(
            f"ranks is {chosen} and leaves out this rank, {group.rank}; wanted it among them, or an empty list"
        )
    return chosen
