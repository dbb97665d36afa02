"""The transport for GPU memory.

The engine gets an op after the GPU has finished all work that precedes the op in the caller's stream.
"""

from __future__ import annotations

import functools
import select
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Self

import msgspec
import torch

from aiocomms import ops
from aiocomms.cuda import Completions, Cuda, TorchCuda
from aiocomms.errors import CommError, UnsupportedOperation
from aiocomms.lowlevel import Waker, has_room, run_in_thread
from aiocomms.ops.writing import octets
from aiocomms.transport import Completion, Rendezvous
from aiocomms_ucx._engine import CUDA, TURNS
from aiocomms_ucx.bringup import Ranks
from aiocomms_ucx.cuda_windows import CudaWindows
from aiocomms_ucx.shared_engine import SharedEngine
from aiocomms_ucx.status import TRUNCATED
from aiocomms_ucx.transport import UcxTransport

_GLANCES: Final = 3
"""The number of times that ``post`` polls the caller's stream. After these polls, the loop polls the stream.

If the GPU is idle, the polls of ``post`` are enough.
"""


class _Waiting:
    """An op that the transport has not passed to the engine yet."""

    __slots__ = ("behind", "fired", "op", "work")

    def __init__(self, op: ops.Op, work: Completion, behind: int) -> None:
        self.op = op
        self.work = work
        self.behind = behind
        """The number of window copies that the GPU must have finished before this op starts."""
        self.fired = False

    def fire(self) -> None:
        """Record that the GPU has finished all work that was queued before the op."""
        self.fired = True


class CudaUcxTransport(UcxTransport):
    """The transport for messages, windows and barriers with tensors on a GPU.

    The core of aiocomms implements other collectives with messages. Atomics are not supported. The engine gets an op
    after all earlier ops, and when the GPU has finished all earlier work of the caller's stream. So messages match in
    the order of the calls, even on different streams. Puts and gets that the GPU executes as copies do not go to the
    engine; see :class:`CudaWindows`.
    """

    capabilities = msgspec.structs.replace(
        UcxTransport.capabilities,
        ops=frozenset({ops.Send, ops.Recv, ops.Barrier}) | ops.ARRIVALS | (ops.RMA - {ops.FetchAdd, ops.CompareSwap}),
        in_process=False,
        lanes=frozenset(),
        spin=TURNS,
    )
    fast_check = None
    windows = CudaWindows
    _windows: CudaWindows
    proves = False  # proofs would use GPU memory and wait for the GPU's streams

    def __init__(self, shared: SharedEngine, ranks: Ranks) -> None:
        self._waker, self._epoll = Waker(), select.epoll()  # epoll may raise, so it is made first
        assert shared.cuda is not None
        self.cuda: Cuda = shared.cuda
        self.completions = Completions(self.cuda, self._waker.wake, TURNS, self)
        self._queue: deque[_Waiting] = deque()
        self._behind: list[_Waiting] = []
        """The ops that have left the queue, and wait until the GPU has finished copies for windows."""
        self._asked: deque[Callable[[], object]] = deque()  # calls from other threads
        super().__init__(shared, ranks)
        for fd in (self.engine.fileno(), self._waker.fileno()):
            self._epoll.register(fd, select.EPOLLIN)

    @classmethod
    def layer(cls, device: torch.device) -> tuple[Cuda, int]:
        """Return the layer through which CUDA is called, and UCX's type of CUDA memory."""
        return TorchCuda(device), CUDA

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`."""
        cuda, memory = await run_in_thread(functools.partial(cls.layer, rendezvous.device), anyhow=True)
        return await cls._open(rendezvous, cuda, memory)

    # --------------------------------------------------------------------------------------- ops and their outcomes

    def post(self, op: ops.Op, work: Completion) -> None:
        """See :meth:`Transport.post`."""
        self._check_not_captured()
        if self._failure is not None:
            self.on_failure(self._failure)
        copied = not self._aborted and self._windows.begin(op, work)
        if copied and not isinstance(op, ops.PutSignal):
            return
        waiting = _Waiting(op, work, self._windows.must_follow(op))
        self._queue.append(waiting)
        if copied:
            waiting.fire()  # the copy itself waits for the stream
        else:
            self.completions.add(self.cuda.current_stream(), waiting.fire)
        with self.cuda.harmless():
            for _ in range(_GLANCES if len(self._queue) == 1 else 0):
                if self.completions.poll():
                    self._post_due()
                    break

    def _check_not_captured(self) -> None:
        if self.cuda.capturing():
            raise UnsupportedOperation(
                "the current stream is being captured into a CUDA graph, and the GPU does not run UCX's operations: "
                "call it before the capture, or after graph.replay()"
            )

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """See :meth:`Transport.caller_stream`."""
        self._check_not_captured()
        return functools.partial(self.cuda.on, self.cuda.current_stream())

    def post_at_once(self, op: ops.Recv, work: Completion) -> None:
        """See :meth:`Transport.post_at_once`. An empty receive need not wait for a stream."""
        self.hand_over(op, work)

    def progress(self) -> bool | None:
        """See :meth:`Transport.progress`. This method does nothing while the current stream is being captured."""
        self._waker.clear()
        if self.cuda.capturing():
            # True makes the loop ask again, because no event reports the end of a capture.
            return bool(self.completions) or bool(self._asked)
        while self._asked:
            call = self._asked.popleft()
            if not self._aborted:
                call()
        with self.cuda.harmless():
            did = self.completions.poll()
            did = self._post_due() or did
            happened = super().progress()
        if did or self.completions:  # the result is not None, because the loop polls the events
            return did or bool(happened)
        return happened

    def soon(self, call: Callable[[], object]) -> None:
        """See :meth:`CudaMember.soon`."""
        self._asked.append(call)
        self._waker.wake()

    def _post_due(self) -> bool:
        """Pass ops from the front of the queue to the engine, up to the first op that must wait for a stream.

        An op that waits for copies leaves the queue, and later ops may overtake the op. The close of a window stays in
        the queue, because a close is a collective.
        """
        queue, did = self._queue, self._post_told()
        while queue and queue[0].fired:
            waiting = queue[0]
            waits = waiting.behind > self._windows.copies.made
            if waits and isinstance(waiting.op, ops.WindowClose) and not self._aborted:
                break
            queue.popleft()
            did = True
            if waits:
                self._behind.append(waiting)
            else:
                self._hand_over(waiting)
        return did

    def _post_told(self) -> bool:
        """Pass ops to the engine after the GPU has made the copies for which these ops wait.

        The engine gets these ops in the order of the calls.
        """
        due = [waiting for waiting in self._behind if waiting.behind <= self._windows.copies.made]
        for waiting in due:
            if waiting in self._behind:  # an earlier pass of this loop may have passed this op
                self._behind.remove(waiting)
                self._hand_over(waiting)
        return bool(due)

    def _hand_over(self, waiting: _Waiting) -> None:
        op, work = waiting.op, waiting.work
        if self._aborted or work.done():
            return
        try:
            if not all(has_room(tensor) for _, tensor in op.reads() + op.writes()):
                raise CommError("the storage of a tensor was resized while the op had it")
            self.hand_over(op, work)
        except CommError as error:
            work.fail(error)
        except RuntimeError as error:  # raised by UCX or by torch
            work.fail(CommError(f"UCX could not begin the op: {error}"))

    def finish(self, work: Completion, index: int, status: int, a: int, b: int) -> None:
        """See :meth:`UcxTransport.finish`. If a message is too long, this method copies the beginning to the tensor."""
        if status == TRUNCATED:
            head, op = self.engine.head(id(work)), work.op
            if head and isinstance(op, ops.Recv):
                octets(op.tensor)[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        super().finish(work, index, status, a, b)

    def fileno(self) -> int | None:
        """See :meth:`Transport.fileno`."""
        return self._epoll.fileno()

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        for waiting in self._queue:
            if waiting.work is work:  # the receive or the wait has not begun
                self._queue.remove(waiting)
                self._waker.wake()  # later ops may be due now
                return True
        return super().try_cancel(work)

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`.

        This method drops the ops that were not passed to the engine, because the tensors of these ops are not in use.
        """
        self._queue.clear()
        self._behind.clear()
        await self._windows.end()
        self.completions.close()
        self._epoll.close()
        self._waker.close()
        await super().aclose()
