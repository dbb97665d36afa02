"""The tensors of one operation of one size: their contents, and the contents expected afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from aiocomms.cli.bench.operations import ITEM, OPERATIONS

ROOT = 0


class BenchCase:
    """A rank's tensors of float32: ``input`` is read, ``output`` written; one and the same where the op is in place.

    The size is that of the larger of both, as in nccl-tests; with an equal part for each rank of an op that has parts,
    and never less than an element.
    """

    op: str
    rank: int
    size: int

    def __init__(self, op: str, nbytes: int, rank: int, size: int) -> None:
        self.op, self.rank, self.size = op, rank, size
        self.moves: str = OPERATIONS[op].moves
        whole = max(1, nbytes // ITEM)
        part = max(1, whole // size)
        mine, theirs = {
            "all_gather": (part, part * size),
            "gather": (part, part * size),
            "reduce_scatter": (part * size, part),
            "scatter": (part * size, part),
            "all_to_all": (part * size, part * size),
            "barrier": (0, 0),
        }.get(self.moves, (whole, whole))
        self.input: Tensor = torch.zeros(mine)
        self.output: Tensor = self.input if self.moves in ("all_reduce", "reduce", "broadcast") else torch.zeros(theirs)
        self.count: int = max(mine, theirs)

    @property
    def nbytes(self) -> int:
        """The size that is measured."""
        return self.count * ITEM

    @property
    def inputs(self) -> list[Tensor]:
        """The input, a part for each rank."""
        return list(self.input.chunk(self.size))

    @property
    def outputs(self) -> list[Tensor]:
        """The output, a part from each rank."""
        return list(self.output.chunk(self.size))

    def fill(self) -> None:
        """Whole numbers that tell ranks and places apart; what is to be written holds something else before."""
        self.output.fill_(-1.0)
        if self.moves != "broadcast" or self.rank == ROOT:
            self.input.copy_(_numbers(len(self.input), self.rank))

    def clear(self) -> None:
        """Zeros, so that sums stay finite however often they are repeated."""
        self.input.zero_()
        self.output.zero_()

    def wrong(self) -> int:
        """Return how many elements of the output are not what the op on the numbers of :meth:`fill` gives."""
        expected = self._expected()
        return 0 if expected is None else int((self.output != expected).sum())

    def _expected(self) -> Tensor | None:
        """Return what this rank must have afterwards; None: nothing, or whatever it may be."""
        n, rank, moves = len(self.input), self.rank, self.moves
        if moves == "all_reduce" or (moves == "reduce" and rank == ROOT):
            return self._sum()
        if moves == "reduce_scatter":
            return self._sum().chunk(self.size)[rank]
        if moves == "all_gather" or (moves == "gather" and rank == ROOT):
            return torch.cat([_numbers(n, r) for r in range(self.size)])
        if moves == "all_to_all":
            return torch.cat([_numbers(n, r).chunk(self.size)[rank] for r in range(self.size)])
        if moves == "scatter":
            return _numbers(n, ROOT).chunk(self.size)[rank]
        writer = {"broadcast": ROOT, "send": 1 - rank, "put_signal": 1 - rank}
        writer |= {"put": 0, "send_burst": 0} if rank == 1 else {"get": 1} if rank == 0 else {}
        return _numbers(n, writer[moves]) if moves in writer else None

    def _sum(self) -> Tensor:
        total = torch.zeros(len(self.input))
        for rank in range(self.size):
            total += _numbers(len(self.input), rank)
        return total


def _numbers(count: int, rank: int) -> Tensor:
    """Small enough that float32 holds their sum over some thousand ranks exactly, in whichever order."""
    return torch.arange(count, dtype=torch.float32) % 1021 + 17 * rank
