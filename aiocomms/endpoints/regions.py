"""Memory regions that an endpoint opens to other endpoints: the owner's handle and the remote handle."""

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
from aiocomms.lowlevel.shielding import shielded
from aiocomms.ops import TensorLike
from aiocomms.progress.work import Work

if TYPE_CHECKING:
    from aiocomms.communicator.rma import Window
    from aiocomms.progress.driver import Promise

Given = TypeVar("Given", bound=TensorLike)


async def all_of(calls: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run all calls concurrently until each has ended, and then raise the first error, if there is one."""
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
"""The type of a function that closes an attachment: ``close(attachment, why, timeout)``."""


class Attachment:
    """A region of one endpoint that another endpoint has opened. Each of the two endpoints has its own object."""

    owner: int
    number: int
    descriptor: bytes
    opened: Promise
    closed: Promise

    def __init__(self, owner: int, number: int, descriptor: bytes, opened: Promise, closed: Promise) -> None:
        self.owner, self.number, self.descriptor = owner, number, descriptor
        self.opened, self.closed = opened, closed
        self.window: Window | None = None
        """The window; None until the window is opened.

        The attribute stays None if the connection is lost before the window is opened.
        """
        self.over = ""
        """The reason why no operation may start on the region any more; empty while operations may start."""
        self.leaving = False


class Region(Handle):
    """Memory of this endpoint that other endpoints may read or write; made by :meth:`Endpoint.register`.

    An ``async with`` block revokes the region at its end. Even if the task is cancelled, the block waits until no peer
    writes the memory any more. The block waits at most for the endpoint's timeout.
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
        """The memory: the tensor or array that was passed to :meth:`Endpoint.register`."""
        return self._given

    @property
    def descriptor(self) -> bytes:
        """The descriptor, which gives a program access to the region; at most 1,024 bytes.

        Only this endpoint can create the descriptor.
        """
        return self._descriptor

    @property
    def revoked(self) -> bool:
        """True once the region is revoked."""
        return self._revoked

    async def revoke(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Revoke the region: refuse new operations, and wait for pending operations. Idempotent.

        When this call returns, no connected endpoint reads or writes the region. An endpoint whose connection was lost
        earlier may write until the process of that endpoint ends.

        :param timeout: the deadline in seconds for all other endpoints to release the region; None: no deadline. The
            default is the endpoint's timeout.
        :raises ArgumentError: ``timeout`` is not valid; nothing was revoked.
        :raises CommTimeoutError: an endpoint did not release the region in time. The connection with that endpoint is
            lost. Pending operations of that endpoint may complete until the process of that endpoint ends.
        :raises RuntimeError: the call is not on the endpoint's thread.
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
        await shielded(self.revoke)  # A cancelled block, too, ends only when no peer writes the memory any more.

    @property
    def _number(self) -> int:
        """The number of the region among the endpoint's regions."""
        return self._says.number

    def _part(self) -> Tensor:
        """Return the memory that another endpoint may open. After the revocation, return an empty tensor."""
        return self._memory.new_empty(0) if self._revoked else self._memory

    def _opened(self, attachment: Attachment, close: Close) -> None:
        """Record that another endpoint has opened the region. :meth:`_left` removes this record."""
        self._open[attachment] = close

    def _left(self, attachment: Attachment) -> None:
        """Record that another endpoint has closed the region."""
        self._open.pop(attachment, None)


class Described(Handle):
    """The properties of an open region of the other endpoint."""

    _says: Descriptor
    _attachment: Attachment

    @property
    def count(self) -> int:
        """The number of elements of the region."""
        return self._says.count

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the region's elements."""
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
        """True once the region is unusable: revoked, closed or expired, or the connection is over."""
        return bool(self._attachment.over) or expired(self._says.expires)


class RemoteRegion(Described):
    """A region of another endpoint; made by :meth:`Peer.attach`. Offsets and sizes are in elements.

    Operations take effect in the order of the calls. When a ``put`` is done, the program may reuse the source tensor.
    The data of a ``put`` has arrived when the other endpoint receives a later :meth:`Peer.signal`, or when a later
    ``flush`` is done.
    """

    def __init__(self, says: Descriptor, attachment: Attachment, close: Close) -> None:
        self._says, self._attachment, self._close = says, attachment, close
        assert attachment.window is not None
        self._window: Window = attachment.window
        self._owner = attachment.owner
        self._puts = self._seen = 0
        """``_puts`` counts all puts. ``_seen`` counts the puts that are known to be visible to the owner."""

    def __repr__(self) -> str:
        state = f" ({self._attachment.over})" if self._attachment.over else ""
        return f"<RemoteRegion {self._says.number}: {self._says.count} of {self._says.dtype}{state}>"

    @property
    def _settled(self) -> bool:
        """True if all puts so far are visible to the owner."""
        return self._puts == self._seen or self._attachment.closed.is_set

    def _settling(self, timeout: OpTimeout) -> tuple[RemoteRegion, int, Awaitable[None]]:
        """Start to wait for all puts so far to be visible.

        :returns: this region, the number of puts so far, and an awaitable that is done when these puts are visible.
        """
        if self._window.closed:  # A window closes after everything else.
            return self, self._puts, self._attachment.closed
        return self, self._puts, self._window.flush(self._owner, timeout=timeout)

    def _is_of(self, attachment: Attachment) -> bool:
        """Return whether this handle belongs to ``attachment``, and not to an earlier attachment of the same region."""
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

        :param tensor: a tensor of any shape, with the region's dtype. Do not change the tensor until the work is done.
        :param offset: the index, in the region, of the first element to write.
        :param hints: advice to the transport.
        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or the tensor would not fit; nothing was sent.
        :raises RegionError: the region is not writable or no longer usable; nothing was sent.
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

        :param tensor: the tensor to read into, of any shape, with the region's dtype.
        :param offset: the index, in the region, of the first element to read.
        :param hints: advice to the transport.
        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or the region has too few elements; nothing was sent.
        :raises RegionError: the region is not readable or no longer usable; nothing was sent.
        """
        self._check("get", "read", self._says.read)
        return self._window.get(tensor, self._owner, offset, hints=hints, timeout=timeout)

    def put_v(
        self, tensor: Given, offsets: Sequence[int] | Tensor, starts: Sequence[int] | Tensor, count: int,
        *, timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:  # fmt: skip
        """Write several runs of a tensor's elements, all of the same length, into the region; see :meth:`Window.put_v`.

        :raises RegionError: the region is not writable or no longer usable; nothing was sent.
        """
        self._check("put_v", "written", self._says.write)
        work = self._window.put_v(tensor, self._owner, offsets, starts, count, timeout=timeout)
        self._puts += 1
        return work

    def get_v(
        self, tensor: Given, offsets: Sequence[int] | Tensor, starts: Sequence[int] | Tensor, count: int,
        *, timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:  # fmt: skip
        """Read several runs of the region's elements, all of the same length, into a tensor; see :meth:`Window.get_v`.

        :raises RegionError: the region is not readable or no longer usable; nothing was sent.
        """
        self._check("get_v", "read", self._says.read)
        return self._window.get_v(tensor, self._owner, offsets, starts, count, timeout=timeout)

    def flush(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> Work[None]:
        """Wait until all puts so far are visible to the owner.

        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :returns: the work; its result is None.
        :raises RegionError: the region is no longer usable.
        """
        self._check("flush", "used", True)
        return self._window.flush(self._owner, timeout=timeout)

    async def _memory(self) -> Tensor | None:
        """Return the region's memory if this process has mapped the memory, and None otherwise.

        The memory stays mapped as long as the tensor exists, even after the region is closed.
        """
        if not self._window.mapped(self._owner):
            return None
        return await self._window.map_remote_tensor(self._owner)

    async def aclose(self) -> None:
        """Close the region on this endpoint: wait for pending operations, and notify the owner. Idempotent."""
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
