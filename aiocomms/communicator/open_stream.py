"""The method that opens streams."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import Tensor

from aiocomms.arguments import as_int
from aiocomms.communicator import greeting
from aiocomms.communicator.greeting import Greeting
from aiocomms.communicator.issuer import Issuer
from aiocomms.communicator.items import kind_of
from aiocomms.communicator.streams import ItemStream, TensorStream
from aiocomms.errors import ArgumentError
from aiocomms.ops import checks

T = TypeVar("T")


class Streams(Issuer):
    """A base class of communicators, with the method that opens streams."""

    _streams = 0

    @overload
    async def open_stream(
        self, peer: int, capacity: int = 8, name: str = "", *, capacity_bytes: int | None = None
    ) -> TensorStream: ...

    @overload
    async def open_stream(
        self, peer: int, capacity: int = 8, name: str = "", *, items: type[T], capacity_bytes: int | None = None
    ) -> ItemStream[T]: ...

    async def open_stream(
        self, peer: int, capacity: int = 8, name: str = "", *, items: Any = Tensor, capacity_bytes: int | None = None
    ) -> ItemStream[Any]:
        """Open a stream to another rank, which must open a stream to this rank with the same name and item type.

        :param peer: the other rank.
        :param capacity: the number of items, 1 to 2**20, that this end can hold until its program receives them.
        :param name: a name that distinguishes streams between the same two ranks. Streams of the same name are paired
            in the order in which they are opened. The name has at most 100 bytes in UTF-8.
        :param items: the type of the items: ``torch.Tensor``, of any shape and dtype; a dataclass; or ``dict``, such as
            ``dict[str, Tensor]``. A dict or a dataclass may hold all values that ``send_object`` can send without
            pickle.
        :param capacity_bytes: the number of bytes of items that this end can hold, at least 1. If this end holds no
            item, it also accepts one item that is larger than ``capacity_bytes``. None: any number of bytes.
        :returns: a duplex :class:`anyio.abc.ObjectStream` of items of this type; for tensors a :class:`TensorStream`.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: the other rank opened the stream with another item type.
        :raises CommError: the communicator is lost.
        """
        peer, capacity, capacity_bytes = map(as_int, (peer, capacity, capacity_bytes))
        try:
            checks.other("peer", peer, self._core)
            greeting.check(capacity, name, capacity_bytes)
            kind = kind_of(items)
        except ArgumentError as error:
            raise error.about(op="open_stream", rank=self.rank) from None
        self._streams += 1
        end = Greeting((self._streams << 2) & 0x7FFFFFFC, capacity, capacity_bytes or 0)
        cls: type[ItemStream[Any]] = TensorStream if items is Tensor else ItemStream
        stream = cls(self, peer, end, name, kind, self._streams)
        try:
            await stream._opened()
        except BaseException:
            await stream.aclose()
            raise
        return stream
