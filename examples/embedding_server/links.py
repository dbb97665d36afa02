"""What the ranks of the server tell each other: nothing else here communicates.

    rank = stage * tp + part             stage 0            stage 1
                              part 0    rank 0 ──────────> rank 2 ───> the vectors, to rank 0
                                          │ sums             │ sums
                              part 1    rank 1 ──────────> rank 3

A stage is a run of layers, and each of its parts has some heads of each. The parts add up what they have computed,
twice in each layer, and all of them then have the whole of it; so each sends it to the same part of the next stage.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiocomms
from aiocomms.errors import CommError
from aiocomms.serving import Service

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from aiocomms import Communicator
    from aiocomms.serving import CurrentComm
RECOVERY = 30.0  # seconds in which those that are left, and those that take the place of the dead, find each other


@dataclass(frozen=True, slots=True)
class Place:
    """Which share of the model a rank has.

    :param tp: over how many parts each layer is split (tensor parallelism)
    :param pp: over how many stages the layers are (pipeline parallelism)
    """

    rank: int
    tp: int
    pp: int

    @property
    def stage(self) -> int:
        """Which stage it belongs to."""
        return self.rank // self.tp

    @property
    def part(self) -> int:
        """Which part of it this is."""
        return self.rank % self.tp

    @property
    def parts(self) -> list[int]:
        """The ranks of this stage."""
        return list(range(self.stage * self.tp, (self.stage + 1) * self.tp))

    @property
    def last(self) -> bool:
        """Whether it is in the last stage."""
        return self.stage == self.pp - 1

    @property
    def home(self) -> int:
        """The rank that sends the vectors to rank 0; that itself, if there is one stage."""
        return (self.pp - 1) * self.tp


class Links:
    """The messages and sums of one rank, within a plan: those of several plans do not meet.

    :param comm: stays valid when a rank is lost and replaced
    """

    def __init__(self, comm: CurrentComm, place: Place) -> None:
        self.place = place
        self._comm = comm
        self._parts: Communicator | None = None

    async def meet(self, comm: Communicator) -> None:
        """Have the parts of each stage meet on a communicator that has just formed; all ranks call it."""
        await self.part()
        if self.place.tp > 1:
            self._parts = await comm.split(self.place.parts)

    async def part(self) -> None:
        """Leave the parts of this stage."""
        parts, self._parts = self._parts, None
        if parts is not None:
            with suppress(CommError):
                await parts.aclose()

    def plan(self, number: int) -> AbstractContextManager[object]:
        """What a rank does for a plan within this block meets the same plan's on the other ranks."""
        return nullcontext() if self._parts is None else self._parts.lane(number)

    async def sum(self, partial: Tensor) -> Tensor:
        """Add up what the parts of this stage have computed, in place, so that all have it."""
        assert self._parts is not None
        return await self._parts.all_reduce(partial)

    async def send(self, data: Tensor, spent: list[float]) -> None:
        """Hand on to the next stage; from the last one the vectors to rank 0."""
        rank = 0 if self.place.last else self.place.rank + self.place.tp
        await self._comm.send_object((data, spent), rank)

    async def receive(self) -> tuple[Tensor, list[float]]:
        """What the stage before has handed on; on rank 0 the vectors."""
        place = self.place
        data, spent = await self._comm.recv_object(place.home if place.rank == 0 else place.rank - place.tp)
        return data, spent


async def open_links(tp: int) -> tuple[Service, Links]:
    """Meet the other ranks; those that are left go on with the process that takes the place of a lost one.

    :raises CommError: the ranks do not find each other
    """

    async def recover(lost: Communicator) -> Communicator:
        comm = await lost.reconfigure(size=lost.size, timeout=RECOVERY)
        with suppress(CommError):  # if that fails it is lost as well, and the service recovers from that
            await links.meet(comm)
        return comm

    comm = await aiocomms.new_comm()
    service = Service(comm, recover)
    links = Links(service.comm, Place(comm.rank, tp, comm.size // tp))
    await links.meet(comm)
    return service, links
