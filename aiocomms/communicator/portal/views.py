"""Batches, windows and streams with blocking methods, for threads other than the event loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, cast

import anyio

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.communicator.p2p import Batch
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.works import BlockingWork, close, run
from aiocomms.communicator.rma import Window
from aiocomms.communicator.streams import ItemStream
from aiocomms.diagnosis.stream_counts import StreamStatistics
from aiocomms.errors import CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.work import Work

_P = ParamSpec("_P")
_T = TypeVar("_T")


def started(method: Callable[Concatenate[Any, _P], Work[_T]]) -> Callable[Concatenate[Any, _P], BlockingWork[_T]]:
    """Return ``method`` unchanged, but typed as a method that returns a :class:`BlockingWork`.

    Use this function in a class whose ``_issue`` returns a :class:`BlockingWork`, for the methods that call ``_issue``.
    """
    return cast("Any", method)  # type: ignore[no-any-return]


class BlockingBatch(Batch):
    """A :class:`~aiocomms.communicator.p2p.Batch` that a thread can wait for."""

    issue: Final = started(Batch.issue)  # type: ignore[assignment]


class BlockingWindow(Handle):
    """A :class:`~aiocomms.Window` whose operations a thread can wait for."""

    def __init__(self, portal: Any, window: Window) -> None:
        self._comm, self._window, self._info = portal, window, window._info
        self._door: Door = portal._door

    @property
    def tensor(self) -> Any:
        """This rank's part of the window: the tensor or array that was passed to ``new_window``."""
        return self._window.tensor

    @property
    def name(self) -> str:
        """See :attr:`Window.name`."""
        return self._window.name

    @property
    def sizes(self) -> list[int]:
        """Each rank's number of elements, in rank order."""
        return self._window.sizes

    @property
    def closed(self) -> bool:
        """True once the window was closed on this rank."""
        return self._window.closed

    put: Final = started(Window.put)
    put_v: Final = started(Window.put_v)
    put_signal: Final = started(Window.put_signal)
    get: Final = started(Window.get)
    get_v: Final = started(Window.get_v)
    fetch_add: Final = started(Window.fetch_add)
    compare_swap: Final = started(Window.compare_swap)
    signal: Final = started(Window.signal)
    wait_signal: Final = started(Window.wait_signal)
    flush: Final = started(Window.flush)
    map_remote_tensor: Final = started(Window.map_remote_tensor)

    def mapped(self, rank: int) -> bool:
        """Return whether the memory of a rank's part is mapped in this process; see :meth:`Window.mapped`."""
        return self._window.mapped(rank)

    def close(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Close the window once all ranks' operations on it have ended. Collective. Idempotent."""
        if not self.closed:
            run(self._door, "close", lambda: self._window.aclose(timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.closed:
                run(self._door, "close", lambda: self._window.__aexit__(kind, error, trace))
        except CommError:
            if error is None:
                raise


class BlockingStream(Handle, Generic[_T]):
    """An :class:`~aiocomms.ItemStream` whose methods block. Iteration ends after the other end's last item."""

    peer: int
    name: str

    def __init__(self, door: Door, stream: ItemStream[_T]) -> None:
        self._door, self._stream = door, stream
        self.peer, self.name = stream.peer, stream.name

    def send(self, item: _T, *, timeout: Timeout = None) -> None:
        """Send an item; see :meth:`ItemStream.send`.

        :param item: an item of the stream's type.
        :param timeout: the seconds to wait; None: no limit.
        :raises TimeoutError: ``timeout`` passed before the other end had free capacity and had received the item.
        """
        run(self._door, "send", lambda: self._stream.send(item), timeout)

    def receive(self, *, timeout: Timeout = None) -> _T:
        """Receive the next item; see :meth:`ItemStream.receive`.

        :param timeout: the seconds to wait; None: no limit.
        :raises TimeoutError: no item arrived within ``timeout``. The next call returns an item that arrives after this
            time.
        :raises anyio.EndOfStream: the other end has sent its last item, and all its items have been received.
        """
        return run(self._door, "receive", self._stream.receive, timeout)

    def send_eof(self) -> None:
        """Tell the other end that this end sends nothing more; see :meth:`ItemStream.send_eof`."""
        run(self._door, "send_eof", self._stream.send_eof)

    def statistics(self) -> StreamStatistics:
        """See :meth:`ItemStream.statistics`."""
        return self._stream.statistics()

    def close(self) -> None:
        """Close both directions, and drop the items that were not received. Idempotent."""
        close(self._door, "close", self._stream.aclose)

    def __iter__(self) -> Iterator[_T]:
        while True:
            try:
                yield self.receive()
            except anyio.EndOfStream:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
