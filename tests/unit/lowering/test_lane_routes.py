"""Routes of ops of lanes: to a transport, or by messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from aiocomms import ReduceOp, ops
from aiocomms.lowering.routing import Router
from aiocomms.transport import Capabilities, Transport

pytestmark = pytest.mark.deterministic

SUMS = {torch.float32: frozenset({"sum"})}


def way_of(op: ops.Op, capabilities: Capabilities | None) -> tuple[str, int]:
    """Return how an op of lane 5 is carried, and the lane that its carrier gets."""
    ways: list[tuple[str, int]] = []

    class Lowering(Router):
        def _has_messages(self) -> bool:
            return True

        def _lower_within(self, op: ops.Op, lane: int, work: Any) -> None:
            ways.append(("messages", lane))

    transport = SimpleNamespace(
        capabilities=capabilities, post_in_lane=lambda op, lane, work: ways.append(("transport", lane))
    )
    family = {op.family: cast("Transport", transport)} if capabilities is not None else {}
    routes = Lowering(cast("Any", SimpleNamespace(offload=None, rank=0)), family).within
    for _ in range(2):  # The first call finds the route, and the second one uses it.
        routes[type(op)](op, 5, cast("Any", None))
    assert ways[0] == ways[1]
    return ways[0]


def all_reduce(dtype: torch.dtype, how: ReduceOp = ReduceOp.SUM) -> ops.Op:
    return ops.AllReduce(torch.ones(2, dtype=dtype), how)


LANES = frozenset({ops.AllReduce, ops.Barrier})


@pytest.mark.parametrize(
    ("op", "capabilities", "way"),
    [
        (ops.Barrier(), Capabilities(ops=ops.COLLECTIVES, lanes=LANES), "transport"),
        (all_reduce(torch.float32), Capabilities(ops=ops.COLLECTIVES, lanes=LANES), "transport"),
        (all_reduce(torch.float32), Capabilities(ops=ops.COLLECTIVES, lanes=LANES, reductions=SUMS), "transport"),
        (all_reduce(torch.float64), Capabilities(ops=ops.COLLECTIVES, lanes=LANES, reductions=SUMS), "messages"),
        (
            all_reduce(torch.float32, ReduceOp.MAX),
            Capabilities(ops=ops.COLLECTIVES, lanes=LANES, reductions=SUMS),
            "messages",
        ),
        (ops.Broadcast(torch.ones(2), 0), Capabilities(ops=ops.COLLECTIVES, lanes=LANES), "messages"),
        (ops.Barrier(), Capabilities(ops=ops.COLLECTIVES), "messages"),
        (ops.Barrier(), None, "messages"),
        (ops.Send(torch.ones(2), 1, 0), Capabilities(ops=ops.P2P, lanes=LANES), "messages"),
    ],
)
def test_each_op_takes_the_route_that_its_transport_allows(
    op: ops.Op, capabilities: Capabilities | None, way: str
) -> None:
    assert way_of(op, capabilities) == (way, 5)
