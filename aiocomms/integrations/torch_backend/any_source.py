"""Receives from any source, which no transport has: one receive from each rank, of which all but one are withdrawn.

A message that one of the others has matched in the meantime is kept for the receive that comes next. So while a receive
from any source is under way, and for as long as a message is kept, receives with its tag go by a queue on the loop. The
first of the queue, being from any source, would match any message that those behind it might, so nothing waits without
need.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial

import anyio
import torch
from torch import Tensor

from aiocomms import blocking
from aiocomms.communicator.portal.pending import Pending
from aiocomms.errors import ArgumentError, CommError, MessageTruncatedError, WorkCancelledError
from aiocomms.integrations.torch_backend.parts import WorkPart
from aiocomms.ops import Recv
from aiocomms.ops.writing import write
from aiocomms.progress.work import Work


class Receive(Pending):
    """One receive that goes by the queue of its tag, and for which a thread waits."""

    tensor: Tensor
    source: int | None
    tag: int

    def __init__(self, comm: blocking.Communicator, tensor: Tensor, source: int | None, tag: int) -> None:
        super().__init__(comm._door)
        self.tensor, self.source, self.tag = tensor, source, tag
        self.error: BaseException | None = None
        self.given_up: Callable[[], object] = self.end_given_up
        """The call that is made, on the loop's thread, when no thread waits any more."""

    def done(self) -> bool:
        """See :class:`aiocomms.integrations.torch_backend.parts.WorkPart`."""
        return self._over

    def wait(self, timeout: float | None = None) -> None:
        """See :class:`aiocomms.integrations.torch_backend.parts.WorkPart`."""
        if not self._over:
            self._door.elsewhere("wait for recv")
            try:
                ended = self._block(timeout)
            except BaseException:
                self._leave_alone()
                raise
            if not ended:
                raise TimeoutError(f"no message came within {timeout} s; the receive goes on")
        if self.error is not None:
            raise self.error.about() if isinstance(self.error, CommError) else self.error

    def end(self, error: BaseException | None = None) -> None:
        """Note that it has ended."""
        if not self._over:
            self.error = error
            self._ring()

    def end_given_up(self) -> None:
        """End the receive, for which no thread waits any more."""
        self.end(WorkCancelledError("the receive was withdrawn"))

    def _withdraw(self) -> None:
        self.given_up()

    _fail = end


class _KeptMessage:
    """A message that has come from a rank; or, where its size was not that of the receive, the error."""

    def __init__(self, source: int, values: Tensor, error: CommError | None) -> None:
        self.source, self._values, self._error = source, values, error

    def give(self, to: Receive) -> None:
        """End a receive with it."""
        to.source, error = self.source, self._error
        if error is None and self._values.nbytes != to.tensor.nbytes:
            error = MessageTruncatedError(
                f"rank {self.source} has sent {self._values.nbytes} bytes, wanted {to.tensor.nbytes} as the tensor has"
            )
        if error is None:
            write(to.tensor, self._values.view(to.tensor.dtype))
        to.end(error)


class _TagQueue:
    """The receives with one tag, and the messages that are kept for them."""

    def __init__(self) -> None:
        self.waiting: deque[Receive] = deque()
        self.kept: list[_KeptMessage] = []
        self.served = False


class Receives:
    """The receives of a group, from one source or from any; any thread."""

    def __init__(self, comm: blocking.Communicator) -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._queues: dict[int, _TagQueue] = {}
        self._lock = threading.Lock()

    def from_one(self, tensor: Tensor, source: int, tag: int) -> WorkPart:
        """Start a receive from a rank; its tensor is one-dimensional and contiguous."""
        # The lock is held while the receive is posted, too, or a message that is kept might be overtaken.
        with self._lock:
            if tag in self._queues:
                return self._queued(Recv(tensor, source, tag), source)
            return self._comm.recv(tensor, source, tag)

    def from_any(self, tensor: Tensor, tag: int) -> Receive:
        """Start a receive from any other rank; its tensor is one-dimensional and contiguous."""
        if not self._others:
            raise ArgumentError("no source was given, and there is no other rank")
        with self._lock:
            return self._queued(Recv(tensor, self._others[0], tag), None)

    def _queued(self, op: Recv, source: int | None) -> Receive:
        core = self._comm._core
        if core.refusing:
            raise core.refused(op)
        try:
            op.check(core)
        except CommError as error:
            raise error.about(comm=core.name, op=op.name, rank=core.rank) from None
        receive = Receive(self._comm, op.tensor, source, op.tag)
        queue = self._queues.setdefault(op.tag, _TagQueue())
        queue.waiting.append(receive)
        if not queue.served:
            queue.served = True
            self._comm._door.put(self._begin, op.tag, queue, copy_context())
        return receive

    # --------------------------------------------------------------------------------------- on the loop's thread

    def _begin(self, tag: int, queue: _TagQueue, context: Context) -> None:
        door = self._comm._door
        if not door.closed:
            self._comm._core.driver.spawn(partial(self._serve, tag, queue), context)
            return
        queue.served = False  # A thread that puts another receive there from now on comes here, too.
        while queue.waiting:
            with contextlib.suppress(IndexError):  # another thread has just ended it
                queue.waiting.popleft().end(door.refusal())

    async def _serve(self, tag: int, queue: _TagQueue) -> None:
        receive = None
        try:
            while (receive := self._next(tag, queue)) is not None:
                await self._serve_one(receive, queue)
        except BaseException:  # the loop ends
            for left in (receive, *queue.waiting):
                if left is not None:
                    left.end(self._comm._door.refusal())
            raise

    async def _serve_one(self, receive: Receive, queue: _TagQueue) -> None:
        try:
            if receive.source is None:
                await self._from_any(receive, queue)
            else:
                self._from_one(receive, receive.source, queue)
        except Exception as error:
            receive.end(error)

    def _next(self, tag: int, queue: _TagQueue) -> Receive | None:
        with self._lock:
            while queue.waiting:
                receive = queue.waiting.popleft()
                if not receive.done():  # A receive that is done was given up.
                    return receive
            queue.served = False
            if not queue.kept:
                del self._queues[tag]
            return None

    def _from_one(self, receive: Receive, source: int, queue: _TagQueue) -> None:
        for message in queue.kept:
            if message.source == source:
                queue.kept.remove(message)
                message.give(receive)
                return
        work = self._comm._comm.recv(receive.tensor, source, receive.tag)
        receive.given_up = work._withdraw
        work.add_done_callback(lambda work: receive.end(work.exception()))

    async def _from_any(self, receive: Receive, queue: _TagQueue) -> None:
        if not queue.kept:
            queue.kept = await self._messages(receive)
        if receive.done():  # The receive was given up.
            return
        queue.kept.pop(0).give(receive)

    async def _messages(self, receive: Receive) -> list[_KeptMessage]:
        """Wait for a message; there may be more of them, or none if the receive has been given up.

        :raises CommError: no rank can send one, or none did in time.
        """
        changed = anyio.Event()
        buffers = {source: torch.empty_like(receive.tensor) for source in self._others}
        works = {source: self._comm._comm.recv(into, source, receive.tag) for source, into in buffers.items()}
        order: list[int] = []

        def ended(source: int, work: Work[Tensor]) -> None:
            order.append(source)
            if _has_come(work) or len(order) == len(works):
                changed.set()

        def given_up() -> None:
            receive.end_given_up()
            changed.set()

        receive.given_up = given_up
        for source, work in works.items():
            work.add_done_callback(partial(ended, source))
        await changed.wait()
        for work in works.values():
            await work.cancel()
        order += [source for source in works if source not in order]
        messages = [_KeptMessage(s, buffers[s], works[s].exception()) for s in order if _has_come(works[s])]
        if not messages and not receive.done():
            raise works[order[-1]].exception() or AssertionError("it has come")
        return messages


def _has_come(work: Work[Tensor]) -> bool:
    """Return whether a message has ended a receive, of whatever size."""
    return work.done() and isinstance(work.exception(), MessageTruncatedError | None)
