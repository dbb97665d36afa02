"""The end of an op: the engine's statuses, and the error for each status."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from aiocomms import ops
from aiocomms.errors import CommError, MismatchError
from aiocomms.lowlevel import closed_by, gone, misfit
from aiocomms_ucx._engine import Status, dtype_names, explain

DONE: Final = int(Status.DONE)
TRUNCATED: Final = int(Status.TRUNCATED)
OTHER_DTYPE: Final = int(Status.OTHER_DTYPE)
CLOSED: Final = int(Status.CLOSED)
UNEQUAL: Final = int(Status.UNEQUAL)
BROKEN: Final = int(Status.BROKEN)
DROPPED: Final = int(Status.DROPPED)
_DTYPES: Final = tuple(getattr(torch, name) for name in dtype_names())
_GONE: Final = frozenset({3, 24, 25, 80})
"""UCX's errors for a broken connection (ucs/type/status.h, without the sign).

This set does not contain the error 6, "destination is unreachable". If this process has no free descriptors, UCX
reports error 6 also for a rank that is alive.
"""


def error_of(op: Any, status: int, a: int, b: int, rank: int, size: int, *, lives: bool = False) -> CommError:
    """Return the error for an op that has ended on ``rank`` with a status other than DONE and DROPPED.

    The details ``a`` and ``b`` depend on the status.

    :param lives: whether the op's peer is known to be alive. If so, the error must not report the peer's death.
    """
    if status == CLOSED:
        return closed_by(a)
    if status == UNEQUAL:
        wanted = op.outs(size)[a].nbytes
        return MismatchError(f"rank {a} sends {b} bytes to rank {rank}, which wants {wanted}", peer=a)
    peer = peer_of(op)
    if status == BROKEN:
        why = explain(a)
        if a in _GONE and not lives:
            return gone(peer, why)
        return CommError(f"UCX failed with rank {peer}: {why}", peer=peer)
    wrong = misfit(op.src, _DTYPES[b], a, op.tensor)
    return wrong or CommError(f"the engine says that {a} bytes of {_DTYPES[b]} do not fit", peer=peer)


def found(op: Any, nbytes: int, dtype: int) -> ops.Message:
    """Return the result of a probe that has found a message."""
    message: ops.Message = op.message(nbytes, _DTYPES[dtype])
    return message


def has_ended(pid: int) -> bool:
    """Return whether a process of this host has ended, or is ending and has already released its memory."""
    try:
        Path(f"/proc/{pid}/exe").readlink()
    except FileNotFoundError:
        return True
    except OSError:
        pass  # This may be another user's process.
    return False


def peer_of(op: Any) -> int | None:
    """Return the rank with which an op communicates; None if the op names no single rank."""
    return next((getattr(op, name) for name in ("src", "dst") if hasattr(op, name)), None)
