"""Arrays in place of tensors: arrays of NumPy, and arrays of a library that supports only DLPack."""

from __future__ import annotations

import gc
import operator
import unittest
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aiocomms import Portal, functional
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError
from aiocomms.ops.arrays import as_tensor
from aiocomms.testing.conformance import data
from aiocomms.testing.conformance.case import Case, ranks, window
from aiocomms.testing.conformance.rank import pending
from aiocomms.testing.conformance.test_arguments import GOOD, still_works
from aiocomms.testing.conformance.test_endpoints import connected, descriptor
from aiocomms.testing.conformance.test_portal import synchronous

pytestmark: pytest.MarkDecorator = pytest.mark.core

SHAPE = (3, 2)


class Foreign:
    """An array of a library that is neither torch nor NumPy.

    The array can export its memory, but the library cannot import the memory of other libraries.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **asked: Any) -> Any:
        return self._tensor.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._tensor.__dlpack_device__()


class ArrayLibrary:
    """An array library, with methods that make its arrays and read their content."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def fits(self, comm: Any) -> bool:
        """Return whether the library has arrays on the communicator's device."""
        return self.name != "numpy" or comm.device.type == "cpu"

    def need(self, comm: Communicator) -> None:
        """Skip the check if the library has no arrays on the communicator's device."""
        if not self.fits(comm):
            raise unittest.SkipTest("arrays of NumPy are on the CPU")

    def make(self, content: Tensor) -> Any:
        """Return a new array with the content of a tensor, on the tensor's device."""
        return content.numpy().copy() if self.name == "numpy" else Foreign(content.clone())

    def look(self, array: Any) -> Tensor:
        """Return the content of an array. This method does not use aiocomms."""
        return torch.from_numpy(array.copy()) if self.name == "numpy" else array._tensor.cpu()

    def place(self, array: Any) -> int:
        """Return the address of an array's memory. This method does not use aiocomms."""
        return int(array.ctypes.data if self.name == "numpy" else array._tensor.data_ptr())


KINDS = [ArrayLibrary("numpy"), ArrayLibrary("foreign")]
kinds: pytest.MarkDecorator = pytest.mark.parametrize("kind", KINDS, ids=str)
COLLECTIVES = [name for name in GOOD if not name.endswith("object") and name not in ("barrier", "send", "recv")]
FORMS: list[Any] = [
    (functional.broadcast, 0), (functional.all_reduce,), (functional.reduce, 0), (functional.scan,),
    (functional.exscan,), (functional.all_gather,), (functional.gather, 1), (functional.reduce_scatter,),
    (functional.all_to_all,),
]  # fmt: skip
RESULTS = ("outputs", "output", "tensor")
"""The parameters that operations write. Each operation returns the first of these parameters that it has."""


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to a tensor, or to each tensor of a list; return any other value unchanged."""
    if isinstance(value, list):
        return [each(item, change) for item in value]
    return change(value) if isinstance(value, Tensor) else value


def arguments(comm: Any, name: str) -> dict[str, Any]:
    """Return valid arguments of an operation.

    The arguments of all ranks match, but their content depends on the rank.
    """
    good = {key: each(value, lambda it: it + comm.rank) for key, value in GOOD[name](comm).items()}
    return {**good, "root": comm.size - 1} if "root" in good else good


class ArrayCall:
    """A collective that is called with tensors, and with arrays of the same content."""

    kind: ArrayLibrary
    name: str
    given: dict[str, Any]
    arrays: dict[str, Any]
    nothing: bool
    wanted: list[Any]
    items: list[Any]
    places: list[int]

    def __init__(self, comm: Any, name: str, kind: ArrayLibrary) -> None:
        self.kind, self.name = kind, name
        self.given = arguments(comm, name)
        self.arrays = {key: each(value, kind.make) for key, value in self.given.items()}
        result = next(key for key in RESULTS if key in self.arrays)
        self.nothing = name.startswith("gather") and comm.rank != self.given["root"]
        self.wanted, self.items = (_listed(of[result]) for of in (self.given, self.arrays))
        self.places = [kind.place(item) for item in self.items]

    def verify(self, got: Any) -> None:
        """Check that the arrays hold the expected content, and that the operation returned them."""
        if self.nothing:
            assert got is None
            return
        for returned, item, place, want in zip(_listed(got), self.items, self.places, self.wanted, strict=True):
            assert returned is item, f"{self.name} returned {returned!r}, wanted the array that it was given"
            assert self.kind.place(item) == place, f"the memory of an array of {self.name} is another one"
            data.same_bits(self.kind.look(item), want.cpu())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@ranks(2, more=(1, 3))
@kinds
@pytest.mark.parametrize("name", COLLECTIVES)
async def test_collectives_of_arrays_match_those_of_tensors(
    comm: Communicator, case: Case, kind: ArrayLibrary, name: str
) -> None:
    kind.need(comm)
    for where in (comm, comm.lane("arrays")):
        call = ArrayCall(comm, name, kind)
        await getattr(where, name)(**call.given)
        call.verify(await getattr(where, name)(**call.arrays))


@ranks(2)
@synchronous
def test_portal_accepts_arrays(comm: Portal, case: Case) -> None:
    for kind in KINDS:
        if kind.fits(comm):
            for name in COLLECTIVES:
                call = ArrayCall(comm, name, kind)
                getattr(comm, name)(**call.given).wait()
                call.verify(getattr(comm, name)(**call.arrays).wait())
            if "p2p" in comm.transports:
                array = kind.make(torch.zeros(2, device=comm.device))
                with comm.new_window(array) as win:
                    assert win.tensor is array
                sent, got = (kind.make(torch.full((2,), comm.rank, device=comm.device)) for _ in range(2))
                work = comm.batch().send(sent, 1 - comm.rank).recv(got, 1 - comm.rank).issue()
                assert all(map(operator.is_, work.wait(), (sent, got)))
                assert kind.look(got).tolist() == [1 - comm.rank] * 2


@ranks(2)
@kinds
async def test_send_recv_and_batch_of_arrays_write_in_place(comm: Communicator, case: Case, kind: ArrayLibrary) -> None:
    kind.need(comm)
    case.need("p2p")
    other = 1 - comm.rank
    contents = [case.bits(torch.float32, SHAPE, r).to(comm.device) for r in range(2)]
    for where in (comm, comm.lane(1)):
        sent, got = kind.make(contents[comm.rank]), kind.make(torch.zeros(SHAPE, device=comm.device))
        place = kind.place(got)
        work = where.send(sent, other, 5)
        assert await where.recv(got, other, 5) is got
        assert await work is sent
        assert kind.place(got) == place
        data.same_bits(kind.look(got), contents[other].cpu())
        tensor, again = torch.zeros(SHAPE, device=comm.device), kind.make(torch.zeros(SHAPE, device=comm.device))
        batch = where.batch().send(sent, other, 1).recv(again, other, 1)
        results = await batch.recv(tensor, other, 2).send(contents[comm.rank], other, 2).issue()
        assert all(map(operator.is_, results, (sent, again, tensor, contents[comm.rank])))
        data.same_bits(kind.look(again), contents[other].cpu())
        data.same_bits(tensor, contents[other].cpu())


@ranks(2)
async def test_broadcast_carries_every_numpy_dtype_and_shape(comm: Communicator, case: Case) -> None:
    """The shapes include arrays without elements, without dimensions, and with several dimensions."""
    KINDS[0].need(comm)
    for dtype in (bool, "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"):
        for shape in ((), (0,), (2, 0), (7,), SHAPE):
            content = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            array = content.copy() if comm.rank == 1 else np.zeros(shape, dtype)
            assert await comm.broadcast(array, 1) is array
            assert np.array_equal(array, content)


@ranks(2)
async def test_read_only_array_is_accepted_as_input_and_refused_as_output(comm: Communicator, case: Case) -> None:
    """Operations accept a read-only array as an input, and refuse a read-only array as an output."""
    KINDS[0].need(comm)
    case.need("p2p")
    fixed = np.full(4, comm.rank, np.float32)
    fixed.flags.writeable = False
    if comm.rank == 0:
        assert await comm.send(fixed, 1) is fixed
    else:
        assert (await comm.recv(np.ones(4, np.float32), 0)).tolist() == [0] * 4
    outputs = [np.zeros(4, np.float32) for _ in range(2)]
    assert all(map(operator.is_, await comm.all_gather(outputs, fixed), outputs))
    assert [output.tolist() for output in outputs] == [[0] * 4, [1] * 4]
    before = pending(comm)
    with pytest.raises(ArgumentError, match=r"tensor is a float32\[4\] numpy\.ndarray which is read-only"):
        comm.all_reduce(fixed)
    with pytest.raises(ArgumentError, match=r"outputs\[1\] is a float32\[4\] numpy\.ndarray which is read-only"):
        comm.all_gather([np.zeros(4, np.float32), fixed], outputs[0])
    assert pending(comm) == before
    await still_works(comm, "all_reduce")


@ranks(2)
@kinds
async def test_put_get_and_put_signal_work_on_a_window_of_an_array(
    comm: Communicator, case: Case, kind: ArrayLibrary
) -> None:
    kind.need(comm)
    _, win = await window(comm, case, torch.float32, 1)  # This call skips the check if there are no windows.
    await win.aclose()
    other = 1 - comm.rank
    part = kind.make(torch.zeros(6, device=comm.device))
    place = kind.place(part)
    async with await comm.new_window(part) as win:
        assert win.tensor is part and win.sizes == [6, 6]
        mine = kind.make(torch.full((2,), comm.rank + 1.0, device=comm.device))
        assert await win.put(mine, other, 1) is mine
        assert await win.put_signal(mine, other, 3) is mine
        await win.wait_signal(other)
        assert kind.look(part).tolist() == [0.0, *[other + 1.0] * 4, 0.0]
        got = kind.make(torch.zeros(3, device=comm.device))
        assert await win.get(got, other, 0) is got
        assert kind.look(got).tolist() == [0.0, comm.rank + 1.0, comm.rank + 1.0]
    assert kind.place(part) == place


@pytest.mark.network
@ranks(2)
@kinds
async def test_put_and_get_work_on_a_region_of_an_array(comm: Communicator, case: Case, kind: ArrayLibrary) -> None:
    kind.need(comm)
    async with connected(comm, case) as (here, peer):
        if comm.rank == 1:
            part = kind.make(torch.zeros(4, device=comm.device))
            place = kind.place(part)
            async with here.register(part) as region:
                assert region.tensor is part
                await descriptor(comm, region.descriptor)
                await peer.wait_signal()
                assert kind.look(part).tolist() == [0, 7, 7, 0] and kind.place(part) == place
                await comm.barrier()
            return
        key = await descriptor(comm)
        mine, got = (kind.make(torch.full((2,), value, device=comm.device)) for value in (7.0, 0.0))
        assert await peer.put(mine, key, 1) is mine
        await peer.signal()
        assert await peer.get(got, key, 1) is got
        assert kind.look(got).tolist() == [7, 7]
        await comm.barrier()


@ranks(2)
@kinds
async def test_stream_of_arrays_delivers_new_tensors(comm: Communicator, case: Case, kind: ArrayLibrary) -> None:
    kind.need(comm)
    case.need("p2p")
    async with await comm.open_stream(1 - comm.rank) as stream:
        await stream.send(kind.make(torch.full((3,), comm.rank, device=comm.device)))
        got = await stream.receive()
        assert isinstance(got, Tensor) and got.tolist() == [1 - comm.rank] * 3


@ranks(2)
@kinds
async def test_functional_forms_return_the_library_of_their_input(
    comm: Communicator, case: Case, kind: ArrayLibrary
) -> None:
    """The results have the input's array type, or are tensors if the library cannot import tensors."""
    kind.need(comm)
    content = torch.arange(4.0, device=comm.device) + comm.rank
    array = kind.make(content)
    for form, *more in FORMS:
        got, want = await form(array, *more), await form(content, *more)
        if want is not None:
            assert isinstance(got, np.ndarray if kind.name == "numpy" else Tensor), f"{form.__name__} returned {got!r}"
            data.same_bits(as_tensor("got", got, write=True), want.cpu())
    scattered = await functional.scatter(array if comm.rank == 0 else None, 0)
    assert isinstance(scattered, np.ndarray if kind.name == "numpy" and comm.rank == 0 else Tensor)
    data.same_bits(as_tensor("scattered", scattered, write=True), torch.arange(4.0).tensor_split(2)[comm.rank])
    data.same_bits(kind.look(array), content.cpu())


@ranks(2)
@kinds
async def test_array_is_kept_alive_until_its_operation_ends(comm: Communicator, case: Case, kind: ArrayLibrary) -> None:
    """The check includes a withdrawn op.

    A withdrawn op keeps its array alive, and does not change the array's content.
    """
    kind.need(comm)
    case.need("p2p")
    for end in ("message", "cancel"):
        array = kind.make(torch.zeros(4, device=comm.device))
        alive = weakref.ref(array)
        if comm.rank == 0:
            work = comm.recv(array, 1)
            del array
            gc.collect()
            assert alive() is not None
            case.tell(end)
            if end == "message":
                assert kind.look(await work).tolist() == [1] * 4
            else:
                assert await work.cancel()
                assert kind.look(alive()).tolist() == [0] * 4
        else:
            await case.told(end, 0)
            if end == "message":
                await comm.send(kind.make(torch.ones(4, device=comm.device)), 0)
    await still_works(comm, "recv")
