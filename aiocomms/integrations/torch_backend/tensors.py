"""The tensors of a call, and copies of tensors that aiocomms cannot move directly."""

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
    """Return whether the tensor itself, and not a copy, is passed to aiocomms.

    A sparse tensor is also passed without a copy, and aiocomms then raises an error about the layout.
    """
    dense = tensor.layout is torch.strided
    return not dense or (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def _flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view, because torch allows the shapes of a tensor to differ between ranks."""
    return tensor if tensor.dim() == 1 or tensor.layout is not torch.strided else tensor.view(-1)


def cuts(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of elements that each rank gets from a tensor, in rank order.

    Rank ``r`` gets ``splits[r]`` rows. If ``splits`` is empty, all ranks get the same number of rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    counts = [operator.index(part) for part in splits] or [rows // size] * size
    if not tensor.dim() or sum(counts) != rows:
        raise ArgumentError(f"splits are {counts} for a tensor of shape {list(tensor.shape)}, wanted its rows in all")
    return [count * (tensor.numel() // (rows or 1)) for count in counts]


class CallTensors:
    """The tensors of one call, with copies in place of tensors that aiocomms cannot move directly."""

    def __init__(self, side: GroupSide) -> None:
        """Store the communicator that moves the tensors."""
        self.side: GroupSide = side
        self.comm: blocking.Communicator = side.comm
        self._copies: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """Return a flat tensor with the values of ``tensor``, for aiocomms to read."""
        tensor = tensor.detach() if tensor.requires_grad else tensor
        return _flat(tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous())

    def written(self, tensor: Tensor) -> Tensor:
        """Return a flat tensor with the values of ``tensor``, for aiocomms to write.

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
        """Return ``started`` unchanged if aiocomms writes directly into the program's tensors.

        If aiocomms writes into copies, return a list with one step. The step waits for the parts in ``started``, and
        then copies the values back into the program's tensors.
        """
        if not self._copies:
            return started

        def put_back() -> None:
            wait_for(started, None)  # All parts have ended. This raises the error of a failed part.
            for tensor, copy in self._copies:
                write(tensor, copy)
            self.side.settle()

        return [WorkStep(started, put_back).after(completer, here=True)]
