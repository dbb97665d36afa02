"""The operations that can be measured, and the factors of their bus bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ITEM = 4
"""The size of an element in bytes. All tensors have the dtype float32."""
BURST = 4
"""The number of messages that are pending at once in a ``send_burst``."""
PING_PONG = 0.5
"""The factor by which the time of an iteration is multiplied to get the time of one message.

An iteration is a round trip of two messages.
"""


def _one(_: int) -> float:
    return 1.0


def _others(size: int) -> float:
    return (size - 1) / size


def _there_and_back(size: int) -> float:
    return 2 * (size - 1) / size


class Operation(NamedTuple):
    """The properties of an operation that do not depend on tensors.

    The bus bandwidth is the algorithm bandwidth times ``factor``. Each rank's link has carried data at this bandwidth
    or faster. nccl-tests uses the same factors: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """

    moves: str
    """The kind of data movement. Operations of the same kind differ only in the tensors that contain the data."""
    factor: Callable[[int], float] = _one
    """A function that returns the factor for a number of ranks."""
    pair: bool = False
    """True if the operation needs exactly two ranks."""
    share: float = 1.0
    """The time of one operation divided by the time of an iteration.

    A ping-pong iteration has two operations, and a burst iteration has several.
    """


OPERATIONS = {
    "all_reduce": Operation("all_reduce", _there_and_back),
    "reduce": Operation("reduce"),
    "broadcast": Operation("broadcast"),
    "all_gather": Operation("all_gather", _others),
    "all_gather_v": Operation("all_gather", _others),
    "all_gather_single": Operation("all_gather", _others),
    "reduce_scatter": Operation("reduce_scatter", _others),
    "reduce_scatter_v": Operation("reduce_scatter", _others),
    "reduce_scatter_single": Operation("reduce_scatter", _others),
    "all_to_all": Operation("all_to_all", _others),
    "all_to_all_single": Operation("all_to_all", _others),
    "all_to_all_v_single": Operation("all_to_all", _others),
    "scatter": Operation("scatter", _others),
    "gather": Operation("gather", _others),
    "gather_single": Operation("gather", _others),
    "barrier": Operation("barrier"),
    "send": Operation("send", pair=True, share=PING_PONG),
    "send_burst": Operation("send_burst", pair=True, share=1 / BURST),
    "put": Operation("put", pair=True),
    "put_signal": Operation("put_signal", pair=True, share=PING_PONG),
    "get": Operation("get", pair=True),
}
