"""How ops end, as the engine says it, and the errors that are made of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from aiocomms.errors import CommAbortedError, CommError, MessageTruncatedError, MismatchError, PeerDiedError
from aiocomms_ucx._engine import dtype_names, explain

DONE, TRUNCATED, OTHER_DTYPE, CLOSED, UNEQUAL, BROKEN, DROPPED = range(7)
"""How an op ended, as in group.hpp."""
_DTYPES: Final = dtype_names()
_GONE: Final = frozenset({3, 6, 24, 25, 80})
"""UCX's errors for a connection that is no more (ucs/type/status.h, without the sign)."""


def error_of(op: Any, status: int, a: int, b: int, rank: int, size: int) -> CommError:
    """What a status other than DONE and DROPPED means, with its details, on a rank."""
    if status == CLOSED:
        return closed_by(a)
    if status == UNEQUAL:
        wanted = op.outs(size)[a].nbytes
        return MismatchError(f"rank {a} sends {b} bytes to rank {rank}, which wants {wanted}", peer=a)
    peer = peer_of(op)
    if status == BROKEN:
        why = explain(a)
        if a in _GONE:
            return PeerDiedError(f"rank {peer} is gone: {why}", peer=peer)
        return CommError(f"UCX could not do it, with rank {peer}: {why}", peer=peer)
    theirs = f"the message from rank {peer} is {_DTYPES[b]}, {a} bytes"
    mine = f"the buffer {str(op.tensor.dtype).removeprefix('torch.')}, {op.tensor.nbytes} bytes"
    cls = MessageTruncatedError if status == TRUNCATED else MismatchError
    return cls(f"{theirs}, and {mine}", peer=peer)


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or about to be: its memory is, before its descriptors are."""
    try:
        Path(f"/proc/{pid}/exe").readlink()
    except FileNotFoundError:
        return True
    except OSError:
        pass  # another user's, say
    return False


def peer_of(op: Any) -> int | None:
    """The one rank that an op is about, if it is about one."""
    return next((getattr(op, name) for name in ("src", "dst") if hasattr(op, name)), None)


def closed_by(rank: int) -> CommAbortedError:
    """What an op fails with that needs a rank which has closed the communicator."""
    return CommAbortedError(f"closed by rank {rank}, which this op needs", peer=rank)
