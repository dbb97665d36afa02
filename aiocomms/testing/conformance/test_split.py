"""Communicators of some of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiocomms import ReduceOp
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommAbortedError, CommClosedError, MismatchError
from aiocomms.testing.conformance.case import Case, ranks
from aiocomms.testing.conformance.test_collectives import check_all
from aiocomms.testing.conformance.trials import EVERY, Setting

SHAPE = (6,)


async def split(comm: Communicator, case: Case, ranks: list[int], name: str | None = None) -> Communicator:
    """Split the communicator. The test case later verifies that the child is closed."""
    child = await comm.split(ranks, name)
    assert child is not None
    case.opened.append(child)
    return child


async def check_sum(comm: Communicator, members: list[int]) -> None:
    """Verify that a child's collective reaches only the members of the child."""
    tensor = torch.tensor([2 ** members[comm.rank]], device=comm.device)
    await comm.all_reduce(tensor)
    assert tensor.item() == sum(2**r for r in members), f"{members}: {tensor}"


@ranks(1, 2, 3, more=(4, 7))
async def test_split_with_all_ranks_forms_an_equal_communicator(comm: Communicator, case: Case) -> None:
    child = await split(comm, case, list(range(comm.size)))
    assert (child.rank, child.size, child.transports) == (comm.rank, comm.size, comm.transports)
    assert child.name != comm.name
    await check_sum(child, list(range(comm.size)))
    await child.aclose()
    await comm.barrier()


@pytest.mark.core
@ranks(2)
async def test_split_takes_timeout_and_hints_of_its_own_or_the_parents(comm: Communicator, case: Case) -> None:
    """The defaults are the values with which the program opened the parent.

    A wrong value is refused before anything is sent.
    """
    formed, members = comm.timeout, [0, 1]
    comm.set_timeout(77)
    own: list[tuple[float | None, dict[str, Any]]] = [
        (formed, {}),
        (33.0, {"timeout": 33}),
        (None, {"timeout": None, "hints": {"heartbeat": 0}}),
    ]
    for wanted, more in own:
        child = await comm.split(members, **more)
        assert child is not None
        case.opened.append(child)
        assert child.timeout == wanted
        await check_sum(child, members)
        await child.aclose()
    mistakes: list[tuple[str, dict[str, Any]]] = [
        ("timeout is 0", {"timeout": 0}),
        ("hints is 3", {"hints": 3}),
        ("heartbeat", {"hints": {"heartbeat": -1}}),
    ]
    for text, wrong in mistakes if comm.rank == 0 else []:
        with pytest.raises(ArgumentError, match=text):
            await comm.split(members, **wrong)
    comm.set_timeout(formed)
    await comm.barrier()


@ranks(3, more=(2, 7))
async def test_split_orders_its_ranks_as_given(comm: Communicator, case: Case) -> None:
    members = list(range(comm.size))[::-1]
    child = await split(comm, case, members, "backwards")
    assert child.name == "backwards" and child.rank == comm.size - 1 - comm.rank
    out = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
    await child.all_gather_single(out, torch.tensor([comm.rank], device=comm.device))
    assert out.tolist() == members
    await child.aclose()


@pytest.mark.fault(136)
@ranks(3, more=(2, 7))
async def test_create_group_by_its_members_alone_forms_a_communicator(comm: Communicator, case: Case) -> None:
    """The ranks outside the group take no part. A second group of the same name is a different communicator."""
    members = [comm.size - 1, 0]
    for _ in range(2) if comm.rank in members else ():
        child = await comm.create_group(members, "some of them")
        case.opened.append(child)
        assert (child.name, child.rank, child.transports) == ("some of them", members.index(comm.rank), comm.transports)
        await check_sum(child, members)
        await child.aclose()
    other = (comm.rank + 1) % comm.size
    for wrong, text in (([], "among them"), ([other], "leaves out this rank"), ([comm.rank] * 2, "each rank once")):
        with pytest.raises(ArgumentError, match=text):
            await comm.create_group(wrong, "wrong")
    await comm.barrier()
    await comm.aclose()
    with pytest.raises(CommClosedError):
        await comm.create_group([comm.rank], "late")


@pytest.mark.memory
@ranks(3, more=(2, 4, 7))
async def test_several_splits_form_concurrently(comm: Communicator, case: Case) -> None:
    """Several child communicators form at the same time, independently of each other.

    A rank may belong to no child communicator.
    """
    first = comm.rank - comm.rank % 2
    members = [r for r in (first, first + 1) if r < comm.size]
    child = await split(comm, case, members)
    for _ in range(3):
        await check_sum(child, members)
    if child.size == 2 and "p2p" in child.transports:
        slot = case.empty(torch.int32, SHAPE)
        sending = child.send(case.bits(torch.int32, SHAPE, comm.rank).to(comm.device), 1 - child.rank)
        await child.recv(slot.tensor, 1 - child.rank)
        await sending
        slot.expect(case.bits(torch.int32, SHAPE, members[1 - child.rank]))
    await child.aclose()
    await comm.barrier()


@ranks(3, more=(2, 7))
async def test_split_returns_none_on_ranks_that_stay_out(comm: Communicator, case: Case) -> None:
    members = list(range(1, comm.size))
    if comm.rank == 0:
        assert await comm.split([]) is None
    else:
        child = await split(comm, case, members)
        await check_sum(child, members)
        await child.aclose()
    await comm.barrier()


@ranks(3, more=(4,))
async def test_collectives_of_a_child_in_reversed_order_are_right(comm: Communicator, case: Case) -> None:
    """The first rank becomes the last rank of the child."""
    child = await split(comm, case, [*range(1, comm.size), 0])
    for name in EVERY:
        settings = [Setting(torch.int32, (5,), root, ReduceOp.MAX, name) for root in range(child.size)]
        await check_all(name, child, case, settings)
    await child.aclose()


@ranks(3, more=(2,))
async def test_ops_of_parent_and_children_stay_apart(comm: Communicator, case: Case) -> None:
    """Three communicators use the same tags and the same collectives at the same time."""
    case.need_any_order()
    everyone = list(range(comm.size))
    comms = [comm, await split(comm, case, everyone), await split(comm, case, everyone)]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    slots = [[case.empty(torch.int32, SHAPE) for _ in range(4)] for _ in comms]
    sums = [torch.full((3,), 10**i * (comm.rank + 1), device=comm.device) for i, _ in enumerate(comms)]
    works = [c.recv(slot.tensor, left, 1) for c, its in zip(comms, slots, strict=True) for slot in its]
    works += [c.all_reduce(tensor) for c, tensor in reversed(list(zip(comms, sums, strict=True)))]
    for n in range(4):
        for i in (2, 0, 1):
            comms[i].send(case.bits(torch.int32, SHAPE, comm.rank, i, n).to(comm.device), right, 1)
    for work in works:
        await work
    for i, its in enumerate(slots):
        for n, slot in enumerate(its):
            slot.expect(case.bits(torch.int32, SHAPE, left, i, n))
        assert (sums[i] == 10**i * sum(r + 1 for r in everyone)).all(), sums
    for child in comms[1:]:
        await child.aclose()


@ranks(3, more=(4,))
async def test_split_of_a_child_forms_a_grandchild(comm: Communicator, case: Case) -> None:
    first = await split(comm, case, list(range(comm.size)))
    members = [0, comm.size - 1]
    if comm.rank in members:
        second = await split(first, case, [0, comm.size - 1])
        await check_sum(second, members)
        await second.aclose()
    else:
        assert await first.split([]) is None
    await first.aclose()


@ranks(2)
async def test_aborted_child_leaves_its_parent_usable(comm: Communicator, case: Case) -> None:
    child = await split(comm, case, [0, 1])
    if comm.rank == 0:
        child.abort("the child only")
    with pytest.raises((CommAbortedError, CommClosedError), match="the child only"):
        await child.all_reduce(torch.ones(1, device=comm.device))
    await child.aclose()
    await check_sum(comm, [0, 1])


@ranks(2)
async def test_child_outlives_its_closed_parent(comm: Communicator, case: Case) -> None:
    parent = await case.open("parent")
    child = await split(parent, case, [1, 0])
    await parent.aclose()
    await check_sum(child, [1, 0])
    await child.aclose()


@pytest.mark.core
@ranks(2)
async def test_wrong_ranks_of_split_are_refused(comm: Communicator, case: Case) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (None, ArgumentTypeError, "ranks is None"),
        ("01", ArgumentTypeError, "ranks is '01'"),
        (3, ArgumentTypeError, "ranks is 3"),
        ([0, 1, 2], ArgumentError, r"ranks\[2\] is 2"),
        ([0, -1], ArgumentError, r"ranks\[1\] is -1"),
        ([0, True], ArgumentTypeError, r"ranks\[1\] is True"),
        ([0.0, 1], ArgumentTypeError, r"ranks\[0\] is 0\.0"),
        ([0, 1, 0], ArgumentError, "each rank once"),
    ]
    if comm.rank == 0:
        for given, error, text in wrong:
            with pytest.raises(error, match=text):
                await comm.split(given)
    await check_sum(comm, [0, 1])


@pytest.mark.core
@ranks(2, more=(3,))
async def test_split_that_leaves_out_this_rank_is_refused(comm: Communicator, case: Case) -> None:
    with pytest.raises(ArgumentError, match="leaves out this rank"):
        await comm.split([(comm.rank + 1) % comm.size])
    await comm.barrier()


@pytest.mark.core
@ranks(2, more=(3,))
async def test_split_with_ranks_that_disagree_aborts_the_communicator(comm: Communicator, case: Case) -> None:
    everyone = list(range(comm.size))
    with pytest.raises((MismatchError, CommAbortedError), match="ranks is"):
        await comm.split(everyone if comm.rank else everyone[::-1])
    assert comm.aborted
