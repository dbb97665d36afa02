"""The record of a batch of collectives."""

from __future__ import annotations

from typing import Any

from aiocomms.ops import checks
from aiocomms.ops._base import Buffers, Op
from aiocomms.ops.checks import CheckedComm


class CollectiveBatch(Op, frozen=True, eq=False):
    """Collectives that start together. The transport may run these collectives at the same time."""

    name = kind = "batch"
    parts: tuple[Op, ...]

    def check(self, group: CheckedComm) -> None:
        written: Buffers = []
        given: Buffers = []
        for number, part in enumerate(self.parts):
            part.check(group)
            writes, reads = _memory_of(part)
            written += _named(number, part, writes)
            given += _named(number, part, reads)
        checks.disjoint(written, given)

    def result(self) -> list[Any]:
        return [part.result() for part in self.parts]

    def reads(self) -> Buffers:
        return [buffer for number, part in enumerate(self.parts) for buffer in _named(number, part, part.reads())]

    def writes(self) -> Buffers:
        return [buffer for number, part in enumerate(self.parts) for buffer in _named(number, part, part.writes())]

    def signature(self) -> tuple[object, ...]:
        return (self.name, *(part.signature() for part in self.parts))


def _named(number: int, part: Op, buffers: Buffers) -> Buffers:
    return [(f"the {name} of part {number} ({part.name})", tensor) for name, tensor in buffers]


def _memory_of(part: Op) -> tuple[Buffers, Buffers]:
    """Return the tensors that an op of a batch writes, and the tensors that this op reads.

    If a written tensor and a read tensor share memory, return only the larger of the two, as a written tensor.
    """
    writes, reads = part.writes(), part.reads()
    for one in writes:
        for other in reads:
            begin, start = one[1].data_ptr(), other[1].data_ptr()
            if begin < start + other[1].nbytes and start < begin + one[1].nbytes:
                return [max(one, other, key=lambda buffer: buffer[1].nbytes)], []
    return writes, reads
