"""Whether the ranks call the same collectives: told when one has to wait, for NCCL would wait for ever.

A collective that is quick costs nothing here: its description is kept as it is, for a while. One that has to wait
is told to the others, who compare it with their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from aiocomms import ops
from aiocomms.errors import MismatchError
from aiocomms.lowlevel import disagreement
from aiocomms_nccl.wire import Calls, Told

_KEPT: Final = 32
"""Calls that are remembered."""
_TEXT: Final = 1000
"""Characters of a description."""


class _Called(msgspec.Struct):
    """One of this rank's calls, without its tensors."""

    signature: tuple[object, ...]
    gives: list[int]
    """Bytes for each rank, where these need not be the same for all; else nothing."""
    takes: list[int]

    def text(self) -> str:
        name, *rest = self.signature
        return f"{name}({', '.join(map(str, rest))})"[:_TEXT]


def _called(op: Any, size: int) -> _Called:
    if op.kind != ops.AllToAll.kind:
        return _Called(op.signature(), [], [])
    return _Called(op.signature(), [t.nbytes for t in op.ins(size)], [t.nbytes for t in op.outs(size)])


class Agreement:
    """What this rank has called, and what it has heard of the others."""

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self.calls = 0
        """Collectives that this rank has called."""
        self._rank = rank
        self._size = len(peers) + 1
        self._heard = dict.fromkeys(peers, 0)  # as far as this rank knows, how many each other rank has called
        self._told = dict.fromkeys(peers, 0)
        self._mine: dict[int, _Called] = {}
        self._theirs: dict[int, dict[int, Told]] = {}  # by collective and rank: what this rank has not called yet

    def call(self, op: ops.Op) -> tuple[int, MismatchError | None]:
        """This rank calls a collective.

        :returns: its number, and what is wrong with it as far as is known.
        """
        index = self.calls
        self.calls = index + 1
        self._mine[index] = _called(op, self._size)
        self._mine.pop(index - _KEPT, None)
        error = None
        for peer, told in self._theirs.pop(index, {}).items():
            error = error or self._compare(index, peer, told)
        return index, error

    def tell(self, peer: int) -> Calls | None:
        """What a rank has not been told yet."""
        told = self._told.get(peer, self.calls)
        if told == self.calls:
            return None
        self._told[peer] = self.calls
        last = []
        for index in range(max(told, self.calls - _KEPT), self.calls):
            mine = self._mine[index]
            last.append(Told(mine.text(), [mine.gives[peer], mine.takes[peer]] if mine.gives else []))
        return Calls(self.calls, last)

    def hear(self, peer: int, said: Calls) -> tuple[int, MismatchError] | None:
        """A rank tells what it has called.

        :returns: the collective in which it does something else, if there is one.
        """
        self._heard[peer] = max(self._heard.get(peer, 0), said.count)
        for index, told in enumerate(said.last, said.count - len(said.last)):
            if index >= self.calls:
                self._theirs.setdefault(index, {})[peer] = told
            elif (error := self._compare(index, peer, told)) is not None:
                return index, error
        return None

    def missing(self, index: int) -> list[int]:
        """The ranks that have not called a collective, as far as this rank knows. Any thread."""
        return [peer for peer, count in list(self._heard.items()) if count <= index]

    def _compare(self, index: int, peer: int, told: Told) -> MismatchError | None:
        mine = self._mine.get(index)
        if mine is None:
            return None
        here, there = mine.text(), told.text
        if mine.text() == told.text:
            if not mine.gives or told.sizes == [mine.takes[peer], mine.gives[peer]]:
                return None
            here += f" for {mine.takes[peer]} bytes from there and {mine.gives[peer]} to there"
            there += f" for {told.sizes} bytes"
        return disagreement(index, peer, there, self._rank, here)
