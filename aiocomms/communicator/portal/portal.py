"""The class ``Portal``: a communicator's methods in blocking form, for threads that do not run the event loop."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.communicator.portal.door import Door
from aiocomms.communicator.portal.operations import BlockingLane, Operations
from aiocomms.communicator.portal.views import BlockingStream, BlockingWindow
from aiocomms.communicator.portal.works import close, run
from aiocomms.communicator.streams import ItemStream
from aiocomms.core.core import Core
from aiocomms.diagnosis.statistics import Statistics
from aiocomms.errors import CommError
from aiocomms.lowering.tags import Key
from aiocomms.ops import TensorLike
from aiocomms.progress.hooks import Hooked

_T = TypeVar("_T")


class Portal(Operations, Hooked):
    """A communicator's operations in blocking form. All threads may use a portal, except the event loop's thread.

    See :meth:`Communicator.portal`.

    Each method has the arguments and the result of the communicator's method of the same name. If the communicator's
    method returns a :class:`~aiocomms.Work`, the portal's method returns a :class:`BlockingWork`. If the communicator's
    method is a coroutine function, the portal's method blocks until the coroutine is done. Calls of one thread start in
    the order in which the thread makes them. Calls of several threads start one after the other. Each call runs with
    the context variables of the thread that makes the call.

    On Ctrl-C, the portal cancels a blocking call, and waits until the call has ended. On a second Ctrl-C, the portal
    does not wait any longer.
    """

    rank: int
    size: int
    name: str
    device: torch.device

    _core: Core

    def __init__(self, comm: Any) -> None:
        self.rank, self.size, self.name, self.device = comm.rank, comm.size, comm.name, comm.device
        self._comm, self._core = comm, comm._core
        self._target, self._where = comm, comm.name
        self._pre_hooks, self._post_hooks, self._abort_hooks = comm._pre_hooks, comm._post_hooks, comm._abort_hooks
        self._door = Door(self._core)
        comm._doors.append(self._door)

    def __repr__(self) -> str:
        return f"<Portal of {self._comm!r}>"

    @property
    def timeout(self) -> float | None:
        """The default deadline of ops, in seconds; None: no deadline."""
        timeout: float | None = self._comm.timeout
        return timeout

    @property
    def transports(self) -> dict[str, str]:
        """A dict from each family of operations to the name of the transport; see :attr:`Communicator.transports`."""
        transports: dict[str, str] = self._comm.transports
        return transports

    @property
    def closed(self) -> bool:
        """True once this rank has begun to close the communicator."""
        return self._core.closed

    @property
    def aborted(self) -> bool:
        """True once the communicator is lost, by an abort, a peer's death, a missed deadline or mismatched calls."""
        return self._core.lost

    # --------------------------------------------------------------------------------------------- operations

    def lane(self, key: Key) -> BlockingLane:
        """Return a lane. The lane's operations match only operations in lanes with the same key on the other ranks.

        See :meth:`Communicator.lane`.

        :raises ArgumentTypeError: the key is no str, bytes or int.
        """
        return BlockingLane(self._door, self._comm.lane(key))

    def new_window(self, tensor: TensorLike, *, timeout: OpTimeout = COMM_TIMEOUT) -> BlockingWindow:
        """Open a tensor to one-sided access by the other ranks; see :meth:`Communicator.new_window`."""
        window = self._run("new_window", lambda: self._comm.new_window(tensor, timeout=timeout))
        return BlockingWindow(self, window)

    @overload
    def open_stream(
        self, peer: int, capacity: int = 8, name: str = "", *, capacity_bytes: int | None = None,
        timeout: Timeout = None,
    ) -> BlockingStream[Tensor]: ...  # fmt: skip

    @overload
    def open_stream(
        self, peer: int, capacity: int = 8, name: str = "", *, items: type[_T], capacity_bytes: int | None = None,
        timeout: Timeout = None,
    ) -> BlockingStream[_T]: ...  # fmt: skip

    def open_stream(
        self, peer: int, capacity: int = 8, name: str = "", *, items: Any = Tensor, capacity_bytes: int | None = None,
        timeout: Timeout = None,
    ) -> BlockingStream[Any]:  # fmt: skip
        """Open a stream to another rank; see :meth:`Communicator.open_stream`.

        :param timeout: the seconds to wait for the other rank; None: no limit.
        :raises TimeoutError: the other rank did not open its end in time.
        """

        def opened() -> Awaitable[ItemStream[Any]]:
            stream: Awaitable[ItemStream[Any]] = self._comm.open_stream(
                peer, capacity, name, items=items, capacity_bytes=capacity_bytes
            )
            return stream

        return BlockingStream(self._door, self._run("open_stream", opened, timeout))

    # --------------------------------------------------------------------------------------------------- life

    def abort(self, reason: str | BaseException) -> None:
        """Abort the communicator on every rank; see :meth:`Communicator.abort`. Any thread may call this method."""
        self._comm.abort(reason)

    def lost(self, *, timeout: Timeout = None) -> CommError:
        """Wait until the communicator is lost, for any reason; see :meth:`Communicator.lost`.

        :param timeout: the seconds to wait; None: no limit.
        :returns: the error that caused the loss.
        :raises TimeoutError: the communicator was not lost in time.
        :raises CommClosedError: this rank closed the communicator before the communicator was lost.
        """
        try:
            error: CommError = self._run("lost", self._comm.lost, timeout)
        except CommError:
            failure = self._core.life.failure
            if failure is None:
                raise
            # The communicator is closed as well as lost, and so the loop runs nothing more for it.
            error = failure.error
        return error

    def dump(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Write the flight recorder to a file; see :meth:`Communicator.dump`. Any thread may call this method."""
        path: Path = self._comm.dump(folder)
        return path

    def statistics(self) -> Statistics:
        """Return the communicator's present and past activity; see :meth:`Communicator.statistics`."""
        found: Statistics = self._comm.statistics()
        return found

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default deadline of ops, for this portal and the communicator itself.

        Any thread may call this method.
        """
        self._comm.set_timeout(timeout)

    def split(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        *,
        timeout: OpTimeout = COMM_TIMEOUT,
        hints: Mapping[str, Any] | None = None,
    ) -> Self | None:
        """Form communicators, and return the portal of the one that this rank joins; see :meth:`Communicator.split`."""
        child = self._run("split", lambda: self._comm.split(ranks, name, timeout=timeout, hints=hints))
        return None if child is None else self._of(child)

    def create_group(self, ranks: Sequence[int], name: str, *, timeout: OpTimeout = COMM_TIMEOUT) -> Self:
        """Form a communicator of some of the ranks, and return its portal; see :meth:`Communicator.create_group`."""
        return self._of(self._run("create_group", lambda: self._comm.create_group(ranks, name, timeout=timeout)))

    def reconfigure(
        self, ranks: Sequence[int] | None = None, *, size: int | None = None, timeout: float | timedelta = 10.0
    ) -> Self:
        """Form a communicator of the remaining ranks, and return its portal; see :meth:`Communicator.reconfigure`."""
        return self._of(self._run("reconfigure", lambda: self._comm.reconfigure(ranks, size=size, timeout=timeout)))

    def close(self) -> None:
        """Close the communicator itself, with all its portals. Idempotent. See :meth:`Communicator.aclose`.

        :raises RuntimeError: the caller is on the loop's own thread.
        :raises CommError: a transport failed to close; all other resources are released.
        """
        if not self._door.closed:
            close(self._door, "close", self._comm.aclose)

    # ------------------------------------------------------------------------------------------------- inside

    def _run(self, what: str, call: Callable[[], Awaitable[_T]], timeout: Timeout = None) -> _T:
        return run(self._door, what, call, timeout)

    def _of(self, comm: Any) -> Self:
        """Return a new portal for a communicator that a method of this portal has formed."""
        return type(self)(comm)
