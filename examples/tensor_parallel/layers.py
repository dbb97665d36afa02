"""Linear layers that are split over the ranks, as in Megatron-LM.

M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
https://arxiv.org/abs/1909.08053, section 3. A pair of layers with an elementwise function or attention heads between
them needs one all_reduce:

    A = [A1 | A2]            column-parallel: rank r has the output features of Ar, without communication
    B = [B1 / B2]            row-parallel:    rank r has the input features of Br
    gelu(X A) B = gelu(X A1) B1 + gelu(X A2) B2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiocomms.serving import CurrentComm

    Read = Callable[[str, slice, slice], Tensor]
    """A function that reads some rows and columns of a weight from the file. A rank never reads the whole weight."""

ALL = slice(None)


def share(features: int, comm: CurrentComm) -> slice:
    """Return this rank's features: a contiguous part, of the same size on all ranks."""
    if features % comm.size:
        raise ValueError(f"{features} features cannot be split evenly over {comm.size} ranks")
    part = features // comm.size
    return slice(comm.rank * part, (comm.rank + 1) * part)


class ColumnParallelLinear(nn.Module):
    """A linear layer that computes this rank's part of the output features from the whole input.

    :param features: the output features of the whole layer, which are the rows of torch's weight
    """

    def __init__(self, read: Read, name: str, features: int, comm: CurrentComm) -> None:
        super().__init__()
        mine = share(features, comm)
        self.weight = nn.Parameter(read(f"{name}.weight", mine, ALL), requires_grad=False)
        self.bias = nn.Parameter(read(f"{name}.bias", mine, ALL), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take `[..., all input features]` to `[..., this rank's output features]`."""
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer that computes all output features from this rank's part of the input, as a sum over the ranks.

    :param features: the input features of the whole layer
    :param comm: the current communicator, which stays valid when ranks are lost and replaced
    """

    def __init__(self, read: Read, name: str, features: int, comm: CurrentComm) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(read(f"{name}.weight", ALL, share(features, comm)), requires_grad=False)
        bias = read(f"{name}.bias", ALL, ALL)
        # Only one rank adds the bias to its summand.
        self.bias = nn.Parameter(bias, requires_grad=False) if comm.rank == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """Take `[..., this rank's input features]` to `[..., all output features]`. It blocks its thread."""
        return self.comm.portal().all_reduce(functional.linear(x, self.weight, self.bias)).wait()
