"""The ledger of a history: each message and item that was sent, and who has got it. All ranks write into one ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from aiocomms.testing.simulation import here

Process = tuple[int, int]
"""A process: its rank of the world, and how often that was started before."""
Way = tuple[Any, ...]
"""The way of a message: its communicator, lane, step, source, destination, and which one it is of several."""
_ROOM: Final = 8
"""The bytes that a message's number takes. A shorter message carries none: its receive says which one it should be."""


def me() -> Process:
    """Return the process that runs."""
    rank = here()
    return rank.rank, rank.restarts


@dataclass
class Entry:
    """A message that somebody has sent."""

    number: int
    way: Way
    sender: Process
    to: tuple[str, int]
    """The rank of a communicator to which it goes."""
    end: str = ""
    """The end of the send: ``"sent"``, or the class of its error; ``"left"``: that says nothing; empty: not yet."""
    got: list[Process] = field(default_factory=list)

    def __str__(self) -> str:
        return f"message {self.number} on {self.way} from {self.sender}"

    def ended(self, work: Any) -> None:
        """Note how its send has ended."""
        self.end = "sent" if work.error is None else type(work.error).__name__


class Ledger:
    """The messages that a history has sent and received, and where its processes have been."""

    def __init__(self) -> None:
        self.come: set[Any] = set()
        """The steps to which ranks have come: all see it, at once and without a message."""
        self.members: dict[tuple[str, int], Process] = {}
        """The process that is a rank of a communicator, from when it has formed that."""
        self._entries: list[Entry] = []
        self._on: dict[Way, Entry] = {}
        self._wrong: list[str] = []

    def join(self, comm: Any) -> None:
        """Note that this process has formed a communicator."""
        other = self.members.setdefault((comm.name, comm.rank), me())
        if other != me():
            self._wrong.append(f"{other} and {me()} are both rank {comm.rank} of '{comm.name}'")

    def formed(self, comm: Any) -> bool:
        """Return whether all ranks of a communicator have formed it."""
        return all((comm.name, rank) in self.members for rank in range(comm.size))

    def enter(self, comm: str, dst: int, way: Way) -> Entry:
        """Note that this process sends something to a rank of a communicator."""
        assert way not in self._on, way
        entry = Entry(len(self._entries), way, me(), (comm, dst))
        self._entries.append(entry)
        self._on[way] = entry
        return entry

    def stamp_as(self, tensor: Tensor, way: Way) -> None:
        """Write into a tensor the number of the message that was sent on a way, if one was."""
        if (entry := self._on.get(way)) is not None:
            stamp(tensor, entry.number)

    def receive(self, tensor: Tensor, way: Way) -> None:
        """Note that this process has received a message."""
        expected = self._on.get(way)
        number = _number_in(tensor, -1 if expected is None else expected.number)
        if not 0 <= number < len(self._entries):
            self._wrong.append(f"{me()} has received on {way} what nobody has sent: {number}")
            return
        entry = self._entries[number]
        if entry.way != way:
            self._wrong.append(f"{me()} has received on {way} {entry}")
        if entry.got:
            self._wrong.append(f"{me()} has received {entry}, which {entry.got} had received before")
        entry.got.append(me())

    def wrong(self, living: set[Process]) -> list[str]:
        """Return what does not balance: each message is received once, or its sender is told.

        :param living: the processes that have come to their end.
        """
        wrong = list(self._wrong)
        for entry in self._entries:
            if not entry.end and entry.sender in living:
                wrong.append(f"the send of {entry} has not ended")
            if entry.end == "sent" and not entry.got and self.members.get(entry.to) in living:
                wrong.append(f"nobody has received {entry}, whose send has succeeded")
        return wrong


def stamp(tensor: Tensor, number: int) -> None:
    """Write the number of a message into its first bytes."""
    if tensor.nbytes >= _ROOM:
        tensor.view(-1).view(torch.uint8)[:_ROOM].view(torch.int64)[0] = number


def _number_in(tensor: Tensor, otherwise: int) -> int:
    """Return the number that a message carries; if it has no room for one, another."""
    if tensor.nbytes < _ROOM:
        return otherwise
    return int(tensor.view(-1).view(torch.uint8)[:_ROOM].view(torch.int64)[0])
