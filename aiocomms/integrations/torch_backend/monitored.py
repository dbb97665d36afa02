"""A barrier whose error names the missing ranks. After the error, the group stays usable."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist

from aiocomms import arguments, blocking
from aiocomms.communicator.portal.operations import BlockingLane
from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.ops import buffers

_ROOT = 0


def remaining(timeout: float | timedelta) -> float:
    """Return a timeout in seconds. As in torch, a ``timedelta`` may be 0 or negative; the barrier then fails at once.

    :raises ArgumentError: the timeout is neither a ``timedelta`` nor a number of seconds above 0.
    """
    if isinstance(timeout, timedelta) and timeout <= timedelta(0):
        return timeout.total_seconds()
    return arguments.seconds("timeout", timeout)


def monitored_barrier(comm: blocking.Communicator, number: int, seconds: float | None, all_ranks: bool) -> None:
    """Send a message to rank 0, and wait for rank 0's answer. On rank 0, receive all messages, and then answer them.

    :param number: the number of this barrier, which is equal on all ranks.
    :param seconds: the deadline of each receive; None for no deadline.
    :param all_ranks: True: the error names all missing ranks. False: the error names only the first missing rank.
    :raises DistBackendError: a rank is missing. The text of the error is the same as in torch's ``monitored_barrier``.
    """
    if seconds is not None and seconds <= 0:
        raise dist.DistBackendError(f"Rank {comm.rank} timed out in monitoredBarrier after {seconds} seconds.")
    lane = comm.lane("aiocomms.integrations.torch_backend: monitored_barrier")
    if comm.rank == _ROOT:
        _hears(lane, number, seconds, all_ranks)
        return
    try:
        lane.send(_nothing(), _ROOT, number)
        lane.recv(_nothing(), _ROOT, number, timeout=seconds).wait()
    except CommError as error:
        raise dist.DistBackendError(
            f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank {_ROOT}. Please check rank {_ROOT} logs for faulty rank."
        ) from error


def _nothing() -> torch.Tensor:
    return buffers.zeros(1, dtype=torch.uint8, device="cpu")


def _hears(lane: BlockingLane, number: int, seconds: float | None, all_ranks: bool) -> None:
    began, others = clock.now(), [rank for rank in range(lane.size) if rank != _ROOT]
    receives = {rank: lane.recv(_nothing(), rank, number, timeout=seconds) for rank in others}
    missing: dict[int, CommError] = {}
    for rank, receive in receives.items():
        try:
            receive.wait()
        except CommError as error:
            missing[rank] = error
            if not all_ranks:
                break
    if missing:
        who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        text = f"{who} failed to pass monitoredBarrier in {clock.now() - began:.3f} seconds"
        raise dist.DistBackendError(text) from next(iter(missing.values()))
    for rank in others:
        lane.send(_nothing(), rank, number)
