"""The copy of a message between two tensors of this process, with the promises of every receive."""

from __future__ import annotations

from torch import Tensor

from aiocomms.errors import CommError, MessageTruncatedError
from aiocomms.lowlevel.failures import misfit
from aiocomms.ops.writing import write, writing


def copy_message(given: Tensor, wanted: Tensor, src: int) -> CommError | None:
    """Copy a message, which is a tensor of this process, into the buffer of the receive that it has matched.

    :param given: the sender's tensor.
    :param wanted: the receiver's; it need not be of the same shape.
    :param src: the sender.
    :returns: the error of the receive, see :func:`misfit`; None if the receive has the message.
    """
    if given.requires_grad:  # an autograd graph does not reach from one rank to another
        given = given.detach()
    error = misfit(src, given.dtype, given.nbytes, wanted, given.shape)
    if error is None:
        with writing(wanted):
            wanted.copy_(given.view(wanted.shape))
    elif isinstance(error, MessageTruncatedError):
        n = min(given.numel(), wanted.numel())
        write(wanted.view(-1)[:n], given.view(-1)[:n])
    return error
