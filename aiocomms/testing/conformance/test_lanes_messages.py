"""Messages of lanes: a message matches only receives of its lane and tag, in the order of the sends."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.lowering.tags import number_of
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.test_lanes import number, shuffled

ALIKE = (18868, 23721, 50482, 61701)
"""Four keys of lanes.

The numbers of the first two lanes differ only above the last 32 bits. The numbers of the last two lanes differ only in
the last 32 bits.
"""


@ranks(2)
async def test_lanes_whose_keys_share_tag_bits_stay_apart(comm: Communicator, case: Case) -> None:
    """Messages of lanes must match only in their own lane.

    A transport that shortens tags would mix the messages of different lanes.
    """
    case.need_any_order()
    numbers = [number_of(key) for key in ALIKE]
    assert (numbers[0] - numbers[1]) % 2**32 == 0 and numbers[2] >> 32 == numbers[3] >> 32, f"{numbers} are not alike"
    peer = 1 - comm.rank
    works: dict[int, list[Work[Tensor]]] = {}
    for key in reversed(ALIKE) if comm.rank else ALIKE:
        lane = comm.lane(key)
        both = lane.all_reduce(number(comm, key % 1000))
        works[key] = [lane.recv(number(comm, -1), peer), lane.send(number(comm, key % 1000), peer), both]
    for key, (received, sent, both) in works.items():
        await sent
        assert (await received).tolist() == [key % 1000] * 3, key
        assert (await both).tolist() == [2 * (key % 1000)] * 3, key


@ranks(2)
async def test_messages_of_a_lane_match_only_that_lane(comm: Communicator, case: Case) -> None:
    """Messages of a lane match no receive of the communicator or of another lane."""
    case.need_any_order()
    tags = (0, 1, -1, 2**31 - 1, -(2**31))
    views: list[Any] = [comm, comm.lane("a"), comm.lane(b"a"), comm.lane(7)]
    calls = [(v, tag) for v in range(len(views)) for tag in tags]
    works = {}
    for v, tag in shuffled(case, calls):
        tensor = number(comm, 100 * v + tags.index(tag) if comm.rank == 0 else -1)
        works[v, tag] = views[v].send(tensor, 1, tag) if comm.rank == 0 else views[v].recv(tensor, 0, tag)
    for (v, tag), work in works.items():
        assert (await work).tolist() == [100 * v + tags.index(tag)] * 3, (views[v], tag)


@ranks(2)
async def test_messages_of_one_lane_and_tag_keep_their_order(comm: Communicator, case: Case) -> None:
    """Some messages wait for their receives, and for others the receive is already posted."""
    case.need_any_order()
    lane = comm.lane("ordered messages")
    values = range(12)
    if comm.rank == 0:
        works = [lane.send(number(comm, value), 1, 3) for value in values[:6]]
        case.tell("sent")
        await case.told("received", 1)
        works += [lane.send(number(comm, value), 1, 3) for value in values[6:]]
    else:
        await case.told("sent", 0)
        works = [lane.recv(number(comm, -1), 0, 3) for _ in values]
        case.tell("received")
    for value, work in zip(values, works, strict=True):
        assert (await work).tolist() == [value] * 3
