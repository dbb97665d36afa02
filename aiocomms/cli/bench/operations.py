"""The operations that can be measured, and how their bus bandwidth follows from their time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ITEM = 4
"""Bytes of an element: all tensors are of float32."""
BURST = 4
"""Messages that are under way at once in a ``send_burst``."""
PING_PONG = 0.5
"""The share of one way in an iteration there and back."""


def _one(_: int) -> float:
    return 1.0


def _others(size: int) -> float:
    return (size - 1) / size


def _there_and_back(size: int) -> float:
    return 2 * (size - 1) / size


class Operation(NamedTuple):
    """The properties of an operation that are known before there is a tensor.

    ``factor`` is that of nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: the algorithm
    bandwidth times it is the bus bandwidth, what each rank's link must have carried.
    """

    moves: str
    """The data that goes from rank to rank. Operations that move the same differ in how the caller holds it."""
    factor: Callable[[int], float] = _one
    """The factor, by the number of ranks."""
    pair: bool = False
    """True if it is between two ranks, and there may be no others."""
    share: float = 1.0
    """The share of the operation in one iteration: a ping-pong is two, a burst several."""


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
