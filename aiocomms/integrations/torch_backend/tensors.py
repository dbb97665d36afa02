"""The tensors of a call: what aiocomms moves in their place where it cannot move them as they are."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from aiocomms import blocking
from aiocomms.errors import ArgumentError
from aiocomms.integrations.torch_backend.communicators import GroupSide
from aiocomms.integrations.torch_backend.completer import Completer
from aiocomms.integrations.torch_backend.parts import WorkPart, WorkStep, wait_for
from aiocomms.ops.writing import write


def _is_plain(tensor: Tensor) -> bool:
    """Return whether aiocomms can move it as it is; or has to say why it moves none of the kind."""
    dense = tensor.layout is torch.strided
    return not dense or (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def _flat(tensor: Tensor) -> Tensor:
    """Return the same memory without its shape: ranks need not agree on that, where their numbers of elements do."""
    return tensor if tensor.dim() == 1 or tensor.layout is not torch.strided else tensor.view(-1)


def cuts(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return how many elements of a tensor belong to each rank, whose rows are said, or are as many as any other's."""
    rows = tensor.shape[0] if tensor.dim() else 0
    counts = [operator.index(part) for part in splits] or [rows // size] * size
    if not tensor.dim() or sum(counts) != rows:
        raise ArgumentError(f"splits are {counts} for a tensor of shape {list(tensor.shape)}, wanted its rows in all")
    return [count * (tensor.numel() // (rows or 1)) for count in counts]


class CallTensors:
    """The tensors of one call: those that aiocomms moves in place of those that it cannot move as they are."""

    def __init__(self, side: GroupSide) -> None:
        """Note by which communicator they go."""
        self.side: GroupSide = side
        self.comm: blocking.Communicator = side.comm
        self._copies: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same values."""
        tensor = tensor.detach() if tensor.requires_grad else tensor
        return _flat(tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous())

    def written(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same values, which is written in its place.

        :raises ArgumentError: elements of the tensor share memory.
        """
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if _is_plain(tensor):
            return _flat(tensor)
        if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ArgumentError("a tensor to be written has elements that share memory, as expand() makes them")
        copy = tensor.resolve_conj().resolve_neg().contiguous()
        copy = copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
        self._copies.append((tensor, copy))
        return _flat(copy)

    def parts(self, started: list[WorkPart], completer: Completer) -> list[WorkPart]:
        """Return the started parts, and behind them what puts values back, if any is to be."""
        if not self._copies:
            return started

        def put_back() -> None:
            wait_for(started, None)  # All parts have ended; one that has failed has nothing to put back.
            for tensor, copy in self._copies:
                write(tensor, copy)
            self.side.settle()

        return [WorkStep(started, put_back).after(completer, here=True)]
