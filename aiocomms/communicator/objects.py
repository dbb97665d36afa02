"""The methods that send and receive Python objects, point to point and with collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiocomms import arguments, ops
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, as_int
from aiocomms.communicator.issuer import Issuer
from aiocomms.communicator.parcels import HEADER_BYTES, ArrivingObject, Parcel, own_copy
from aiocomms.cuda import crossing
from aiocomms.errors import ArgumentError, CommError, ProtocolError
from aiocomms.lowering.runs import AloneError, Steps
from aiocomms.lowering.schedules import Context, broadcast_tree, ring_gather, schedule
from aiocomms.ops import Family, Op, buffers, checks
from aiocomms.ops.checks import CheckedComm
from aiocomms.progress.work import Work


def _tensors_of(parcels: Sequence[Parcel]) -> list[tuple[str, Tensor]]:
    tensors = [tensor for parcel in parcels for tensor in parcel.tensors]
    return [(f"obj's tensor {i}", tensor) for i, tensor in enumerate(tensors)]


class SendObject(Op, frozen=True, eq=False):
    """A send of an object to rank ``dst``."""

    name = kind = "send_object"
    family: ClassVar[Family] = "p2p"
    sends = True
    parcel: Parcel
    dst: int
    tag: int

    def check(self, group: CheckedComm) -> None:
        """See :meth:`Op.check`."""
        checks.end("dst", self.dst, group)
        checks.tagged(self.tag)

    def reads(self) -> list[tuple[str, Tensor]]:
        """See :meth:`Op.reads`."""
        return _tensors_of([self.parcel])


class RecvObject(Op, frozen=True, eq=False):
    """A receive of an object from rank ``src``."""

    name = kind = "recv_object"
    family: ClassVar[Family] = "p2p"
    withdrawable = True
    src: int
    tag: int
    pickle: bool

    def check(self, group: CheckedComm) -> None:
        """See :meth:`Op.check`."""
        checks.end("src", self.src, group)
        checks.tagged(self.tag)


class _ObjectCollective(Op, frozen=True, eq=False):
    root: int
    pickle: bool
    parcels: tuple[Parcel, ...]
    rooted: ClassVar[bool] = True

    def check(self, group: CheckedComm) -> None:
        """See :meth:`Op.check`."""
        if self.rooted:
            checks.index("root", self.root, group)

    def reads(self) -> list[tuple[str, Tensor]]:
        """See :meth:`Op.reads`."""
        return _tensors_of(self.parcels)


class BroadcastObject(_ObjectCollective, frozen=True, eq=False):
    """The op in which every rank gets the root's object."""

    name = kind = "broadcast_object"


class AllGatherObject(_ObjectCollective, frozen=True, eq=False):
    """The op in which every rank gets the objects of all ranks."""

    name = kind = "all_gather_object"
    rooted = False


class GatherObject(_ObjectCollective, frozen=True, eq=False):
    """The op in which the root gets every rank's object."""

    name = kind = "gather_object"


class ScatterObject(_ObjectCollective, frozen=True, eq=False):
    """The op in which every rank ``r`` gets the object with index ``r`` in the root's list."""

    name = kind = "scatter_object"


def _arrival(header: Tensor) -> ArrivingObject:
    return ArrivingObject(crossing.to_bytes(header), header.device)


def _opened(arrival: ArrivingObject, op: RecvObject | _ObjectCollective) -> Any:
    """Decode an object after its last message has arrived."""
    try:
        return arrival.open(pickle=op.pickle)
    except ProtocolError as error:
        raise AloneError(error) from error


@schedule(SendObject)
def _send(g: Context, op: SendObject) -> Steps:
    parcel = op.parcel
    first: list[Op] = [ops.Send(parcel.header, op.dst, op.tag, ops.OBJECT)]
    if parcel.body.numel():
        first.append(ops.Send(parcel.body, op.dst, parcel.tag, ops.OBJECT_DATA))
    if parcel.late:
        yield first
        yield from parcel.prepared()
        first = []
    yield first + [ops.Send(message, op.dst, parcel.tag, ops.OBJECT_DATA) for message in parcel.messages]
    yield from parcel.released()


@schedule(RecvObject)
def _recv(g: Context, op: RecvObject) -> Steps:
    header = buffers.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device)
    yield [ops.Recv(header, op.src, op.tag, ops.OBJECT)]
    try:
        arrival = _arrival(header)
        if arrival.body.numel():
            yield [ops.Recv(arrival.body, op.src, arrival.tag, ops.OBJECT_DATA)]
        messages = arrival.unpack()
    except ProtocolError as error:
        raise AloneError(error) from error
    if messages:
        yield [ops.Recv(message, op.src, arrival.tag, ops.OBJECT_DATA) for message in messages]
        yield from arrival.settled()
    return _opened(arrival, op)


@schedule(BroadcastObject)
def _broadcast(g: Context, op: BroadcastObject) -> Steps:
    mine = op.parcels[0] if op.parcels else None
    header = mine.header if mine else buffers.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device)
    yield from broadcast_tree(g, header, op.root)
    arrival = _arrival(header)
    body = mine.body if mine else arrival.body
    if body.numel():
        yield from broadcast_tree(g, body, op.root)
    if mine:
        yield from mine.prepared()
    yield from _spread(g, mine.messages if mine else arrival.unpack(), op.root)
    yield from own_copy(mine, arrival) if mine else arrival.settled()
    if mine:
        yield from mine.released()
    return _opened(arrival, op)


def _spread(g: Context, messages: Sequence[Tensor], root: int) -> Steps:
    for message in messages:
        yield from broadcast_tree(g, message, root)


@schedule(AllGatherObject)
def _all_gather(g: Context, op: AllGatherObject) -> Steps:
    mine = op.parcels[0]
    headers = [buffers.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device) for _ in range(g.size)]
    headers[g.rank] = mine.header
    yield from ring_gather(g, [[header] for header in headers])
    arrivals = [_arrival(header) for header in headers]
    arrivals[g.rank].body = mine.body
    yield from ring_gather(g, [[arrival.body] for arrival in arrivals])
    yield from mine.prepared()
    yield from ring_gather(g, [mine.messages if r == g.rank else a.unpack() for r, a in enumerate(arrivals)])
    for r, arrival in enumerate(arrivals):
        yield from own_copy(mine, arrival) if r == g.rank else arrival.settled()
    yield from mine.released()
    return [_opened(arrival, op) for arrival in arrivals]


@schedule(GatherObject)
def _gather(g: Context, op: GatherObject) -> Steps:
    mine = op.parcels[0]
    if g.rank != op.root:
        yield from _pass_on(g, {op.root: mine})
        return None
    headers = [buffers.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device) for _ in range(g.size)]
    headers[g.rank] = mine.header
    others = [r for r in range(g.size) if r != g.rank]
    yield [g.recv(headers[r], r) for r in others]
    arrivals = [_arrival(header) for header in headers]
    yield [g.recv(arrivals[r].body, r) for r in others]
    yield [g.recv(message, r) for r in others for message in arrivals[r].unpack()]
    for r, arrival in enumerate(arrivals):
        yield from own_copy(mine, arrival) if r == g.rank else arrival.settled()
    return [_opened(arrival, op) for arrival in arrivals]


@schedule(ScatterObject)
def _scatter(g: Context, op: ScatterObject) -> Steps:
    if g.rank != op.root:
        header = buffers.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device)
        yield [g.recv(header, op.root)]
        arrival = _arrival(header)
        yield [g.recv(arrival.body, op.root)]
        yield [g.recv(message, op.root) for message in arrival.unpack()]
        yield from arrival.settled()
        return _opened(arrival, op)
    mine = op.parcels[g.rank]
    yield from _pass_on(g, {r: parcel for r, parcel in enumerate(op.parcels) if r != g.rank})
    arrival = _arrival(mine.header)
    yield from own_copy(mine, arrival)
    return _opened(arrival, op)


def _pass_on(g: Context, parcels: Mapping[int, Parcel]) -> Steps:
    """Send each rank in ``parcels`` the encoded object for that rank."""
    for parcel in parcels.values():
        yield from parcel.prepared()
    yield [g.send(t, r) for r, parcel in parcels.items() for t in (parcel.header, parcel.body, *parcel.messages)]
    for parcel in parcels.values():
        yield from parcel.released()


class Objects(Issuer):
    """The methods that send and receive Python objects.

    An object may hold None, bool, int (64 bits), float, str, bytes, list, tuple, dict, and torch's Tensor, dtype,
    device and Size. The encoded object, including its tensors, may have at most
    :data:`aiocomms.ops.codec.MAX_OBJECT_BYTES` bytes. Tensors in the object must not be changed until the work is done.
    All other values in the object may be changed as soon as the call returns. Large tensors and ``bytes`` values are
    sent directly from the memory of the given object. The receiving rank writes these values directly into the memory
    of the result. A tensor on a GPU arrives on the device of the receiver's communicator if this device is a GPU. Any
    other tensor arrives on the CPU.

    With ``pickle=True`` the object may be any object that ``pickle`` accepts. Unpickling runs code that the sender
    chooses, so all receivers must pass ``pickle=True``, too.
    """

    def send_object(
        self,
        obj: Any,
        dst: int,
        tag: int = 0,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[None]:
        """Send an object to another rank or, if the communicator's device is the CPU, to this rank.

        :param obj: the object.
        :param dst: the receiving rank.
        :param tag: the tag, a 32-bit signed integer. The matching ``recv_object`` has the same tag. Objects never match
            receives of tensors.
        :param pickle: whether to send the object as a pickle.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is None.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(SendObject(self._parcel("send_object", obj, pickle), dst, tag), hints, timeout)

    def recv_object(
        self,
        src: int,
        tag: int = 0,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Any]:
        """Receive an object from another rank or, if the communicator's device is the CPU, from this rank.

        :param src: the sending rank.
        :param tag: the tag, a 32-bit signed integer. The matching ``send_object`` has the same tag.
        :param pickle: whether to expect the object as a pickle, and to unpickle it.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout. If
            no message has arrived at the deadline, only the receive fails, and the communicator stays usable.
        :returns: the work; its result is the object.
        :raises ArgumentError: an argument is wrong.
        :raises ProtocolError: the work raises this error if the bytes encode no object, or if one end uses pickle and
            the other end does not.
        """
        return self._issue(RecvObject(src, tag, pickle), hints, timeout)

    def broadcast_object(
        self,
        obj: Any,
        root: int,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Any]:
        """Give every rank the root's object.

        :param obj: the object on the root; ignored on other ranks.
        :param root: the rank whose object is sent.
        :param pickle: whether the root sends a pickle and the other ranks expect a pickle.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work. The result of the work is the object. On the root, the result is a copy of the object.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: the work raises this error in the same cases as the work of :meth:`recv_object`.
        """
        root = as_int(root)
        parcels = (self._parcel("broadcast_object", obj, pickle),) if self.rank == root else ()
        return self._issue(BroadcastObject(root, pickle, parcels), hints, timeout)

    def all_gather_object(
        self,
        obj: Any,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[list[Any]]:
        """Give every rank the objects of all ranks.

        :param obj: this rank's object.
        :param pickle: whether all ranks send and expect their objects as pickles.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is the list of objects, in rank order.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: the work raises this error in the same cases as the work of :meth:`recv_object`.
        """
        parcel = self._parcel("all_gather_object", obj, pickle)
        return self._issue(AllGatherObject(0, pickle, (parcel,)), hints, timeout)

    def gather_object(
        self,
        obj: Any,
        root: int,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[list[Any] | None]:
        """Give the root every rank's object.

        :param obj: this rank's object.
        :param root: the rank that gets the objects.
        :param pickle: whether all ranks send and expect their objects as pickles.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is the list of objects, in rank order, on the root, and None on other ranks.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: the work raises this error in the same cases as the work of :meth:`recv_object`.
        """
        parcel = self._parcel("gather_object", obj, pickle)
        return self._issue(GatherObject(root, pickle, (parcel,)), hints, timeout)

    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        root: int,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Any]:
        """Give every rank ``r`` the root's ``objs[r]``.

        :param objs: one object per rank on the root; ignored on other ranks.
        :param root: the rank that has the objects.
        :param pickle: whether all ranks send and expect their objects as pickles.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is this rank's object.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: the work raises this error in the same cases as the work of :meth:`recv_object`.
        """
        parcels: tuple[Parcel, ...] = ()
        root = as_int(root)
        if self.rank == root:
            if not isinstance(objs, (list, tuple)) or len(objs) != self.size:
                raise ArgumentError(
                    f"objs is {arguments.short(objs)}, wanted a list of {self.size} objects, one per rank",
                    comm=self.name, op="scatter_object", rank=self.rank,
                )  # fmt: skip
            parcels = tuple(self._parcel("scatter_object", obj, pickle) for obj in objs)
        return self._issue(ScatterObject(root, pickle, parcels), hints, timeout)

    def _parcel(self, op: str, obj: Any, pickle: bool) -> Parcel:
        try:
            self._core.caller_stream()  # This call refuses a CUDA capture before anything is copied to a GPU.
            return Parcel(obj, self.device, pickle=pickle)
        except CommError as error:
            raise error.about(comm=self.name, op=op, rank=self.rank) from error.__cause__
