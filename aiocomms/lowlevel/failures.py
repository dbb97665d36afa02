"""The errors that all transports raise in the same situations.

For each kind of error, one function creates the error, so that all transports raise the error with the same text.

The module ``errors`` has the functions that create the errors about a closed or dead rank.
"""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from aiocomms.arguments import describe
from aiocomms.errors import (
    CommAbortedError,
    CommError,
    CommTimeoutError,
    DriverLostError,
    MessageTruncatedError,
    MismatchError,
    PeerDiedError,
    WorkerError,
)

_LONGEST: Final = 2000
"""The largest number of characters of a reason that is sent to other ranks."""
_TRAVELS: Final = {
    cls.__name__: cls for cls in (CommAbortedError, CommTimeoutError, DriverLostError, MismatchError, PeerDiedError)
}
"""The classes of errors that are passed to :meth:`aiocomms.transport.Transport.abort`.

The other ranks then raise errors of these classes.
"""

_OF_OTHERS: Final = (CommAbortedError, PeerDiedError, WorkerError)
"""The classes of errors whose attribute ``peer`` is the rank at fault.

MismatchError is not one of these classes, because either of the two ranks may be at fault.
"""


def is_caused(error: BaseException | None) -> bool:
    """Return True if this rank's error, or the error's ``__cause__``, says that another rank is at fault."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_caused, error.exceptions))
    if isinstance(error, CommTimeoutError) and error.late:
        return error.rank not in error.late
    if isinstance(error, _OF_OTHERS) and error.peer is not None:
        return error.peer != error.rank
    return error is not None and is_caused(error.__cause__)


def misfit(
    rank: int, dtype: torch.dtype, nbytes: int, buffer: torch.Tensor, shape: torch.Size | None = None
) -> MessageTruncatedError | MismatchError | None:
    """Return the error of a receive whose buffer does not fit the message; None if the buffer fits.

    After a :class:`MessageTruncatedError`, the buffer contains the beginning of the message, up to the buffer's size.
    After a :class:`MismatchError` the buffer is unchanged.

    :param rank: the sender.
    :param dtype: the message's dtype.
    :param nbytes: the message's size in bytes.
    :param shape: the shape of the sender's tensor, if the transport knows the shape.
    """
    if dtype == buffer.dtype and nbytes == buffer.nbytes:
        return None
    what = str(dtype).removeprefix("torch.") + ("" if shape is None else str(list(shape)))
    cls = MessageTruncatedError if dtype == buffer.dtype else MismatchError
    return cls(
        f"the message from rank {rank} is {what}, {nbytes} bytes, and the buffer {describe(buffer)}, "
        f"{buffer.nbytes} bytes", peer=rank,
    )  # fmt: skip


def disagreement(peer: int, theirs: str, rank: int, mine: str) -> MismatchError:
    """Return the error of a communicator whose ranks disagree on a collective.

    The communicator's core adds the collective's number to the error.

    :param theirs: the op that ``peer`` calls, as text.
    :param mine: the op that ``rank`` calls.
    """
    return MismatchError(f"rank {peer} calls {theirs}, and rank {rank} calls {mine}", peer=peer)


class Reason(msgspec.Struct, array_like=True, frozen=True):
    """A message that tells other ranks why its sender ends the communicator.

    A reason is small enough for a control message. The receiver checks the reason.
    """

    error: str
    """The name of the error's class."""
    message: str
    peer: int
    """The rank at fault. For a timeout, this is the rank whose deadline has passed."""
    late: tuple[int, ...] = ()
    """The late ranks. The sender of this reason has waited for the late ranks until the sender's deadline."""

    @classmethod
    def of(cls, error: CommError, rank: int) -> Reason:
        """Return the reason for an error that ends the communicator of ``rank``.

        The rank sends the reason to the other ranks.
        """
        name = type(error).__name__
        late: tuple[int, ...] = ()
        peer = error.peer
        if isinstance(error, CommTimeoutError):
            peer, late = error.teller, error.late
        peer = rank if peer is None else peer
        return cls(name if name in _TRAVELS else "CommAbortedError", error.message[:_LONGEST], peer, late)

    def to_error(self) -> CommError:
        """Return the error that a rank raises after it has received the reason."""
        kind = _TRAVELS.get(self.error, CommAbortedError)
        if kind is CommTimeoutError:
            return CommTimeoutError(self.message[:_LONGEST], late=self.late, teller=self.peer)
        return kind(self.message[:_LONGEST], peer=self.peer)
