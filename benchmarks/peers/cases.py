"""One operation to be measured, its tensors, and the check that it did what it should."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

BURST = 4
"""Messages under way at once in a stream."""


class Case(NamedTuple):
    """An operation on ``nbytes`` of float32.

    For all_gather that is what each rank ends with, for reduce_scatter what each begins with, for all_to_all both.
    """

    kind: str
    nbytes: int

    @property
    def share(self) -> float:
        """How much of one iteration is one op: a ping-pong is two messages, a stream's burst is several."""
        return {"ping_pong": 0.5, "put_signal": 0.5, "stream": 1 / BURST}.get(self.kind, 1.0)


class Way(NamedTuple):
    """One way to do it: ``call()`` is one iteration, to be awaited unless it blocks; None where a rank has no part."""

    call: Callable[[], Awaitable[Any]] | Callable[[], Any] | None
    blocking: bool = False


class Buffers:
    """A rank's tensors for a case: ``input`` is read, ``outputs`` are written; in place where an op is in place."""

    def __init__(self, case: Case, rank: int, size: int) -> None:
        self.case, self.rank, self.size = case, rank, size
        n = max(1, case.nbytes // 4)
        whole, part = (n,), (n // size,)
        shapes = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}
        mine, theirs = shapes.get(case.kind, (whole, whole))
        self.input = torch.empty(mine)
        in_place = case.kind in ("all_reduce", "broadcast")
        # A stream's messages all go to one buffer, as in osu_bw and ucx_perftest: it is the transport that is measured.
        copies = BURST if case.kind == "stream" else 1
        self.outputs = [self.input] if in_place else [torch.empty(theirs)] * copies

    @property
    def output(self) -> Tensor:
        """The only output, or the first."""
        return self.outputs[0]

    def fill(self) -> None:
        """Data that tells ranks and places apart; what is written holds something else before."""
        for output in self.outputs:
            output.fill_(-1.0)
        if self.case.kind != "broadcast" or self.rank == 0:
            self.input.copy_(pattern(len(self.input), self.rank))

    def clear(self) -> None:
        """Zeros, so that sums stay finite however often they are repeated."""
        for tensor in (self.input, *self.outputs):
            tensor.zero_()

    def check(self) -> None:
        """Fail unless the outputs hold what the operation on :meth:`fill`'s data gives."""
        expected = self._expected()
        for output in self.outputs if expected is not None else ():
            if not torch.equal(output, expected):
                wrong = int((output != expected).nonzero()[0])
                raise AssertionError(
                    f"{self.case.kind} of {self.case.nbytes} B: element {wrong} on rank {self.rank} is "
                    f"{output[wrong]}, wanted {expected[wrong]}"
                )

    def _expected(self) -> Tensor | None:
        kind, rank, size = self.case.kind, self.rank, self.size
        n, part = max(1, self.case.nbytes // 4), len(self.output)
        everyone = [pattern(len(self.input), r) for r in range(size)]
        if kind == "all_reduce":
            return torch.stack(everyone).sum(0)
        if kind == "reduce_scatter":
            return torch.stack(everyone).sum(0)[rank * part : (rank + 1) * part]
        if kind == "all_gather":
            return torch.cat(everyone)
        if kind == "all_to_all":
            share = n // size
            return torch.cat([whole[rank * share : (rank + 1) * share] for whole in everyone])
        if kind == "put_signal":
            return everyone[1 - rank]
        if kind == "get":
            return everyone[1] if rank == 0 else None
        if kind == "stream":
            return everyone[0] if rank == 1 else None
        return everyone[0]  # a broadcast, and a ping-pong that ends where it began


def pattern(n: int, rank: int) -> Tensor:
    """Small whole numbers, so that float32 sums are exact."""
    return torch.arange(n, dtype=torch.float32) % 1021 + 17 * rank
