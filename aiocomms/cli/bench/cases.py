"""The tensors for one operation at one size, and the contents that are expected after the operation."""

from __future__ import annotations

import torch
from torch import Tensor

from aiocomms.cli.bench.operations import ITEM, OPERATIONS

ROOT = 0


class BenchCase:
    """A rank's float32 tensors: the op reads ``input`` and writes ``output``.

    For an in-place op, both are the same tensor. The measured size is the size of the larger tensor, as in
    nccl-tests. If a tensor has one part for each rank, all parts have the same number of elements, at least one.
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
        """The measured size in bytes."""
        return self.count * ITEM

    @property
    def inputs(self) -> list[Tensor]:
        """The list of the input's parts, one part for each rank."""
        return list(self.input.chunk(self.size))

    @property
    def outputs(self) -> list[Tensor]:
        """The list of the output's parts, one part from each rank."""
        return list(self.output.chunk(self.size))

    def fill(self) -> None:
        """Fill the input with integers that differ by rank and position, and the output with the wrong number -1."""
        self.output.fill_(-1.0)
        if self.moves != "broadcast" or self.rank == ROOT:
            self.input.copy_(_numbers(len(self.input), self.rank))

    def clear(self) -> None:
        """Fill both tensors with zeros, so that repeated sums stay finite."""
        self.input.zero_()
        self.output.zero_()

    def wrong(self) -> int:
        """Return the number of wrong elements in the output of an op. Call :meth:`fill` before the op."""
        expected = self._expected()
        return 0 if expected is None else int((self.output != expected).sum())

    def _expected(self) -> Tensor | None:
        """Return the correct output of this rank after the op; None if the output of this rank is not checked."""
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
    """Return the input of a rank: integers so small that their sum over a thousand ranks is exact in float32."""
    return torch.arange(count, dtype=torch.float32) % 1021 + 17 * rank
