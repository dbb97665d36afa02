"""The communication of the server's ranks. No other module communicates.

    rank = stage * tp + part             stage 0            stage 1
                              part 0    rank 0 ──────────> rank 2 ───> the vectors, to rank 0
                                          │ sums             │ sums
                              part 1    rank 1 ──────────> rank 3

A stage is a run of layers, and each of its parts has some heads of each layer. The parts add up their results twice in
each layer. Then every part has the sum, and sends it to the same part of the next stage.
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
RECOVERY = 30.0  # seconds within which survivors and replacements must meet


@dataclass(frozen=True, slots=True)
class Place:
    """The share of the model that a rank has.

    :param tp: the number of parts of each layer (tensor parallelism)
    :param pp: the number of stages of layers (pipeline parallelism)
    """

    rank: int
    tp: int
    pp: int

    @property
    def stage(self) -> int:
        """The rank's stage."""
        return self.rank // self.tp

    @property
    def part(self) -> int:
        """The rank's part of the stage."""
        return self.rank % self.tp

    @property
    def parts(self) -> list[int]:
        """The ranks of this stage."""
        return list(range(self.stage * self.tp, (self.stage + 1) * self.tp))

    @property
    def last(self) -> bool:
        """True if the rank is in the last stage."""
        return self.stage == self.pp - 1

    @property
    def home(self) -> int:
        """The rank that sends the vectors to rank 0. With one stage, it is rank 0 itself."""
        return (self.pp - 1) * self.tp


class Links:
    """The messages and sums of one rank. Those of different plans are separate.

    :param comm: the current communicator, which stays valid when a rank is lost and replaced
    """

    def __init__(self, comm: CurrentComm, place: Place) -> None:
        self.place = place
        self._comm = comm
        self._parts: Communicator | None = None

    async def meet(self, comm: Communicator) -> None:
        """Form a communicator for the parts of each stage. All ranks call this method."""
        await self.part()
        if self.place.tp > 1:
            self._parts = await comm.split(self.place.parts)

    async def part(self) -> None:
        """Close the communicator of this stage's parts."""
        parts, self._parts = self._parts, None
        if parts is not None:
            with suppress(CommError):
                await parts.aclose()

    def plan(self, number: int) -> AbstractContextManager[object]:
        """Return a context whose sums match the same plan's sums on the other ranks."""
        return nullcontext() if self._parts is None else self._parts.lane(number)

    async def sum(self, partial: Tensor) -> Tensor:
        """Add up the results of this stage's parts in place, on all parts."""
        assert self._parts is not None
        return await self._parts.all_reduce(partial)

    async def send(self, data: Tensor, spent: list[float]) -> None:
        """Send data to the next stage, or vectors from the last stage to rank 0."""
        rank = 0 if self.place.last else self.place.rank + self.place.tp
        await self._comm.send_object((data, spent), rank)

    async def receive(self) -> tuple[Tensor, list[float]]:
        """Receive data from the previous stage, or the vectors on rank 0."""
        place = self.place
        data, spent = await self._comm.recv_object(place.home if place.rank == 0 else place.rank - place.tp)
        return data, spent


async def open_links(tp: int) -> tuple[Service, Links]:
    """Meet the other ranks. After a loss, the other ranks continue with the process that replaces the lost rank.

    :raises CommError: the ranks do not meet
    """

    async def recover(lost: Communicator) -> Communicator:
        comm = await lost.reconfigure(size=lost.size, timeout=RECOVERY)
        with suppress(CommError):  # a failure loses this communicator, and the service recovers again
            await links.meet(comm)
        return comm

    comm = await aiocomms.new_comm()
    service = Service(comm, recover)
    links = Links(service.comm, Place(comm.rank, tp, comm.size // tp))
    await links.meet(comm)
    return service, links
