"""Memory that an endpoint opens to others, as its owner and as these see it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.endpoints.credentials import Descriptor, dtype_of, expired
from aiocomms.errors import CommError, RegionError, wrong_thread
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import TensorLike
from aiocomms.progress.work import Work

if TYPE_CHECKING:
    from aiocomms.communicator.rma import Window
    from aiocomms.progress.driver import Promise

Given = TypeVar("Given", bound=TensorLike)


async def all_of(calls: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run them all, each to its end, and raise the first error afterwards."""
    errors: list[CommError] = []

    async def run(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await call()
        except CommError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(run, call)
    if errors:
        raise errors[0]


REVOKED = "its owner has revoked the region"
Close = Callable[..., Coroutine[Any, Any, None]]
"""A function that closes an attachment: ``close(attachment, why, timeout)``."""


class Attachment:
    """One region that is open between the two, as either of them sees it."""

    owner: int
    number: int
    descriptor: bytes
    opened: Promise
    closed: Promise

    def __init__(self, owner: int, number: int, descriptor: bytes, opened: Promise, closed: Promise) -> None:
        self.owner, self.number, self.descriptor = owner, number, descriptor
        self.opened, self.closed = opened, closed
        self.window: Window | None = None
        """The window, once it is opened, unless the connection was lost before."""
        self.over = ""
        """The reason why nothing may be started on it any more; empty: it may."""
        self.leaving = False


class Region(Handle):
    """Memory of this endpoint's that others may read or write; made by :meth:`Endpoint.register`.

    ``async with`` revokes it at the end.
    """

    def __init__(
        self, given: TensorLike, memory: Tensor, says: Descriptor, key: bytes, forget: Callable[[], object]
    ) -> None:
        self._given, self._memory, self._descriptor, self._says = given, memory, says.pack(key), says
        self._forget = forget
        self._open: dict[Attachment, Close] = {}
        self._revoked, self._thread = False, get_ident()

    def __repr__(self) -> str:
        rights = "".join(letter for letter, may in zip("rw", (self._says.read, self._says.write), strict=True) if may)
        return f"<Region {self._says.number}: {self._says.count} of {self._says.dtype}, {rights}>"

    @property
    def tensor(self) -> Any:
        """The memory: the tensor or array that was given."""
        return self._given

    @property
    def descriptor(self) -> bytes:
        """The descriptor to give to those that may use the region.

        It has at most 1,024 bytes, which only this endpoint can have made.
        """
        return self._descriptor

    @property
    def revoked(self) -> bool:
        """True once no endpoint may use it any more."""
        return self._revoked

    async def revoke(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Take it back: what is under way ends, and no endpoint reads or writes it when this returns. Idempotent.

        That holds for the endpoints that are connected. One whose connection was lost before, though its process goes
        on (it was stopped, or its deadlines have passed), may have begun to write by then.

        :param timeout: the seconds that the other endpoints have for that, None for no deadline; by default the
            endpoint's.
        :raises ArgumentError: ``timeout`` is none; nothing was revoked.
        :raises CommTimeoutError: one did not let go by then. The connection with it is lost, and as long as its process
            lives it may finish what it had begun.
        :raises RuntimeError: this is not the endpoint's thread.
        """
        if get_ident() != self._thread:
            raise wrong_thread("revoke")
        if timeout is not COMM_TIMEOUT:
            arguments.deadline("timeout", timeout)
        self._revoked = True
        self._forget()
        await all_of([functools.partial(close, it, REVOKED, timeout) for it, close in self._open.items()])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.revoke()

    @property
    def _number(self) -> int:
        """Its number among the endpoint's."""
        return self._says.number

    def _part(self) -> Tensor:
        """Return what is open to another endpoint: nothing once it is revoked."""
        return self._memory.new_empty(0) if self._revoked else self._memory

    def _opened(self, attachment: Attachment, close: Close) -> None:
        """Note that it is open to another endpoint, until :meth:`_left`."""
        self._open[attachment] = close

    def _left(self, attachment: Attachment) -> None:
        """Note that it is no longer open to another endpoint."""
        self._open.pop(attachment, None)


class Described(Handle):
    """The properties of an open region of the other endpoint."""

    _says: Descriptor
    _attachment: Attachment

    @property
    def count(self) -> int:
        """Its number of elements."""
        return self._says.count

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return dtype_of(self._says)

    @property
    def readable(self) -> bool:
        """True if :meth:`get` is allowed."""
        return self._says.read

    @property
    def writable(self) -> bool:
        """True if :meth:`put` is allowed."""
        return self._says.write

    @property
    def closed(self) -> bool:
        """True once it may not be used any more: it was revoked or closed, has expired, or the connection is over."""
        return bool(self._attachment.over) or expired(self._says.expires)


class RemoteRegion(Described):
    """A region of another endpoint's; made by :meth:`Peer.attach`. Offsets and sizes are in elements.

    Operations take effect in the order of the calls. A ``put`` is done when its source may be reused; it has arrived
    when the other endpoint gets a later :meth:`Peer.signal`, or a later ``flush`` is done.
    """

    def __init__(self, says: Descriptor, attachment: Attachment, close: Close) -> None:
        self._says, self._attachment, self._close = says, attachment, close
        assert attachment.window is not None
        self._window: Window = attachment.window
        self._owner = attachment.owner
        self._puts = self._seen = 0
        """The number of puts, and the number of those that are known to be visible."""

    def __repr__(self) -> str:
        state = f" ({self._attachment.over})" if self._attachment.over else ""
        return f"<RemoteRegion {self._says.number}: {self._says.count} of {self._says.dtype}{state}>"

    @property
    def _settled(self) -> bool:
        """True if all that was put so far is visible."""
        return self._puts == self._seen or self._attachment.closed.is_set

    def _settling(self, timeout: OpTimeout) -> tuple[RemoteRegion, int, Awaitable[None]]:
        """Begin to see to that: the number of puts that are visible once the last is awaited."""
        if self._window.closed:  # A window closes after everything else.
            return self, self._puts, self._attachment.closed
        return self, self._puts, self._window.flush(self._owner, timeout=timeout)

    def _is_of(self, attachment: Attachment) -> bool:
        """Return whether it is this opening of the region, and no earlier one."""
        return self._attachment is attachment

    def put(
        self,
        tensor: Given,
        offset: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Write a tensor into the region.

        :param tensor: a tensor of any shape and of the region's dtype; it must not be changed until the work is done.
        :param offset: the first element to write.
        :param hints: advice to the transport.
        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or the tensor would not fit; nothing was sent.
        :raises RegionError: the region may not be written, or not any more; nothing was sent.
        """
        self._check("put", "written", self._says.write)
        work = self._window.put(tensor, self._owner, offset, hints=hints, timeout=timeout)
        self._puts += 1
        return work

    def get(
        self,
        tensor: Given,
        offset: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Read from the region into a tensor.

        :param tensor: the tensor to read into, of any shape and of the region's dtype.
        :param offset: the first element to read.
        :param hints: advice to the transport.
        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or the region has fewer elements; nothing was sent.
        :raises RegionError: the region may not be read, or not any more; nothing was sent.
        """
        self._check("get", "read", self._says.read)
        return self._window.get(tensor, self._owner, offset, hints=hints, timeout=timeout)

    def put_v(
        self, tensor: Given, offsets: Sequence[int] | Tensor, starts: Sequence[int] | Tensor, count: int,
        *, timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:  # fmt: skip
        """Write equal runs of a tensor's elements into the region; see :meth:`Window.put_v`.

        :raises RegionError: as :meth:`put`.
        """
        self._check("put_v", "written", self._says.write)
        work = self._window.put_v(tensor, self._owner, offsets, starts, count, timeout=timeout)
        self._puts += 1
        return work

    def get_v(
        self, tensor: Given, offsets: Sequence[int] | Tensor, starts: Sequence[int] | Tensor, count: int,
        *, timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:  # fmt: skip
        """Read equal runs of the region's elements into a tensor; see :meth:`Window.get_v`.

        :raises RegionError: as :meth:`get`.
        """
        self._check("get_v", "read", self._says.read)
        return self._window.get_v(tensor, self._owner, offsets, starts, count, timeout=timeout)

    def flush(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> Work[None]:
        """Wait until all that was put so far is visible to the owner.

        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :returns: the work; its result is None.
        :raises RegionError: the region may not be used any more.
        """
        self._check("flush", "used", True)
        return self._window.flush(self._owner, timeout=timeout)

    async def _memory(self) -> Tensor | None:
        """Return the region itself, where this process has mapped it; None: it has not.

        It stays mapped as long as the tensor is kept, whatever becomes of the region.
        """
        if not self._window.mapped(self._owner):
            return None
        return await self._window.map_remote_tensor(self._owner)

    async def aclose(self) -> None:
        """Use it no more: what is under way ends, and the owner hears of it. Idempotent."""
        await self._close(self._attachment, "")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _check(self, op: str, done: str, right: bool) -> None:
        over = self._attachment.over or ("its descriptor has expired" if expired(self._says.expires) else "")
        if over or not right:
            why = over or f"its owner does not let it be {done}"
            raise self._window._comm._core.worded(RegionError(f"the region cannot be {done}: {why}", op=op))
