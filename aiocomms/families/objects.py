"""The methods that send Python objects: point to point, and as collectives.

An object travels as a header of fixed size. A small object stands in the header itself; the bytes of a larger one
follow in a second message.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.errors import ArgumentError, ProtocolError
from aiocomms.families.issuer import Issuer
from aiocomms.lowering.runs import AloneError, Steps
from aiocomms.lowering.schedules import Context, broadcast_tree, ring_gather, schedule
from aiocomms.lowlevel.versions import Dialect
from aiocomms.ops import Op, checks, codec
from aiocomms.ops.checks import Group, Timeout
from aiocomms.progress.work import Work

HEADER_BYTES = 256
_HEADER = struct.Struct("<6sBxIIQ")  # head, flags, tag of the second message, bytes here, bytes in all
_OBJECTS = Dialect("objects", b"aioO", 2)
_INLINE = HEADER_BYTES - _HEADER.size
_PICKLED = 1

# The tag of each second message, so that those between one pair of ranks differ; one count for all ranks of a process.
_tags = itertools.count()


class Parcel:
    """An encoded object: its header and, if the object does not fit into that, the bytes of the second message."""

    __slots__ = ("body", "header", "tag")

    def __init__(self, obj: Any, device: torch.device, *, pickle: bool) -> None:
        data = codec.encode(obj, pickle=pickle)
        inline = data if len(data) <= _INLINE else b""
        self.tag = next(_tags) & 0x7FFFFFFF
        head = _HEADER.pack(_OBJECTS.head, _PICKLED if pickle else 0, self.tag, len(inline), len(data))
        self.header = codec.to_tensor((head + inline).ljust(HEADER_BYTES, b"\0"), device)
        self.body = codec.to_tensor(b"" if inline else data, device)  # which are not copied: nobody else has them


class Arrival:
    """An object that arrives: its parsed header, and memory for the second message if there is one.

    :raises ProtocolError: the header makes no sense.
    """

    __slots__ = ("body", "inline", "pickled", "tag")

    def __init__(self, header: Tensor) -> None:
        data = codec.to_bytes(header)
        _OBJECTS.check(data, "the sender of an object")
        _, flags, self.tag, here, total = _HEADER.unpack(data[: _HEADER.size])
        if flags > _PICKLED or here not in (0, total) or here > _INLINE or self.tag > 0x7FFFFFFF:
            raise ProtocolError(f"an object's header makes no sense: {data[: _HEADER.size].hex()}")
        if total > codec.MAX_OBJECT_BYTES:
            raise ProtocolError(f"an object of {total} bytes was announced, at most {codec.MAX_OBJECT_BYTES} are taken")
        self.pickled = bool(flags & _PICKLED)
        self.inline = data[_HEADER.size : _HEADER.size + here]
        self.body = torch.empty(total - here, dtype=torch.uint8, device=header.device)

    def open(self, *, pickle: bool) -> Any:
        """Decode the object; :attr:`body` must have been received.

        :raises ProtocolError: the bytes encode no object, or one end uses pickle and the other does not.
        """
        if self.pickled != pickle:
            how = ("pickled", "not pickled")[:: 1 if self.pickled else -1]
            raise ProtocolError(f"the object was {how[0]} by its sender, and this end asked for one that is {how[1]}")
        return codec.decode(self.inline or codec.to_bytes(self.body), pickle=pickle)


class SendObject(Op, frozen=True, eq=False):
    """Send an object to rank ``dst``."""

    name = kind = "send_object"
    family = "p2p"
    parcel: Parcel
    dst: int
    tag: int

    def check(self, group: Group) -> None:
        """See :meth:`Op.check`."""
        checks.other("dst", self.dst, group)
        checks.tagged(self.tag)


class RecvObject(Op, frozen=True, eq=False):
    """Receive an object from rank ``src``."""

    name = kind = "recv_object"
    family = "p2p"
    withdrawable = True
    src: int
    tag: int
    pickle: bool

    def check(self, group: Group) -> None:
        """See :meth:`Op.check`."""
        checks.other("src", self.src, group)
        checks.tagged(self.tag)


class _ObjectCollective(Op, frozen=True, eq=False):
    root: int
    pickle: bool
    parcels: tuple[Parcel, ...]
    rooted: ClassVar[bool] = True

    def check(self, group: Group) -> None:
        """See :meth:`Op.check`."""
        if self.rooted:
            checks.index("root", self.root, group)


class BroadcastObject(_ObjectCollective, frozen=True, eq=False):
    """Every rank gets the root's object."""

    name = kind = "broadcast_object"


class AllGatherObject(_ObjectCollective, frozen=True, eq=False):
    """Every rank gets every rank's object."""

    name = kind = "all_gather_object"
    rooted = False


class GatherObject(_ObjectCollective, frozen=True, eq=False):
    """The root gets every rank's object."""

    name = kind = "gather_object"


class ScatterObject(_ObjectCollective, frozen=True, eq=False):
    """Every rank gets the object that the root gives for it."""

    name = kind = "scatter_object"


def _opened(arrival: Arrival, op: RecvObject | _ObjectCollective) -> Any:
    """Decode an object after the last message."""
    try:
        return arrival.open(pickle=op.pickle)
    except ProtocolError as error:
        raise AloneError(error) from error


@schedule(SendObject)
def _send(g: Context, op: SendObject) -> Steps:
    parcel = op.parcel
    messages: list[Op] = [ops.Send(parcel.header, op.dst, op.tag, ops.OBJECT)]
    if parcel.body.numel():
        messages.append(ops.Send(parcel.body, op.dst, parcel.tag, ops.OBJECT_DATA))
    yield messages


@schedule(RecvObject)
def _recv(g: Context, op: RecvObject) -> Steps:
    header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device)
    yield [ops.Recv(header, op.src, op.tag, ops.OBJECT)]
    try:
        arrival = Arrival(header)
    except ProtocolError as error:
        raise AloneError(error) from error
    if arrival.body.numel():
        yield [ops.Recv(arrival.body, op.src, arrival.tag, ops.OBJECT_DATA)]
    return _opened(arrival, op)


@schedule(BroadcastObject)
def _broadcast(g: Context, op: BroadcastObject) -> Steps:
    mine = op.parcels[0] if op.parcels else None
    header = mine.header if mine else torch.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device)
    yield from broadcast_tree(g, header, op.root)
    arrival = Arrival(header)
    body = mine.body if mine else arrival.body
    if body.numel():
        yield from broadcast_tree(g, body, op.root)
        arrival.body = body
    return _opened(arrival, op)


@schedule(AllGatherObject)
def _all_gather(g: Context, op: AllGatherObject) -> Steps:
    headers = [torch.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device) for _ in range(g.size)]
    headers[g.rank] = op.parcels[0].header
    yield from ring_gather(g, headers)
    arrivals = [Arrival(header) for header in headers]
    arrivals[g.rank].body = op.parcels[0].body
    yield from ring_gather(g, [arrival.body for arrival in arrivals])
    return [_opened(arrival, op) for arrival in arrivals]


@schedule(GatherObject)
def _gather(g: Context, op: GatherObject) -> Steps:
    mine = op.parcels[0]
    if g.rank != op.root:
        yield [g.send(mine.header, op.root), g.send(mine.body, op.root)]
        return None
    headers = [torch.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device) for _ in range(g.size)]
    headers[g.rank] = mine.header
    others = [r for r in range(g.size) if r != g.rank]
    yield [g.recv(headers[r], r) for r in others]
    arrivals = [Arrival(header) for header in headers]
    arrivals[g.rank].body = mine.body
    yield [g.recv(arrivals[r].body, r) for r in others]
    return [_opened(arrival, op) for arrival in arrivals]


@schedule(ScatterObject)
def _scatter(g: Context, op: ScatterObject) -> Steps:
    if g.rank != op.root:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=g.device)
        yield [g.recv(header, op.root)]
        arrival = Arrival(header)
        yield [g.recv(arrival.body, op.root)]
        return _opened(arrival, op)
    parcels = [(r, parcel) for r, parcel in enumerate(op.parcels) if r != g.rank]
    yield [g.send(tensor, r) for r, parcel in parcels for tensor in (parcel.header, parcel.body)]
    arrival = Arrival(op.parcels[g.rank].header)
    arrival.body = op.parcels[g.rank].body
    return _opened(arrival, op)


class Objects(Issuer):
    """The methods that send Python objects.

    An object may hold None, bool, int (64 bits), float, str, bytes, list, tuple, dict, and torch's Tensor, dtype,
    device and Size. Encoded it takes at most :data:`aiocomms.ops.codec.MAX_OBJECT_BYTES` bytes. Tensors travel through
    the CPU. With ``pickle=True`` it may be any object that pickles. Every rank concerned must say so, as unpickling
    runs code that the sender chose.
    """

    def send_object(
        self,
        obj: Any,
        dst: int,
        tag: int = 0,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: Timeout = None,
    ) -> Work[None]:
        """Send an object to another rank. The object may be changed as soon as the call returns.

        :param obj: the object.
        :param dst: the receiving rank.
        :param tag: the tag of the ``recv_object`` that the object matches: a 32-bit signed integer. It never matches
            the tag of a tensor.
        :param pickle: send a pickle.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds; None: the communicator's.
        :returns: the work; its result is None.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._issue(SendObject(self._parcel(obj, pickle), dst, tag), hints, timeout)

    def recv_object(
        self,
        src: int,
        tag: int = 0,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: Timeout = None,
    ) -> Work[Any]:
        """Receive an object from another rank.

        :param src: the sending rank.
        :param tag: the tag of the ``send_object`` that the receive matches: a 32-bit signed integer.
        :param pickle: expect a pickle, and load it.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds; None: the communicator's. A receive that nothing has matched by
            then fails alone, and the communicator stays usable.
        :returns: the work; its result is the object.
        :raises ArgumentError: an argument is wrong.
        :raises ProtocolError: raised by the work: the bytes encode no object, or only one end uses pickle.
        """
        return self._issue(RecvObject(src, tag, pickle), hints, timeout)

    def broadcast_object(
        self,
        obj: Any,
        root: int,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: Timeout = None,
    ) -> Work[Any]:
        """Give every rank the root's object.

        :param obj: the object on the root; ignored elsewhere.
        :param root: the rank whose object is sent.
        :param pickle: send and expect a pickle.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds; None: the communicator's.
        :returns: the work; its result is the object, and on the root a copy of it.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: raised by the work, as by that of :meth:`recv_object`.
        """
        parcels = (self._parcel(obj, pickle),) if self.rank == root else ()
        return self._issue(BroadcastObject(root, pickle, parcels), hints, timeout)

    def all_gather_object(
        self, obj: Any, *, pickle: bool = False, hints: Mapping[str, Any] | None = None, timeout: Timeout = None
    ) -> Work[list[Any]]:
        """Give every rank every rank's object.

        :param obj: this rank's object.
        :param pickle: send and expect pickles.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds; None: the communicator's.
        :returns: the work; its result is the list of objects, in rank order.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: raised by the work, as by that of :meth:`recv_object`.
        """
        return self._issue(AllGatherObject(0, pickle, (self._parcel(obj, pickle),)), hints, timeout)

    def gather_object(
        self,
        obj: Any,
        root: int,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: Timeout = None,
    ) -> Work[list[Any] | None]:
        """Give the root every rank's object.

        :param obj: this rank's object.
        :param root: the rank that gets the objects.
        :param pickle: send and expect pickles.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds; None: the communicator's.
        :returns: the work; its result is the list of objects, in rank order, on the root, and None elsewhere.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: raised by the work, as by that of :meth:`recv_object`.
        """
        return self._issue(GatherObject(root, pickle, (self._parcel(obj, pickle),)), hints, timeout)

    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        root: int,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: Timeout = None,
    ) -> Work[Any]:
        """Give every rank the object that the root has for it.

        :param objs: one object per rank on the root; ignored elsewhere.
        :param root: the rank that has the objects.
        :param pickle: send and expect pickles.
        :param hints: advice to the transport.
        :param timeout: the op's deadline in seconds; None: the communicator's.
        :returns: the work; its result is this rank's object.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: raised by the work, as by that of :meth:`recv_object`.
        """
        parcels: tuple[Parcel, ...] = ()
        if self.rank == root:
            if not isinstance(objs, (list, tuple)) or len(objs) != self.size:
                raise ArgumentError(f"objs is {checks.short(objs)}, wanted a list of {self.size} objects, one per rank")
            parcels = tuple(self._parcel(obj, pickle) for obj in objs)
        return self._issue(ScatterObject(root, pickle, parcels), hints, timeout)

    def _parcel(self, obj: Any, pickle: bool) -> Parcel:
        return Parcel(obj, self.device, pickle=pickle)
