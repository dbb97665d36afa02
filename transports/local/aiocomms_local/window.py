"""The semantics of the one-sided operations. Each operation directly reads or writes the target's tensor."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

from torch import Tensor

from aiocomms import ops
from aiocomms.ops.writing import write, writing
from aiocomms.transport import OP_RESULT, Completion


class LocalWindow:
    """The parts of one window on all ranks, and the signals between the ranks."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.mapped = range(len(tensors))
        """The ranks whose memory this process can access."""
        self.signals: Counter[tuple[int, int]] = Counter()
        """The number of signals that no wait has consumed yet, for each pair of source and destination."""
        self.waiting: defaultdict[tuple[int, int], deque[Completion]] = defaultdict(deque)
        """The waits that no signal has ended yet, for each pair of source and destination."""

    def act(self, op: Any, rank: int, work: Completion) -> list[tuple[int, Completion, Any]]:
        """Perform an operation that rank ``rank`` has called.

        :returns: the works that are now complete, each with its rank and its result.
        """
        match op:
            case ops.Put():
                write(self._span(op.dst, op.offset, op.tensor), op.tensor)
                if isinstance(op, ops.PutSignal):
                    return [(rank, work, OP_RESULT), *self._signal(rank, op.dst)]
            case ops.Get():
                write(op.tensor, self._span(op.src, op.offset, op.tensor))
            case ops.FetchAdd():
                element = self.tensors[op.dst].view(-1)[op.offset]
                before = int(element.item())
                with writing(element):
                    element.add_(op.value)
                return [(rank, work, before)]
            case ops.CompareSwap():
                element = self.tensors[op.dst].view(-1)[op.offset]
                before = int(element.item())
                if before == op.expected:
                    with writing(element):
                        element.fill_(op.value)
                return [(rank, work, before)]
            case ops.MapRemoteTensor():
                return [(rank, work, self.tensors[op.rank].detach())]
            case ops.Signal():
                return [(rank, work, OP_RESULT), *self._signal(rank, op.dst)]
            case ops.WaitSignal():
                return self._wait(op.src, rank, work)
        return [(rank, work, OP_RESULT)]  # every put and get completes at its call, so a flush waits for nothing

    def withdraw(self, op: ops.WaitSignal, rank: int, work: Completion) -> bool:
        """Withdraw a wait. Return False if a signal has already ended the wait."""
        waiting = self.waiting[op.src, rank]
        if work not in waiting:
            return False
        waiting.remove(work)
        return True

    def _span(self, rank: int, offset: int, like: Tensor) -> Tensor:
        return self.tensors[rank].view(-1)[offset : offset + like.numel()]

    def _signal(self, src: int, dst: int) -> list[tuple[int, Completion, Any]]:
        waiting = self.waiting[src, dst]
        if waiting:
            return [(dst, waiting.popleft(), OP_RESULT)]
        self.signals[src, dst] += 1
        return []

    def _wait(self, src: int, dst: int, work: Completion) -> list[tuple[int, Completion, Any]]:
        if self.signals[src, dst]:
            self.signals[src, dst] -= 1
            return [(dst, work, OP_RESULT)]
        self.waiting[src, dst].append(work)
        return []
