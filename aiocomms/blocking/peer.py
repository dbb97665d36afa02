"""The peers and regions of a blocking endpoint. Any thread except the event loop's thread may use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast, overload

from torch import Tensor

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.portal import Portal
from aiocomms.communicator.portal.views import BlockingStream, BlockingWindow, started
from aiocomms.communicator.portal.works import BlockingWork, close
from aiocomms.diagnosis.statistics import Statistics
from aiocomms.endpoints.peer import Peer
from aiocomms.endpoints.regions import Described, Region, RemoteRegion
from aiocomms.errors import CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import TensorLike
from aiocomms.progress.hooks import Hook

_T = TypeVar("_T")
Given = TypeVar("Given", bound=TensorLike)


class BlockingPeer(Handle):
    """The connection to another endpoint: an :class:`aiocomms.Peer` in blocking form.

    Any thread except the event loop's thread may use the object.

    Each method has the arguments, the result and the errors of the :class:`aiocomms.Peer` method with the same name. If
    that method returns a :class:`~aiocomms.Work`, the method here returns a :class:`~aiocomms.BlockingWork`. If that
    method is a coroutine function, the method here blocks.
    """

    name: str
    address: bytes
    transports: dict[str, str]

    def __init__(self, door: Door, peer: Peer) -> None:
        """Make the blocking form of a peer. Only the loop's thread calls this method.

        :param door: the endpoint's queue of calls to the loop's thread. :meth:`close` uses this queue, because the
            connection's own queue closes with the connection.
        """
        self.name, self.address, self.transports = peer.name, peer.address, peer.transports
        self._peer, self._other, self._door = peer, peer._other, door
        self._comm = peer._comm.portal()
        # Several threads count their puts under this lock, and a finalizer or signal handler may put during a put.
        self._counting = threading.RLock()
        self._signals = BlockingWindow(self._comm, peer._signals)
        self.register_abort_hook: Callable[[Callable[[CommError], object]], Hook] = self._comm.register_abort_hook

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._peer)[1:]}"

    @property
    def closed(self) -> bool:
        """True after the connection has been closed on either side, or has been lost."""
        return self._peer.closed

    def statistics(self) -> Statistics:
        """See :meth:`Peer.statistics`."""
        return self._peer.statistics()

    # These methods run on the portal, and so return its works.
    send: Final = started(Peer.send)
    recv: Final = started(Peer.recv)
    send_object: Final = started(Peer.send_object)
    recv_object: Final = started(Peer.recv_object)
    wait_signal: Final = started(Peer.wait_signal)

    @overload
    def open_stream(
        self, capacity: int = 8, name: str = "", *, capacity_bytes: int | None = None, timeout: Timeout = None
    ) -> BlockingStream[Tensor]: ...

    @overload
    def open_stream(
        self, capacity: int = 8, name: str = "", *, items: type[_T], capacity_bytes: int | None = None,
        timeout: Timeout = None,
    ) -> BlockingStream[_T]: ...  # fmt: skip

    def open_stream(
        self, capacity: int = 8, name: str = "", *, items: Any = Tensor, capacity_bytes: int | None = None,
        timeout: Timeout = None,
    ) -> BlockingStream[Any]:  # fmt: skip
        """Open a stream to the other endpoint; see :meth:`Portal.open_stream`."""
        return self._comm.open_stream(
            self._other, capacity, name, items=items, capacity_bytes=capacity_bytes, timeout=timeout
        )

    def attach(self, descriptor: bytes, *, timeout: OpTimeout = COMM_TIMEOUT) -> BlockingRemoteRegion:
        """Open a region of the other endpoint; see :meth:`aiocomms.Peer.attach`."""
        remote = self._comm._run("attach", lambda: self._peer.attach(descriptor, timeout=timeout))
        return BlockingRemoteRegion(self._door, self._comm, remote, self._counting)

    def put(self, tensor: Given, descriptor: bytes, offset: int = 0, *, timeout: OpTimeout = COMM_TIMEOUT) -> Given:
        """Write a tensor into a region; see :meth:`aiocomms.Peer.put`."""
        return self._comm._run("put", lambda: self._peer.put(tensor, descriptor, offset, timeout=timeout))

    def get(self, tensor: Given, descriptor: bytes, offset: int = 0, *, timeout: OpTimeout = COMM_TIMEOUT) -> Given:
        """Read from a region into a tensor; see :meth:`aiocomms.Peer.get`."""
        return self._comm._run("get", lambda: self._peer.get(tensor, descriptor, offset, timeout=timeout))

    def signal(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Tell the other endpoint that all earlier puts have arrived; see :meth:`aiocomms.Peer.signal`."""
        self._comm._run("signal", lambda: self._peer.signal(timeout=timeout))

    def lost(self, *, timeout: Timeout = None) -> CommError:
        """Wait until the connection is lost; see :meth:`aiocomms.Peer.lost`.

        :param timeout: the seconds to wait; None means no limit.
        :returns: the reason for the loss.
        :raises TimeoutError: the connection was not lost in time.
        :raises CommClosedError: the connection was closed on either side.
        """
        try:
            return self._comm._run("lost", self._peer.lost, timeout)
        except CommError:
            if not self._comm.aborted:
                raise
        # The communicator is closed as well as lost, and so the loop runs nothing more for it.
        return self._comm.lost()

    def abort(self, reason: str | BaseException) -> None:
        """Abort the connection on both sides; see :meth:`aiocomms.Peer.abort`. Any thread may call this method."""
        self._peer.abort(reason)

    def close(self) -> None:
        """Close the connection: let pending ops end, and release all resources. Idempotent.

        See :meth:`aiocomms.Peer.aclose`.
        """
        if not self._comm.closed:
            close(self._door, "close", self._peer.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()


class BlockingRegion(Handle):
    """An :class:`aiocomms.Region` in blocking form, for all threads except the event loop's thread.

    The end of a ``with`` block revokes the region.
    """

    tensor: Tensor
    descriptor: bytes

    def __init__(self, door: Door, region: Region) -> None:
        self._door, self._region = door, region
        self.tensor, self.descriptor = region.tensor, region.descriptor

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._region)[1:]}"

    @property
    def revoked(self) -> bool:
        """True after the region has been revoked: no endpoint may use the region any more."""
        return self._region.revoked

    def revoke(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Revoke the region; see :meth:`aiocomms.Region.revoke`. The call does nothing if the endpoint is closed."""
        if not self._door.core.closed:
            close(self._door, "revoke", lambda: self._region.revoke(timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.revoke()


class BlockingRemoteRegion(Described):
    """An :class:`aiocomms.RemoteRegion` in blocking form: a thread can wait for each operation.

    The end of a ``with`` block closes the object.
    """

    def __init__(self, door: Door, portal: Portal, remote: RemoteRegion, counting: threading.RLock) -> None:
        self._door, self._remote, self._owner = door, remote, remote._owner
        self._says, self._attachment = remote._says, remote._attachment
        self._window, self._counting = BlockingWindow(portal, remote._window), counting

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._remote)[1:]}"

    def put(
        self,
        tensor: Given,
        offset: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> BlockingWork[Given]:
        """Write a tensor into the region; see :meth:`aiocomms.RemoteRegion.put`."""
        self._check("put", "written", self.writable)
        with self._counting:
            work = self._window.put(tensor, self._owner, offset, hints=hints, timeout=timeout)
            self._remote._puts += 1
        return work

    def put_v(
        self, tensor: Given, offsets: Sequence[int] | Tensor, starts: Sequence[int] | Tensor, count: int,
        *, timeout: OpTimeout = COMM_TIMEOUT,
    ) -> BlockingWork[Given]:  # fmt: skip
        """Write runs of elements of equal length into the region; see :meth:`aiocomms.RemoteRegion.put_v`."""
        self._check("put_v", "written", self.writable)
        with self._counting:
            work = self._window.put_v(tensor, self._owner, offsets, starts, count, timeout=timeout)
            self._remote._puts += 1
        return work

    get: Final = started(RemoteRegion.get)
    get_v: Final = started(RemoteRegion.get_v)
    flush: Final = started(RemoteRegion.flush)
    _check: Callable[..., None] = cast("Any", RemoteRegion._check)

    def close(self) -> None:
        """Stop using the region: let pending operations end, and inform the region's owner. Idempotent."""
        if not self._door.core.closed:
            close(self._door, "close", self._remote.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
