"""The text that explains a hang: the ranks that have not called an op, and what these ranks do instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from aiocomms.diagnosis.recorder import Brief, Item

NO_ANSWER: Final = "not answer: dead, stopped or busy"
"""The text for a rank that does not answer a request for its current ops."""


def judge(late: Item, briefs: Mapping[int, Brief], silent: Iterable[int] = ()) -> str:
    """Describe the state of one op on each rank: "ranks 0, 1, 2 are in it (collective 41), rank 3 has finished ...".

    :param late: the late op, as a rank that has called the op describes it.
    :param briefs: each rank's report on the rank's own ops, by rank.
    :param silent: the ranks that did not report in time.
    """
    inside, done, rest = [], [], []
    for rank, brief in sorted(briefs.items()):
        instead = instead_of(late, brief)
        if instead is None:
            inside.append(rank)
        elif instead:
            rest.append(f"rank {rank} {instead}")
        else:
            done.append(rank)
    number = f" (collective {late.collective})" if late.collective else ""
    parts = [
        *([f"{_ranks(inside, 'is', 'are')} in it{number}"] if inside else []),
        *([f"{_ranks(done, 'is', 'are')} done with it"] if done else []),
        *rest,
        *([f"{_ranks(quiet, 'does', 'do')} {NO_ANSWER}"] if (quiet := sorted(silent)) else []),
    ]
    return ", ".join(parts)


def behind(late: Item, briefs: Mapping[int, Brief], silent: Collection[int], absent: Sequence[int]) -> tuple[int, ...]:
    """Return the missing ranks that delay a collective, according to the reports of all ranks.

    A step of the collective may wait for rank A, although rank A has also called the collective. Rank A may itself wait
    for rank B. In this case only rank B is missing.

    :param briefs: each rank's report on the rank's own ops, by rank.
    :param silent: the ranks that did not report in time.
    :param absent: the ranks that a step of the collective waits for.
    """
    out = [rank for rank, brief in briefs.items() if instead_of(late, brief)]
    both = [rank for rank in absent if rank in silent or rank in out]
    return tuple(sorted(both or out or absent))


def instead_of(late: Item, brief: Brief) -> str | None:
    """Return, as text, what a rank does instead of an op.

    :returns: None if the rank has called the op and waits in it. The text is empty if the rank has finished the op.
    """
    if late.collective is not None:
        alike = (item for item in brief.pending if (item.collective, item.lane) == (late.collective, late.lane))
        here = next(alike, None)
        if here is not None:
            return None if str(here) == str(late) else f"is in {here} instead"
        if not late.lane and brief.ended >= late.collective:
            return ""
    return doing(brief)


def doing(brief: Brief) -> str:
    """Return, as text, what a rank does: "has finished collective 40 (broadcast #57) and is in recv(src=1, tag=7)"."""
    last = f" ({brief.last})" if brief.last else ""
    before = f"has finished collective {brief.ended}{last}" if brief.ended else "has finished no collective"
    if not brief.pending:
        return f"{before} and is in no operation"
    more = f" and {brief.more} more" if brief.more else ""
    return f"{before} and is in {', '.join(map(str, brief.pending))}{more}"


def numbered(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _ranks(ranks: list[int], one: str, several: str) -> str:
    return f"{numbered(ranks)} {several if len(ranks) > 1 else one}"
