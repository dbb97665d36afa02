"""The rendezvous of Ray actors by a name."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from ray.experimental import internal_kv

import aiocomms
import aiocomms.integrations.ray
from aiocomms.errors import (
    ArgumentError,
    AuthError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerDiedError,
    StoreLostError,
)
from aiocomms.integrations.ray import meeting
from aiocomms.lowlevel.jobstore import JobStore

pytestmark = pytest.mark.real


@ray.remote(num_cpus=0)
class Actor:
    """An async actor that is one rank."""

    comm: aiocomms.Communicator
    meeting: meeting.RayMeeting | None = None

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        add = JobStore.add

        def heard(store: JobStore, key: str, amount: int) -> int:
            count = add(store, key, amount)
            self.arrived.add(self.meeting._name)
            return count

        run = meeting.RayMeeting.run

        def kept(self_: meeting.RayMeeting) -> JobStore:
            self.meeting = self_
            return run(self_)

        JobStore.add, meeting.RayMeeting.run = heard, kept

    async def meet(self, name: str, rank: int, size: int, **more: Any) -> str:
        self.comm = await aiocomms.integrations.ray.rendezvous(name, rank=rank, size=size, **more)
        return repr(self.comm)

    async def refused(self, *where: Any, **more: Any) -> tuple[str, str]:
        with pytest.raises(CommError) as error:
            await self.meet(*where, **more)
        return type(error.value).__name__, str(error.value)

    async def sum(self) -> float:
        return (await self.comm.all_reduce(torch.ones(1))).item()

    async def lost(self) -> str:
        return type(await self.comm.lost()).__name__

    async def close(self) -> None:
        await self.comm.aclose()

    async def given_up(self, name: str, rank: int, size: int) -> None:
        """Begin a rendezvous, and cancel it once rank 0's record is there, or rank 0 knows of this rank."""
        before = set(found())
        task = asyncio.create_task(self.meet(name, rank, size))
        await asyncio.to_thread(until, lambda: name in self.arrived if rank else set(found()) - before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert set(found()) <= before

    async def meet_at_once(self, name: str, size: int, others: int) -> None:
        """Meet as rank 0, and search for rivals only after this many actors have put their records."""
        put, list_ = internal_kv._internal_kv_put, internal_kv._internal_kv_list

        def held(*args: Any, **more: Any) -> None:
            put(*args, **more)
            put(f"{name} {os.getpid()}".encode(), b"", namespace="tests")  # no actor deletes this marker
            until(lambda: len(list_(name.encode(), namespace="tests")) == others)

        with mock.patch.object(internal_kv, "_internal_kv_put", held):
            await self.meet(name, 0, size)

    async def has_arrived(self, name: str) -> None:
        """Wait until this actor has announced itself to rank 0."""
        await asyncio.to_thread(until, lambda: name in self.arrived)

    async def time_is_up(self, name: str) -> None:
        """Set the deadline of this actor's meeting to the past, once the meeting has begun."""
        await asyncio.to_thread(until, lambda: self.meeting is not None and self.meeting._name == name)
        self.meeting._ends = 0.0

    async def process(self) -> int:
        return os.getpid()

    async def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def found() -> list[bytes]:
    """Return the keys of aiocomms in Ray's key-value store."""
    return internal_kv._internal_kv_list(b"", namespace=meeting.NAMESPACE)


def until(holds: Callable[[], object]) -> None:
    """Poll until a condition holds."""
    while not holds():
        time.sleep(0.001)


def actors(number: int) -> list[Any]:
    return [Actor.remote() for _ in range(number)]


def meet(who: list[Any], name: str, **more: Any) -> list[str]:
    return ray.get([actor.meet.remote(name, rank, len(who), **more) for rank, actor in enumerate(who)])


def test_arguments_and_no_ray():
    assert not ray.is_initialized()
    for wrong, message in (
        ({"rank": 2, "size": 2}, "rank is 2 and size is 2"),
        ({"rank": "0", "size": 2}, "rank is '0', wanted an int"),
        ({"rank": 0, "size": 2, "timeout": 0}, "timeout"),
    ):
        with pytest.raises(ArgumentError, match=message):
            aiocomms.integrations.ray.rendezvous("wrong", **wrong)

    async def main() -> None:
        await aiocomms.integrations.ray.rendezvous("nowhere", rank=0, size=2)

    with pytest.raises(CommError, match="Ray is not initialized in this process"):
        asyncio.run(main())


@pytest.fixture(scope="module")
def crew(cluster: None) -> list[Any]:
    """Return actors that no test kills."""
    return actors(4)


def test_actors_meet_again_and_again(crew: list[Any]):
    """Actors meet by one name several times, with new roles, and with a new actor in place of a killed one."""
    three = [*crew[:2], Actor.remote()]
    assert meet(three, "pipeline")[1] == "<Communicator 'pipeline' rank 1 of 3 on cpu>"
    for _ in range(3):
        three = [*three[1:], three[0]]
        meet(three, "pipeline")
        assert ray.get([actor.sum.remote() for actor in three]) == [3.0] * 3
    killed = next(rank for rank, actor in enumerate(three) if actor not in crew)
    os.kill(ray.get(three[killed].process.remote()), signal.SIGKILL)
    left = [actor for actor in three if actor in crew]
    assert ray.get([actor.lost.remote() for actor in left]) == [PeerDiedError.__name__] * 2
    three[killed] = Actor.remote()
    meet(three, "pipeline")
    assert ray.get([actor.sum.remote() for actor in three]) == [3.0] * 3
    ray.get([actor.close.remote() for actor in three])
    assert found() == []


def test_two_groups_at_once_and_a_driver(crew: list[Any]):
    first, second = crew[:2], crew[2:3]
    meetings = [actor.meet.remote("first", rank, 2) for rank, actor in enumerate(first)]
    meetings.append(second[0].meet.remote("second", 0, 2))

    async def driver() -> None:
        async with aiocomms.integrations.ray.rendezvous("second", rank=1, size=2) as comm:
            await meetings[-1]
            summed = second[0].sum.remote()
            assert (await comm.all_reduce(torch.ones(1))).item() == await summed == 2.0

    asyncio.run(driver())
    ray.get(meetings)
    assert ray.get([actor.sum.remote() for actor in first]) == [2.0, 2.0]
    assert found() == []


def test_alone(crew: list[Any]):
    meet(crew[:1], "alone")
    assert ray.get(crew[0].sum.remote()) == 1.0


@pytest.mark.parametrize(
    ("come", "late", "named"),
    [
        ([1, 2], [1, 2], "rank 0 of 4"),
        ([0, 2], [0], "ranks 1, 3 of 4"),
        ([0, 2], [2], "ranks 1, 3 of 4"),
        ([0, 1, 2], [0], "rank 3 of 4"),
    ],
)
def test_who_did_not_come_is_named(crew: list[Any], come: list[int], late: list[int], named: str):
    """Rank 0 names the missing ranks to all. A rank whose deadline passes before rank 0's names them itself."""
    who = dict(zip(come, crew, strict=False))
    name = f"{come} {late}"
    refused = {rank: actor.refused.remote(name, rank, 4) for rank, actor in who.items()}
    if 0 in come:
        ray.get([who[rank].has_arrived.remote(name) for rank in come if rank])
    ray.get([who[rank].time_is_up.remote(name) for rank in late])
    for rank in late if 0 not in late else come:
        kind, message = ray.get(refused[rank])
        assert kind == CommTimeoutError.__name__
        assert f"{named} did not join '{name}' within 600 s" in message
    if 0 not in late and 0 in come:
        ray.get(who[0].time_is_up.remote(name))
        ray.get(refused[0])
    assert found() == []


def test_a_rank_that_is_there_twice_and_another_size(crew: list[Any]):
    first, again, other, late = crew
    meeting_, waiting = first.meet.remote("twice", 0, 3), again.meet.remote("twice", 1, 3)
    ray.get(again.has_arrived.remote("twice"))
    for rank, size, kind, message in (
        (0, 3, ArgumentError, "is rank 0 of 'twice' at this time"),
        (1, 4, MismatchError, "size is 4, and rank 0's is 3"),
    ):
        name, said = ray.get(other.refused.remote("twice", rank, size))
        assert (name, message in said) == (kind.__name__, True), said
    stranger = Actor.options(runtime_env={"env_vars": {"AIOCOMMS_TOKEN": "of another job, it seems"}}).remote()
    assert ray.get(stranger.refused.remote("twice", 1, 3))[0] == AuthError.__name__
    name, said = ray.get(other.refused.remote("twice", 1, 3))
    assert (name, "rank 1 of 'twice' already" in said) == (ArgumentError.__name__, True), said
    ray.get([meeting_, waiting, late.meet.remote("twice", 2, 3)])
    assert found() == []


def test_records_that_lead_elsewhere(crew: list[Any]):
    """The records lead to another meeting, to a server with another protocol, and to a port without a listener."""
    first, second, third, last = crew
    other = first.meet.remote("other", 0, 2)
    until(found)
    (key,) = found()
    record = msgspec.msgpack.decode(
        internal_kv._internal_kv_get(key, namespace=meeting.NAMESPACE), type=meeting.RayRecord
    )
    with socket.create_server((record.host, 0)) as silent, socket.socket() as deaf:
        deaf.bind((record.host, 0))
        stale = [key[:-8].replace(b"other", b"mine") + bytes(7) + bytes([number]) for number in range(3)]
        ports = record.port, silent.getsockname()[1], deaf.getsockname()[1]
        for at, port in zip(stale, ports, strict=True):
            raw = msgspec.msgpack.encode(msgspec.structs.replace(record, port=port))
            internal_kv._internal_kv_put(at, raw, namespace=meeting.NAMESPACE)
        told = second.refused.remote("mine", 1, 2)
        with silent.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            ray.get(second.time_is_up.remote("mine"))
            name, said = ray.get(told)
        assert (name, "rank 0 of 2 did not join 'mine'" in said) == (CommTimeoutError.__name__, True), said
        assert set(found()) == {key, *stale}  # other ranks may reach the records' addresses
        waiting = second.meet.remote("mine", 1, 2)
        ray.get([waiting, third.meet.remote("mine", 0, 2)])
        assert set(found()) == {key, stale[1]}
        internal_kv._internal_kv_del(stale[1], namespace=meeting.NAMESPACE)
    ray.get([other, last.meet.remote("other", 1, 2)])
    assert found() == []


def test_two_that_come_as_rank_0_at_once(crew: list[Any]):
    """One of them gets an error, and the other one's meeting continues."""
    waiting = crew[2].meet.remote("both", 1, 2)
    both = [actor.meet_at_once.remote("both", 2, 2) for actor in crew[:2]]
    ray.get(waiting)
    told = list[str]()
    for one in both:  # Ray determines the order of the answers
        try:
            ray.get(one)
        except RayTaskError as error:
            told.append(str(error))
    assert len(told) == 1, told
    assert re.search(r"another actor, on node .*, is rank 0 of 'both' at this time", told[0])
    assert found() == []


def test_who_is_cancelled_can_come_again_at_once(crew: list[Any]):
    """The other ranks do not count a cancelled rank as present."""
    first, second, third = crew[:3]
    ray.get(first.given_up.remote("again", 0, 3))
    meeting_ = first.meet.remote("again", 0, 3)
    until(found)
    ray.get(second.given_up.remote("again", 1, 3))
    waiting = third.meet.remote("again", 2, 3)
    ray.get(third.has_arrived.remote("again"))
    ray.get([meeting_, waiting, second.meet.remote("again", 1, 3)])
    assert ray.get([actor.sum.remote() for actor in crew[:3]]) == [3.0] * 3
    assert found() == []


def test_rank_0_is_killed_and_given_up(crew: list[Any]):
    """A rank that has arrived gets an error, and a new rank 0 deletes the record of the killed one."""
    first, second, third = Actor.remote(), *crew[:2]
    process = ray.get(first.process.remote())
    first.meet.remote("killed", 0, 3)
    told = second.refused.remote("killed", 1, 3)
    ray.get(second.has_arrived.remote("killed"))
    os.kill(process, signal.SIGKILL)
    name, said = ray.get(told)
    assert (name, "rank 0" in said) == (StoreLostError.__name__, True), said
    assert len(found()) == 1
    ray.get(third.given_up.remote("killed", 0, 2))
    assert found() == []
    meet([third, second], "killed")
    assert found() == []
