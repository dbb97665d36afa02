"""Ray actors exchange tensors by Ray Direct Transport over endpoints."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, RayDirectTransportError, RayTaskError
from ray.experimental.rdt.util import get_tensor_transport_manager

import aiocomms.integrations.ray
from aiocomms.errors import RegionError
from aiocomms.integrations.ray import transport as under_test

pytestmark = pytest.mark.real

MANY = 2**20
"""The elements of a tensor that is too large for Ray or a message to carry inline."""


def manager() -> under_test.RayTransport:
    return get_tensor_transport_manager(under_test.NAME)


def until(holds: Callable[[], object]) -> None:
    """Poll until a condition holds."""
    while not holds():
        time.sleep(0.001)


def waits(_: Any, stage: str) -> None:
    """Wait until the transport's only transfer in this process has reached a stage."""

    def reached() -> bool:
        found = manager()._fetches
        return len(found) == 1 and (stage == "connecting" or found[0]._peer is not None)

    until(reached)


def abort(_: Any) -> None:
    """Abort the transfer, as Ray does when it takes too long."""
    (fetch,) = manager()._fetches
    manager().abort_transport(fetch.obj_id, None)


def meanwhile(actor: Any, call: Callable[..., None], *args: Any) -> None:
    """Call a function in an actor whose event loop Ray blocks until the tensors of an argument arrive."""
    ray.get(actor.__ray_call__.options(concurrency_group="_ray_system_error").remote(call, *args))


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Actor:
    """An async actor that makes tensors, and takes them."""

    kept: torch.Tensor

    @ray.method(tensor_transport="aiocomms")
    async def make(self, value: float, count: int = MANY) -> torch.Tensor:
        self.kept = torch.full((count,), value)
        return self.kept

    @ray.method(tensor_transport="aiocomms")
    async def make_all(self) -> dict[str, Any]:
        part = torch.arange(12.0).reshape(3, 4)
        weight = torch.ones(5, requires_grad=True)
        return {
            "first": part[0], "others": part[1:], "again": part, "none": torch.empty(0, 3), "scalar": torch.tensor(7),
            "half": torch.ones(3, dtype=torch.bfloat16), "bool": torch.tensor([True, False]), "weight": weight,
            "text": "as it is",
        }  # fmt: skip

    @ray.method(tensor_transport="aiocomms")
    async def pass_on(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    @ray.method(tensor_transport="aiocomms")
    async def wrong(self) -> torch.Tensor:
        return torch.zeros(4, 4).T

    async def look(self, tensor: torch.Tensor) -> tuple[float, int]:
        return tensor.float().mean().item(), tensor.numel()

    async def look_at_all(self, made: dict[str, Any]) -> dict[str, Any]:
        return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in made.items()}

    async def fetch(self, refs: list[Any]) -> list[float]:
        """Read tensors by :func:`aiocomms.integrations.ray.get`, and check that other tasks run meanwhile."""
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(heart())
        tensors = await asyncio.gather(*(aiocomms.integrations.ray.get(ref) for ref in refs))
        beating.cancel()
        assert beats > 0
        return [tensor.mean().item() for tensor in tensors]

    async def objects(self, number: int) -> None:
        """Wait until other actors can read this many objects of this actor."""
        await asyncio.to_thread(until, lambda: len(manager()._objects) == number)

    async def descriptors(self) -> tuple[bytes, list[bytes]]:
        ((meta, _),) = manager()._objects.values()
        return meta.address, list(meta.descriptors)

    async def read(self, address: bytes, descriptor: bytes) -> str:
        """Read a region by an address and a descriptor that another process has received."""

        def read() -> str:
            try:
                manager()._here().connect(address).get(torch.zeros(1), descriptor)
            except RegionError as error:
                return error.message
            return "read"

        return await asyncio.to_thread(read)

    async def move_to(self, node: str) -> None:
        """Pretend that this actor is on another node, from its next tensor on."""
        under_test.node = lambda: node

    async def process(self) -> int:
        return os.getpid()


def known(ref: Any) -> None:
    """Wait until this process knows where an object's tensors are, without reading them."""
    theirs = ray._private.worker.global_worker.rdt_manager
    assert theirs.wait_for_tensor_transport_metadata(ref.hex(), 60.0) is not None


@pytest.fixture(scope="module")
def pair(cluster: None) -> list[Any]:
    """Return two actors that no test kills."""
    return [Actor.remote(), Actor.remote()]


def test_from_actor_to_actor_and_to_the_driver(pair: list[Any]):
    one, two = pair
    made = one.make.remote(3.0)
    assert ray.get(two.look.remote(made)) == (3.0, MANY)
    assert ray.get(two.look.remote(two.pass_on.remote(made))) == (4.0, MANY)
    assert ray.get(one.look.remote(two.pass_on.remote(made))) == (4.0, MANY)
    here = ray.get(made)
    assert here.mean().item() == 3.0
    here.zero_()
    assert ray.get(two.look.remote(made)) == (3.0, MANY)
    put = ray.put(torch.full((MANY,), 5.0), _tensor_transport="aiocomms")
    assert ray.get([actor.look.remote(put) for actor in pair]) == [(5.0, MANY)] * 2


def test_whatever_a_task_returns(pair: list[Any]):
    one, two = pair
    made = one.make_all.remote()
    assert ray.get(two.look_at_all.remote(made)) == {
        "first": [0.0, 1.0, 2.0, 3.0], "others": [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]],
        "again": [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]],
        "none": [], "scalar": 7, "half": [1.0] * 3, "bool": [True, False], "weight": [1.0] * 5, "text": "as it is",
    }  # fmt: skip
    with pytest.raises(RayTaskError, match=r"of strides .* wanted a contiguous one on the CPU"):
        ray.get(two.look.remote(one.wrong.remote()))


def test_on_another_node_without_a_token(pair: list[Any]):
    """The source listens on its own node's loopback, so the receiver must not connect to an address on its loopback."""
    source = Actor.remote()
    ray.get(source.move_to.remote("192.0.2.77"))
    with pytest.raises(RayDirectTransportError, match=r"it is on node 192.0.2.77, and .* AIOCOMMS_TOKEN in os.environ"):
        ray.get(pair[0].look.remote(source.make.remote(1.0)))


def test_awaiting(pair: list[Any]):
    """An actor and a driver await several tensors at once by ``get``, where ``await ref`` would never end."""
    one, two = pair
    refs = [one.make.remote(float(value)) for value in range(3)]
    for ref in refs:  # Ray must know where the objects are before refs are passed in a list
        known(ref)
    assert ray.get(two.fetch.remote(refs)) == [0.0, 1.0, 2.0]

    async def driver() -> list[float]:
        return [tensor.mean().item() for tensor in await asyncio.gather(*map(aiocomms.integrations.ray.get, refs))]

    assert asyncio.run(driver()) == [0.0, 1.0, 2.0]


def test_into_a_buffer(pair: list[Any]):
    buffer = torch.zeros(MANY)
    made = pair[0].make.remote(2.0)
    ray.experimental.set_target_for_ref(made, [buffer])
    got = ray.get(made)
    assert got.data_ptr() == buffer.data_ptr()
    assert buffer.mean().item() == 2.0


def test_what_cannot_be_described_is_not_open(cluster: None):
    """Ray never frees an object without metadata, so its regions must be revoked at once."""
    regions = manager()._here()._endpoint._regions
    before = set(regions)
    with (
        mock.patch.object(under_test, "_source", side_effect=RuntimeError("Ray is going down")),
        pytest.raises(RuntimeError, match="Ray is going down"),
    ):
        manager().extract_tensor_transport_metadata("no object", [torch.ones(2), torch.ones(3)])
    assert set(regions) == before


def test_what_is_freed_can_be_read_no_more(pair: list[Any]):
    one, two = Actor.remote(), pair[0]  # a new actor has no other objects
    made = one.make.remote(2.0, 1)
    assert ray.get(two.look.remote(made)) == (2.0, 1)
    address, (descriptor,) = ray.get(one.descriptors.remote())
    assert ray.get(two.read.remote(address, descriptor)) == "read"
    del made
    ray.get(one.objects.remote(0))
    assert "its owner has revoked the region" in ray.get(two.read.remote(address, descriptor))


@pytest.mark.parametrize("stage", ["connecting", "reading"])
@pytest.mark.parametrize("how", ["kill", "abort"])
def test_a_source_that_is_lost_during_a_fetch(pair: list[Any], stage: str, how: str):
    """The receiver survives, gets an error that names the source, and reads from another actor afterwards."""
    other, receiver = pair
    source = Actor.remote()
    process = ray.get(source.process.remote())
    if stage == "reading":
        assert ray.get(receiver.look.remote(source.make.remote(1.0))) == (1.0, MANY)
    tensor = source.make.remote(2.0)
    known(tensor)
    os.kill(process, signal.SIGSTOP)  # a stopped source cannot complete the fetch before it is killed
    looking = receiver.look.remote(tensor)
    meanwhile(receiver, waits, stage)
    if how == "abort":
        meanwhile(receiver, abort)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RayDirectTransportError) as error:
        ray.get(looking)
    assert f"could not be read from its source, Actor(Actor, {source._actor_id.hex()}) (process {process} on " in str(
        error.value
    )
    assert ("the transfer was aborted" in str(error.value)) == (how == "abort")
    with pytest.raises(RayDirectTransportError, match=f"process {process}"):
        ray.get(receiver.look.remote(tensor))
    assert ray.get(receiver.look.remote(other.make.remote(6.0))) == (6.0, MANY)


def test_patience_with_a_source_that_is_stopped(pair: list[Any]):
    """``ray.get`` keeps its timeout while the source is stopped, and succeeds once the source continues."""
    source = Actor.remote()
    process = ray.get(source.process.remote())
    tensor = source.make.remote(2.0)
    known(tensor)
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(GetTimeoutError):
            ray.get(tensor, timeout=0.2)
    finally:
        os.kill(process, signal.SIGCONT)
    assert ray.get(tensor).mean().item() == 2.0
    assert ray.get(pair[0].look.remote(tensor)) == (2.0, MANY)
